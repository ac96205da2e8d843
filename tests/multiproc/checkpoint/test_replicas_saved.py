"""Checkpoints of stages with different numbers of replicas, with the options that Megatron shares work by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.multiproc.cases.script_cases import ScriptRun, Scripts, arguments, assert_same_training
from tests.support.hosts import (
    background_flags,
    exact_resume_tolerance,
    reshardable_flags,
    resharding_flags,
    resume_tolerance,
)

pytestmark = pytest.mark.needs("scripts_here")

RESHARDABLE = reshardable_flags()
DISTRIBUTED = ["--use-distributed-optimizer"]
U_SHAPE = ["--layerwise-disaggregated-training", "--num-layer-list", "1,2,1"]
# Megatron's local experts fail with fused activations and with biases.
EXPERTS = ["--num-experts", "4", "--moe-router-topk", "2", "--no-bias-gelu-fusion", "--disable-bias-linear"]
BY_COPIES_OF_EXPERTS = [f"--ckpt-fully-parallel-{what}-process-group=ep_dp" for what in ("save", "load")]
PARALLEL_LOAD = ["--ckpt-fully-parallel-load"]
TRACKER = "latest_checkpointed_iteration.txt"
CONSTANT = ["--ckpt-assume-constant-structure"]


def train(scripts: Scripts, sizes: str, dp_sizes: str, extra: Sequence[str] = ()) -> list[ScriptRun]:
    """Run the example with both lists and a global batch of 16; a failure of any rank is the test's."""
    num_ranks = sum(int(tp) * int(dp) for tp, dp in zip(sizes.split(","), dp_sizes.split(","), strict=True))
    command = arguments(sizes, dp=2, extra=["--vtp-dp-list", dp_sizes, *extra])
    return scripts.finish(num_ranks, {"arguments": command, "timeout_s": 120.0})


@pytest.mark.needs("worker_on_cpus", cases=("background",))
@pytest.mark.needs("flags_of_0_19", cases=("copies",))
@pytest.mark.parametrize(
    ("sizes", "dp_sizes", "extra"),
    [
        pytest.param("1,1", "1,2", DISTRIBUTED, id="1,2"),
        pytest.param("1,1", "2,1", DISTRIBUTED, id="2,1", marks=pytest.mark.full),
        pytest.param("1,1", "1,2", [], id="plain", marks=pytest.mark.full),
        pytest.param("1,1", "1,2", [*DISTRIBUTED, *RESHARDABLE], id="reshardable", marks=pytest.mark.full),
        pytest.param("2,1", "1,2", [*DISTRIBUTED, *background_flags()], id="background", marks=pytest.mark.full),
        pytest.param("1,1", "1,2", [*DISTRIBUTED, *U_SHAPE], id="u-shape", marks=pytest.mark.full),
        pytest.param(
            "1,1", "1,2", [*DISTRIBUTED, *EXPERTS, "--vtp-ep-list", "1,2"], id="experts", marks=pytest.mark.full
        ),
        pytest.param(
            "1,1",
            "2,2",
            [*DISTRIBUTED, *EXPERTS, "--vtp-ep-list", "2,1", *BY_COPIES_OF_EXPERTS],
            id="copies",
            marks=pytest.mark.full,
        ),
    ],
)
def test_saves_and_loads_with_shared_work(
    scripts: Scripts, tmp_path: Path, sizes: str, dp_sizes: str, extra: list[str]
) -> None:
    """Replicas share the work of loads and keep what a first save has worked out; all is as without these options.

    Four saves; a run loads the second, and saves two more, which others load: the same list, and another one.
    """
    # A few steps further 0.12 is 2.2e-5 off.
    tolerance = 2 * exact_resume_tolerance()
    first, second = tmp_path / "first", tmp_path / "second"
    whole = train(scripts, sizes, dp_sizes, [*extra, *CONSTANT, "--save", str(first), "--save-interval", "1"])
    for step in (1, 3):
        (first / TRACKER).write_text(str(step))
        runs = train(scripts, sizes, dp_sizes, [*extra, *PARALLEL_LOAD, "--load", str(first)])
        assert_same_training(runs, whole, first=step, tolerance=tolerance)
    (first / TRACKER).write_text("2")
    saving = ["--load", str(first), "--save", str(second), "--save-interval", "1"]
    runs = train(scripts, sizes, dp_sizes, [*extra, *PARALLEL_LOAD, *CONSTANT, *saving])
    assert_same_training(runs, whole, first=2, tolerance=tolerance)
    (second / TRACKER).write_text("3")
    runs = train(scripts, sizes, dp_sizes, [*extra, "--load", str(second)])
    assert_same_training(runs, whole, first=3, tolerance=tolerance)
    # Experts with groups of their own load only where they have some.
    other = ("2,1", ["--vtp-ep-list", "2,1"]) if "--vtp-ep-list" in extra else ("1,1", [])
    into = [*extra, *other[1], *resharding_flags(), *PARALLEL_LOAD, "--load", str(second)]
    runs = train(scripts, "1,1", other[0], into)
    assert_same_training(runs, whole, first=3, tolerance=max(tolerance, resume_tolerance()))
