"""Laws of schedules over random placements, orders, durations, latencies and limits, against independent oracles."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.expected import schedule_oracle as oracle
from tests.expected.schedule_oracle import peak_posted
from tests.support.plans import channels, worker_boundaries
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.schedule.cost.costs import Costs, lower_bound, make_route
from vtp_plugin.plan.schedule.cost.simulator import choose_lookahead, simulate
from vtp_plugin.plan.schedule.make.u_shape import (
    UOrder,
    interleaved_one_f_one_b,
    one_f_one_b,
    plan_u_shape,
    reference_u_shape,
)
from vtp_plugin.plan.schedule.order.actions import Action, Op
from vtp_plugin.plan.schedule.order.add_communication import lower
from vtp_plugin.plan.schedule.order.placement import Placement, num_rings, plain_placement, u_placement
from vtp_plugin.plan.schedule.proof.check_schedule import check

SETTINGS = settings(max_examples=80)
# Quarters add up without rounding, so the comparisons below may be exact.
quarters = st.integers(0, 24).map(lambda number: number / 4)


@st.composite
def placements(draw: st.DrawFn, *, is_tree: bool = True) -> Placement:
    num_stages = draw(st.integers(1, 4))
    rest = draw(st.lists(st.integers(0, num_stages - 1), max_size=3))
    stages = tuple(draw(st.permutations([*range(num_stages), *rest])))
    last = len(stages) - 1
    successors = tuple(draw(st.integers(v + 1, last)) for v in range(last)) if is_tree else ()
    return Placement(stages=stages, num_replicas=draw(replicas(num_stages)), successors=successors)


@st.composite
def replicas(draw: st.DrawFn, num_stages: int) -> tuple[int, ...]:
    """Numbers of which any divides any larger one, so that every boundary is possible."""
    numbers = st.sampled_from(draw(st.sampled_from([(1,), (1, 2), (1, 3), (1, 2, 4)])))
    return tuple(draw(st.lists(numbers, min_size=num_stages, max_size=num_stages)))


def microbatches(draw: st.DrawFn, num_replicas: tuple[int, ...], most: int) -> int:
    """Draw a number that all replicas can share, `most` or little more."""
    unit = max(num_replicas)
    return unit * draw(st.integers(1, math.ceil(most / unit)))


@st.composite
def costs_of(draw: st.DrawFn, placement: Placement) -> Costs:
    def row(length: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(quarters, min_size=length, max_size=length)))

    num_vstages = placement.num_vstages
    return Costs(
        forward=row(num_vstages),
        backward=row(num_vstages),
        latency=row(num_vstages - 1),
        bandwidth=(math.inf,) * (num_vstages - 1),
        message_bytes=(8,) * (num_vstages - 1),
    )


@SETTINGS
@given(st.data())
def test_any_order_that_respects_the_needs_can_be_lowered_and_run(data: st.DataObject) -> None:
    placement = data.draw(placements())
    forward_only = data.draw(st.booleans())
    schedule = oracle.random_schedule(
        placement,
        microbatches(data.draw, placement.num_replicas, 5),
        forward_only=forward_only,
        seed=data.draw(st.integers(0, 10**6)),
    )
    assert check(schedule) == ()
    lookahead = data.draw(st.integers(1, 6))
    lowered = lower(schedule, lookahead=lookahead)
    assert check(lowered) == ()
    oracle.Machine(lowered, seed=data.draw(st.integers(0, 10**6))).run()
    costs = data.draw(costs_of(placement))
    timeline = simulate(schedule, costs)
    times = oracle.start_and_end(schedule, costs)
    spans = {oracle.node_of(span.action): (span.start, span.end) for row in timeline.spans for span in row}
    assert spans == times
    assert timeline.in_flight == oracle.peaks(schedule)
    if not forward_only:  # there, sends that nothing proves are waited for
        assert simulate(lowered, costs).makespan >= timeline.makespan
    assert sum(size for _, size in timeline.bytes_by_channel) == 8 * len(timeline.flights)


@SETTINGS
@given(st.data())
def test_messages_in_one_order_keep_the_bound_on_posted_receives(data: st.DataObject) -> None:
    num_stages, num_groups = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    schedule = data.draw(
        st.sampled_from(
            [
                one_f_one_b(num_stages, num_stages * num_groups),
                interleaved_one_f_one_b(num_stages, 2, num_stages * num_groups),
                reference_u_shape(num_stages, num_stages * num_groups),
            ]
        )
    )
    lookahead = data.draw(st.integers(1, 8))
    lowered = lower(schedule, lookahead=lookahead)
    machine = oracle.Machine(lowered, seed=data.draw(st.integers(0, 10**6)))
    machine.run()
    assert max(machine.most_open_at_compute) <= lookahead
    assert max(peak_posted(order)[0] for order in lowered.orders) <= lookahead


@st.composite
def replicas_in_a_row(draw: st.DrawFn) -> tuple[int, ...]:
    return draw(replicas(draw(st.integers(1, 5))))


@SETTINGS
@given(replicas_in_a_row(), st.data())
def test_one_f_one_b_with_replicas_never_deadlocks_and_keeps_its_limits(
    num_replicas: tuple[int, ...], data: st.DataObject
) -> None:
    num_stages, num_microbatches = len(num_replicas), microbatches(data.draw, num_replicas, 24)
    in_flight = None
    if data.draw(st.booleans()):
        in_flight = tuple(data.draw(st.lists(st.integers(1, 9), min_size=num_stages, max_size=num_stages)))
    try:
        schedule = one_f_one_b(
            plain_placement(num_stages, num_replicas=num_replicas), num_microbatches, in_flight=in_flight
        )
    except ConfigError as error:
        assert in_flight is not None and "deadlock" in str(error)
        event("refused")
        return
    by_stage = in_flight or [limit_of(num_replicas, stage) for stage in range(num_stages)]
    workers = oracle.workers(schedule.placement)
    limits = [min(by_stage[stage], num_microbatches // num_replicas[stage]) for stage, _ in workers]
    assert check(schedule, limits=limits) == ()
    assert oracle.peaks(schedule) == tuple(limits)
    lookahead = data.draw(st.integers(1, 4))
    lowered = lower(schedule, lookahead=lookahead)
    assert check(lowered) == ()
    machine = oracle.Machine(lowered, seed=data.draw(st.integers(0, 10**6)))
    machine.run()
    assert max(machine.most_open_at_compute) <= lookahead
    costs = data.draw(costs_of(schedule.placement))
    assert simulate(schedule, costs).makespan == oracle.makespan(schedule, costs)


@SETTINGS
@given(st.data())
def test_one_f_one_b_of_a_tree_never_deadlocks_and_keeps_its_limits(data: st.DataObject) -> None:
    num_stages, num_microbatches = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    successors = tuple(data.draw(st.integers(v + 1, num_stages - 1)) for v in range(num_stages - 1))
    placement = Placement(stages=tuple(range(num_stages)), successors=successors)
    in_flight = None
    if data.draw(st.booleans()):
        in_flight = tuple(data.draw(st.lists(st.integers(1, 9), min_size=num_stages, max_size=num_stages)))
    try:
        schedule = one_f_one_b(placement, num_microbatches, in_flight=in_flight)
    except ConfigError as error:
        assert in_flight is not None and "deadlock" in str(error)
        event("refused")
        return
    event("chain" if placement.is_chain else "tree")
    depths = [1] * num_stages
    for v in reversed(range(num_stages - 1)):
        depths[v] = depths[successors[v]] + 1
    limits = [min(limit, num_microbatches) for limit in in_flight or depths]
    assert check(schedule, limits=limits) == ()
    assert oracle.peaks(schedule) == tuple(limits)
    lowered = lower(schedule, lookahead=data.draw(st.integers(1, 4)))
    assert check(lowered) == ()
    oracle.Machine(lowered, seed=data.draw(st.integers(0, 10**6))).run()
    costs = data.draw(costs_of(placement))
    assert simulate(schedule, costs).makespan == oracle.makespan(schedule, costs)


def limit_of(num_replicas: tuple[int, ...], stage: int) -> int:
    """Own microbatch, and the share of what the stages behind may have in flight."""
    if stage == len(num_replicas) - 1:
        return 1
    behind = num_replicas[stage + 1] * limit_of(num_replicas, stage + 1)
    return 1 + math.ceil(behind / num_replicas[stage])


@SETTINGS
@given(st.data())
def test_channels_are_the_pairs_that_exchange(data: st.DataObject) -> None:
    placement = data.draw(placements())
    crossing = {
        (oracle.who(placement, v, h), oracle.who(placement, after, h))
        for v, after in enumerate(placement.successors)
        for h in range(4 * max(placement.num_replicas))
        if placement.stages[v] != placement.stages[after]
    }
    pairs = [(placement.stage_and_replica(a), placement.stage_and_replica(b)) for a, b in worker_boundaries(placement)]
    assert set(pairs) == crossing and len(pairs) == len(crossing)
    assert len(set(channels(placement))) == len(channels(placement)) == 2 * len(pairs)
    assert [placement.stage_and_replica(worker) for worker in range(placement.num_workers)] == oracle.workers(placement)
    for worker, (stage, replica) in enumerate(oracle.workers(placement)):
        assert placement.worker(stage, replica) == worker
        handled = [h for h in range(24) if oracle.who(placement, placement.stages.index(stage), h) == (stage, replica)]
        assert [*placement.microbatches(worker, 24)] == handled


@SETTINGS
@given(st.data())
def test_a_compute_on_another_replica_is_found(data: st.DataObject) -> None:
    placement = data.draw(placements().filter(lambda p: max(p.num_replicas) > 1))
    num_microbatches = 2 * max(placement.num_replicas)
    schedule = oracle.random_schedule(placement, num_microbatches, forward_only=False, seed=0)
    stage = data.draw(st.sampled_from([s for s, num in enumerate(placement.num_replicas) if num > 1]))
    orders = [list(order) for order in schedule.orders]
    taken, given = (placement.worker(stage, replica) for replica in (1, 0))
    action = orders[taken].pop(data.draw(st.integers(0, len(orders[taken]) - 1)))
    orders[given].append(action)
    problems = check(replace(schedule, orders=tuple(map(tuple, orders))))
    assert f"stage {stage} replica 0: {action} does not belong there" in problems
    assert f"stage {stage} replica 1: {action} comes 0 times instead of once" in problems


@SETTINGS
@given(st.data())
def test_a_lost_or_doubled_action_is_found(data: st.DataObject) -> None:
    placement = data.draw(placements())
    num_microbatches = 2 * max(placement.num_replicas)
    seed = data.draw(st.integers(0, 10**6))
    schedule = lower(oracle.random_schedule(placement, num_microbatches, forward_only=False, seed=seed))
    worker = data.draw(st.integers(0, placement.num_workers - 1))
    order = schedule.orders[worker]
    place = data.draw(st.integers(0, len(order) - 1))
    changed = order[:place] + data.draw(st.sampled_from([(), order[place : place + 1] * 2])) + order[place + 1 :]
    problems = check(replace(schedule, orders=(*schedule.orders[:worker], changed, *schedule.orders[worker + 1 :])))
    assert any(str(order[place]) in problem for problem in problems)


UCase = tuple[Placement, int, Costs, tuple[int, ...]]


@st.composite
def u_cases(draw: st.DrawFn) -> UCase:
    rings = draw(st.sampled_from([1, 1, 2]))
    num_stages = draw(st.integers(2, 5 if rings == 1 else 3))
    placement = u_placement(num_stages, num_rings=rings, num_replicas=draw(replicas(num_stages)))
    limits = draw(st.lists(st.integers(1, 12), min_size=placement.num_workers, max_size=placement.num_workers))
    num_microbatches = microbatches(draw, placement.num_replicas, 10)
    costs = draw(costs_of(placement))
    # Both rings cross the same boundaries.
    latency = tuple(costs.latency[v % num_stages] for v in range(placement.num_vstages - 1))
    return placement, num_microbatches, replace(costs, latency=latency), tuple(limits)


def plan_of(case: UCase, *, forward_only: bool = False) -> UOrder:
    placement, num_microbatches, costs, limits = case
    return plan_u_shape(
        placement.num_stages,
        num_microbatches,
        costs,
        num_rings=num_rings(placement),
        num_replicas=placement.num_replicas,
        limits=limits,
        forward_only=forward_only,
    )


@SETTINGS
@given(u_cases(), st.booleans())
def test_u_shape_keeps_its_promises(case: UCase, forward_only: bool) -> None:
    placement, num_microbatches, costs, limits = case
    num_stages = placement.num_stages
    plan = plan_of(case, forward_only=forward_only)
    event(plan.candidate.split(",")[0])
    event("replicas" if max(placement.num_replicas) > 1 else "no replicas")
    event(f"{num_rings(placement)} rings")
    wanted = Counter(
        Action(op=op, vstage=vstage, microbatch=microbatch)
        for op in ((Op.F,) if forward_only else (Op.F, Op.B))
        for vstage in range(placement.num_vstages)
        for microbatch in range(num_microbatches)
    )
    assert Counter(action for order in plan.schedule.orders for action in order) == wanted
    assert check(plan.schedule, limits=limits) == ()
    assert plan.makespan == oracle.makespan(plan.schedule, costs)
    assert plan.in_flight == oracle.peaks(plan.schedule)
    assert all(peak <= limit for peak, limit in zip(plan.in_flight, limits, strict=True))
    route = make_route(placement, costs, forward_only=forward_only)
    assert plan.lower_bound == lower_bound(route, num_microbatches, limits) <= plan.makespan
    assert plan_of(case, forward_only=forward_only) == plan
    if num_rings(placement) > 1:
        assert plan.reference_makespan is None
    elif not forward_only and max(placement.num_replicas) == 1:
        reference = reference_u_shape(num_stages, num_microbatches)
        fits = all(peak <= limit for peak, limit in zip(oracle.peaks(reference), limits, strict=True))
        assert (plan.reference_makespan is not None) == fits
        if fits:
            assert plan.makespan <= oracle.makespan(reference, costs) == plan.reference_makespan


@SETTINGS
@given(u_cases(), st.data())
def test_search_and_simulator_agree_on_bandwidth(case: UCase, data: st.DataObject) -> None:
    """Two implementations: the search's inner loop, and the walk through lowered lists."""
    placement, num_microbatches, costs, limits = case
    num_links = placement.num_vstages - 1
    sizes = data.draw(st.lists(st.integers(0, 12), min_size=num_links, max_size=num_links))
    costs = replace(costs, message_bytes=tuple(sizes), bandwidth=(4.0,) * num_links)
    plan = plan_of((placement, num_microbatches, costs, limits))
    timeline = simulate(plan.schedule, costs)
    assert plan.lower_bound <= plan.makespan == timeline.makespan
    assert plan.in_flight == timeline.in_flight
    for channel, total in timeline.bytes_by_channel:
        flights = [flight for flight in timeline.flights if flight.channel == channel]
        # A pair of workers carries every max-th microbatch; with two rings, two links share it.
        (upstream, _), (downstream, _) = (oracle.workers(placement)[w] for w in (channel.upstream, channel.downstream))
        num_pairs = max(placement.num_replicas[upstream], placement.num_replicas[downstream])
        between = [v for v in range(num_links) if placement.stages[v : v + 2] == (upstream, downstream)]
        assert total == num_microbatches // num_pairs * sum(sizes[v] for v in between)
        assert all(first.end <= second.end for first, second in itertools.pairwise(flights))


@SETTINGS
@given(st.data())
def test_lower_bound_is_below_every_order(data: st.DataObject) -> None:
    placement = data.draw(placements(is_tree=False))
    costs, forward_only = data.draw(costs_of(placement)), data.draw(st.booleans())
    schedule = oracle.random_schedule(
        placement,
        microbatches(data.draw, placement.num_replicas, 5),
        forward_only=forward_only,
        seed=data.draw(st.integers(0, 10**6)),
    )
    route = make_route(placement, costs, forward_only=forward_only)
    bound = lower_bound(route, schedule.num_microbatches, oracle.peaks(schedule))
    assert bound <= oracle.makespan(schedule, costs)


@settings(SETTINGS, max_examples=15)
@given(u_cases())
def test_lookahead_costs_no_time(case: UCase) -> None:
    _, _, costs, _ = case
    schedule = plan_of(case).schedule
    lookahead = choose_lookahead(schedule, costs)
    times = [simulate(lower(schedule, lookahead=n), costs, mode="rendezvous").makespan for n in (lookahead, 10**6)]
    assert times[0] == times[1] >= simulate(schedule, costs).makespan
