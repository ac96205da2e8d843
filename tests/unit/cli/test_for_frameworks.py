"""Layouts in the words of frameworks: what ``--for`` prints, and that Megatron's parser reads it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

import pytest

from tests.rules.import_rules import ROOT
from vtp_plugin.cli import main
from vtp_plugin.cli.for_frameworks import layout_string

MODEL = [
    *("--num-layers", "32", "--hidden-size", "4096", "--num-attention-heads", "32", "--group-query-attention"),
    *("--num-query-groups", "8", "--vocab-size", "128256", "--max-position-embeddings", "4096", "--seq-length", "4096"),
    *("--micro-batch-size", "1", "--global-batch-size", "64", "--bf16"),
]
HAVE = ["plan", "--have", "8,6", *MODEL]


def printed(capsys: pytest.CaptureFixture[str], words: Sequence[str]) -> str:
    main([*words])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("layers", "num_chunks", "stages"),
    [
        ((19, 9, 4), 1, [[19], [9], [4]]),
        ((1, 1), 1, [[1], [1]]),
        ((4, 4), 2, [[2, 2], [2, 2]]),
        ((2, 1, 6), 1, [[2], [1], [6]]),
    ],
)
def test_megatron_reads_the_layout(layers: tuple[int, ...], num_chunks: int, stages: list[list[int]]) -> None:
    module = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    read = module.PipelineParallelLayerLayout.from_str(layout_string(layers, num_chunks), len(layers))
    assert [[sum("decoder" in str(one) for one in chunk) for chunk in stage] for stage in read.layout] == stages
    assert "embedding" in str(read.layout[0][0][0]) and "loss" in str(read.layout[-1][-1][-1])


def test_ms_swift_runs_the_list_itself(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, [*HAVE, "--for", "swift"])
    for node, number in enumerate((8, 6)):
        assert f"NNODES=2 NODE_RANK={node} NPROC_PER_NODE={number} MASTER_ADDR=$MASTER_ADDR MASTER_PORT=" in text
    assert text.count("VTP_FLAGS='--vtp-size-list 8,4,2' megatron sft") == 2 and "torchrun" not in text
    assert text.count("--pipeline_model_parallel_layout 'Et*19|t*9|t*4L'") == 2
    command, _ = re.findall(r"PORT \\\n +megatron sft ((?:.*\n)*?.*) FLAGS", text)
    flags = dict(zip(*[iter(shlex.split(command.replace("\\\n", "")))] * 2, strict=True))
    assert flags["--tensor_model_parallel_size"] == "4" and flags["--pipeline_model_parallel_size"] == "3"


@pytest.mark.parametrize("name", ["bridge", "verl"])
def test_a_framework_without_unequal_stages_says_so(capsys: pytest.CaptureFixture[str], name: str) -> None:
    text = printed(capsys, [*HAVE, "--for", name])
    title = {"bridge": "Megatron-Bridge", "verl": "verl"}[name]
    assert f"{title} cannot run --vtp-size-list 8,4,2\n" in text
    (loss,) = re.findall(r"the best layout of one size takes (\S+) times as long as 8,4,2", text)
    assert 1.01 < float(loss) < 2


def test_words_of_hydra(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, [*HAVE, "--for", "bridge"])
    (command,) = re.findall(r"--node-rank 0 --nproc-per-node 8 .*\n +RECIPE (.*)", text)
    words = shlex.split(command)
    assert words[:2] == ["model.tensor_model_parallel_size=4", "model.pipeline_model_parallel_size=3"]
    assert re.fullmatch(r'model\.pipeline_model_parallel_layout="Et\*\d+\|t\*\d+\|t\*\d+L"', words[2])


def test_verl_has_one_number_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, [*HAVE, "--for", "verl"])
    assert "trainer.n_gpus_per_node is one number, and this layout needs 8 on node 0, 4 on node 1" in text
    alike = printed(capsys, ["plan", "--have", "8,8", *MODEL, "--for", "verl"])
    assert "trainer.n_gpus_per_node=8 trainer.nnodes=2" in alike and "cannot run" not in alike


def test_megatron_itself(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(
        capsys,
        [
            "search",
            "--cluster",
            str(ROOT / "examples/clusters/unequal.toml"),
            *MODEL,
            "--for",
            "megatron",
        ],
    )
    own, one = text.split("start Megatron with one size")
    assert "run SCRIPT FLAGS --vtp-size-list" in own
    assert len(re.findall(r"\n +SCRIPT FLAGS --tensor-model-parallel-size \d+ --pipeline", one)) == 4


@pytest.mark.parametrize(("name", "plugin"), [("swift", "with the plugin"), ("megatron", "run SCRIPT FLAGS")])
def test_what_is_advised_comes_first(capsys: pytest.CaptureFixture[str], name: str, plugin: str) -> None:
    text = printed(capsys, ["plan", "--have", "4,2", *MODEL, "--for", name])
    assert "says little: stay with one size\n" in text
    assert 0 < text.index("with one size on each node") < text.index(plugin)


def test_ms_swift_has_no_batch_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*HAVE, "--for", "swift", "--slurm"])
    assert "--slurm --for swift: the batch script starts torchrun; leave --slurm out" in capsys.readouterr().err


def test_given_sizes_are_not_found(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--vtp-size-list", "1,2", "--for", "verl"])
    assert "--for with sizes that were given; " in capsys.readouterr().err
