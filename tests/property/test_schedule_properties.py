"""Laws of schedules over random placements, orders, durations, latencies and limits, against independent oracles."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests import schedule_oracle as oracle
from vtp_plugin.schedule import (
    Action,
    Costs,
    Op,
    Placement,
    check,
    choose_lookahead,
    interleaved_one_f_one_b,
    lower,
    lower_bound,
    make_chain,
    one_f_one_b,
    peak_posted,
    plan_u_shape,
    reference_u_shape,
    simulate,
    u_placement,
)

SETTINGS = settings(max_examples=80, deadline=None)
# Quarters add up without rounding, so the comparisons below may be exact.
quarters = st.integers(0, 24).map(lambda number: number / 4)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    num_stages = draw(st.integers(1, 4))
    rest = draw(st.lists(st.integers(0, num_stages - 1), max_size=3))
    return Placement(stages=tuple(draw(st.permutations([*range(num_stages), *rest]))))


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
        placement, data.draw(st.integers(1, 5)), forward_only=forward_only, seed=data.draw(st.integers(0, 10**6))
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


@SETTINGS
@given(st.data())
def test_a_lost_or_doubled_action_is_found(data: st.DataObject) -> None:
    placement = data.draw(placements())
    schedule = lower(oracle.random_schedule(placement, 2, forward_only=False, seed=data.draw(st.integers(0, 10**6))))
    stage = data.draw(st.integers(0, placement.num_stages - 1))
    order = schedule.orders[stage]
    place = data.draw(st.integers(0, len(order) - 1))
    changed = order[:place] + data.draw(st.sampled_from([(), order[place : place + 1] * 2])) + order[place + 1 :]
    orders = (*schedule.orders[:stage], changed, *schedule.orders[stage + 1 :])
    problems = check(type(schedule)(name="", placement=placement, num_microbatches=2, orders=orders))
    assert any(str(order[place]) in problem for problem in problems)


@st.composite
def u_cases(draw: st.DrawFn) -> tuple[int, int, Costs, tuple[int, ...]]:
    num_stages = draw(st.integers(2, 5))
    num_microbatches = draw(st.integers(1, 10))
    limits = draw(st.lists(st.integers(1, 12), min_size=num_stages, max_size=num_stages))
    return num_stages, num_microbatches, draw(costs_of(u_placement(num_stages))), tuple(limits)


@SETTINGS
@given(u_cases(), st.booleans())
def test_u_shape_keeps_its_promises(case: tuple[int, int, Costs, tuple[int, ...]], forward_only: bool) -> None:
    num_stages, num_microbatches, costs, limits = case
    plan = plan_u_shape(num_stages, num_microbatches, costs, limits=limits, forward_only=forward_only)
    event(plan.candidate.split(",")[0])
    wanted = Counter(
        Action(op=op, vstage=vstage, microbatch=microbatch)
        for op in ((Op.F,) if forward_only else (Op.F, Op.B))
        for vstage in range(num_stages + 1)
        for microbatch in range(num_microbatches)
    )
    assert Counter(action for order in plan.schedule.orders for action in order) == wanted
    assert check(plan.schedule, limits=limits) == ()
    assert plan.makespan == oracle.makespan(plan.schedule, costs)
    assert plan.in_flight == oracle.peaks(plan.schedule)
    assert all(peak <= limit for peak, limit in zip(plan.in_flight, limits, strict=True))
    chain = make_chain(u_placement(num_stages), costs, forward_only=forward_only)
    assert plan.lower_bound == lower_bound(chain, num_microbatches, limits) <= plan.makespan
    again = plan_u_shape(num_stages, num_microbatches, costs, limits=limits, forward_only=forward_only)
    assert again == plan
    if not forward_only:
        reference = reference_u_shape(num_stages, num_microbatches)
        fits = all(peak <= limit for peak, limit in zip(oracle.peaks(reference), limits, strict=True))
        assert (plan.reference_makespan is not None) == fits
        if fits:
            assert plan.makespan <= oracle.makespan(reference, costs) == plan.reference_makespan


@SETTINGS
@given(u_cases(), st.data())
def test_search_and_simulator_agree_on_bandwidth(
    case: tuple[int, int, Costs, tuple[int, ...]], data: st.DataObject
) -> None:
    """Two implementations: the search's inner loop, and the walk through lowered lists."""
    num_stages, num_microbatches, costs, limits = case
    sizes = data.draw(st.lists(st.integers(0, 12), min_size=num_stages, max_size=num_stages))
    costs = replace(costs, message_bytes=tuple(sizes), bandwidth=(4.0,) * num_stages)
    plan = plan_u_shape(num_stages, num_microbatches, costs, limits=limits)
    timeline = simulate(plan.schedule, costs)
    assert plan.lower_bound <= plan.makespan == timeline.makespan
    assert plan.in_flight == timeline.in_flight
    for channel, total in timeline.bytes_by_channel:
        flights = [flight for flight in timeline.flights if flight.channel == channel]
        assert total == num_microbatches * sizes[channel.upstream]
        assert all(first.end <= second.end for first, second in itertools.pairwise(flights))


@SETTINGS
@given(st.data())
def test_lower_bound_is_below_every_order(data: st.DataObject) -> None:
    placement = data.draw(placements())
    costs, forward_only = data.draw(costs_of(placement)), data.draw(st.booleans())
    schedule = oracle.random_schedule(
        placement, data.draw(st.integers(1, 5)), forward_only=forward_only, seed=data.draw(st.integers(0, 10**6))
    )
    chain = make_chain(placement, costs, forward_only=forward_only)
    bound = lower_bound(chain, schedule.num_microbatches, oracle.peaks(schedule))
    assert bound <= oracle.makespan(schedule, costs)


@settings(SETTINGS, max_examples=15)
@given(u_cases())
def test_lookahead_costs_no_time(case: tuple[int, int, Costs, tuple[int, ...]]) -> None:
    num_stages, num_microbatches, costs, limits = case
    schedule = plan_u_shape(num_stages, num_microbatches, costs, limits=limits).schedule
    lookahead = choose_lookahead(schedule, costs)
    times = [simulate(lower(schedule, lookahead=n), costs, mode="rendezvous").makespan for n in (lookahead, 10**6)]
    assert times[0] == times[1] >= simulate(schedule, costs).makespan
