"""Orders whose backwards are split: what the proof finds wrong, and what they gain."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.expected.schedule_oracle import Machine, makespan, peaks
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.schedule.cost.costs import Costs, u_costs, uniform_costs
from vtp_plugin.plan.schedule.cost.simulator import simulate
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
from vtp_plugin.plan.schedule.make.split_backward import fill_waits, time_of_whole
from vtp_plugin.plan.schedule.make.u_shape import interleaved_one_f_one_b, one_f_one_b, plan_u_shape
from vtp_plugin.plan.schedule.order.actions import Op, Schedule, parse_actions
from vtp_plugin.plan.schedule.order.add_communication import lower
from vtp_plugin.plan.schedule.order.placement import Placement, interleaved_placement, plain_placement, u_placement
from vtp_plugin.plan.schedule.proof.check_schedule import check, peak_in_flight

TWO = one_f_one_b(2, 2)
PLACEMENTS = [
    plain_placement(2),
    plain_placement(4),
    plain_placement(3, num_replicas=(1, 2, 2)),
    plain_placement(2, num_replicas=(1, 4), joint=((1, 1), (2, 2))),
    interleaved_placement(2, 2),
    u_placement(3),
    u_placement(3, num_replicas=(1, 2, 2)),
    u_placement(2, num_rings=2),
    replace(u_placement(3), num_frozen=2),
    replace(u_placement(3), num_frozen=3),
    replace(plain_placement(3), num_frozen=1),
    replace(interleaved_placement(2, 2), num_frozen=2),
    Placement(stages=(0, 1, 2), successors=(2, 2)),
]


def split_backwards(schedule: Schedule) -> Schedule:
    """Both parts of every backward, one directly after the other."""
    orders = (
        " ".join(re.sub(r"(\d+)B(\d+)", r"\1I\2 \1W\2", str(action)) for action in order) for order in schedule.orders
    )
    return replace(schedule, orders=tuple(map(parse_actions, orders)))


def with_order(worker: int, text: str) -> Schedule:
    orders = list(split_backwards(TWO).orders)
    orders[worker] = parse_actions(text)
    return replace(TWO, orders=tuple(orders))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0 0F1 0I0 0W0 0I1", "stage 0: 0W1 comes 0 times instead of once"),
        ("0F0 0F1 0I0 0W0 0W0 0I1 0W1", "stage 0: 0W0 comes 2 times instead of once"),
        ("0F0 0F1 0W0 0I0 0I1 0W1", "deadlock: stage 0 stands before 0W0, which needs 0I0"),
        ("0F0 0F1 0I0 0I1 0W1 0W0", "stage 0: 0W1 adds to the gradients of weights where microbatch 0 is due"),
        ("0F0 0F1 0I1 0I0 0W0 0W1", "stage 0: 0W0 adds to the gradients of weights where microbatch 1 is due"),
        # A whole backward that is the last one lets its bucket leave.
        ("0F0 0F1 0I0 0B1 0W0", "stage 0: 0B1 adds to the gradients of weights where microbatch 0 is due"),
        ("0F0 0F1 0B0 0W0 0I1 0W1", "stage 0: 0B0 does not belong there"),
        ("0F0 0F1 0B0 0I0 0W0 0I1 0W1", "stage 0: 0B0 does not belong there"),
        ("0F0 0F1 0I0 0I1 0W0 1W1", "stage 0: 1W1 does not belong there"),
        ("0F0 0I0 0F1 0W0 0I1 0W1", ""),
        ("0F0 0F1 0B0 0I1 0W1", ""),
    ],
)
def test_the_proof_finds_what_is_wrong_with_gradients_of_weights(text: str, said: str) -> None:
    for schedule in (with_order(0, text), *([lower(with_order(0, text))] if not said else [])):
        problems = check(schedule)
        assert any(said in problem for problem in problems) if said else not problems, problems


def test_a_deadlock_names_the_half_that_is_waited_for() -> None:
    (problem,) = check(with_order(1, "1F0 1W0 1I0 1F1 1I1 1W1"))
    assert "stage 0 stands before 0I0, which needs 1I0" in problem


def test_a_gradient_of_weights_keeps_its_microbatch() -> None:
    late = with_order(0, "0F0 0I0 0F1 0I1 0W0 0W1")
    assert check(late, limits=(1, 1)) == ("stage 0: 2 microbatches in flight at 0F1, the limit is 1",)
    assert simulate(late, uniform_costs(late.placement)).in_flight == (2, 1) == peaks(late)


def test_it_moves_no_message() -> None:
    whole, split = lower(TWO), lower(split_backwards(TWO))
    for one, other in zip(whole.orders, split.orders, strict=True):
        sends = [[action for action in order if action.op.startswith("SEND")] for order in (one, other)]
        assert sends[0] == sends[1]


@pytest.mark.parametrize("latency", [0.0, 0.7])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_every_kind_of_pipeline_has_an_order(placement: Placement, latency: float) -> None:
    """It computes all, its simulated time is that of the longest path, and it is not slower than without a split."""
    costs = uniform_costs(placement, latency=latency)
    costs = replace(costs, forward=tuple(1 + 0.3 * (v % 3) for v in range(placement.num_vstages)))
    request = ScheduleRequest(placement=placement, num_microbatches=8, costs=costs, split_backward=True)
    schedule, reason = make_schedule(request)
    whole, _ = make_schedule(replace(request, split_backward=False))
    Machine(schedule, seed=1).run()
    bare, before = (
        replace(one, orders=tuple(tuple(a for a in order if a.op.is_compute) for order in one.orders))
        for one in (schedule, whole)
    )
    if max(map(max, placement.joint)) == 1:
        assert simulate(bare, costs).makespan == pytest.approx(makespan(bare, costs))
    assert simulate(bare, costs).makespan <= simulate(before, costs).makespan * (1 + 1e-9)
    assert ("gain nothing" in reason) == all(action.op is not Op.I for order in bare.orders for action in order)
    assert make_schedule(request)[0].digest == schedule.digest != whole.digest or "gain nothing" in reason


def test_four_equal_stages_take_what_the_paper_says() -> None:
    """ZB-H1 of arXiv 2401.10241: with three equal parts, 27 instead of 33, with as much memory as the first stage."""
    request = ScheduleRequest(placement=plain_placement(4), num_microbatches=8, split_backward=True)
    costs = uniform_costs(request.placement)
    schedule, _ = make_schedule(request)
    assert simulate(schedule, costs).makespan == 27
    assert simulate(make_schedule(replace(request, split_backward=False))[0], costs).makespan == 33
    assert max(peaks(schedule)) == 4


@pytest.mark.parametrize(("latency", "most"), [(1.0, 1.0), (2.0, 1.0), (4.0, 1.05)])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_u_hides_its_links(num_stages: int, latency: float, most: float) -> None:
    """Beside today's order without latency."""
    placement = u_placement(num_stages)
    request = ScheduleRequest(placement=placement, num_microbatches=16, costs=u_costs(num_stages))
    at_once = simulate(make_schedule(request)[0], u_costs(num_stages)).makespan
    costs = u_costs(num_stages, latency=latency)
    split = make_schedule(replace(request, costs=costs, split_backward=True))[0]
    assert simulate(split, costs).makespan <= most * at_once


@pytest.mark.parametrize(
    ("placement", "in_flight", "num_microbatches", "first"),
    [
        (plain_placement(2), None, 4, "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"),
        # Gradients of two replicas come at once.
        (plain_placement(2, num_replicas=(1, 2)), None, 4, "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"),
        # The second stage waits for a forward.
        (plain_placement(2), (3, 2), 4, "0F0 0F1 0I0 0F2 0I1 0W0 0F3 0I2 0W1 0W2 0B3"),
    ],
    ids=str,
)
def test_what_nobody_waits_for_stays_whole(
    placement: Placement, in_flight: tuple[int, ...] | None, num_microbatches: int, first: str
) -> None:
    """Of the first stage, unless it has something else to do before the gradients of weights."""
    request = ScheduleRequest(
        placement=placement, num_microbatches=num_microbatches, in_flight=in_flight, split_backward=True
    )
    schedule, _ = make_schedule(request)
    computes = [[action for action in order if action.op.is_compute] for order in schedule.orders]
    assert tuple(computes[0]) == parse_actions(first)
    assert all(action.op is not Op.B for order in computes[1:] for action in order)


def test_less_memory_fills_less() -> None:
    request = ScheduleRequest(placement=plain_placement(4), num_microbatches=8, split_backward=True)
    costs = uniform_costs(request.placement)
    times = []
    for in_flight in ((4, 3, 2, 1), (4, 4, 3, 2), (4, 4, 4, 4)):
        schedule, _ = make_schedule(replace(request, in_flight=in_flight))
        assert all(peak <= limit for peak, limit in zip(peaks(schedule), in_flight, strict=True))
        times.append(simulate(schedule, costs).makespan)
    assert times == sorted(times, reverse=True) and times[0] > times[-1] == 27


@pytest.mark.parametrize("in_flight", [(3, 2, 3), (2, 3, 3), (1, 3, 3), (1, 1, 1)])
def test_a_later_stage_may_keep_more(in_flight: tuple[int, ...]) -> None:
    """A limit says what a stage may keep, of however large memory; 1F1B would wait for more than stages before have."""
    request = ScheduleRequest(
        placement=plain_placement(3), num_microbatches=6, in_flight=in_flight, split_backward=True
    )
    schedule, _ = make_schedule(request)
    assert all(peak <= limit for peak, limit in zip(peaks(schedule), in_flight, strict=True))
    assert in_flight[0] == 1 or any(action.op is Op.W for order in schedule.orders for action in order)


def test_limits_hold_where_replicas_compute_jointly() -> None:
    """As without a split: too small ones are not supported, and more are used."""
    placement = plain_placement(2, num_replicas=(1, 4), joint=((1, 1), (2, 2)))
    request = ScheduleRequest(placement=placement, num_microbatches=16, split_backward=True)
    with pytest.raises(ConfigError, match=re.escape("(4, 2) microbatches in flight on stages with (1, 4) replicas")):
        make_schedule(replace(request, in_flight=(4, 2)))
    schedule, _ = make_schedule(replace(request, in_flight=(12, 2)))
    assert peak_in_flight(schedule, 0) == 12


def test_what_is_simulated_knows_both_parts() -> None:
    costs = Costs(forward=(1.0,), backward=(5.0,), latency=(), bandwidth=(), message_bytes=(), weights=(2.0,))
    schedule = replace(one_f_one_b(1, 2), orders=(parse_actions("0F0 0I0 0F1 0I1 0W0 0W1"),))
    spans = simulate(schedule, costs).spans[0]
    assert [span.end - span.start for span in spans] == [1, 3, 1, 3, 2, 2]
    assert (costs.of_input, replace(costs, weights=()).of_weights) == ((3.0,), (2.5,))


@pytest.mark.parametrize("patience", [0.0, 0.5, 1.0])
def test_forwards_and_gradients_of_inputs_keep_their_order(patience: float) -> None:
    bases = [one_f_one_b(3, 6), interleaved_one_f_one_b(2, 2, 4), plan_u_shape(3, 6, u_costs(3, latency=1.0)).schedule]
    for base in bases:
        kept = (base.num_microbatches,) * base.placement.num_workers
        costs = uniform_costs(base.placement, latency=0.4)
        filled, time = fill_waits(base, costs, kept, patience=patience)
        assert time == pytest.approx(simulate(filled, costs).makespan)
        assert time_of_whole(base, costs) == pytest.approx(simulate(base, costs).makespan)
        assert check(filled) == () and check(lower(filled)) == ()
        for before, after in zip(base.orders, filled.orders, strict=True):
            assert list(before) == [action.whole for action in after if action.op is not Op.W]


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("num_replicas", [(2, 2), (1, 2)])
def test_interleaving_with_replicas_in_turn_is_refused(num_replicas: tuple[int, ...], is_split: bool) -> None:
    """An order of one replica each would leave the others without a microbatch."""
    placement = replace(interleaved_placement(2, 2), num_replicas=num_replicas)
    said = re.escape(f"{','.join(map(str, num_replicas))} replicas that share the microbatches, with 2 chunks on each")
    with pytest.raises(ConfigError, match=said):
        make_schedule(ScheduleRequest(placement=placement, num_microbatches=4, split_backward=is_split))
