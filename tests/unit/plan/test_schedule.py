"""Actions, placements, fixed orders, lowering, the checker and the simulator."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.expected import schedule_oracle as oracle
from tests.expected.schedule_oracle import peak_posted
from vtp_plugin.config import VtpConfig, read_keywords
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.schedule.cost.costs import Costs, parse_costs, u_costs, uniform_costs
from vtp_plugin.plan.schedule.cost.simulator import choose_lookahead, simulate
from vtp_plugin.plan.schedule.make.u_shape import (
    interleaved_one_f_one_b,
    one_f_one_b,
    plain_forward_only,
    plan_u_shape,
    reference_u_shape,
)
from vtp_plugin.plan.schedule.order.actions import (
    Action,
    Actions,
    Op,
    Schedule,
    format_actions,
    parse_action,
    parse_actions,
)
from vtp_plugin.plan.schedule.order.add_communication import lower
from vtp_plugin.plan.schedule.order.placement import Placement, interleaved_placement, plain_placement, u_placement
from vtp_plugin.plan.schedule.proof.check_schedule import check

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "u_shape_reference.json").read_text())


def chain(*num_replicas: int) -> Placement:
    return plain_placement(len(num_replicas), num_replicas=num_replicas)


@pytest.mark.parametrize("op", list(Op))
def test_text_form_is_read_back(op: Op) -> None:
    action = Action(op=op, vstage=12, microbatch=345)
    assert str(action) == f"12{op.value}345"
    assert parse_action(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "1F", "1X0", "1F0 ", "-1F0", "1SEND_F", "1SEND_X0", "1f0", "1FB0"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no action"):
        parse_action(text)


def test_lists_are_read_back() -> None:
    order = lower(one_f_one_b(3, 4)).orders[1]
    assert parse_actions(format_actions(order)) == order


@pytest.mark.parametrize(
    ("placement", "stages"),
    [
        (plain_placement(1), (0,)),
        (plain_placement(3), (0, 1, 2)),
        (interleaved_placement(3, 2), (0, 1, 2, 0, 1, 2)),
        (u_placement(2), (0, 1, 0)),
        (u_placement(4), (0, 1, 2, 3, 0)),
    ],
)
def test_placements(placement: Placement, stages: tuple[int, ...]) -> None:
    assert placement.stages == stages
    assert placement.num_stages == max(stages) + 1
    for stage in range(placement.num_stages):
        held = placement.vstages(stage)
        assert [stages[v] for v in held] == [stage] * len(held)
        assert [placement.chunk(v) for v in held] == list(range(len(held)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Placement(stages=()), "at least one virtual stage"),
        (lambda: Placement(stages=(0, 2)), "leaves out a stage"),
        (lambda: Placement(stages=(1, 2)), "leaves out a stage"),
        (lambda: Placement(stages=(0, -1)), "leaves out a stage"),
        (lambda: u_placement(1), "at least one cloud stage"),
        (lambda: interleaved_placement(2, 0), "at least 1"),
        (lambda: one_f_one_b(2, 0), "at least 1"),
        (lambda: plain_forward_only(0, 2), "at least 1"),
        (lambda: interleaved_one_f_one_b(2, 1, 4), "at least 2"),
        (lambda: interleaved_one_f_one_b(4, 2, 8, group_size=3), "between"),
        (lambda: interleaved_one_f_one_b(4, 2, 8, group_size=9), "between"),
        (lambda: interleaved_one_f_one_b(4, 2, 7), "leave 3 for the last group"),
        (lambda: lower(one_f_one_b(2, 2), lookahead=-1), "0 computes ahead or more"),
        (lambda: replace(u_costs(3), backward=(1.0,)), "backward has 1 entries"),
        (lambda: replace(u_costs(3), latency=(1.0,)), "latency has 1 entries"),
        (lambda: replace(u_costs(3), forward=(1.0, 1.0, -1.0, 1.0)), "not negative"),
        (lambda: replace(u_costs(3), forward=(1.0, 1.0, float("nan"), 1.0)), "finite"),
        (lambda: replace(u_costs(3), bandwidth=(1.0, 0.0, 1.0)), "above 0"),
        (lambda: plan_u_shape(1, 4, u_costs(2)), "at least one cloud stage"),
        (lambda: plan_u_shape(2, 0, u_costs(2)), "at least 1"),
        (lambda: plan_u_shape(2, 4, u_costs(2), limits=(3,)), "2 stages need 2 entries"),
        (lambda: plan_u_shape(2, 4, u_costs(2), limits=(3, 0)), "no microbatch could ever start"),
        (lambda: plan_u_shape(2, 4, u_costs(3)), "costs of 4 virtual stages"),
        (lambda: reference_u_shape(1, 4), "at least one cloud stage"),
        (lambda: u_placement(2, num_rings=0), "at least one"),
        (lambda: plan_u_shape(2, 4, u_costs(2), num_rings=2), "a U of 2 stages and 2 rings has 5"),
        (lambda: parse_costs(("forward_ms=1,2,3", "message_kib=1,2,3"), u_placement(2)), "message_kib has 3 entries"),
        (lambda: VtpConfig(size_list=(1, 2), encoder_layer_list=(1, 2, 1)), "--vtp-encoder-layer-list is for"),
        (lambda: read_keywords({"encoder_layer_list": "1,0,1"}), "--vtp-encoder-layer-list '1,0,1': every entry"),
        (lambda: chain(2, 3), "2 replicas of stage 0 and 3 of stage 1 .* 3 mod 2 = 1"),
        (lambda: chain(2, 6, 4), "6 replicas of stage 1 and 4 of stage 2 .* 6 mod 4 = 2"),
        (lambda: u_placement(3, num_replicas=(2, 1, 3)), "3 replicas of stage 2 and 2 of stage 0 .* 3 mod 2 = 1"),
        (lambda: plain_placement(2, num_replicas=(1, 2, 2)), "of 2 stages"),
        (lambda: chain(1, 0), "at least 1"),
        (lambda: one_f_one_b(chain(1, 2, 2), 7), "7 microbatches for 2 replicas of stage 1: 7 mod 2 = 1"),
        (
            lambda: one_f_one_b(2, 4, in_flight=(1, 3)),
            "stage 1 would wait for 2 microbatches more .* at most 1 in flight",
        ),
        (lambda: one_f_one_b(chain(1, 3, 3), 9, in_flight=(3, 2, 1)), "stage 0 has at most 3 in flight"),
        (lambda: one_f_one_b(2, 4, in_flight=(2,)), "each needs at least 1"),
        (lambda: one_f_one_b(2, 4, in_flight=(2, 0)), "each needs at least 1"),
        (lambda: plain_forward_only(chain(3, 1), 5), "5 mod 3 = 2"),
        (lambda: plan_u_shape(2, 5, u_costs(2), num_replicas=(1, 2)), "5 mod 2 = 1"),
        (lambda: plan_u_shape(2, 4, u_costs(2), num_replicas=(1, 2), limits=(1, 1)), r"\(1, 2\) replicas need 3"),
    ],
)
def test_bad_input_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("name", sorted(GOLDEN["orders"]))
def test_reference_orders(name: str) -> None:
    case = GOLDEN["orders"][name]
    schedule = reference_u_shape(case["num_stages"], case["num_microbatches"])
    assert oracle.words(schedule.orders[0]) == oracle.reference_edge(case["edge"], case["num_stages"])
    for stage, row in enumerate(case["cloud"], start=1):
        assert oracle.words(schedule.orders[stage]) == oracle.reference_cloud(row, stage)


@pytest.mark.parametrize("case", GOLDEN["makespans"], ids=str)
def test_simulator_gives_the_references_figures(case: dict[str, int]) -> None:
    schedule = reference_u_shape(case["num_stages"], case["num_microbatches"])
    costs = u_costs(case["num_stages"], latency=case["latency"])
    timeline = simulate(schedule, costs)
    assert timeline.makespan == case["makespan"] == oracle.makespan(schedule, costs)
    assert timeline.in_flight == tuple(case["num_stages"] + 1 - stage for stage in range(case["num_stages"]))


@pytest.mark.parametrize("num_stages", range(2, 9))
def test_reference_orders_work_for_every_number_of_microbatches(num_stages: int) -> None:
    for num_microbatches in range(1, 12):
        assert check(reference_u_shape(num_stages, num_microbatches)) == ()


FIXED = [
    *(one_f_one_b(stages, m) for stages in (1, 2, 3, 5) for m in (1, 2, 5, 9)),
    *(plain_forward_only(stages, m) for stages in (1, 2, 4) for m in (1, 2, 5)),
    *(interleaved_one_f_one_b(stages, 2, 2 * stages) for stages in (1, 2, 3, 4)),
    interleaved_one_f_one_b(2, 3, 8, group_size=3),
    interleaved_one_f_one_b(2, 3, 4, forward_only=True),
    reference_u_shape(2, 1),
    reference_u_shape(3, 6),
]


@pytest.mark.parametrize("schedule", FIXED, ids=lambda s: f"{s.name}-{s.placement.num_stages}-{s.num_microbatches}")
def test_fixed_orders_are_right_and_can_be_run(schedule: Schedule) -> None:
    assert check(schedule) == ()
    for lookahead in (1, 3):
        lowered = lower(schedule, lookahead=lookahead)
        assert check(lowered) == ()
        machine = oracle.Machine(lowered, seed=0)
        machine.run()
        # All these orders send and use microbatches in the same order, so the bound is strict.
        assert max(machine.most_open_at_compute) <= lookahead
        assert [a for a in lowered.orders[0] if a.op.is_compute] == list(schedule.orders[0])


def test_sends_do_not_pile_up() -> None:
    """Proved sends are waited for on the way: fewer are open than the step has."""
    for schedule in (one_f_one_b(4, 32), reference_u_shape(4, 32), interleaved_one_f_one_b(4, 2, 32)):
        assert max(peak_posted(order)[1] for order in lower(schedule).orders) <= 12
    assert max(peak_posted(order)[1] for order in lower(plain_forward_only(4, 32)).orders) == 2


def edited(schedule: Schedule, stage: int, edit: Callable[[list[Action]], object]) -> Schedule:
    order = list(schedule.orders[stage])
    edit(order)
    return replace(schedule, orders=(*schedule.orders[:stage], tuple(order), *schedule.orders[stage + 1 :]))


def moved(order: list[Action], text: str, before: str) -> None:
    order.remove(parse_action(text))
    order.insert(order.index(parse_action(before)), parse_action(text))


def renamed(order: list[Action], text: str, new: str) -> None:
    order[order.index(parse_action(text))] = parse_action(new)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda o: o.remove(parse_action("1B1")), "stage 1: 1B1 comes 0 times instead of once"),
        (lambda o: o.append(parse_action("1F0")), "stage 1: 1F0 comes 2 times instead of once"),
        (lambda o: renamed(o, "1F1", "2F1"), "stage 1: 2F1 does not belong there"),
        (lambda o: renamed(o, "1F1", "1F7"), "stage 1: 1F7 does not belong there"),
        (lambda o: o.remove(parse_action("1SEND_F1")), "stage 1: 1SEND_F1 comes 0 times instead of once"),
        (lambda o: o.append(parse_action("1RECV_B0")), "stage 1: 1RECV_B0 comes 2 times instead of once"),
        (lambda o: o.append(parse_action("1WAIT_RECV_F0")), "stage 1: 1WAIT_RECV_F0 comes 2 times instead of once"),
        (lambda o: o.remove(parse_action("1WAIT_SEND_B1")), "stage 1: 1WAIT_SEND_B1 comes 0 times instead of once"),
        (lambda o: o.append(parse_action("2SEND_F0")), "stage 1: 2SEND_F0 does not belong there"),
        (lambda o: moved(o, "1SEND_F1", "1F1"), "stage 1: 1SEND_F1 comes before 1F1"),
        (lambda o: moved(o, "1F0", "1WAIT_RECV_F0"), "stage 1: 1F0 comes before 1WAIT_RECV_F0"),
        (lambda o: moved(o, "1WAIT_RECV_F1", "1RECV_F1"), "stage 1: 1WAIT_RECV_F1 comes before 1RECV_F1"),
        (lambda o: moved(o, "1WAIT_SEND_F0", "1SEND_F0"), "stage 1: 1WAIT_SEND_F0 comes before 1SEND_F0"),
        (
            lambda o: moved(o, "1RECV_F1", "1RECV_F0"),
            "boundary 0->1, forward: 0SEND_F0 is sent where 1RECV_F1 is received",
        ),
    ],
)
def test_checker_finds_and_names(edit: Callable[[list[Action]], object], problem: str) -> None:
    schedule = lower(one_f_one_b(3, 3))
    assert check(schedule) == ()
    assert problem in check(edited(schedule, 1, edit))


def test_checker_finds_a_backward_in_a_forward_pass() -> None:
    schedule = replace(one_f_one_b(2, 1), forward_only=True)
    assert "stage 0: 0B0 does not belong there" in check(schedule)


def test_checker_keeps_limits() -> None:
    assert check(one_f_one_b(3, 4), limits=(3, 2, 1)) == ()
    (problem,) = check(one_f_one_b(3, 4), limits=(3, 1, 1))
    assert problem == "stage 1: 2 microbatches in flight at 1F1, the limit is 1"


def test_checker_finds_orders_that_wait_for_each_other() -> None:
    schedule = edited(one_f_one_b(2, 2), 0, lambda order: order.insert(0, order.pop()))
    (problem,) = check(schedule)
    assert problem.startswith("deadlock: stage 0 stands before 0B1, which needs 1B1, 0F1; stage 1 stands before 1F0")


def blocking(order: Actions) -> Actions:
    """Make every send and receive block: its wait directly behind it."""
    result: list[Action] = []
    for action in order:
        if action.op.startswith(("SEND", "RECV")):
            result += [action, replace(action, op=Op(f"WAIT_{action.op}"))]
        elif action.op.is_compute:
            result.append(action)
    return tuple(result)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_blocking_one_f_one_b_deadlocks_only_in_rendezvous_mode(num_stages: int) -> None:
    """The classic: in the steady phase both neighbours send at the same time."""
    schedule = lower(one_f_one_b(num_stages, 6))
    bad = replace(schedule, orders=tuple(map(blocking, _just_in_time(schedule))))
    (problem,) = check(bad)
    assert problem.startswith("deadlock in rendezvous mode: stage 0 stands before 0WAIT_SEND_F")
    with pytest.raises(AssertionError, match="deadlock"):
        oracle.Machine(bad, seed=0).run()


def _just_in_time(schedule: Schedule) -> list[Actions]:
    """Post every receive where it is waited for."""
    result: list[Actions] = []
    for order in schedule.orders:
        kept = [a for a in order if not a.op.startswith("RECV") and not a.op.startswith("WAIT_SEND")]
        result.append(tuple(replace(a, op=Op(a.op.removeprefix("WAIT_"))) for a in kept))
    return result


def test_bandwidth_queues_messages() -> None:
    """Three messages of 2 s each leave at 1, 3 and 5 and arrive 0.5 s after their last byte."""
    costs = Costs(forward=(1.0, 1.0), backward=(0.0, 0.0), latency=(0.5,), bandwidth=(50.0,), message_bytes=(100,))
    timeline = simulate(plain_forward_only(2, 3), costs)
    assert [(f.sent, f.start, f.end) for f in timeline.flights] == [(1, 1, 3.5), (2, 3, 5.5), (3, 5, 7.5)]
    assert [span.start for span in timeline.spans[1]] == [3.5, 5.5, 7.5]
    assert timeline.makespan == 8.5
    assert [(str(channel), size) for channel, size in timeline.bytes_by_channel] == [("boundary 0->1, forward", 300)]


def test_rendezvous_waits_for_the_receivers_word() -> None:
    """With one receive posted ahead, the word for message 2 leaves when message 1 has come, and takes a latency."""
    costs = uniform_costs(plain_placement(2), latency=4.0)
    assert simulate(plain_forward_only(2, 3), costs).makespan == 1 + 4 + 3
    flights = simulate(lower(plain_forward_only(2, 3)), costs, mode="rendezvous").flights
    assert [(f.start, f.end) for f in flights] == [(4, 8), (12, 16), (20, 24)]
    assert choose_lookahead(plain_forward_only(2, 3), costs) == 3


def test_wait_for_a_send_takes_until_it_has_arrived() -> None:
    schedule = lower(plain_forward_only(2, 1))
    assert simulate(schedule, uniform_costs(plain_placement(2), latency=4.0)).spans[0][0].end == 1
    early = replace(schedule, orders=tuple(map(blocking, _just_in_time(lower(plain_forward_only(2, 2))))))
    timeline = simulate(replace(early, num_microbatches=2), uniform_costs(plain_placement(2), latency=4.0))
    assert [span.start for span in timeline.spans[0]] == [0, 5]


def test_digest_tells_schedules_apart() -> None:
    schedules = [one_f_one_b(2, 4), one_f_one_b(2, 5), one_f_one_b(4, 4), lower(one_f_one_b(2, 4))]
    schedules += [reference_u_shape(2, 4), plain_forward_only(2, 4)]
    assert len({schedule.digest for schedule in schedules}) == len(schedules)
    assert one_f_one_b(2, 4).digest == one_f_one_b(2, 4).digest
    swapped = edited(one_f_one_b(2, 4), 0, lambda order: order.insert(0, order.pop(1)))
    assert swapped.digest != one_f_one_b(2, 4).digest
