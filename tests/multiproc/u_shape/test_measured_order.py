"""The order of a U-shaped pipeline follows what the first steps measured, alike on all ranks, or what flags say."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.multiproc.cases.core_cases import Runs, assemble, assert_close
from tests.multiproc.cases.script_cases import Scripts, arguments, assert_refused, grad_norms, losses, num_ranks
from tests.multiproc.cases.u_shape_cases import Saved, sequential, u_shaped
from tests.multiproc.jobs.planned_job import Pass, Seen
from tests.support.pace import pace
from tests.support.pool import Pool
from vtp_plugin.plan.schedule.cost.costs import parse_costs, u_costs
from vtp_plugin.plan.schedule.cost.simulator import simulate
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
from vtp_plugin.plan.schedule.order.placement import u_placement

pytestmark = pytest.mark.needs("scripts_here")

JOB = "tests.multiproc.jobs.planned_job:run"
STEP, EVALUATION = Pass(num_microbatches=5), Pass(num_microbatches=2, forward_only=True)


def measured(text: str) -> list[str]:
    """Find the costs that a run logged, which may go over several lines with a prefix each."""
    joined = re.sub(r" \\\n(\[vtp[^\]]*\])?\s*", " ", text)
    return re.findall(r"measured in training steps \d+ to \d+:\n(?:\[vtp[^\]]*\] )?--vtp-costs (.*)", joined)


def run(pool: Pool, sizes: tuple[int, ...], passes: list[Pass], **options: Any) -> list[Seen]:
    forward_ms = options.pop("forward_ms", [2.0] * (len(sizes) + 1))
    kwargs = {"sizes": sizes, "forward_ms": forward_ms, "passes": passes, **options}
    ranks = pool.run(sum(sizes), JOB, kwargs)
    assert all(seen.digests == ranks[0].digests for seen in ranks)
    assert all(seen.costs == ranks[0].costs for seen in ranks)
    assert [seen.wrong for seen in ranks] == [[]] * len(ranks)
    return ranks


@pytest.mark.parametrize("varying", [False, True])
def test_measured_costs_choose_one_order_for_all_ranks(pool: Pool, varying: bool) -> None:
    """A slow cloud stage: in the model U-shape all stages have equal work."""
    busy = pace()  # so that what a busy machine adds does not make all stages alike
    forward_ms = [busy * ms for ms in (3.0, 3.0, 30.0, 6.0)]
    passes = [STEP, EVALUATION, STEP, EVALUATION, STEP, STEP, EVALUATION, STEP, Pass(num_microbatches=7), STEP]
    ranks = run(pool, (1, 2, 1), passes, forward_ms=forward_ms, varying=varying)
    printed = ranks[0].printed
    assert all(seen.printed == printed for seen in ranks)
    # Training steps 2 to 4 are measured; what comes next is planned for them, once for each kind of step.
    assert "measured in training steps 2 to 4" in printed[6]
    (text,) = measured(printed[6])
    assert [*map(bool, printed)] == [True, True, False, False, False, False, True, True, True, False]
    costs = parse_costs(text.split(), u_placement(3))
    # What a sleep takes is not less, and not much more unless the machine is busy.
    assert all(a <= b <= 2 * a + 60 * busy for a, b in zip(forward_ms, costs.forward, strict=True)), text
    assert all(2 * a <= b <= 4 * a + 60 * busy for a, b in zip(forward_ms, costs.backward, strict=True)), text
    assert set(costs.message_bytes) == {4 * 6 * 4} and max(costs.latency) < 60 * busy, text
    for one, before, digest in zip(passes, [True] * 6 + [False] * 4, ranks[0].digests, strict=True):
        step = ScheduleRequest(
            placement=u_placement(3), num_microbatches=one.num_microbatches, forward_only=one.forward_only
        )
        assert make_schedule(step if before else replace(step, costs=costs))[0].digest == digest
    assert ranks[0].digests[7] != ranks[0].digests[0]


def test_one_slow_step_does_not_choose_the_order(pool: Pool) -> None:
    """The figures are medians over the measured steps; the second step alone says something else."""
    slow = Pass(num_microbatches=3, factor=20.0)
    usual = Pass(num_microbatches=3)
    busy = pace()
    ranks = run(pool, (1, 1), [slow, slow, usual, usual, usual], forward_ms=[5.0 * busy] * 3)
    (text,) = measured(ranks[0].printed[4])
    costs = parse_costs(text.split(), u_placement(2))
    assert max(costs.forward) < (5 + 60) * busy and max(costs.backward) < (10 + 60) * busy, text


def test_a_step_that_takes_longer_than_planned_is_planned_anew(pool: Pool) -> None:
    """The machines become slower by a factor: real and predicted time are shown, and the costs are measured again."""
    usual, slow = (Pass(num_microbatches=3, factor=factor) for factor in (1.0, 8.0))
    passes = [usual] * 4 + [slow] * 12
    busy = pace()
    forward_ms = [busy * ms for ms in (5.0, 10.0, 5.0)]
    ranks = run(pool, (1, 1), passes, forward_ms=forward_ms, replan_share=2.0, interval=4)
    printed = "".join(ranks[0].printed)
    assert all("".join(seen.printed) == printed for seen in ranks)
    first, second = (parse_costs(text.split(), u_placement(2)) for text in measured(printed))
    assert min(second.forward) >= 40 * busy and max(first.forward) < (10 + 60) * busy, printed
    # Steps 8, 12 and 16 end an interval; what the first two show was planned for the first costs.
    reports = re.findall(r"step of 3 microbatches: predicted ([\d.]+) ms, real ([\d.]+) ms .*", printed)
    (early, _), (real, again) = map(float, reports[0]), map(float, reports[-1])
    assert early < 3 * again and len(reports) == 3, (printed, real)
    assert printed.count("too far apart: measuring again, 1 of at most 3 times") == 1
    assert abs(again - real) < 2.0 * real, printed


def test_planning_anew_has_an_end(pool: Pool) -> None:
    """A share that every step breaks: the order changes a few times and then stays."""
    usual = Pass(num_microbatches=2)
    ranks = run(pool, (1, 1), [usual] * 30, forward_ms=[1.0] * 3, replan_share=1e-9, interval=3)
    printed = "".join(ranks[0].printed)
    assert len(measured(printed)) == 4
    assert "already: the order stays" in printed and printed.count("measuring again,") == 3


def test_stated_costs_are_not_measured(pool: Pool) -> None:
    costs = u_costs(3, cloud=20.0, latency=40.0, edge=10.0)
    ranks = run(pool, (1, 1, 2), [STEP] * 4, costs=costs, in_flight=(4, 3, 3))
    assert len(set(ranks[0].digests)) == 1
    assert [*map(bool, ranks[0].printed)] == [True, False, False, False]
    assert "limit 4,3,3 (as asked)" in ranks[0].printed[0] and "measured" not in ranks[0].printed[0]


def test_stated_costs_that_are_wrong_are_told(pool: Pool) -> None:
    """The user said them, so the order stays; one warning says what the run sees."""
    costs = u_costs(2, cloud=20.0, latency=40.0, edge=10.0)
    step = Pass(num_microbatches=2)
    ranks = run(pool, (1, 1), [step] * 9, costs=costs, forward_ms=[0.1] * 3, replan_share=0.5, interval=4)
    printed = "".join(ranks[0].printed)
    assert len(set(ranks[0].digests)) == 1 and "measur" not in printed.replace("measure them", "")
    assert [text.count("--vtp-costs says 3") for text in ("".join(seen.printed) for seen in ranks)] == [1, 0]
    assert printed.count("step of 2 microbatches: predicted") == 2, printed


def test_kept_activations_are_as_planned(pool: Pool) -> None:
    """Counted where they live: outputs that somebody still holds, when a forward has run."""
    passes = [Pass(num_microbatches=m) for m in (1, 2, 3, 6, 9)]
    for in_flight in (None, (2, 2, 1)):
        costs = u_costs(3, latency=3.0)
        ranks = run(pool, (1, 2, 1), passes, costs=costs, in_flight=in_flight, forward_ms=[0.2] * 4)
        for seen in ranks:
            assert seen.kept == seen.planned
        if in_flight is None:
            schedule, _ = make_schedule(ScheduleRequest(placement=u_placement(3), num_microbatches=9, costs=costs))
            peaks = simulate(schedule, costs).activations
            assert ranks[0].kept[-1] == {0: peaks[0], 3: peaks[3]} and ranks[1].kept[-1] == {1: peaks[1]}
            assert max(peaks) > 4
        else:
            assert [seen.kept[-1] for seen in ranks] == [{0: 2, 3: 1}, {1: 2}, {1: 2}, {2: 1}]


def test_losses_are_the_same_after_the_new_plan(runs: Runs, pool: Pool, saved: Saved) -> None:
    """Of a model, with an evaluation before every step and one microbatch more in each."""
    case = u_shaped(1, 2, num_microbatches=3, rampup=True, num_evaluations=1, num_steps=6)
    case = case.but(load=saved(case))
    ranks = pool.run(case.world_size, "tests.multiproc.jobs.planned_job:train_and_print", {"case": case})
    (text,) = measured(ranks[0][1])
    assert ranks[0][1].count("times in ms") == 2 * 2
    costs = parse_costs(text.split(), u_placement(2))
    assert min(costs.forward + costs.backward) > 0
    assert_close(assemble(case, [result for result, _ in ranks]), runs.kept(sequential(case)))


U_SHAPE = ["--layerwise-disaggregated-training", "--num-layer-list", "1,2,1"]


def test_flags_of_a_script(scripts: Scripts) -> None:
    """What a run prints as measured is a flag that gives the same order at once, and the same numbers."""
    extra = [*U_SHAPE, "--vtp-in-flight", "3", "--vtp-replan-share", "inf", "--train-iters", "6"]
    extra += ["--vtp-log-level", "DEBUG"]
    runs = scripts.train("1,1", extra)
    (words,) = measured(runs[0].output)
    digests = re.findall(r"schedule (\w+): u-shape,", runs[0].output)
    assert len(digests) == 2
    assert runs[0].output.count("] planned a U of 4 microbatches: up to ") == 2
    again = scripts.train("1,1", [*extra, "--vtp-costs", *words.split()])
    assert re.findall(r"schedule (\w+): u-shape,", again[0].output) == digests[1:]
    for runs_of, num in ((runs, 2), (again, 5)):  # every interval, and that is one step here
        found = re.findall(r"predicted [\d.]+ ms, real [\d.]+ ms", runs_of[0].output)
        assert len(found) == num, runs_of[0].output
    assert "measured in" not in again[0].output and "limit 3,3 (as asked)" in again[0].output
    assert (losses(again), grad_norms(again)) == (losses(runs), grad_norms(runs))


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ([*U_SHAPE, "--vtp-in-flight", "4,0"], ["--vtp-in-flight 4,0", "no microbatch could ever start"]),
        (["--vtp-costs", "forward_ms=1,2,1"], ["--vtp-costs", "--layerwise-disaggregated-training"]),
        (["--vtp-in-flight", "3,1"], ["--vtp-in-flight 3,1", "add --vtp-schedule planned"]),
        pytest.param(
            [*U_SHAPE, "--vtp-in-flight", "4,4,4"], ["--vtp-in-flight 4,4,4 has 3 entries"], marks=pytest.mark.full
        ),
        pytest.param([*U_SHAPE, "--vtp-costs", "forward_ms=1,2"], ["forward_ms has 2 entries"], marks=pytest.mark.full),
    ],
)
def test_refused(scripts: Scripts, extra: list[str], words: list[str]) -> None:
    assert_refused(scripts.launch(num_ranks("1,1"), {"arguments": arguments("1,1", extra=extra)}), *words)
