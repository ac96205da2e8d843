"""The example script with a data-parallel size per stage: same losses, counts and samples as the uniform run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cases.script_cases import (
    ScriptRun,
    arguments,
    assert_refused,
    assert_same_training,
    evaluations,
    launch,
    succeeded,
)
from tests.support.hosts import exact_resume_tolerance, resharding_flags, resume_tolerance
from tests.support.lines import error_line
from tests.support.pool import Pool

pytestmark = pytest.mark.needs("scripts_here")

DISTRIBUTED = ["--use-distributed-optimizer", "--overlap-grad-reduce"]
EVALUATE = ["--eval-interval", "2", "--eval-iters", "1", "--split", "80,10,10"]


@pytest.fixture(scope="module")
def pool(script_pool: Pool) -> Pool:
    """Workers for scripts."""
    return script_pool


def start(pool: Pool, sizes: str, dp_sizes: str, extra: Sequence[str] = (), **options: Any) -> list[ScriptRun]:
    """Run the example with both lists and a global batch of 16, whatever comes of it."""
    num_ranks = sum(int(tp) * int(dp) for tp, dp in zip(sizes.split(","), dp_sizes.split(","), strict=True))
    command = arguments(sizes, dp=2, extra=["--vtp-dp-list", dp_sizes, *extra])
    return launch(pool, num_ranks, {"arguments": command, **options})


def train(pool: Pool, sizes: str, dp_sizes: str, extra: Sequence[str] = (), **options: Any) -> list[ScriptRun]:
    """Run the example with both lists; a failure of any rank is the test's."""
    return succeeded(start(pool, sizes, dp_sizes, extra, **options))


NOTES = ["note_samples"]


def assert_same_samples(runs: Sequence[ScriptRun], reference: Sequence[ScriptRun], *, num_samples: int) -> None:
    """Check who reads what: in microbatches of two, one replica of stage 0 takes those of both of stage 1 in turn.

    Of a tensor-parallel group one rank reads. The reference has two replicas of both stages, each with all its samples.
    """
    narrow, *ours = (samples for run in runs if (samples := run.facts["samples"]))
    theirs = [run.facts["samples"] for run in reference]
    assert theirs[:2] == theirs[2:] and len(theirs[0]) == num_samples
    assert ours == theirs[2:]
    pairs = [[samples[i : i + 2] for i in range(0, num_samples, 2)] for samples in ours]
    assert narrow == [sample for both in zip(*pairs, strict=True) for pair in both for sample in pair]


@pytest.mark.parametrize(
    ("sizes", "dp_sizes", "oracle", "extra"),
    [
        pytest.param("1,2", "1,2", ("1,1", "2,2", []), [*EVALUATE, "--log-params-norm"], id="multiplex"),
        pytest.param(
            "2,1",
            "2,1",
            ("1,1", "1,1", ["--micro-batch-size", "4"]),
            ["--vtp-dp-mode", "split", *EVALUATE, "--calculate-per-token-loss", *DISTRIBUTED],
            id="split",
            marks=pytest.mark.full,
        ),
    ],
)
def test_trains_as_the_uniform_run(
    pool: Pool, sizes: str, dp_sizes: str, oracle: tuple[str, str, list[str]], extra: list[str]
) -> None:
    reference_extra = [word for word in extra if word not in (*DISTRIBUTED, "--vtp-dp-mode", "split")]
    reference = train(pool, oracle[0], oracle[1], [*oracle[2], *reference_extra], hooks=NOTES)
    runs = train(pool, sizes, dp_sizes, extra, hooks=NOTES)
    assert_same_training(runs, reference)
    assert evaluations(runs) == pytest.approx(evaluations(reference), rel=1e-5)
    consumed = [run.facts["consumed"] for run in (*runs, *reference)]
    assert consumed == [consumed[0]] * len(consumed) and min(consumed[0]) > 0
    if "split" not in extra:
        assert_same_samples(runs, reference, num_samples=4 * 8)
    assert "data-parallel sizes differ" in runs[0].output
    assert f"stage 0: data-parallel size {dp_sizes[0]} * micro batch size 2 * " in runs[0].output


@pytest.mark.full
def test_samples_and_their_order(pool: Pool) -> None:
    """Of split batches; of others they are compared where the training is."""
    steps = ["--train-iters", "2"]
    ours = train(pool, "1,1", "1,2", [*steps, "--vtp-dp-mode", "split"], hooks=NOTES)
    assert_same_samples(ours, train(pool, "1,1", "2,2", steps, hooks=NOTES), num_samples=16)


@pytest.mark.full
@pytest.mark.parametrize("extra", [[], DISTRIBUTED], ids=["plain", "distributed"])
def test_save_and_resume(pool: Pool, tmp_path: Path, extra: list[str]) -> None:
    """The resumed run repeats the uninterrupted one bit by bit."""
    whole = train(pool, "2,1", "1,2", [*extra, "--save", str(tmp_path), "--save-interval", "2"])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    runs = train(pool, "2,1", "1,2", [*extra, "--load", str(tmp_path)])
    assert_same_training(runs, whole, first=2, tolerance=exact_resume_tolerance())


@pytest.mark.full
@pytest.mark.parametrize("extra", [[], ["--use-distributed-optimizer"]], ids=["plain", "distributed"])
def test_checkpoint_of_another_dp_list(pool: Pool, tmp_path: Path, extra: list[str]) -> None:
    whole = train(pool, "2,1", "2,2", [*extra, "--save", str(tmp_path), "--save-interval", "2"])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    runs = train(pool, "2,1", "1,2", [*extra, "--load", str(tmp_path)])
    assert_same_training(runs, whole, first=2, tolerance=resume_tolerance())


@pytest.mark.full
@pytest.mark.parametrize("mode", ["multiplex", "split"])
def test_u_shape_continues_a_sequential_run(pool: Pool, tmp_path: Path, mode: str) -> None:
    """The edge has one replica and the loss, the cloud two replicas of two ranks."""
    reference = train(pool, "1", "1", [*EVALUATE, "--save", str(tmp_path), "--save-interval", "2"])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    micro_batch = "1" if mode == "split" else "2"
    extra = ["--layerwise-disaggregated-training", "--num-layer-list", "1,2,1", "--vtp-dp-mode", mode]
    extra += [*EVALUATE, "--micro-batch-size", micro_batch, "--load", str(tmp_path), *resharding_flags()]
    runs = train(pool, "1,2", "1,2", extra)
    assert_same_training(runs, reference, first=2, tolerance=resume_tolerance())
    assert runs[0].evaluations == pytest.approx(reference[0].evaluations[1:], rel=1e-5)


@pytest.mark.needs("ramp_up", cases=("ramp-up",))
@pytest.mark.needs("ignored_ramp", cases=("schedule",))
@pytest.mark.needs("flags_after_0_12", cases=("full-validation",))
@pytest.mark.parametrize(
    ("dp_sizes", "extra", "words"),
    [
        pytest.param(
            "1,2",
            ["--global-batch-size", "6"],
            [
                "--global-batch-size 6 cannot be shared",
                "data-parallel size 2 * micro batch size 2 = 4",
                "multiple of 4",
            ],
            id="batch",
        ),
        pytest.param(
            "1,2",
            ["--rampup-batch-size", "4", "2", "64"],
            ["--rampup-batch-size 2 cannot be shared"],
            id="ramp-up",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "1,2",
            ["--step-batch-size-schedule", "0:4 1K:6"],
            ["--step-batch-size-schedule 6 cannot be shared"],
            id="schedule",
            marks=pytest.mark.full,
        ),
        pytest.param("2,3", [], ["boundary 0->1 joins data-parallel sizes 2 and 3", "3 / 2 is not whole"], id="sizes"),
        pytest.param(
            "1,2",
            ["--dataloader-type", "cyclic"],
            ["--dataloader-type cyclic with"],
            id="cyclic",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "1,2", ["--full-validation"], ["--full-validation with"], id="full-validation", marks=pytest.mark.full
        ),
        pytest.param(
            "1,2",
            ["--decrease-batch-size-if-needed"],
            ["--decrease-batch-size-if-needed with"],
            id="decrease",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "1,2",
            ["--use-tp-pp-dp-mapping"],
            ["rank order tp-cp-pp-dp needs equal cp and dp"],
            id="order",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "1,2",
            ["--num-virtual-stages-per-pipeline-rank", "2"],
            [
                "--num-virtual-stages-per-pipeline-rank 2 with --vtp-size-list",
                "--vtp-dp-list 1,2; no interleaved order",
            ],
            id="interleaving",
        ),
        pytest.param(
            "1,2",
            ["--vtp-dp-mode", "both"],
            ["dp mode 'both' is unknown; use one of multiplex, split"],
            id="mode",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "1,2",
            ["--vtp-dp-list", "1,2,2"],
            ["vtp_dp_list 1,2,2 has 3 entries, the size list has 2"],
            id="length",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "1,2",
            ["--vtp-dp-list", "2,2"],
            ["need 4 processes (tp * cp * dp of each: 1 * 1 * 2 + 1 * 1 * 2); this run has 3; start 4"],
            id="world",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "1,2",
            ["--vtp-data-parallel-size", "2"],
            ["vtp_dp_list 1,2 say the same thing twice"],
            id="twice",
            marks=pytest.mark.full,
        ),
    ],
)
def test_refused(pool: Pool, dp_sizes: str, extra: list[str], words: list[str]) -> None:
    runs = start(pool, "1,1", dp_sizes, extra)
    assert_refused(runs, *words)
    assert not any("initializing torch distributed" in run.output for run in runs), "refused too late"


@pytest.mark.full
def test_replica_that_fails_in_a_step_ends_all(pool: Pool) -> None:
    """Also the other replica of its stage, which it sends nothing to."""
    runs = start(pool, "1,1", "1,2", hooks=["fail_on_rank_1"])
    assert all(run.exit_code not in (0, None) for run in runs), [(r.exit_code, r.output[-2000:]) for r in runs]
    assert "RuntimeError: the disk is on fire" in runs[1].output
    for rank in (0, 2):
        line = error_line(runs[rank].output)
        assert f"[vtp rank {rank}] error: " in line and "rank 1 failed: RuntimeError: the disk is on fire" in line, line
