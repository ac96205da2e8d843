"""Checkpoints that ranks of several sites write together: what the ranks tell each other of them crosses as data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.multiproc.cases.script_cases import Scripts, assert_same_training
from tests.support.hosts import host_name

pytestmark = pytest.mark.needs("scripts_here")

U_SHAPE = ["--layerwise-disaggregated-training", "--num-layer-list", "1,1,2", "--vtp-sites", "edge,cloud"]
EVALUATION = ["--eval-interval", "2", "--eval-iters", "1", "--split", "80,10,10"]
# Megatron 0.12 ends a run of another number of ranks that does not leave the random states of the checkpoint alone.
ELSEWHERE = ["--no-load-rng"] if host_name() == "0.12" else []
SHARDED = ["--use-distributed-optimizer", "--ckpt-fully-parallel-load", "--untie-embeddings-and-output-weights"]
BACKGROUND = ["--async-save"]


@pytest.mark.parametrize(
    ("options", "dp"),
    [
        pytest.param([], 1, id="plain"),
        pytest.param(SHARDED, 2, id="sharded"),
        pytest.param(BACKGROUND, 1, id="background", marks=pytest.mark.full),
    ],
)
def test_a_shared_checkpoint_names_nothing(scripts: Scripts, tmp_path: Path, options: Sequence[str], dp: int) -> None:
    """Saved by two sites whose arguments differ, and loaded by them, in this layout and in another one."""
    folder = str(tmp_path / "saved")
    command = [*EVALUATION, *U_SHAPE, *options, "--ckpt-format", "torch_dist"]
    own = {0: ["--tensorboard-dir", str(tmp_path / "tensorboard")]}
    runs = scripts.train("1,2", [*command, "--save", folder, "--save-interval", "2"], dp=dp, by_rank=own)
    for sizes, flags in (("1,2", []), ("1,1", ELSEWHERE)):
        Path(folder, "latest_checkpointed_iteration.txt").write_text("2")
        again = scripts.train(sizes, [*command, *flags, "--load", folder], dp=dp, by_rank=own)
        assert_same_training(again, runs, first=2)


def test_files_of_each_rank_name_nothing(scripts: Scripts, tmp_path: Path) -> None:
    """Timers of all ranks, and a file of each rank in a folder of each site."""
    folders = {rank: ["--save", str(tmp_path / site)] for rank, site in enumerate(("edge", "cloud", "cloud"))}
    extra = [*EVALUATION, *U_SHAPE, "--ckpt-format", "torch", "--save-interval", "2", "--timing-log-level", "2"]
    scripts.train("1,2", [*extra, "--timing-log-option", "all", "--vtp-timing"], by_rank=folders)
    assert [len([*(tmp_path / site).glob("iter_0000004/mp_rank_*")]) for site in ("edge", "cloud")] == [1, 2]
