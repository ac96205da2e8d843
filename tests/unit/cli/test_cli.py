"""The command line: what the commands print, write and refuse; those that import Megatron in processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

import vtp_plugin
from tests.rules.import_rules import ROOT
from tests.support.hosts import PYTHON_PATH, host_name
from tests.support.lines import error_line, only_line_of_error
from tests.support.pool import Done, forked_python
from vtp_plugin.cli import main, model_flags
from vtp_plugin.cli.boundaries import format_bytes
from vtp_plugin.cli.run_flags import known_flags
from vtp_plugin.config.flag import Flag
from vtp_plugin.config.resolve import VTP_FLAGS
from vtp_plugin.host.megatron_flags import MODEL_FLAGS, RUN_FLAGS
from vtp_plugin.host.rules.table.rows import documented
from vtp_plugin.patches.hosts import load_host
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.patches.registry import declared_at
from vtp_plugin.plan.boundary.strategies.known_strategies import TransportRules
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.schedule.cost.costs import COST_KEYS, parse_costs, u_costs
from vtp_plugin.plan.schedule.cost.simulator import simulate
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
from vtp_plugin.plan.schedule.make.u_shape import plan_u_shape
from vtp_plugin.plan.schedule.order.placement import u_placement
from vtp_plugin.report.pictures.draw_pipeline import draw_pipeline
from vtp_plugin.report.pictures.draw_simulated_step import draw_svg
from vtp_plugin.util.text import own_command

U = ("--vtp-size-list", "1,2,2", "--layerwise-disaggregated-training")
MODEL = ("--seq-length", "2048", "--micro-batch-size", "1", "--hidden-size", "4096", "--bf16")
# What a user may have on the command line of a run beside what matters here.
OF_A_RUN = (
    *("--num-layer-list=2,7,7,2", "--num-layers", "18", "--lr", "1e-4", "--data-path", "0.5", "/data/a", "--mock-data"),
    *("--train-iters", "10", "--vtp-timeout-s", "60", "--vtp-schedule", "planned", "--eval-micro-batch-size", "4"),
)

# Runs a command and returns what it prints.
Output = Callable[..., str]
Error = Callable[..., str]


@pytest.fixture
def output_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Output:
    """Run a command that imports neither torch nor Megatron, in this process and an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        main(words)
        return capsys.readouterr().out

    return run


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Error:
    """Return the only line of a refusal."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        return only_line_of_error(capsys, words)

    return run


def environment_of(**more: str) -> dict[str, str]:
    """Give the variables of a command, without accelerators, so that --device cpu is allowed everywhere."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}
    return {**os.environ, **hidden, "PYTHONPATH": PYTHON_PATH, **more}


def run_cli(*arguments: str, cwd: Path, **environment: str) -> Done:
    return subprocess.run(
        [sys.executable, "-m", "vtp_plugin", *arguments],
        cwd=cwd,
        env=environment_of(**environment),
        timeout=600,
        check=False,
        capture_output=True,
        text=True,
    )


def forked_cli(*arguments: str, cwd: Path, **environment: str) -> Done:
    """As run_cli, without the seconds that importing torch and Megatron takes."""
    return forked_python("-m", "vtp_plugin", *arguments, cwd=cwd, env=environment_of(**environment))


def process_output(*arguments: str, cwd: Path, start: Callable[..., Done] = run_cli, **environment: str) -> str:
    done = start(*arguments, cwd=cwd, **environment)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


SCRIPT = """\
import sys
import beside
assert __name__ == "__main__"
print(beside.WORD, sys.argv)
"""


def test_version(tmp_path: Path) -> None:
    assert process_output("--version", cwd=tmp_path) == f"vtp_plugin {vtp_plugin.__version__}\n"


def test_planning_needs_neither_torch_nor_megatron(tmp_path: Path) -> None:
    """On a laptop, and without the seconds that importing torch takes."""
    for name in ("torch", "megatron"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')\n")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    for command in ("plan", "draw --output x.svg", "simulate --num-microbatches 4"):
        process_output(*command.split(), *U, cwd=tmp_path, PYTHONPATH=path)


def test_plan_says_who_sends_which_part_to_whom(output_of: Output) -> None:
    assert output_of("plan", "--vtp-size-list", "1,2,2", "--world-size", "10") == (
        "stage  tp  cp  dp  ranks  leaders\n"
        "    0   1   1   2  0-1    0-1\n"
        "    1   2   1   2  2-5    2,4\n"
        "    2   2   1   2  6-9    6,8\n"
        "world size 10, rank order tp-cp-dp-pp; rank 9 reports the loss\n"
        "memory of a rank: give --num-layers, --hidden-size, --num-attention-heads, --vocab-size, "
        "--max-position-embeddings to see it\n"
        "What crosses: activations [S, B, H] (sequence, batch, hidden); give --seq-length, --micro-batch-size and "
        "--hidden-size to see bytes.\n"
        "Gradients of the same shape come back. S[0:1/4] is the first quarter of the sequence; a part without S has "
        "all of it.\n"
        "boundary 0->1: sliced (the stages' sizes differ: every link carries its share)\n"
        "  2 replicas cross alike; here replica dp 0 cp 0\n"
        "  rank 0 -> rank 2: 1/2 of the tensor, S[0:1/2]\n"
        "  rank 0 -> rank 3: 1/2 of the tensor, S[1/2:1]\n"
        "  then ranks 2-3 all-gather the whole tensor from their parts\n"
        "  gradients come back: the same parts over the same links\n"
        "boundary 1->2: sliced (both stages have the same size: rank to rank)\n"
        "  2 replicas cross alike; here replica dp 0 cp 0\n"
        "  rank 2 -> rank 6: the whole tensor\n"
        "  rank 3 -> rank 7: the whole tensor\n"
        "  gradients come back: the same parts over the same links\n"
        "\n"
        "start on each node (SCRIPT: your training script; FLAGS: its own and Megatron's;\n"
        "MASTER_ADDR: address of node 0; MASTER_PORT: a port that is free there, such as 29500):\n"
        "node 0: ranks 0-1, stage 0\n"
        "    torchrun --nnodes 3 --node-rank 0 --nproc-per-node 2 --master-addr $MASTER_ADDR "
        "--master-port $MASTER_PORT \\\n"
        "        -m vtp_plugin run SCRIPT FLAGS --vtp-size-list 1,2,2\n"
        "node 1: ranks 2-5, stage 1\n"
        "    torchrun --nnodes 3 --node-rank 1 --nproc-per-node 4 --master-addr $MASTER_ADDR "
        "--master-port $MASTER_PORT \\\n"
        "        -m vtp_plugin run SCRIPT FLAGS --vtp-size-list 1,2,2\n"
        "node 2: ranks 6-9, stage 2\n"
        "    torchrun --nnodes 3 --node-rank 2 --nproc-per-node 4 --master-addr $MASTER_ADDR "
        "--master-port $MASTER_PORT \\\n"
        "        -m vtp_plugin run SCRIPT FLAGS --vtp-size-list 1,2,2\n"
        "nodes of 2,4,4 devices were assumed; --nodes, such as --nodes 8,6, says how many devices each of yours has\n"
    )


def test_the_way_out_for_experts_is_a_plan(output_of: Output) -> None:
    """What the error of ``--vtp-ep-list 1,2`` advises."""
    assert "etp" in output_of("plan", "--vtp-size-list", "1,2", "--vtp-ep-list", "1,2", "--vtp-etp-list", "1,1")


def test_plan_says_what_to_start_on_given_nodes(output_of: Output) -> None:
    """With all flags of the layout, and none of what describes the model."""
    words = ("--vtp-size-list", "1,4,4", "--vtp-dp-list=1,2,2", "--nodes", "1,8,8", "--vtp-transport", "rank0", *MODEL)
    plan = json.loads(output_of("plan", *words, "--json"))
    flags = "--vtp-size-list 1,4,4 --vtp-dp-list=1,2,2 --vtp-transport rank0"
    ranks = ([0], [*range(1, 9)], [*range(9, 17)])
    assert plan["launch"]["nodes"] == [
        {
            "node": f"node {node}",
            "ranks": own,
            "stages": [node],
            "commands": [
                f"torchrun --nnodes 3 --node-rank {node} --nproc-per-node {len(own)} --master-addr $MASTER_ADDR "
                f"--master-port $MASTER_PORT -m vtp_plugin run SCRIPT FLAGS {flags}"
            ],
        }
        for node, own in enumerate(ranks)
    ]
    assert plan["launch"]["slurm"] is None and plan["launch"]["stages_across_nodes"] == []
    split = output_of("plan", "--vtp-size-list", "2,2", "--nodes", "1,3")
    assert "stage 0: a TP group lies across node 0 and node 1; every layer sends between them, which is slow" in split


def test_plan_ends_with_a_batch_script(output_of: Output) -> None:
    text = output_of("plan", "--vtp-size-list", "8,6", "--slurm")
    assert text.partition("batch script")[2].splitlines()[1:] == [
        "#!/bin/bash",
        "#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8",
        "#SBATCH hetjob",
        "#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=6",
        "export MASTER_ADDR=$(hostname) MASTER_PORT=29500",
        "srun --het-group=0-1 bash -c 'PROCESSES=(8 6); torchrun --nnodes 2 --node-rank $SLURM_PROCID "
        "--nproc-per-node ${PROCESSES[$SLURM_PROCID]} \\",
        '    --master-addr $MASTER_ADDR --master-port $MASTER_PORT "$@"\' torchrun \\',
        "    -m vtp_plugin run SCRIPT FLAGS --vtp-size-list 8,6",
        "nodes of 8,6 devices were assumed; --nodes, such as --nodes 8,6, says how many devices each of yours has",
    ]


@pytest.mark.parametrize("flag", ["--sft", "--dataloader-inter-document-masking"])
def test_plan_knows_no_activations_of_packed_samples(output_of: Output, flag: str) -> None:
    model = ["--num-layers", "2", "--hidden-size", "8", "--num-attention-heads", "2", "--vocab-size", "5"]
    model += ["--position-embedding-type", "rope", "--seq-length", "4", "--micro-batch-size", "1"]
    model += ["--transformer-impl", "local", "--attention-dropout", "0", "--hidden-dropout", "0"]
    plain, packed = (
        json.loads(output_of("plan", "--vtp-size-list", "1,2", *model, *words, "--json")) for words in ([], [flag])
    )
    assert all(held["activation_bytes"] for held in plain["memory"])
    assert all(held["activation_bytes"] is None for held in packed["memory"])
    assert f"activations: not known with {flag}" in output_of("plan", "--vtp-size-list", "1,2", *model, flag)


def test_plan_cuts_the_sizes_of_latent_attention_that_a_run_has(output_of: Output) -> None:
    """20 + 64, Megatron's default, divides by 3."""
    model = ["--multi-latent-attention", "--transformer-impl", "local", "--kv-lora-rank", "20", "--q-lora-rank", "36"]
    assert "rank 0 -> rank 1" in output_of("plan", "--vtp-size-list", "1,3", *model)


def test_flags_without_a_model_of_memory_are_not_declared() -> None:
    """A declared flag is not among the unknown words, in which these are looked for."""
    looked_for = {*model_flags._NOT_MODELLED, *model_flags.OTHER_ACTIVATIONS}
    assert not looked_for & set(known_flags())


def test_plan_says_what_a_rank_holds(output_of: Output) -> None:
    """Two layers, of 2 * 8 weights in norms, 4 * 64 in attention and 2 * 96 between, and two ends of 8 * 8."""
    model = ["--num-layers", "2", "--hidden-size", "8", "--num-attention-heads", "2", "--ffn-hidden-size", "12"]
    model += ["--vocab-size", "5", "--make-vocab-size-divisible-by", "4", "--position-embedding-type", "rope"]
    model += ["--normalization", "RMSNorm", "--disable-bias-linear", "--bf16"]
    lines = output_of("plan", "--vtp-size-list", "1,2", *model).splitlines()
    assert lines[4:7] == [
        "memory of a rank  parameters    weights  gradients  optimizer   overhead  activations",
        "stage 0                  528  1.031 KiB  2.062 KiB  6.188 KiB  519.4 MiB            -",
        "stage 1                  280  560 bytes  1.094 KiB  3.281 KiB  739.9 MiB            -",
    ]
    memory = json.loads(output_of("plan", "--vtp-size-list", "1,2", *model, "--json"))["memory"]
    assert memory[2] == {
        "rank": 2,
        "in_flight": None,
        "num_waiting": None,
        "total_bytes": None,
        "chunks": [],
        "num_parameters": 280,
        "weight_bytes": 560,
        "gradient_bytes": 1120,
        "optimizer_bytes": 3360,
        "overhead_bytes": (28 + 32) * 2**20 + (3 * 24 + 2) * (9 * 2**20 + 3 * 2**16),
        "activation_bytes": None,
        "kept_bytes": {},
        "waiting_bytes": None,
    }
    assert lines[7] == "activations: give --seq-length, --micro-batch-size to see them"
    known = [*model, "--seq-length", "4", "--micro-batch-size", "1"]
    assert "\nactivations: estimated, of one microbatch" in output_of("plan", "--vtp-size-list", "1,2", *known)
    odd = {
        "context parallelism and --transformer-impl local": "--context-parallel-size 2 --transformer-impl local",
        "--cp-comm-type a2a+p2p": "--cp-comm-type a2a+p2p",
        "--transformer-impl inference_optimized": "--transformer-impl inference_optimized",
        "--attention-backend unfused": "--attention-backend unfused",
        "--fp4-format": "--fp4-format e2m1",
        "--fp8-format e5": "--fp8-format e5",
        "--fp8-recipe custom": "--fp8-format e4m3 --fp8-recipe custom",
        "--fp8-format and --transformer-impl local": "--fp8-format e4m3 --transformer-impl local",
    }
    for what, words in odd.items():
        assert f"activations: not known with {what}\n" in output_of(
            "plan", "--vtp-size-list", "1,1", *known, *words.split()
        )
    full = [word for word in known if word != "--bf16"]
    assert "activations: give --bf16 or --fp16, or --transformer-impl local to" in output_of(
        "plan", "--vtp-size-list", "1,2", *full
    )
    again = ["--num-experts", "4", "--recompute-granularity"]
    experts = output_of("plan", "--vtp-size-list", "1,1", *model, *again, "selective", "--recompute-modules", "moe")
    assert "activations: not known with --recompute-modules moe\n" in experts
    layers = output_of("plan", "--vtp-size-list", "1,1", *model, *again, "full", "--recompute-method", "block")
    assert "activations: give --seq-length, --micro-batch-size, --recompute-num-layers" in layers
    other = ["--optimizer", "lion", "--pipeline-model-parallel-layout", "Et|tL"]
    assert "memory of a rank: not known with --pipeline-model-parallel-layout, --optimizer lion" in output_of(
        "plan", "--vtp-size-list", "1,2", *model, *other
    )


def test_plan_says_what_a_rank_holds_in_all(output_of: Output) -> None:
    """1F1B: a stage keeps as many microbatches as there are stages from it on, unless the step has fewer."""
    model = ["--num-layers", "6", "--hidden-size", "8", "--num-attention-heads", "4", "--vocab-size", "5", "--bf16"]
    model += ["--seq-length", "4", "--micro-batch-size", "1", "--max-position-embeddings", "4"]

    def counts(*words: str) -> list[int | None]:
        """Give the numbers of all ranks."""
        return [held["in_flight"] for held in json.loads(output_of("plan", *words, *model, "--json"))["memory"]]

    sizes = ["--vtp-size-list", "1,2,1"]
    assert counts(*sizes) == [3, 2, 2, 1]
    assert counts(*sizes, "--global-batch-size", "2") == [2, 2, 2, 1]
    assert counts(*sizes, "--vtp-schedule", "planned", "--vtp-in-flight", "4,2,1") == [4, 2, 2, 1]
    # A narrow stage keeps those of both replicas that it serves.
    assert counts("--vtp-size-list", "1,2", "--vtp-dp-list", "1,2") == [3, 1, 1, 1, 1]
    # Before its first backward each of two stages runs two groups of two, and stage 0 two forwards more.
    twice = ["--vtp-size-list", "1,2", "--num-virtual-stages-per-pipeline-rank", "3"]
    assert counts(*twice) == counts(*twice, "--global-batch-size", "64") == [7, 5, 5]
    assert counts(*twice, "--global-batch-size", "2") == [6, 5, 5]
    u = [*U, "--num-layer-list", "1,2,2,1", "--vtp-in-flight", "4,2,2"]
    assert counts(*u) == [4, 2, 2, 2, 2]
    memory = json.loads(output_of("plan", *u, *model, "--json"))["memory"]
    assert [chunk["in_flight"] for chunk in memory[0]["chunks"]] == [3, 1] and len(memory[1]["chunks"]) == 1
    kept = sum(chunk["in_flight"] * chunk["activation_bytes"] for chunk in memory[0]["chunks"])
    steady = sum(memory[0][part] for part in ("weight_bytes", "gradient_bytes", "optimizer_bytes", "overhead_bytes"))
    assert memory[0]["total_bytes"] == steady + kept
    lines = output_of("plan", *u, *model).splitlines()
    assert any(line.startswith("stage 0  ") and f"  3, 1  {format_bytes(steady + kept)}" in line for line in lines)
    assert any(line.startswith("several numbers: of a stage's chunks") for line in lines)
    # Both replicas of the wide stage share the samples of a microbatch.
    assert counts("--vtp-size-list", "1,2", "--vtp-dp-list", "1,2", "--vtp-dp-mode", "split") == [2, 1, 1, 1, 1]
    [line] = [line for line in output_of("plan", *sizes, *model).splitlines() if line.startswith("stage 0  ")]
    held = json.loads(output_of("plan", *sizes, *model, "--json"))["memory"][0]
    parts = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "overhead_bytes")
    total = sum(held[part] for part in parts) + 3 * held["activation_bytes"]
    assert line.split("  ")[-2:] == ["3", format_bytes(total)]


def test_plan_keeps_nothing_before_the_first_adapters(output_of: Output) -> None:
    """A U whose last part alone has adapters: the cloud runs forwards, and holds nothing for a backward."""
    model = ["--num-layers", "4", "--hidden-size", "8", "--num-attention-heads", "2", "--vocab-size", "5000"]
    model += ["--seq-length", "64", "--micro-batch-size", "1", "--position-embedding-type", "rope"]
    model += ["--transformer-impl", "local", "--global-batch-size", "8", "--vtp-size-list", "1,2"]
    model += ["--layerwise-disaggregated-training"]
    adapted = ["plan", *model, "--num-layer-list", "1,2,1", "--vtp-lora-rank", "2", "--vtp-lora-layers"]
    edge, cloud, _ = json.loads(output_of(*adapted, "3:4", "--json"))["memory"]
    assert cloud["in_flight"] == 0 and edge["in_flight"] > 0, (edge, cloud)
    text = output_of(*adapted, "3:4", "--vtp-sites", "edge,cloud")
    assert text.count("no gradient comes back: nothing before it has") == 2
    # Of activations [64, 1, 8] in fp32.
    assert "edge sends to site cloud: 2 KiB for each" in text and "cloud sends to site edge: 2 KiB for each" in text
    assert json.loads(output_of(*adapted, "1:4", "--json"))["memory"][1]["in_flight"] > 0
    # Layers that a string shares out are not read; so nothing is left out, and nothing is rejected.
    placed = ["--vtp-schedule", "planned", "--pipeline-model-parallel-layout", "Et*2|t*3L", "--num-layers", "5"]
    words = [word for word in model if word != "--layerwise-disaggregated-training"]
    assert "gradients come back: " in output_of("plan", *words, *placed, "--vtp-lora-rank", "2")


def test_plan_counts_what_split_backwards_keep(output_of: Output) -> None:
    """Each of four equal stages has begun four microbatches: stage 3 one forward, and three that wait."""
    model = ["--num-layers", "4", "--hidden-size", "8", "--num-attention-heads", "2", "--vocab-size", "5000"]
    model += ["--seq-length", "64", "--micro-batch-size", "1", "--position-embedding-type", "rope"]
    model += ["--vtp-schedule", "planned", "--global-batch-size", "8", "--transformer-impl", "local"]
    split = ["plan", *model, "--vtp-split-backward"]
    sizes = ["--vtp-size-list", "1,1,1,1", "--vtp-force"]
    memory = json.loads(output_of(*split, *sizes, "--json"))["memory"]
    assert [(held["in_flight"], held["num_waiting"]) for held in memory] == [(4, 0), (3, 1), (2, 2), (1, 3)]
    # Inputs of 8, 8, 8 and 32 channels, and gradients of 24, 8, 32 and 8, at 64 positions of 4 bytes.
    assert {held["waiting_bytes"] for held in memory} == {64 * (56 + 72) * 4}
    lines = output_of(*split, *sizes).splitlines()
    (line,) = (line for line in lines if line.startswith("stage 3  "))
    parts = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "overhead_bytes", "activation_bytes")
    total = sum(memory[3][part] for part in parts) + 3 * memory[3]["waiting_bytes"]
    assert line.split("  ")[-2:] == ["1 + 3", format_bytes(total)]
    assert "waiting: of one microbatch, from the gradient of its input to those of its weights" in lines
    experts = ["--num-experts", "2", "--moe-grouped-gemm", "--bf16"]
    grouped = output_of(*split, *experts, *sizes)
    assert "waiting: not known but of Megatron's own layers" in grouped and "  in flight" not in grouped
    # A layout that fits without a split has no room for what waits: it keeps whole backwards, or fewer in flight.
    have = ["--have", "1,1,1,1", "--vtp-stages", "4:4", "--vtp-data-parallel-size", "1"]
    whole = json.loads(output_of("plan", *model, *have, "--json"))["memory"]
    held = [sum(one[part] for part in parts[:4]) + one["activation_bytes"] * one["in_flight"] for one in whole]
    assert held[3] == max(held)
    limit = ["--card-memory", str(held[3])]
    assert output_of("plan", *model, *have, *limit)
    fitted = json.loads(output_of(*split, *have, *limit, "--json"))["memory"]
    assert max(one["total_bytes"] for one in fitted) <= held[3]
    # What is computed again keeps less than what waits.
    again = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    small = [*model, *again, "--vocab-size", "8", "--make-vocab-size-divisible-by", "8"]
    whole = json.loads(output_of("plan", *small, *have, "--json"))["memory"]
    held = [sum(one[part] for part in parts[:4]) + one["activation_bytes"] * one["in_flight"] for one in whole]
    limit = ["--card-memory", str(max(held) + 15000)]
    assert "or the memory is too small" in output_of("plan", *small, "--vtp-split-backward", *have, *limit)
    limit = ["--card-memory", str(max(held) + 150000)]
    fitted = json.loads(output_of("plan", *small, "--vtp-split-backward", *have, *limit, "--json"))["memory"]
    assert max(held) < max(one["total_bytes"] for one in fitted) <= max(held) + 150000


@pytest.mark.parametrize("command", ["plan", "draw", "simulate"])
def test_a_list_with_spaces_gets_the_list_with_commas(command: str, error_of: Error) -> None:
    error = error_of(command, "--vtp-size-list", "1", "2", "2", "--vtp-force")
    assert error.endswith("--vtp-size-list 1 2 2 has a space; it takes one word; write --vtp-size-list 1,2,2")


def test_plan_takes_the_flags_of_a_run_and_shows_bytes(output_of: Output) -> None:
    sites = ("--vtp-sites", "edge,cloud,cloud")
    lines = output_of("plan", *U, *sites, *MODEL, *OF_A_RUN, "--vtp-costs", "forward_ms=1,2,2,1 mbit=9").splitlines()
    assert lines[1].split()[:3] == ["0", "edge", "1"] and "rank 0 reports the loss" in lines[4]
    # 2048 * 1 * 4096 * 2 bytes.
    assert "  rank 0 -> rank 1: the whole tensor, 16 MiB" in lines
    assert "  then rank 1 broadcasts the whole tensor to rank 2" in lines
    assert "boundary 2->0: rank0 (crosses from site cloud to site edge)" in lines
    assert any("on HCCL only" in line and line.endswith("0->1 16 MiB, 1->2 16 MiB, 2->0 16 MiB") for line in lines)
    # An activation down and a gradient down; the same up.
    sent = [line for line in lines if line.startswith("site ")]
    assert sent == [
        f"site {way}: 32 MiB for each microbatch, activations and gradients together"
        for way in ("edge sends to site cloud", "cloud sends to site edge")
    ]


def test_plan_says_what_a_run_will_try(output_of: Output) -> None:
    trying = "a run tries rank0 as well at its start"
    text = output_of("plan", "--vtp-size-list", "1,2", *MODEL)
    assert text.count(trying) == text.count("rank0") == 1
    assert "\n  with --vtp-transport-threshold nothing is tried\n" in text
    output = output_of("plan", "--vtp-size-list", "1,2", *MODEL, "--vtp-transport-threshold", "33554432")
    assert trying not in output and "boundary 0->1: rank0 (" in output


def test_plan_slices_bytes_and_rows_add_up(output_of: Output) -> None:
    flags = (*MODEL, "--seq-length", "1536", "--hidden-size", "3072")
    plan = json.loads(output_of("plan", "--vtp-size-list", "2,3", *flags, "--json"))
    assert plan["command"] == "plan" and plan["vtp_plugin"] == vtp_plugin.__version__
    assert plan["world_size"] == 5 and plan["is_active"] is True
    assert plan["tensor"] == {"shape": [1536, 1, 3072], "bytes": 1536 * 3072 * 2}
    assert [stage["ranks"] for stage in plan["stages"]] == [[0, 1], [2, 3, 4]]
    (boundary,) = plan["boundaries"]
    for direction, num_links in (("forward", 4), ("backward", 4)):
        transfers = boundary[direction]["transfers"]
        assert len(transfers) == num_links
        assert sum(transfer["bytes"] for transfer in transfers) == plan["tensor"]["bytes"]
        assert sum(transfer["share"] for transfer in transfers) == pytest.approx(1)
        rows = sorted((start, stop) for transfer in transfers for (start, stop), *_ in transfer["boxes"])
        assert rows[0][0] == 0 and rows[-1][1] == 1536 and all(a[1] == b[0] for a, b in pairwise(rows))
    assert boundary["forward"]["after"] == {"kind": "all-gather", "groups": [[2, 3, 4]]}


@pytest.mark.parametrize(
    "flags",
    [
        ("--vtp-size-list", "16,32,32,32", "--world-size", "10080"),
        ("--vtp-size-list", ",".join(["1", *["99"] * 101])),
        ("--vtp-size-list", ",".join(map(str, range(8, 38))), "--vtp-data-parallel-size", "14"),
        ("--vtp-size-list", "8,64,64,64", "--vtp-dp-list", "10,50,50,50", *MODEL),
        ("--vtp-size-list", "64,64,64", "--world-size", "9984", "--use-tp-pp-dp-mapping", "--vtp-force"),
    ],
    ids=["replicas", "stages", "all different", "unequal dp", "replica major"],
)
def test_plan_of_ten_thousand_ranks_fits_a_screen(output_of: Output, flags: tuple[str, ...]) -> None:
    lines = output_of("plan", *flags).splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 160, len(lines)
    assert json.loads(output_of("plan", *flags, "--json"))["world_size"] > 9000


def test_plan_joins_the_replicas_where_context_parallelism_differs(output_of: Output) -> None:
    output = output_of("plan", "--vtp-size-list", "2,1", "--vtp-cp-list", "1,2")
    assert "world size 4" in output
    assert "boundary 0->1: sliced (context-parallel sizes differ)" in output
    assert output.count(" -> rank") == 4


@pytest.mark.parametrize(
    ("mode", "lines"),
    [
        (
            "multiplex",
            ["  2 replicas cross alike; here replica dp 0 cp 0", "  rank 0 -> rank 1: 1/2 of the tensor, S[0:1/2]"],
        ),
        ("split", ["  rank 0 -> rank 1: 1/4 of the tensor, S[0:1/2], B[0:1/2]"]),
    ],
)
def test_plan_joins_stages_of_different_data_parallel_sizes(output_of: Output, mode: str, lines: list[str]) -> None:
    output = output_of("plan", "--vtp-size-list", "1,2", "--vtp-dp-list", "1,2", "--vtp-dp-mode", mode)
    assert "world size 5" in output and all(line in output.splitlines() for line in lines)


def test_plan_of_a_uniform_list_says_that_the_plugin_does_nothing(output_of: Output) -> None:
    assert "the plugin leaves Megatron as it is" in output_of("plan", "--vtp-size-list", "2,2")
    assert "leaves" not in output_of("plan", "--vtp-size-list", "2,2", "--vtp-force")
    assert "nothing crosses" in output_of("plan", "--vtp-size-list", "2")


def test_flags_that_change_nothing_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    main(["plan", *U, *OF_A_RUN])
    note = capsys.readouterr().err
    assert note == (
        "vtp_plugin: 5 flag(s) change nothing here: --lr, --data-path, --mock-data, --train-iters, "
        "--eval-micro-batch-size\n"
    )


def test_draw_writes_the_picture_that_the_flags_ask_for(output_of: Output, tmp_path: Path) -> None:
    flags = ("--num-virtual-stages-per-pipeline-rank", "2", "--vtp-transport", "rank0", "--output", "picture.svg")
    assert output_of("draw", "--vtp-size-list", "2,2", *flags) == "wrote picture.svg\n"
    layout = PipelineLayout.from_sizes((2, 2), world_size=4)
    assert (tmp_path / "picture.svg").read_text() == draw_pipeline(
        layout, is_ring=True, rules=TransportRules(transport="rank0")
    )
    drawn = json.loads(output_of("draw", *U, "--vtp-dp-list", "1,2,2", "--output", "u.svg", "--json"))
    assert (drawn["output"], drawn["num_stages"], drawn["world_size"], drawn["num_replicas"]) == ("u.svg", 3, 9, 2)


def test_draw_writes_a_file_of_its_own_name_and_replaces_only_a_picture(
    output_of: Output, error_of: Error, tmp_path: Path
) -> None:
    path = tmp_path / "pipeline.svg"
    for words in (["--vtp-size-list", "1,2"], ["--vtp-size-list", "1,3"], ["--bridge", "a=1,1,1", "b=2,1,1"]):
        assert output_of("draw", *words) == "wrote pipeline.svg\n"
    assert "Bridge a -&gt; b" in path.read_text()
    for text in ("", "notes", '<svg xmlns="http://www.w3.org/2000/svg"><title>mine</title></svg>'):
        path.write_text(text)
        error = error_of("draw", "--vtp-size-list", "1,2")
        assert "pipeline.svg is no picture of this plugin; " in error and error.endswith("give --output FILE.svg")
        assert path.read_text() == text
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")  # which is not there
    assert "pipeline.svg is no picture" in error_of("draw", "--vtp-size-list", "1,2")
    assert not (tmp_path / "elsewhere").exists()
    assert output_of("draw", "--vtp-size-list", "1,2", "--output", "other.svg") == "wrote other.svg\n"


@pytest.mark.parametrize("command", ["plan", "search", "simulate", "trace", "draw"])
def test_two_files_are_refused(command: str, error_of: Error, tmp_path: Path) -> None:
    words = [command, *({"search": ["--cluster", "c"], "trace": ["."]}.get(command, []))]
    error = error_of(*words, "--output", "a.svg", "--output", "b.html")
    assert "error: --output a.svg and b.html: a command writes one file; give one of them; see: " in error
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_rights_is_refused_before_the_work(error_of: Error, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, int]] = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))  # root has all rights
    words = ["--num-layers", "2", "--cluster", "absent.toml"]  # is read next
    error = error_of("search", *words, "--output", "x.html")
    assert error.endswith("--output x.html may not be written; choose another file") and asked == [(Path(), os.W_OK)]


@pytest.mark.parametrize("words", [["draw"], ["simulate", "--num-microbatches", "2"]], ids=lambda words: words[0])
def test_a_picture_replaces_pictures_only(words: list[str], output_of: Output, error_of: Error, tmp_path: Path) -> None:
    words = [*words, "--vtp-size-list", "1,2", "--output", "named.svg"]
    path = tmp_path / "named.svg"
    path.write_text("notes")
    assert error_of(*words).endswith(
        "--output named.svg is no picture; only pictures are replaced; choose another file"
    )
    assert path.read_text() == "notes"
    for text in ("", '<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>'):
        path.write_text(text)
        assert output_of(*words).endswith("wrote named.svg\n")
        assert path.read_text().startswith("<svg ")


def test_simulate_shows_the_order_of_the_run_and_why(output_of: Output) -> None:
    words = "forward_ms=1,2,2,1 latency_ms=1"
    flags = (*U, *OF_A_RUN, "--vtp-in-flight", "6", "--vtp-costs", words)
    lines = output_of("simulate", *flags, "--global-batch-size", "8", *MODEL).splitlines()
    assert lines[0].startswith("stage 0 |0") and lines[1].startswith("stage 1 |....1F0")
    assert "dots: the stage is idle" in " ".join(lines[3:5])
    # The run's own step: the same digest, so the same order.
    costs = parse_costs(words.split(), u_placement(3))
    schedule, _ = make_schedule(
        ScheduleRequest(placement=u_placement(3), num_microbatches=8, costs=costs, in_flight=(6,))
    )
    timeline = simulate(schedule, costs, mode="rendezvous")
    plan = plan_u_shape(3, 8, costs, limits=(6, 6, 6))
    assert timeline.makespan == plan.makespan
    assert "simulated step 59 ms; the stages compute 81.4 % of it on average, the busiest (stage 0) 81.4 %" in lines
    rows = [line.split() for line in lines if line[:5].strip().isdigit()]
    assert [(row[1], row[5]) for row in rows] == [("81.4", str(kept)) for kept in plan.in_flight]
    text = " ".join(lines[-4:])
    assert f"no order can take less than {plan.lower_bound:g} with at most 6,6,6 microbatches in flight" in text
    assert f"schedule {schedule.digest}; times in ms, from --vtp-costs" in text


def test_simulate_says_which_stages_are_idle(output_of: Output) -> None:
    """The busiest stage works all the time but the fill and drain, the others a tenth of it."""
    costs = "forward_ms=1,1,1,10,1"
    step = json.loads(
        output_of(
            "simulate", "--vtp-size-list", "1,1,1,1,1", "--num-microbatches", "64", "--vtp-costs", costs, "--json"
        )
    )
    shares = [stage["utilization"] for stage in step["stages"]]
    assert shares[3] > 0.98 and max(shares[:3] + shares[4:]) < 0.1
    assert step["unit"] == "ms" and step["num_microbatches"] == 64 and step["stages"][3]["busy"] == 64 * 30
    lines = output_of(
        "simulate", "--vtp-size-list", "1,1,1,1,1", "--num-microbatches", "64", "--vtp-costs", costs
    ).splitlines()
    (summary,) = [line for line in lines if line.startswith("simulated step")]
    assert "compute 27.9 % of it on average, the busiest (stage 3) 99.5 %" in summary
    assert max(map(len, lines)) <= 160


@pytest.mark.parametrize(
    ("flags", "step"),
    [
        # The last stage works 4 * 3, 1 + 0.5 before and 0.5 + 2 after, and waits 1 for its third microbatch.
        (("--vtp-size-list", "1,2", "--vtp-costs", "forward_ms=1,1 latency_ms=0.5"), "17 ms"),
        # The last stage works 4 * 9, 1 before and 2 after.
        (("--vtp-size-list", "1,2", "--vtp-costs", "forward_ms=1,3"), "39 ms"),
        # The last stage works 4 * 2 * 3, 1 before and 2 after.
        (("--vtp-size-list", "1,2", "--num-virtual-stages-per-pipeline-rank", "2"), "27"),
        (("--vtp-size-list", "1,2", "--num-layers-per-virtual-pipeline-stage", "2", "--num-layers", "8"), "27"),
    ],
)
def test_simulate_knows_the_plain_schedules(output_of: Output, flags: tuple[str, ...], step: str) -> None:
    output = output_of("simulate", "--num-microbatches", "4", *flags)
    assert f"simulated step {step}; " in output and "order: Megatron's " in output


@pytest.mark.parametrize(
    ("mode", "rows"),
    [
        ("multiplex", [["0", "3", "3"], ["1", "replica", "0", "1", "1"], ["1", "replica", "1", "1", "1"]]),
        ("split", [["0", "2", "2"], ["1", "1", "1"]]),
    ],
)
def test_simulate_knows_replicas(output_of: Output, mode: str, rows: list[list[str]]) -> None:
    """Sizes 2 and 4: two copies, each with two replicas of stage 1 that run a microbatch in the time of stage 0."""
    flags = ("--vtp-size-list", "1,1", "--vtp-dp-list", "2,4", "--vtp-dp-mode", mode)
    # 8 samples are 4 microbatches of each copy; split joins two and two.
    lines = output_of("simulate", *flags, "--global-batch-size", "8", "--micro-batch-size", "1").splitlines()
    # In both modes stage 0 works 4 * 3, and waits 1 for its first gradient.
    (summary,) = [line for line in lines if line.startswith("simulated step")]
    assert summary.startswith("simulated step 13; ") and summary.endswith("(stage 0) 92.3 %")
    table = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert [[word for word in row if word not in "%" and "." not in word][:-3] + row[-2:] for row in table] == rows


@pytest.mark.parametrize(
    ("flags", "number"),
    [
        (("--vtp-size-list", "1,4,4"), 8),
        (("--vtp-size-list", "1,4,4", "--micro-batch-size", "2"), 8),
        (("--vtp-size-list", "1,2,2", "--num-virtual-stages-per-pipeline-rank", "2"), 9),
        ((*U, "--vtp-dp-list", "1,3,3"), 9),
        (("--vtp-size-list", "1,2", "--vtp-dp-list", "2,6"), 9),
        (("--bridge", "vision=1,1,2", "language=1,2,2"), 8),
    ],
)
def test_simulate_has_a_default_number_of_microbatches(output_of: Output, flags: tuple[str, ...], number: int) -> None:
    """It is said; and it is a number that replicas and model chunks can share."""
    assert f"\n{number} microbatches, by default; --num-microbatches N" in output_of("simulate", *flags)
    assert json.loads(output_of("simulate", *flags, "--json"))["num_microbatches"] == number
    assert "by default" not in output_of("simulate", *flags, "--num-microbatches", str(2 * number))


@pytest.mark.parametrize("flags", [("--vtp-size-list", "1,4,4"), U, ("--vtp-size-list", "1,2,4,8,8,1")])
def test_a_step_of_many_microbatches_shows_its_ends(output_of: Output, flags: tuple[str, ...]) -> None:
    """So that forwards and backwards can be told apart, with their microbatches; --output is named for the rest."""
    lines = output_of("simulate", *flags, "--global-batch-size", "128", "--micro-batch-size", "1").splitlines()
    rows = [line for line in lines if "|" in line]
    assert len(rows) == len(flags[1].split(",")) and "0F0-" in rows[0] and rows[0].rstrip("|").endswith("=")
    assert any("B127=" in row for row in rows)
    for row in rows:
        begin, end = row.split("|")[1].split(" ~ ")
        cells = re.findall(r"\d+[FB]\d+[-=]|\d[-=]", begin + end)
        assert len(cells) >= 4 and not re.search(r"\d{5}", row), row
    (said,) = [line for line in lines if line.startswith("Only the first ")]
    assert said.endswith("are drawn; --output step.svg draws all.")
    assert "Only the first" not in output_of("simulate", *flags, "--num-microbatches", "8")


def test_simulate_writes_a_picture_or_a_trace_and_sums_up(output_of: Output, tmp_path: Path) -> None:
    flags = ("simulate", *U, "--num-microbatches", "8", "--output")
    output = output_of(*flags, "step.svg")
    assert "simulated step 57; " in output and output.endswith("wrote step.svg\n")
    schedule, _ = make_schedule(ScheduleRequest(placement=u_placement(3), num_microbatches=8))
    timeline = simulate(schedule, u_costs(3), mode="rendezvous")
    title = "u-shape, --vtp-size-list 1,2,2, 8 microbatches"
    assert (tmp_path / "step.svg").read_text() == draw_svg(timeline, title=title)
    assert "simulated step 57; " in output_of(*flags, "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    # Four chunks, forward and backward.
    assert len([event for event in events if event["ph"] == "X"]) == 8 * 4 * 2


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("plan", "--vtp-size-list", "1,x"), "'1,x' has the entry 'x', which is not a positive whole number"),
        (("plan", "--vtp-size-list", "2,0"), "'2,0' has the entry '0', which is not a positive whole number"),
        (("plan", "--vtp-size-list", "auto"), "auto needs a running launcher"),
        (("plan",), "--vtp-size-list is missing"),
        (
            ("plan", "--vtp-size-list", "1,2", "--vtp-size-lsit", "1"),
            "--vtp-size-lsit is unknown; do you mean --vtp-size-list?",
        ),
        (
            ("plan", "--vtp-size-list", "1,2", "--vtp-magic"),
            f"--vtp-magic is unknown; `{own_command()} run --help-all` lists the flags",
        ),
        (("plan", "--vtp-size-list", "1,2", "--sequence-paralel"), "do you mean --sequence-parallel?"),
        (("plan", "--vtp-size-list", "1,2", "--distributed-bakend"), "do you mean --distributed-backend?"),
        (("plan", "pretrain.py", "--vtp-size-list", "1,2"), "'pretrain.py' belongs to no flag"),
        (("plan", "--vtp-size-list", "1,2", "--world-size", "x"), "argument --world-size: invalid int value: 'x'"),
        (("plan", "--vtp-size-list", "1,2", "--world-size", "0"), "the world size must be a positive integer, got 0"),
        (("plan", "--vtp-size-list", "1,2", "--world-size", "4"), "this run has 4; start"),
        (("plan", "--vtp-size-list", "1,2", "--tensor-model-parallel-size", "4"), "contradicts --vtp-size-list 1,2"),
        (("plan", "--vtp-size-list", "1,2", "--pipeline-model-parallel-size", "3"), "contradicts --vtp-size-list 1,2"),
        (("plan", "--vtp-size-list", "1,2", "--vtp-transport", "tcp"), "transport 'tcp' is unknown"),
        (("plan", "--vtp-size-list", "1,2", "--vtp-sites", "edge"), "'edge' names 1 sites, the size list has 2 stages"),
        (("plan", "--vtp-size-list", "1,2", "--vtp-sites", "edge,"), "'edge,' has an empty name"),
        (("plan", "--vtp-size-list", "1,2", "--vtp-cp-list", "1"), "vtp_cp_list 1 has 1 entries, the size list has 2"),
        (
            ("plan", "--vtp-size-list", "1,4", "--sequence-parallel", "--seq-length", "6"),
            "--seq-length 6 with --sequence",
        ),
        (("plan", "--vtp-size-list", "1,2", "--num-layer-list", "1,2,1"), "--num-layer-list is for --layerwise-disag"),
        (("plan", *U, "--num-layer-list", "1,2,1"), "--num-layer-list has 3 parts (1,2,1), 3 stages need 4"),
        (("plan", *U, "--num-virtual-stages-per-pipeline-rank", "2"), "2 with --layerwise-disaggregated-training; "),
        (("plan", "--vtp-size-list", "1,2", "--vtp-in-flight", "2"), "add --vtp-schedule planned and leave interl"),
        (("plan", "--vtp-size-list", "1,2", "--vtp-costs", "forward_ms=1,1"), "is for a U or split backwards"),
        (
            ("plan", "--vtp-size-list", "1,2", "--vtp-cp-list", "1,2", "--vtp-transport", "rank0"),
            "boundary 0->1 joins context-parallel sizes 1 and 2, and ",
        ),
        (("draw", "--vtp-size-list", "1,-2", "--output", "x.svg"), "'-2', which is not a positive whole number"),
        (
            ("draw", "--vtp-size-list", "1,2", "--output", "absent/x.svg"),
            "--output absent/x.svg: there is no folder absent; make",
        ),
        (
            ("draw", "--vtp-size-list", "1,2", "--output", "x.png"),
            "--output x.png: the name must end in .svg (picture)",
        ),
        (("draw", "--vtp-size-list", "1,2", "--output", "x"), "--output x: the name must end in .svg (picture)"),
        (("simulate", *U, "--num-microbatches", "0"), "must be at least 1"),
        (
            ("simulate", *U, "--global-batch-size", "9", "--micro-batch-size", "2"),
            "is no multiple of --micro-batch-size 2",
        ),
        (("simulate", *U, "--num-microbatches", "-1"), "must be at least 1"),
        (
            ("simulate", *U, "--num-microbatches", "8", "--vtp-in-flight", "0"),
            "with a limit below 1 no microbatch could",
        ),
        (("simulate", *U, "--num-microbatches", "8", "--vtp-costs", "forward=1"), "costs: 'forward=1' is not one of"),
        (
            ("simulate", *U, "--num-microbatches", "8", "--vtp-costs", "forward_ms=1,2"),
            "has 2 entries; this pipeline has 4",
        ),
        (
            ("simulate", "--vtp-size-list", "1", *U[2:], "--num-microbatches", "8"),
            "it needs an edge and at least one cloud",
        ),
        (("simulate", *U, "--num-microbatches", "8", "--vtp-dp-list", "1,2"), "vtp_dp_list 1,2 has 2 entries"),
        (("simulate", *U, "--num-microbatches", "8", "--vtp-dp-list", "1,3,3"), "8 mod 3 = 2 must be 0"),
        (
            ("simulate", *U[:2], "--num-virtual-stages-per-pipeline-rank", "2", "--vtp-dp-list", "1,2,2"),
            "with --vtp-size-list 1,2,2 --vtp-dp-list 1,2,2; no interleaved order",
        ),
        (("trace", ".", "--out", "x.png"), "--output x.png: the name must end in .json (trace"),
        (("plan", "--vtp-size-list", "1,2", "--output", "x.svg"), "--output x.svg: the name must end in .html (page)"),
        (
            ("plan", "--vtp-size-list", "1,2", "--output", "absent/x.html"),
            "--output absent/x.html: there is no folder absent; ma",
        ),
        (("simulate", *U, "--output", "x.png"), "--output x.png: the name must end in .svg (picture) or .json (trace"),
        (
            ("simulate", *U, "--num-microbatches", "8", "--output", "absent/x.svg"),
            "--output absent/x.svg: there is no folder absent; make it, or choose another file",
        ),
        (("doctor", "--device", "tpu"), "device 'tpu' is unknown; use one of auto, cuda, npu, cpu"),
        (("doctor", "--vebose"), "--vebose is unknown"),
        (("run", "absent.py", "--help"), "script absent.py does not exist; give the path of the training script"),
        (("run", "."), "script . does not exist"),
        (("run", "--vtp-size-list", "1,2", "train.py"), "--vtp-size-list stands before the script"),
        (("fly",), "fly is no command; the commands are run, path, plan"),
        (("simulte",), "simulte is no command; do you mean simulate?"),
        (("train.py", "--vtp-size-list", "1,2"), "train.py stands where a command is expected; write `run` before"),
        (("plan", "--vtp-size-list", "1,2", "--num-layers", "5"), "--num-layers 5; 2 stages cannot hold equally"),
        (("--verbose",), "the following arguments are required: COMMAND"),
        (
            ("plan", "--vtp-size-list", "8,6", "--num-attention-heads", "32", "--hidden-size", "4096"),
            "--num-attention-heads 32, --ffn-hidden-size 16384 (from --hidden-size 4096): stage 1 has TP 6, which does "
            "not divide them; TP sizes that divide this model: 1, 2, 4, 8, 16, 32",
        ),
        (
            ("plan", "--vtp-size-list", "1,2", "--vtp-ep-list", "1,2"),
            "choose an ep size that divides 1, or --vtp-etp-list 1,1",
        ),
        (
            ("plan", "--have", "2,1", "--num-layers", "4", "--global-batch-size", "4", *MODEL, "--nodes", "2,1"),
            "--nodes and --have say the devices of every node twice; leave --nodes out",
        ),
        (("plan", "--vtp-size-list", "8,6", "--nodes", "8,4"), "--nodes 8,4: 12 devices; the layout has 14 ranks"),
        (("plan", "--vtp-size-list", "1,2", "--nodes", "2,x"), "argument --nodes: '2,x' is no list of sizes"),
        (("plan", "--bridge", "a=1,1,1", "b=1,1,1", "--slurm"), "--nodes and --slurm are for one pipeline"),
    ],
)
def test_bad_input_is_one_line(error_of: Error, arguments: tuple[str, ...], line: str) -> None:
    error = error_of(*arguments)
    assert error.startswith("vtp_plugin: error: ") and line in error


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 101  # argparse may break a usage so
    return lines


NAMES = (
    "run",
    "plan",
    "draw",
    "simulate",
    "search",
    "profile",
    "certify",
    "checkpoint",
    "trace",
    "rendezvous",
    "link",
    "doctor",
)
OF_A_CHECKPOINT = ("show", "verify", "diff", "reshard", "import", "export")
OF_A_LINK = ("keys", "up", "down", "show", "run")


@pytest.mark.parametrize(
    "words",
    [
        (),
        *((name,) for name in NAMES),
        *(("checkpoint", action) for action in OF_A_CHECKPOINT),
        *(("link", action) for action in OF_A_LINK),
    ],
)
def test_help_fits_a_screen(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "102")
    lines = help_of(capsys, *words, "--help")
    assert len(lines) <= 40, len(lines)
    # Without any word, help is what a user is looking for.
    assert words or lines == help_of(capsys)


@pytest.mark.parametrize("name", ["plan", "draw", "simulate", "search", "profile"])
def test_own_flags_come_first_and_help_all_has_every_flag(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "102")
    of_a_run = [flag.name for flag in (*VTP_FLAGS, *RUN_FLAGS, *MODEL_FLAGS)]
    if name in ("search", "profile"):  # for all layouts
        of_a_run += ["--world-size", "--have", "--card-memory"]
    for words in (("--help",), ("--help-all",)):
        shown = [line.split()[0].rstrip(",") for line in help_of(capsys, name, *words) if line.startswith("  -")]
        own = [flag for flag in shown if flag not in of_a_run]
        assert len(own) > 3 and shown[: len(own)] == own, shown
        assert {"--vtp-size-list", "--num-layers"} & {*shown[len(own) :]}
    assert set(of_a_run) <= set(shown)


def test_help_of_run_shows_every_flag_in_its_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "102")
    lines = help_of(capsys, "run", "--help-all")
    for flag in VTP_FLAGS:
        before = lines[: next(i for i, line in enumerate(lines) if line.startswith(f"  {flag.name}"))]
        assert [line for line in before if line.startswith("vtp_plugin:")][-1] == group_title(flag)
    assert all(
        any(line.strip().startswith(f"{name} ({key.unit}): ") for line in lines) for name, key in COST_KEYS.items()
    )


def test_run_gives_the_script_its_arguments_and_its_neighbours(tmp_path: Path) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "beside.py").write_text("WORD = 'neighbour'\n")
    # The same name in the working directory must not win.
    (tmp_path / "beside.py").write_text("WORD = 'stranger'\n")
    arguments = ["scripts/train.py", "--help", "--vtp-size-list", "1,2", "--version"]
    output = process_output("run", *arguments, cwd=tmp_path)
    assert f"neighbour {arguments}" in output.splitlines()
    assert "usage" not in output


@pytest.mark.needs("help_of_0_19")
def test_run_shows_the_help_of_a_script_with_megatrons_parser(tmp_path: Path) -> None:
    """One of Megatron 0.19's help texts has a percent sign that argparse cannot format."""
    (tmp_path / "train.py").write_text("from megatron.training.arguments import parse_args\nparse_args()\n")
    output = " ".join(process_output("run", "train.py", "--help", cwd=tmp_path, start=forked_cli).split())
    assert "(e.g. 1.10 = 10%)" in output and "default 100%" in output and "100%%" not in output
    assert all(flag.name in output and group_title(flag) in output for flag in VTP_FLAGS)
    assert all(f"{name} ({key.unit})" in output for name, key in COST_KEYS.items())


def group_title(flag: Flag) -> str:
    return f"{flag.group.value}:"


def test_run_reports_the_error_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from vtp_plugin.errors import ConfigError\nraise ConfigError('no such size')\n")
    done = forked_cli("run", "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert error_line(done.stderr).endswith("error: no such size") and "Traceback" not in done.stderr


def test_doctor_tries_all_patches_and_gives_a_verdict(tmp_path: Path) -> None:
    """As inside a launcher, whose other ranks are not there: doctor must not wait for them."""
    launcher = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
    done = forked_cli("doctor", "--device", "cpu", "--verbose", "--rendezvous", "127.0.0.1:1", cwd=tmp_path, **launcher)
    lines = done.stdout.splitlines()
    # Nothing listens there, which is the only problem.
    assert done.returncode == 1 and lines[-1] == "verdict: 1 problem, see above"
    assert any(line.startswith("problem: rendezvous 127.0.0.1:1: no connection") for line in lines)
    assert any(line.startswith("    store: ") for line in lines)
    assert any(line.startswith("    gloo: ") for line in lines)
    first, second, patches, *_ = lines
    assert first.startswith(f"vtp_plugin {vtp_plugin.__version__}, torch ") and ", megatron-core " in first
    assert second.startswith(f"Megatron {host_name()} (")
    assert second.endswith("/megatron/core), device cpu, backend gloo")
    assert "device: cpu, backend gloo (requested)" in lines
    (interfaces,) = [line for line in lines if line.startswith("interfaces: ")]
    assert "lo 127.0.0.1" in interfaces
    assert any(line.startswith("a run that resumes after losses") for line in lines)
    applied = [line.split()[0] for line in lines if line.split()[1:2] in (["applied"], ["ready"])]
    assert patches == f"patches: {len(applied)} of {len(applied)} applied, then reverted"
    known = {
        *("vtp-flags", "argument-checks", "padded-vocabulary", "parallel-state", "p2p-communication"),
        *("finalize-model-grads", "embedding-start-value", "checkpoint-integrity", "checkpoint-layout"),
        *("dataset-helper", "cpu-rng-tracker", "cpu-norm", "training-log"),
        *("last-stage", "batch-on-edge", "tokenizer-on-edge"),
    }
    assert known - set(applied) <= ({"last-stage", "batch-on-edge"} if host_name() == "0.12" else set())
    of_u = {record.id for record in declared_at(Moment.U_SHAPE, load_host(host_name()))}
    assert len(of_u & set(applied)) >= 11
    assert all(f"    {rule.option}" in lines for rule in documented())
    assert max(map(len, lines)) <= 160


def test_doctor_prints_three_lines_and_a_verdict(tmp_path: Path) -> None:
    """Warnings and problems, which are not there, would stand between them."""
    lines = process_output("doctor", "--device", "cpu", cwd=tmp_path, start=forked_cli).splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["vtp_plugin", "Megatron", "patches:", "verdict:"], lines
    assert lines[-1] == "verdict: fine"


def test_doctor_is_content_without_a_launcher(tmp_path: Path) -> None:
    report = json.loads(process_output("doctor", "--json", cwd=tmp_path))
    assert report["exit_code"] == 0 and report["problems"] == [] and report["platform"].startswith("cpu, backend gloo")
    assert {patch["state"] for patch in report["patches"]} == {"applied", "ready"}
    assert report["warnings"] == []


@pytest.mark.full
@pytest.mark.needs("records_of_0_19")
def test_doctor_names_a_resiliency_package_that_breaks_checkpoints(tmp_path: Path) -> None:
    """As 0.4.1 beside core 0.19: what Megatron imports of it is there, and it does not say its version."""
    names = {
        "core": "AsyncCallsQueue = AsyncRequest = 1",
        "cached_metadata_filesystem_reader": "CachedMetadataFileSystemReader = 1",
        "filesystem_async": "FileSystemWriterAsync = get_write_results_queue = _results_queue = 1",
        "state_dict_saver": "CheckpointMetadataCache = save_state_dict_async_finalize = save_state_dict_async_plan = 1",
    }
    folder = tmp_path / "nvidia_resiliency_ext" / "checkpointing" / "async_ckpt"
    folder.mkdir(parents=True)
    for name, text in names.items():
        (folder / f"{name}.py").write_text(text)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").touch()
    info = tmp_path / "nvidia_resiliency_ext-0.4.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-resiliency-ext\nVersion: 0.4.1\n")
    done = run_cli("doctor", "--device", "cpu", cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{PYTHON_PATH}")
    report = " ".join(done.stdout.split())
    assert done.returncode == 1, done.stdout
    assert "beside nvidia-resiliency-ext 0.4.1 megatron.core.dist_checkpointing cannot be imported; remove it" in report


# Doctor where a record does not fit the installed version, and what it leaves behind.
TROUBLE = """\
import dataclasses
import inspect
import sys
import vtp_plugin.patches.core.pipeline_parallel.utils as utils
from vtp_plugin.cli import main
from vtp_plugin.host.patching.record import resolve_target
before = resolve_target("megatron.core.parallel_state:initialize_model_parallel").value
hook, kept = sys.excepthook, None
utils._is_last.__vtp_declared__ = tuple(
    dataclasses.replace(record, versions=">=9", aliases=()) for record in utils._is_last.__vtp_declared__
)
read = inspect.getsource
inspect.getsource = lambda value: read(value) + "# changed" * (value.__name__ == "validate_args")
try:
    main(["doctor", "--device", "cpu"])
except SystemExit as left:
    kept = left.code
after = resolve_target("megatron.core.parallel_state:initialize_model_parallel").value
print(kept, after is before, sys.excepthook is hook)
"""


@pytest.mark.needs("records_of_0_19")
def test_doctor_leaves_nothing_behind_and_names_what_does_not_apply(tmp_path: Path) -> None:
    (tmp_path / "trouble.py").write_text(TROUBLE)
    done = forked_python("trouble.py", cwd=tmp_path, env=environment_of())
    *_, state = done.stdout.splitlines()
    assert state == "1 True True", (done.stdout, done.stderr)
    problems = [line for line in done.stdout.splitlines() if line.startswith("problem: ")]
    (warning,) = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    assert warning.startswith("warning: megatron-core: megatron.training.arguments:validate_args is not as in 0.")
    assert any(
        "patch last-stage (megatron.core.pipeline_parallel.utils:" in p and "was not applied" in p for p in problems
    )


def test_doctor_names_the_package_that_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vtp_plugin.cli import doctor

    monkeypatch.setattr(doctor, "find_megatron", lambda: None)
    said: list[str] = []
    for words in ([], ["--verbose", "--rendezvous", "192.0.2.1:29511"]):
        with pytest.raises(SystemExit) as left:
            main(["doctor", *words])
        assert left.value.code == 1
        said.append(" ".join(capsys.readouterr().out.split()))  # wide lines are cut
    verdict = "verdict: Megatron is missing: there is no megatron.core; run: pip install 'megatron-core"
    assert said[0].startswith(verdict)
    assert said[1] == f"rendezvous 192.0.2.1:29511: not tested; install what is missing first {said[0]}"


# `doctor --rendezvous` where somebody listens, then where nobody does; neither torch nor Megatron can be imported.
ASKING = """\
import socket
import sys
from vtp_plugin.cli import main

sys.modules["megatron"] = sys.modules["torch"] = None
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
for _ in range(2):
    try:
        main(["doctor", "--rendezvous", f"127.0.0.1:{port}"])
    except SystemExit as left:
        print("ended with", left.code)
    listener.close()
"""


def test_doctor_asks_a_rendezvous_and_nothing_else(tmp_path: Path) -> None:
    """What takes seconds is not done: no patch is tried, and torch is imported only to talk with who listens."""
    (tmp_path / "asking.py").write_text(ASKING)
    env = {"PYTHONPATH": PYTHON_PATH, "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "asking.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    there, gone, rest = done.stdout.split("ended with 1\n")
    for said, line in ((there, "torch is missing, so the store cannot be asked; run: pip"), (gone, "no connection to")):
        text = " ".join(said.split())  # wide lines are cut
        assert text.startswith("rendezvous 127.0.0.1 is 127.0.0.1 ") and line in text
        assert " problem: rendezvous 127.0.0.1:" in text and text.endswith(" verdict: 1 problem, see above")
    assert "connected to port" in there and rest == ""
