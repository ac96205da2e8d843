"""The plugin's executor computes what Megatron's schedules compute, and communicates as its plan promises."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiproc.boundaries.test_ordering import Recordings
from tests.multiproc.cases.core_cases import OVERLAPPED, PER_TOKEN, Case, Runs, assert_identical, defaults_first
from tests.multiproc.cases.script_cases import MODEL, Scripts, assert_same_training, grad_norms, losses
from tests.multiproc.training.test_parity import check_parity, contextual, sharded
from tests.ordering.check import check
from tests.ordering.models import MODELS
from tests.ordering.overlap import blocking_sends, exposed_receives
from tests.ordering.trace import Event
from tests.support.lines import error_line
from tests.support.pool import Pool

pytestmark = pytest.mark.needs("scripts_here")


def planned(*sizes: int, **fields: Any) -> Case:
    return Case.of(sizes=sizes, schedule="planned", **fields)


CASES = [
    planned(2, 1, vpp=2, varying_lengths=True, num_microbatches=4, **PER_TOKEN),
    planned(1, 2, tied=True, dp=2, **OVERLAPPED),
    sharded(1, 2, 1).but(schedule="planned"),
    planned(1, 1),
    planned(3, 1, 2, vpp=2, varying_lengths=True, num_microbatches=6, **PER_TOKEN),
    planned(2, 1, vpp=2, num_microbatches=4, tied=True, dp=2, **OVERLAPPED),
    sharded(2, 3, vpp=2, num_microbatches=4).but(schedule="planned"),
    planned(1, 2, num_microbatches=1, deallocate=True),
    planned(2, 1, vpp=2, num_microbatches=4, deallocate=True, recompute=True),
    planned(2, 3, varying_lengths=True, transport="rank0"),
    planned(1, 2, vpp=2, vpp_group_size=3, num_microbatches=5, batch_p2p=True),
    planned(1, 2, vpp=3, num_microbatches=4, **PER_TOKEN),
    planned(1, 2, 1, num_microbatches=2, dtype="bf16", optimizer="adam", transport="rank0"),
    planned(1, 2, dp=2, overlap_grad_reduce=True, align_grad_reduce=False),
    planned(2, 1, vpp=2, num_microbatches=4, dp=2, **OVERLAPPED, align_grad_reduce=False),
    sharded(1, 2, 1, 2, transport="rank0", varying_lengths=True).but(schedule="planned"),
    contextual(1, 2).but(schedule="planned"),
]


@pytest.mark.parametrize("case", defaults_first(CASES, 2))
def test_parity(runs: Runs, case: Case) -> None:
    check_parity(runs, case)


STOCK = [
    Case.of(sizes=(2, 1), num_microbatches=3),
    Case.of(sizes=(1, 2), vpp=2, num_microbatches=4, dtype="fp16", optimizer="adam"),
]


@pytest.mark.parametrize("case", STOCK, ids=str)
def test_equals_megatrons_schedule_to_the_last_bit(runs: Runs, case: Case) -> None:
    case = case.but(wants_weights=True)
    assert_identical(runs.run(case.but(schedule="planned")), runs.run(case))


EVALUATED = [
    planned(2, 1, num_microbatches=3, num_evaluations=2),
    planned(1, 2, vpp=2, num_microbatches=4, num_evaluations=1, collects=True, dp=2, **OVERLAPPED),
]


@pytest.mark.parametrize("case", defaults_first(EVALUATED, 1))
def test_evaluation_sees_the_losses_of_the_step_and_changes_nothing(runs: Runs, case: Case) -> None:
    run, plain = runs.run(case), runs.run(case.but(num_evaluations=0, collects=False))
    assert run.losses == plain.losses
    for trained, evaluations in zip(run.losses, run.evaluations, strict=True):
        assert evaluations == [step for step in trained for _ in range(case.checks.num_evaluations)]


@pytest.fixture(scope="module")
def recordings(pool: Pool) -> Recordings:
    return Recordings(pool)


RECORDED = [
    planned(1, 2, num_steps=2, num_microbatches=4),
    planned(1, 2, 1, num_steps=2, num_microbatches=6, vpp=2, transport="rank0"),
    planned(2, 3, num_steps=2, num_microbatches=4, varying_lengths=True),
    planned(2, 1, num_steps=2, num_microbatches=4, vpp=2, varying_lengths=True),
    planned(1, 2, num_steps=2, num_microbatches=2, dp=2, **OVERLAPPED),
]


@pytest.mark.parametrize("case", defaults_first(RECORDED, 1))
def test_recorded_steps_pass_all_models(recordings: Recordings, case: Case) -> None:
    assert check(recordings.of(case), MODELS) == ()


def of_tensors(events: tuple[Event, ...]) -> list[Event]:
    """Leave out the warm-up of the channels, one number each."""
    return [event for event in events if event.num_bytes > 4]


@pytest.mark.parametrize("transport", ["rank0", "sliced"])
def test_receives_are_posted_before_compute_and_no_send_blocks(recordings: Recordings, transport: str) -> None:
    """All through the step; Megatron's 1F1B waits for every receive as soon as it has posted it."""
    case = planned(1, 2, num_steps=2, num_microbatches=4, transport=transport)
    for rank, trace in enumerate(recordings.of(case)):
        assert of_tensors(blocking_sends(trace)) == []
        # The first activation of a step: there is no compute yet that could hide it.
        num_exposed = {"rank0": (0, 1, 0), "sliced": (0, 1, 1)}[transport][rank] * case.data.num_steps
        assert len(of_tensors(exposed_receives(trace))) == num_exposed
    stock = recordings.of(case.but(schedule="stock"))
    assert all(len(of_tensors(exposed_receives(trace))) >= case.data.num_microbatches for trace in stock[:2])


DETAILS = ["--vtp-log-level", "DEBUG"]


def test_training_script(scripts: Scripts) -> None:
    runs = scripts.train("1,2", ["--vtp-schedule", "planned"])
    stock = scripts.train("1,2")
    assert "] planned 1F1B of 4 microbatches: up to 2,1 in flight on the stages" in runs[0].output
    assert (losses(runs), grad_norms(runs)) == (losses(stock), grad_norms(stock))


def test_more_microbatches_in_flight_train_alike(scripts: Scripts) -> None:
    runs = scripts.train("1,2", ["--vtp-schedule", "planned", "--vtp-in-flight", "4,1", *DETAILS])
    stock = scripts.train("1,2")
    assert ": 1f1b, microbatches: 4, lookahead: 8; kept activations by stage 4,1" in runs[0].output
    assert (losses(runs), grad_norms(runs)) == (losses(stock), grad_norms(stock))


@pytest.mark.full
def test_a_script_in_virtual_stages(scripts: Scripts) -> None:
    """As `search --virtual-stages 2` prints it."""
    words = ["--num-virtual-stages-per-pipeline-rank", "2"]
    runs = scripts.train("1,2", ["--vtp-schedule", "planned", *words, *DETAILS])
    assert ": interleaved-1f1b, microbatches: 4, lookahead: 1" in runs[0].output
    assert_same_training(runs, scripts.train("1,1", words))


def test_planned_schedule_without_stages_is_refused(scripts: Scripts) -> None:
    command = [*MODEL, "--global-batch-size", "8", "--train-iters", "1", "--vtp-schedule", "planned"]
    (run,) = scripts.launch(1, {"arguments": [*command, "--vtp-device", "cpu"]})
    assert run.exit_code not in (0, None)
    assert "planned schedules need stages: give --vtp-size-list, such as 1,1" in error_line(run.output)
