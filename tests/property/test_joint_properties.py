"""Replicas that wait for each other inside a compute: the proof against a model that shares no code with it.

Of orders that know nothing of them, many wait in a circle; of those that are planned for them, none.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.expected.joint_collectives import runs_to_its_end
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.schedule.cost.costs import Costs, lower_bound, make_route
from vtp_plugin.plan.schedule.cost.simulator import simulate
from vtp_plugin.plan.schedule.make.leg_orders import dispatch, in_flight, makespan, mirrored, to_actions
from vtp_plugin.plan.schedule.make.u_shape import one_f_one_b, plan_u_shape
from vtp_plugin.plan.schedule.order.actions import Schedule
from vtp_plugin.plan.schedule.order.add_communication import lower
from vtp_plugin.plan.schedule.order.placement import Placement, plain_placement, u_placement
from vtp_plugin.plan.schedule.proof.check_schedule import check

NUM_IN_CI = 400
NUM_WHOLE = 2400


class Draw:
    """Random pipelines in which replicas meet: of experts, of the loss, or of both."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        num_stages = rng.randint(2, 4)
        self.is_u = rng.random() < 0.6
        num_replicas = self._replicas(num_stages)
        stages = (*range(num_stages), *([0] * self.is_u))
        spans = [rng.choice([size for size in range(1, n + 1) if n % size == 0]) for n in num_replicas]
        joint = [(spans[stage],) * 2 for stage in stages]
        if rng.random() < 0.5:
            joint[-1] = num_replicas[stages[-1]], joint[-1][1]
        place = u_placement if self.is_u else plain_placement
        self.placement = place(num_stages, num_replicas=num_replicas, joint=tuple(joint))
        self.alone = place(num_stages, num_replicas=num_replicas)
        self.num_microbatches = math.lcm(*num_replicas) * rng.randint(1, 3)
        self.costs = self._costs(len(stages))
        self.limits = self._limits()

    def _replicas(self, num_stages: int) -> tuple[int, ...]:
        """Draw numbers of which neighbours divide each other; two stages apart they may be 2 and 3."""
        while True:
            numbers = self.rng.choice([(1, 2), (1, 3), (1, 2, 3), (1, 2, 4), (2, 4)])
            found = tuple(self.rng.choice(numbers) for _ in range(num_stages))
            pairs = [*pairwise(found), *([(found[-1], found[0])] if self.is_u else [])]
            if all(max(pair) % min(pair) == 0 for pair in pairs):
                return found

    def _costs(self, num_vstages: int) -> Costs:
        def row(length: int) -> tuple[float, ...]:
            return tuple(self.rng.randint(0, 24) / 4 for _ in range(length))

        num_links = num_vstages - 1
        return Costs(
            forward=row(num_vstages),
            backward=row(num_vstages),
            latency=row(num_links),
            bandwidth=(math.inf,) * num_links,
            message_bytes=(8,) * num_links,
        )

    def _limits(self) -> tuple[int, ...]:
        """Draw limits that are now and then as small as they may be."""
        least = self.placement.by_worker(self.placement.least_in_flight)
        return tuple(limit + self.rng.choice([0, 0, 1, 2, 8]) for limit in least)

    def orders(self, placement: Placement) -> Schedule:
        """Order greedily by random rankings, forward or backward in time."""
        route = make_route(placement, self.costs)
        ranking = [self.rng.sample(route.legs(stage), len(route.legs(stage))) for stage in range(route.num_stages)]
        if is_reversed := self.rng.random() < 0.5:
            route = route.reversed()
            limits = [self.limits[mirror] for mirror in route.mirrors]
            last = route.num_legs - 1
            orders = dispatch(route, self.num_microbatches, [[last - q for q in row] for row in ranking], limits)
            orders = mirrored(route, orders)
        else:
            orders = dispatch(route, self.num_microbatches, ranking, self.limits)
        return Schedule(
            name=f"random{' reversed' * is_reversed}",
            placement=self.placement,
            num_microbatches=self.num_microbatches,
            orders=to_actions(placement, orders),
        )


def check_seed(seed: int) -> str:
    """Look at one random pipeline; return what became of the orders that know nothing of joint computes."""
    draw = Draw(seed)
    planned = draw.orders(draw.placement)
    assert check(planned) == (), planned.describe()
    lowered = lower(planned, lookahead=draw.rng.randint(1, 3))
    assert check(lowered) == (), planned.describe()
    assert runs_to_its_end(lowered, seed), planned.describe()
    ignorant = draw.orders(draw.alone)
    is_proved = check(ignorant) == ()
    lowered = lower(ignorant, lookahead=draw.rng.randint(1, 3))
    assert (check(lowered) == ()) == is_proved == runs_to_its_end(lowered, seed), (seed, ignorant.describe())
    if max(map(max, draw.placement.joint)) == 1:
        return "nobody meets"
    return "well" if is_proved else "waits in a circle"


def check_seeds(seeds: range) -> None:
    seen = Counter(map(check_seed, seeds))
    # Both happen: the proof tells them apart, and says neither of all.
    assert min(seen["well"], seen["waits in a circle"]) > len(seeds) / 10, seen


def test_the_proof_agrees_with_the_model() -> None:
    check_seeds(range(NUM_IN_CI))


@pytest.mark.full
def test_the_proof_agrees_with_the_model_on_thousands() -> None:
    check_seeds(range(NUM_IN_CI, NUM_IN_CI + NUM_WHOLE))


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 600), marks=pytest.mark.full)], ids=len)
def test_planned_orders_of_a_u_keep_joint_computes_apart(seeds: range) -> None:
    """The planner's choice runs in the model, takes as long as the simulator says, and keeps its limits."""
    for seed in seeds:
        draw = Draw(seed)
        if not draw.is_u:
            continue
        plan = plan_u_shape(
            draw.placement.num_stages,
            draw.num_microbatches,
            draw.costs,
            num_replicas=draw.placement.num_replicas,
            joint=draw.placement.joint,
            limits=draw.limits,
            forward_only=seed % 3 == 0,
        )
        assert check(plan.schedule, limits=draw.limits) == ()
        lowered = lower(plan.schedule)
        assert check(lowered) == () and runs_to_its_end(lowered, seed)
        route = make_route(draw.placement, draw.costs, forward_only=seed % 3 == 0)
        assert simulate(plan.schedule, draw.costs).makespan == plan.makespan
        assert plan.makespan >= lower_bound(route, draw.num_microbatches, draw.limits) == plan.lower_bound


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 3000), marks=pytest.mark.full)], ids=len)
def test_one_f_one_b_leaves_room_for_joint_computes(seeds: range) -> None:
    """The default limits are enough; others are refused if, and only if, the model says that replicas would wait."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        draw = Draw(seed)
        if draw.is_u:
            continue
        schedule = one_f_one_b(draw.placement, draw.num_microbatches)
        assert check(schedule) == () and runs_to_its_end(lower(schedule), seed)
        in_flight_limits = tuple(draw.rng.randint(1, 5) for _ in range(draw.placement.num_stages))
        try:
            asked = one_f_one_b(draw.alone, draw.num_microbatches, in_flight=in_flight_limits)
        except ConfigError:
            continue  # refused without joint computes, too
        is_well = runs_to_its_end(lower(replace(asked, placement=draw.placement)), seed)
        seen[f"{is_well}"] += 1
        if is_well:
            found = one_f_one_b(draw.placement, draw.num_microbatches, in_flight=in_flight_limits)
            assert found.orders == asked.orders
        else:
            with pytest.raises(ConfigError, match="wait for each other inside a compute"):
                one_f_one_b(draw.placement, draw.num_microbatches, in_flight=in_flight_limits)
    assert min(seen["True"], seen["False"]) > len(seeds) / 50, seen


def test_times_of_joint_computes_by_hand() -> None:
    """The second replica's microbatch comes two later; the first waits for it, forward and backward."""
    placement = plain_placement(2, num_replicas=(1, 2), joint=((1, 1), (2, 2)))
    costs = Costs(forward=(2.0, 1.0), backward=(3.0, 5.0), latency=(0.5,), bandwidth=(math.inf,), message_bytes=(0,))
    timeline = simulate(one_f_one_b(placement, 2), costs)
    assert [(str(s.action), s.start) for s in timeline.spans[1]] == [("1F0", 4.5), ("1B0", 5.5)]
    assert [(str(s.action), s.start) for s in timeline.spans[2]] == [("1F1", 4.5), ("1B1", 5.5)]
    assert timeline.makespan == 10.5 + 0.5 + 3 + 3
    route = make_route(placement, costs)
    orders = ((0, 0, 3, 3), (1, 2), (1, 2))
    assert makespan(route, 2, orders) == timeline.makespan and in_flight(route, orders) == (2, 1, 1)
    assert makespan(route, 2, ((0, 3, 0, 3), (1, 2), (1, 2))) is None, "the second forward comes too late"
