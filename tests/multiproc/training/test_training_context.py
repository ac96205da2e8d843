"""The example script with a context-parallel size per stage; its attention is the tests' own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.multiproc.cases.script_cases import ScriptRun, Scripts, arguments, assert_same_training, evaluations, uniform
from tests.support.hosts import exact_resume_tolerance, resharding_flags, resume_tolerance

pytestmark = pytest.mark.needs("scripts_here")

DISTRIBUTED = ["--use-distributed-optimizer"]
INTERLEAVED = ["--num-virtual-stages-per-pipeline-rank", "2"]
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1"]
TRACKER = "latest_checkpointed_iteration.txt"
EVALUATE = ["--eval-interval", "2", "--eval-iters", "1"]


def train_mixed(scripts: Scripts, sizes: str, cp_sizes: str, extra: Sequence[str], *, dp: int = 1) -> list[ScriptRun]:
    """Run the example with both lists."""
    num_ranks = dp * sum(int(tp) * int(cp) for tp, cp in zip(sizes.split(","), cp_sizes.split(","), strict=True))
    command = arguments(sizes, dp=dp, extra=["--vtp-cp-list", cp_sizes, *extra])
    return scripts.finish(num_ranks, {"arguments": command, "hooks": ["context_parallel"]})


@pytest.mark.needs("stock_without_overlap", cases=("2,1-cp-1,2-interleaved", "1,1-cp-2,1-dp2"))
@pytest.mark.parametrize(
    ("sizes", "cp_sizes", "extra", "dp"),
    [
        pytest.param("1,1", "1,2", [*EVALUATE, "--log-params-norm"], 1, id="1,1-cp-1,2"),
        pytest.param(
            "1,2",
            "2,1",
            ["--sequence-parallel", *DISTRIBUTED, "--overlap-grad-reduce", "--calculate-per-token-loss"],
            1,
            id="1,2-cp-2,1",
            marks=pytest.mark.full,
        ),
        pytest.param("1,2", "2,2", EVALUATE, 1, id="1,2-cp-2,2", marks=pytest.mark.full),
        pytest.param(
            "2,1", "1,2", [*INTERLEAVED, "--sequence-parallel"], 1, id="2,1-cp-1,2-interleaved", marks=pytest.mark.full
        ),
        pytest.param("1,1", "2,1", [*INTERLEAVED, *DISTRIBUTED], 2, id="1,1-cp-2,1-dp2", marks=pytest.mark.full),
        pytest.param(
            "1,2,1",
            "1,1,2",
            [*RECOMPUTE, "--num-layers", "6"],
            1,
            id="1,2,1-cp-1,1,2-recompute",
            marks=pytest.mark.full,
        ),
    ],
)
def test_trains_as_the_uniform_run(scripts: Scripts, sizes: str, cp_sizes: str, extra: list[str], dp: int) -> None:
    own = ("--sequence-parallel", *DISTRIBUTED, "--overlap-grad-reduce")
    reference = scripts.train(uniform(sizes), [word for word in extra if word not in own], dp=dp)
    runs = train_mixed(scripts, sizes, cp_sizes, extra, dp=dp)
    assert_same_training(runs, reference)
    assert evaluations(runs) == pytest.approx(evaluations(reference), rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(("sizes", "cp_sizes"), [("1,1", "1,2"), ("1,2", "2,1"), ("2,1", "2,2")])
def test_a_u_continues_a_sequential_run(scripts: Scripts, tmp_path: Path, sizes: str, cp_sizes: str) -> None:
    """And another list goes on from there."""
    reference = scripts.train("1", [*EVALUATE, "--save", str(tmp_path), "--save-interval", "1"])
    (tmp_path / TRACKER).write_text("1")
    u_shape = [*EVALUATE, "--layerwise-disaggregated-training", "--num-layer-list", "1,1,2", *resharding_flags()]
    saving = ["--save", str(tmp_path / "u"), "--save-interval", "1"]
    runs = train_mixed(scripts, sizes, cp_sizes, [*u_shape, "--load", str(tmp_path), *saving])
    assert_same_training(runs, reference, first=1)
    assert runs[0].evaluations == pytest.approx(reference[0].evaluations, rel=1e-5)
    (tmp_path / "u" / TRACKER).write_text("3")
    again = train_mixed(scripts, "1,1", "2,1", [*u_shape, "--load", str(tmp_path / "u")])
    assert_same_training(again, reference, first=3, tolerance=resume_tolerance())


@pytest.mark.full
@pytest.mark.parametrize(("sizes", "cp_sizes"), [("1,2", "2,1"), ("1,1", "1,1")])
def test_resumed_with_another_list(scripts: Scripts, tmp_path: Path, sizes: str, cp_sizes: str) -> None:
    whole = train_mixed(scripts, "2,1", "1,2", ["--save", str(tmp_path), "--save-interval", "2"])
    (tmp_path / TRACKER).write_text("2")
    runs = train_mixed(scripts, sizes, cp_sizes, ["--load", str(tmp_path), *resharding_flags()])
    assert_same_training(runs, whole, first=2, tolerance=resume_tolerance())


@pytest.mark.full
@pytest.mark.parametrize("extra", [[], DISTRIBUTED], ids=["plain", "distributed"])
def test_save_and_resume(scripts: Scripts, tmp_path: Path, extra: list[str]) -> None:
    """The resumed run repeats the uninterrupted one bit by bit."""
    sizes, cp_sizes = "2,1", "1,2"
    whole = train_mixed(scripts, sizes, cp_sizes, [*extra, "--save", str(tmp_path), "--save-interval", "2"])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    runs = train_mixed(scripts, sizes, cp_sizes, [*extra, "--load", str(tmp_path)])
    assert_same_training(runs, whole, first=2, tolerance=exact_resume_tolerance())
