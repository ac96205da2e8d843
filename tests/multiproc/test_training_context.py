"""The example script with a context-parallel size per stage; its attention is the tests' own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.hosts import exact_resume_tolerance
from tests.multiproc.script_cases import (
    ScriptRun,
    arguments,
    assert_same_training,
    launch,
    succeeded,
    train,
)
from tests.pool import Pool

DISTRIBUTED = ["--use-distributed-optimizer"]
EVALUATE = ["--eval-interval", "2", "--eval-iters", "1"]


@pytest.fixture(scope="module")
def pool(script_pool: Pool) -> Pool:
    """Workers for scripts."""
    return script_pool


def train_mixed(pool: Pool, sizes: str, cp_sizes: str, extra: Sequence[str]) -> list[ScriptRun]:
    """Run the example with both lists."""
    num_ranks = sum(int(tp) * int(cp) for tp, cp in zip(sizes.split(","), cp_sizes.split(","), strict=True))
    command = arguments(sizes, extra=["--vtp-cp-list", cp_sizes, *extra])
    return succeeded(launch(pool, num_ranks, {"arguments": command, "hooks": ["context_parallel"]}))


@pytest.mark.parametrize(
    ("sizes", "cp_sizes", "extra"),
    [
        pytest.param("1,1", "1,2", [*EVALUATE, "--log-params-norm"], id="1,1-cp-1,2"),
        pytest.param(
            "1,2",
            "2,1",
            ["--sequence-parallel", *DISTRIBUTED, "--overlap-grad-reduce", "--calculate-per-token-loss"],
            id="1,2-cp-2,1",
            marks=pytest.mark.full,
        ),
    ],
)
def test_trains_as_the_uniform_run(pool: Pool, sizes: str, cp_sizes: str, extra: list[str]) -> None:
    reference = train(pool, "1,1", [*EVALUATE, *(word for word in extra if word == "--calculate-per-token-loss")])
    runs = train_mixed(pool, sizes, cp_sizes, extra)
    assert_same_training(runs, reference)


@pytest.mark.full
@pytest.mark.parametrize("extra", [[], DISTRIBUTED], ids=["plain", "distributed"])
def test_save_and_resume(pool: Pool, tmp_path: Path, extra: list[str]) -> None:
    """The resumed run repeats the uninterrupted one bit by bit."""
    sizes, cp_sizes = "2,1", "1,2"
    whole = train_mixed(pool, sizes, cp_sizes, [*extra, "--save", str(tmp_path), "--save-interval", "2"])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    runs = train_mixed(pool, sizes, cp_sizes, [*extra, "--load", str(tmp_path)])
    assert_same_training(runs, whole, first=2, tolerance=exact_resume_tolerance())
