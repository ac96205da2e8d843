"""Dropout on CPUs: all ranks of a stage drop the same elements of what they hold whole, as those of a GPU do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.multiproc.cases.script_cases import ScriptRun, Scripts, arguments, assert_same_training, num_ranks
from tests.support.hosts import exact_resume_tolerance

pytestmark = pytest.mark.needs("scripts_here")

DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
EVALUATION = ["--eval-interval", "2", "--eval-iters", "1", "--split", "80,10,10"]
RECOMPUTED = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
U_SHAPE = ["--layerwise-disaggregated-training", "--num-layer-list", "1,2,1"]


def train(scripts: Scripts, sizes: str, extra: Sequence[str], dp: int | Sequence[int] = 1) -> list[ScriptRun]:
    """Run the example with dropout, on replicas for each stage where there are several numbers."""
    each = [int(size) for size in sizes.split(",")]
    if isinstance(dp, int):
        world_size = num_ranks(sizes, dp)
    else:
        world_size = sum(tp * replicas for tp, replicas in zip(each, dp, strict=True))
        extra = ["--vtp-dp-list", ",".join(map(str, dp)), *extra]
    words = arguments(sizes, dp=2 if world_size > sum(each) else 1, extra=[*DROPOUT, *extra])
    return scripts.finish(world_size, {"arguments": words, "hooks": ["note_whole_weights"]})


def assert_equal_on_all_ranks(runs: Sequence[ScriptRun]) -> None:
    """Check that ranks of a stage have trained the weights that each holds whole to the same numbers."""
    num_compared = 0
    for rank, run in enumerate(runs):
        assert rank in run.facts["stage"]
        first = runs[run.facts["stage"][0]].facts["whole"]
        for name, weight in run.facts["whole"].items():
            np.testing.assert_array_equal(weight, first[name], err_msg=f"rank {rank}: {name}")
            num_compared += run is not runs[run.facts["stage"][0]]
        assert "RNG state changed" not in run.output, "Megatron's tracker saw the host's generator move"
    assert num_compared > 5


@pytest.mark.parametrize(
    ("sizes", "extra", "dp"),
    [
        pytest.param("2", EVALUATION, 1, id="uniform", marks=pytest.mark.full),
        pytest.param("1,2", EVALUATION, 1, id="evaluated"),
        pytest.param("1,2", ["--sequence-parallel"], 1, id="sequence-parallel", marks=pytest.mark.full),
        pytest.param("1,2", RECOMPUTED, 1, id="recomputed"),
        pytest.param("2,1", U_SHAPE, 1, id="u-shape"),
        pytest.param("1,2", [], (1, 2), id="dp-list"),
    ],
)
def test_ranks_of_a_stage_drop_the_same(
    scripts: Scripts, sizes: str, extra: list[str], dp: int | tuple[int, ...]
) -> None:
    assert_equal_on_all_ranks(train(scripts, sizes, extra, dp))


def test_a_resumed_run_drops_as_the_whole_one(scripts: Scripts, tmp_path: Path) -> None:
    """Its data loader is a new one, which moves the host's generator once more."""
    whole = train(scripts, "1,2", ["--save", str(tmp_path), "--save-interval", "2"])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(scripts, "1,2", ["--load", str(tmp_path)])
    assert_equal_on_all_ranks(resumed)
    assert_same_training(resumed, whole, first=2, tolerance=exact_resume_tolerance())
