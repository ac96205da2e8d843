"""The chosen order of the U-shape: against the best there is, the bounds it is sold with, and its refusals."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.expected import schedule_oracle as oracle
from vtp_plugin.plan.schedule.cost.costs import Costs, in_flight_needed, lower_bound, make_route, u_costs
from vtp_plugin.plan.schedule.make.u_shape import plan_u_shape, reference_u_shape
from vtp_plugin.plan.schedule.order.actions import Schedule, parse_actions
from vtp_plugin.plan.schedule.order.placement import Placement, u_placement
from vtp_plugin.plan.schedule.proof.check_schedule import check

CASES = json.loads((Path(__file__).parents[2] / "golden" / "u_shape_plans.json").read_text())
CLOUD_TIMES = (1, 2, 3)
STAGES = range(2, 9)


def need_by_formula(num_stages: int, cloud: float, latency: float) -> int:
    return math.ceil((6 + 4 * latency + 3 * cloud * (num_stages - 1)) / max(6, 3 * cloud))


def bound_by_hand(num_stages: int, num_microbatches: int, cloud: float, latency: float) -> float:
    """Bound without limits: edge, last cloud stage and one microbatch, each with what must come before and after."""
    around = cloud * (num_stages - 1) + 2 * latency
    edge = 6 * num_microbatches
    edge += max(0, 1 + around - num_microbatches)  # before the first FE only FS can run
    edge += max(0, 2 * cloud * (num_stages - 1) + 2 * latency + 2 - 2 * num_microbatches)  # after the last BS only BE
    last = 3 * cloud * num_microbatches + (1 + latency + 2 + latency) + 3 * cloud * (num_stages - 2)
    alone = 6 + 4 * latency + 3 * cloud * (num_stages - 1)
    return max(edge, last, alone)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"P{c['num_stages']}-m{c['num_microbatches']}-L{c['latency']}")
def test_plans_do_not_change_unseen(case: dict[str, object]) -> None:
    """Ranks compare digests, so the same arguments must give the same order on every machine and Python.

    The cases are such that each kind of candidate wins one: forward, reversed, perturbed, the reference's order.
    """
    num_stages, cloud, latency = case["num_stages"], case["cloud"], case["latency"]
    limits = [case["limit"]] * num_stages
    plan = plan_u_shape(
        num_stages, case["num_microbatches"], u_costs(num_stages, cloud=cloud, latency=latency), limits=limits
    )
    found = {"makespan": plan.makespan, "in_flight": list(plan.in_flight), "digest": plan.schedule.digest}
    assert found == {key: case[key] for key in found}


def routes(counts: tuple[int, ...], total: int) -> Iterator[tuple[int, ...]]:
    """Yield all orders of `total` microbatches through the steps of a stage, each step in the microbatches' order."""
    if min(counts) == total:
        yield ()
    for step, count in enumerate(counts):
        if count < total and (step == 0 or counts[step - 1] > count):
            after = (*counts[:step], count + 1, *counts[step + 1 :])
            yield from ((step, *rest) for rest in routes(after, total))


def all_schedules(placement: Placement, num_microbatches: int) -> Iterator[Schedule]:
    """Yield all orders of a U, with one ring or several."""
    names = []
    for vstages in map(placement.vstages, range(placement.num_stages)):
        names.append([*(f"{v}F" for v in vstages), *(f"{v}B" for v in reversed(vstages))])
    for steps in itertools.product(*(routes((0,) * len(row), num_microbatches) for row in names)):
        orders = []
        for row, order in zip(names, steps, strict=True):
            numbers = [itertools.count() for _ in row]
            orders.append(parse_actions(" ".join(f"{row[step]}{next(numbers[step])}" for step in order)))
        yield Schedule(name="any", placement=placement, num_microbatches=num_microbatches, orders=tuple(orders))


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "slack"),
    # With three microbatches one case (limit 2, short cloud, no latency) takes 20 where 19 is possible.
    [(2, 1, 0), (2, 2, 0), (3, 2, 0), (4, 2, 0), (2, 3, 1)],
)
def test_small_plans_are_the_best_of_all(num_stages: int, num_microbatches: int, slack: int) -> None:
    schedules = [(s, oracle.peaks(s)) for s in all_schedules(u_placement(num_stages), num_microbatches)]
    for cloud, latency in [(1, 0), (2, 1), (3, 4)]:
        costs = u_costs(num_stages, cloud=cloud, latency=latency)
        route = make_route(u_placement(num_stages), costs)
        times = {s: oracle.makespan(s, costs) for s, _ in schedules if check(s) == ()}
        for limit in range(1, num_microbatches + 1):
            limits = [limit] * num_stages
            best = min(times[s] for s, peaks in schedules if s in times and max(peaks) <= limit)
            plan = plan_u_shape(num_stages, num_microbatches, costs, limits=limits)
            assert lower_bound(route, num_microbatches, limits) <= best <= plan.makespan <= best + slack


@pytest.mark.parametrize("num_stages", STAGES)
def test_need_follows_the_formula(num_stages: int) -> None:
    for cloud, latency in itertools.product((0.5, 1, 2, 3), range(9)):
        found = in_flight_needed(u_placement(num_stages), u_costs(num_stages, cloud=cloud, latency=latency))
        assert found == need_by_formula(num_stages, cloud, latency)


def hides_latency(num_stages: int, cloud: float, latency: float, extra: int) -> None:
    """At most 1.05, 1.10, 1.20 of our own step without latency at the same limits, for 1, 2, 4."""
    limits = [min(16, need_by_formula(num_stages, cloud, latency) + extra)] * num_stages
    times = [
        plan_u_shape(num_stages, 16, u_costs(num_stages, cloud=cloud, latency=x), limits=limits).makespan
        for x in (0, latency)
    ]
    assert times[1] <= {1: 1.05, 2: 1.10, 4: 1.20}[latency] * times[0]


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("cloud", CLOUD_TIMES)
def test_latency_is_hidden_with_two_more_than_needed(num_stages: int, cloud: int) -> None:
    for latency in (1, 2, 4):
        hides_latency(num_stages, cloud, latency, 2)


def is_optimal_without_limit(num_stages: int, num_microbatches: int, cloud: float) -> None:
    fastest = 0.0
    for latency in range(9):
        plan = plan_u_shape(num_stages, num_microbatches, u_costs(num_stages, cloud=cloud, latency=latency))
        assert plan.makespan == plan.lower_bound == bound_by_hand(num_stages, num_microbatches, cloud, latency)
        fastest = fastest or plan.makespan
        assert plan.makespan <= fastest + 2 * latency


@pytest.mark.parametrize("num_stages", [2, 3, 5, 8])
def test_nothing_is_lost_without_a_limit(num_stages: int) -> None:
    is_optimal_without_limit(num_stages, 16, 2)


def is_never_slower_than_the_reference(num_stages: int, num_microbatches: int, cloud: float, latency: float) -> None:
    reference = reference_u_shape(num_stages, num_microbatches)
    limits = oracle.peaks(reference)
    costs = u_costs(num_stages, cloud=cloud, latency=latency)
    plan = plan_u_shape(num_stages, num_microbatches, costs, limits=limits)
    assert plan.makespan == oracle.makespan(plan.schedule, costs)
    assert plan.reference_makespan == oracle.makespan(reference, costs)
    assert plan.lower_bound <= plan.makespan <= plan.reference_makespan
    assert check(plan.schedule, limits=limits) == ()


@pytest.mark.parametrize("num_stages", STAGES)
def test_never_slower_than_the_reference(num_stages: int) -> None:
    for num_microbatches, cloud, latency in [(1, 2, 1), (2, 1, 0), (3, 3, 2), (5, 2, 8), (16, 2, 2)]:
        is_never_slower_than_the_reference(num_stages, num_microbatches, cloud, latency)


def test_evaluation_keeps_the_edge_or_the_cloud_busy() -> None:
    """Forward only, 2 + 2L around one cloud stage: the cloud's 16 * 2, or the edge's 16 * (1 + 1)."""
    plan = plan_u_shape(2, 16, u_costs(2, latency=3), forward_only=True)
    assert plan.makespan == plan.lower_bound == 1 + 3 + 16 * 2 + 3 + 1
    # Two at a time: eight rounds of one microbatch's way, and the second waits once for the first in the cloud.
    slow = plan_u_shape(2, 16, u_costs(2, latency=3), forward_only=True, limits=(2, 2))
    assert slow.makespan == 8 * (1 + 3 + 2 + 3 + 1) + 2 and max(slow.in_flight) <= 2


def test_no_two_microbatches_at_a_time_under_limit_one() -> None:
    costs = u_costs(3, cloud=2, latency=1)
    plan = plan_u_shape(3, 5, costs, limits=(1, 1, 1))
    assert plan.makespan == 5 * (6 + 4 + 3 * 2 * 2)
    assert plan.in_flight == (1, 1, 1)


def test_reason_says_what_was_chosen() -> None:
    plan = plan_u_shape(3, 16, u_costs(3, latency=2), limits=(7, 7, 7))
    for part in (plan.schedule.digest, plan.candidate, "109", "no order can beat", "129", "7,"):
        assert part in plan.reason


def test_rounding_does_not_hide_ties() -> None:
    """Tenths have no exact binary form; the choice must be that of whole numbers."""
    whole = u_costs(4, cloud=20, latency=10, edge=10)
    tenths = u_costs(4, cloud=2e-7, latency=1e-7, edge=1e-7)
    for limits in [(5, 5, 5, 5), (7, 7, 7, 7)]:
        plans = [plan_u_shape(4, 16, costs, limits=limits) for costs in (whole, tenths)]
        assert plans[0].schedule.digest == plans[1].schedule.digest


def test_free_compute_is_no_trouble() -> None:
    nothing = Costs(
        forward=(0.0,) * 3, backward=(0.0,) * 3, latency=(0.0,) * 2, bandwidth=(1.0,) * 2, message_bytes=(0,) * 2
    )
    assert plan_u_shape(2, 3, nothing).makespan == 0


@pytest.mark.full
@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("cloud", CLOUD_TIMES)
def test_grid_without_limit(num_stages: int, cloud: int) -> None:
    for num_microbatches in (16, 17, 20, 25, 32):
        is_optimal_without_limit(num_stages, num_microbatches, cloud)


@pytest.mark.full
@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("cloud", CLOUD_TIMES)
def test_grid_of_hidden_latency(num_stages: int, cloud: int) -> None:
    for latency, extra in itertools.product((1, 2, 4), (3, 4, 6, 8)):
        hides_latency(num_stages, cloud, latency, extra)


@pytest.mark.full
@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("cloud", CLOUD_TIMES)
def test_grid_against_the_reference(num_stages: int, cloud: int) -> None:
    for num_microbatches, latency in itertools.product((*range(1, 9), 12, 16, 32), (0, 1, 2, 4, 8)):
        is_never_slower_than_the_reference(num_stages, num_microbatches, cloud, latency)
