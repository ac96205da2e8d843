"""The recipes fit: layout, memory, published sizes, Megatron's parser, files for Slurm and Kubernetes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.expected.of_megatron import megatron_arguments
from tests.multiproc.cases.recipe_cases import ALL, RECIPES, Recipe, Start, started
from tests.rules.launcher_commands import environment
from tests.support.hosts import ROOT, host_name
from vtp_plugin.cli import main
from vtp_plugin.config import VtpConfig
from vtp_plugin.patches.hosts import load_host
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.patches.registry import records_at
from vtp_plugin.session import Session

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which Megatron brings")
GIB = 1 << 30
# Of what a GPU has, which a plan may fill: there are holes between blocks, and the driver's own.
SHARE = 0.95
each = pytest.mark.parametrize("recipe", ALL, ids=str)


def starts(recipe: Recipe, folder: Path, **variables: str) -> list[Start]:
    return [started(recipe, node, folder, **variables) for node in range(len(recipe.scripts))]


def planned(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    main(["plan", *words, "--json"])
    return json.loads(capsys.readouterr().out)


def value(words: Sequence[str], flag: str) -> str:
    """Give the value of a flag that counts, the last one."""
    return words[len(words) - words[::-1].index(flag)]


@each
@pytest.mark.parametrize("small", ["", "1"], ids=["whole", "small"])
def test_nodes_start_the_ranks_of_the_layout(
    recipe: Recipe, small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = starts(recipe, tmp_path, SMALL=small)
    plan = planned(nodes[0].words, capsys)
    assert len({stage["tp"] for stage in plan["stages"]}) > 1
    if small and len({*recipe.scripts}) == 1:
        (num_nodes,) = {value(node.launcher, "--nnodes") for node in nodes}
        assert num_nodes == "1" and nodes[0].num_processes == plan["world_size"] <= 4
        return
    ends = [*accumulate(node.num_processes for node in nodes)]
    assert ends[-1] == plan["world_size"]
    for stage in plan["stages"]:  # none is spread over two nodes
        assert len({sum(rank >= end for end in ends) for rank in stage["ranks"]}) == 1
    for number, node in enumerate(nodes):
        assert [value(node.launcher, flag) for flag in ("--nnodes", "--node-rank")] == [str(len(nodes)), str(number)]
        assert value(node.launcher, "--master-addr") == "10.0.0.1"
        assert Path(node.script).resolve() == ROOT / "examples" / "pretrain_gpt.py"
    # All nodes give the same, but for what only the edge of a U has.
    assert {*nodes[1].words} - {"cloud"} <= {*nodes[0].words}


@each
def test_what_a_rank_holds_fits_into_its_gpu(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = starts(recipe, tmp_path)
    plan = planned(nodes[0].words, capsys)
    ends = [*accumulate(node.num_processes for node in nodes)]
    for held in plan["memory"]:
        rank, total = held["rank"], held["total_bytes"]
        memory = recipe.memory_gib[sum(rank >= end for end in ends)] * GIB
        assert total <= SHARE * memory, (rank, total / GIB)


@pytest.mark.parametrize(
    ("recipe", "question"),
    [
        (ALL[0], "--cluster examples/clusters/two-nodes.toml --vtp-stages 1:3"),
        (ALL[1], "--cluster examples/clusters/old-and-new.toml"),
        (
            ALL[2],
            "--cluster examples/clusters/two-nodes.toml --vtp-stages 1:3 --expert-model-parallel-size 2 "
            "--expert-tensor-parallel-size 1",
        ),
    ],
    ids=["llama two-nodes", "llama old-and-new", "qwen two-nodes"],
)
def test_layouts_are_what_search_answers(recipe: Recipe, question: str, tmp_path: Path) -> None:
    """With the question that the script quotes, for which the script itself asks."""
    script = RECIPES / recipe.folder / "train.sh"
    assert question in re.sub(r"\n *#  *", " ", script.read_text())
    known = environment(ASK=f"search {question} --json", LAYOUT=recipe.layout)
    done = subprocess.run([script], cwd=ROOT, env=known, capture_output=True, text=True, check=True)
    best = json.loads(done.stdout)["best"][0]
    words = started(recipe, 0, tmp_path).words
    assert {*best["flags"]} <= {*words}
    assert value(words, "--vtp-data-parallel-size") == str(best["num_replicas"])


@each
def test_models_are_as_published(recipe: Recipe, tmp_path: Path) -> None:
    config = json.loads((ROOT / "tests" / "golden" / "published_configs.json").read_text())[recipe.model]
    published = config["flags"].split()
    for start in starts(recipe, tmp_path):
        for flag, wanted in zip(published, [*published[1:], ""], strict=True):
            if flag.startswith("--"):
                assert start.words.count(flag) == 1, flag
                if not wanted.startswith("--") and wanted:
                    found = value(start.words, flag)
                    assert found == wanted or float(found) == float(wanted), (flag, found, wanted)
        assert value(start.words, "--padded-vocab-size") == str(config["config"]["vocab_size"])
        assert value(start.words, "--max-position-embeddings") == str(config["config"]["max_position_embeddings"])


@pytest.mark.filterwarnings("ignore::Warning")  # Megatron's own
@pytest.mark.needs("flags_of_0_19")
@each
@pytest.mark.parametrize("small", ["", "1"], ids=["whole", "small"])
def test_megatron_parses_and_checks_the_flags(
    recipe: Recipe, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rank 0 of the run does; the store that joins the ranks is left out."""
    from vtp_plugin.patches.training import arguments as patches

    megatron = megatron_arguments()
    start = started(recipe, 0, tmp_path, SMALL=small, CHECKPOINTS=str(tmp_path / "checkpoints"))  # which is locked
    sizes = [int(size) for size in value(start.words, "--vtp-size-list").split(",")]
    flag = "--vtp-data-parallel-size"
    num_replicas = int(value(start.words, flag)) if flag in start.words else 1
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(num_replicas * sum(sizes)))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as the scripts do
    # Hopper.
    monkeypatch.setattr(megatron, "get_device_arch_version", lambda: 9)
    monkeypatch.setattr(megatron.torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(sys, "argv", ["script.py", *start.words])
    name, backend = ("cpu", "gloo") if small else ("cuda", "nccl")
    session = Session(
        VtpConfig(device=name), platform=cast(Any, SimpleNamespace(name=name, backend=backend, reason=""))
    )
    monkeypatch.setattr(session.ranks, "agree", lambda name, prepare, **options: prepare())
    monkeypatch.setattr(patches, "open_store", lambda *where: None)
    parse, validate = records_at(session, load_host(host_name()), Moment.COMMAND_LINE)[:2]
    try:
        args = validate.build(megatron.validate_args)(parse.build(megatron.parse_args)())
    finally:
        session.close_log()
    assert args.vtp_size_list == ",".join(map(str, sizes)) or list(args.vtp_size_list) == sizes
    assert args.sequence_parallel == (sizes[0] > 1) and args.bf16 == (not small)


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.s[hb]*")), ids=lambda path: str(path.relative_to(RECIPES)))
def test_bash_reads_it(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)


def of_node(recipe: Recipe) -> str:
    return recipe.layout or "cloud"


@each
def test_slurm_starts_as_many(recipe: Recipe, tmp_path: Path) -> None:
    """A component of a heterogeneous job for every node; in a U for the cloud alone."""
    text = (RECIPES / recipe.folder / f"{of_node(recipe)}.sbatch").read_text()
    asked = [int(number) for number in re.findall(r"^#SBATCH .*--gpus-per-node=(?:\w+:)?(\d+)$", text, re.MULTILINE)]
    numbers = [start.num_processes for start in starts(recipe, tmp_path)]
    assert asked == (numbers if recipe.layout else numbers[1:])
    assert len(re.findall(r"^#SBATCH hetjob$", text, re.MULTILINE)) == len(asked) - 1


@each
def test_slurm_gives_every_node_its_number(recipe: Recipe, tmp_path: Path) -> None:
    """With stand-ins of Slurm's commands, which print what they were given."""
    for name, body in (
        ("srun", 'echo "$MASTER_ADDR $MASTER_PORT $LAYOUT $*"'),
        ("scontrol", "echo first.node; echo second.node"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    known = environment(SLURM_JOB_NODELIST_HET_GROUP_0="first.node", MASTER_ADDR="10.8.0.1", MASTER_PORT="29500")
    known = {**known, "PATH": f"{tmp_path}:{known['PATH']}", "LAYOUT": ""}
    script = RECIPES / recipe.folder / f"{of_node(recipe)}.sbatch"
    lines = subprocess.run(["bash", script], env=known, capture_output=True, text=True, check=True).stdout.splitlines()
    path = f"examples/recipes/{recipe.folder}/{recipe.scripts[-1]}"
    if not recipe.layout:
        assert lines == [f"10.8.0.1 29500  {path}"]
        return
    assert sorted(lines) == [
        f"first.node 29500 {recipe.layout} --het-group={node} --export=ALL,NODE_RANK={node} {path}" for node in (0, 1)
    ]


@each
def test_kubernetes_starts_as_many(recipe: Recipe, tmp_path: Path) -> None:
    objects = [*yaml.safe_load_all((RECIPES / recipe.folder / f"{of_node(recipe)}.yaml").read_text())]
    jobs = [one for one in objects if one["kind"] == "Job"]
    numbers = [start.num_processes for start in starts(recipe, tmp_path)]
    asked = []
    for number, job in enumerate(jobs):
        pod = job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        given = {one["name"]: one["value"] for one in container["env"]}
        asked.append(container["resources"]["limits"]["nvidia.com/gpu"])
        assert container["command"] == [f"examples/recipes/{recipe.folder}/{recipe.scripts[-1]}"]
        assert all(isinstance(text, str) for text in given.values())
        assert {mount["name"] for mount in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
        if recipe.layout:
            (service,) = (one for one in objects if one["kind"] == "Service")
            assert (given["LAYOUT"], given["NODE_RANK"]) == (recipe.layout, str(number))
            assert pod["subdomain"] == service["metadata"]["name"] and pod["hostname"] == f"node-{number}"
            assert given["MASTER_ADDR"] == f"node-0.{pod['subdomain']}"
            assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
            assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert asked == (numbers if recipe.layout else numbers[1:])
    assert len({job["metadata"]["name"] for job in jobs}) == len(jobs)


@pytest.mark.parametrize("folder", ["llama-3.1-8b", "qwen-3-30b-a3b"])
@pytest.mark.parametrize(
    ("variables", "said"),
    [({"LAYOUT": "3-nodes"}, "LAYOUT=3-nodes; there are"), ({"LAYOUT": "two-nodes"}, "NODE_RANK: 0 on the first node")],
)
def test_what_is_missing_is_said_in_a_line(folder: str, variables: dict[str, str], said: str) -> None:
    command = [RECIPES / folder / "train.sh"]
    done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, check=False)
    assert done.returncode and len(done.stderr.splitlines()) == 1 and said in done.stderr, done.stderr


def test_the_page_names_every_example() -> None:
    text = (ROOT / "examples" / "README.md").read_text()
    examples = [path.name for path in (ROOT / "examples").iterdir() if path.name not in ("README.md", "__pycache__")]
    assert [name for name in examples if f"({name}" not in text and f"`{name}`" not in text] == []
    assert [path.name for path in RECIPES.iterdir() if path.is_dir() and path.name not in text] == []
