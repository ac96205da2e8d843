"""Unequal data parallelism: who does what, that nothing deadlocks, how fast it is, and what is refused."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace

import pytest

from tests.expected import schedule_oracle as oracle
from tests.support.plans import channels
from tests.unit.plan.test_schedule import chain
from vtp_plugin.plan.layout.pipeline_layout import ChannelId
from vtp_plugin.plan.schedule.cost.costs import (
    Costs,
    in_flight_needed,
    lower_bound,
    make_route,
    split_costs,
    u_costs,
    uniform_costs,
)
from vtp_plugin.plan.schedule.cost.simulator import simulate
from vtp_plugin.plan.schedule.make.u_shape import one_f_one_b, one_f_one_b_limits, plain_forward_only, plan_u_shape
from vtp_plugin.plan.schedule.order.actions import Action, Op, Schedule, parse_actions
from vtp_plugin.plan.schedule.order.add_communication import lower
from vtp_plugin.plan.schedule.order.placement import Placement, interleaved_placement, plain_placement, u_placement
from vtp_plugin.plan.schedule.proof.check_schedule import check
from vtp_plugin.report.pictures.draw_simulated_step import chrome_trace, draw_svg, draw_text

LISTS = [(1, 2), (2, 1), (1, 3, 3), (1, 2, 2, 2), (1, 2, 1), (1, 4, 4), (2, 1, 2), (1, 2, 4, 2), (3, 1, 3)]


def balanced(placement: Placement, latency: float = 0.0) -> Costs:
    """Costs with which every stage takes equally long for a microbatch, as its replicas share the work."""
    forward = tuple(float(placement.num_replicas[stage]) for stage in placement.stages)
    return replace(
        uniform_costs(placement, latency=latency), forward=forward, backward=tuple(2 * time for time in forward)
    )


def u_plan(num_replicas: tuple[int, ...], num_microbatches: int, costs: Costs, limit: int | None = None) -> Schedule:
    limits = None if limit is None else (limit,) * sum(num_replicas)
    plan = plan_u_shape(len(num_replicas), num_microbatches, costs, num_replicas=num_replicas, limits=limits)
    return plan.schedule


@pytest.mark.parametrize("num_replicas", LISTS, ids=str)
@pytest.mark.parametrize("kind", ["1f1b", "forward only", "u", "u with limit"])
def test_every_worker_does_its_share_once_and_nothing_deadlocks(num_replicas: tuple[int, ...], kind: str) -> None:
    num_stages = len(num_replicas)
    for rounds in (1, 3):
        num_microbatches = rounds * math.lcm(*num_replicas)
        if kind == "1f1b":
            schedule = one_f_one_b(chain(*num_replicas), num_microbatches)
        elif kind == "forward only":
            schedule = plain_forward_only(chain(*num_replicas), num_microbatches)
        else:
            costs = u_costs(num_stages, latency=1.0)
            schedule = u_plan(num_replicas, num_microbatches, costs, 2 if kind == "u with limit" else None)
        for (stage, replica), order in zip(oracle.workers(schedule.placement), schedule.orders, strict=True):
            chunks = [v for v, holder in enumerate(schedule.placement.stages) if holder == stage]
            wanted = Counter(
                Action(op=op, vstage=v, microbatch=h)
                for v in chunks
                for op in ((Op.F,) if kind == "forward only" else (Op.F, Op.B))
                for h in range(num_microbatches)
                if h % num_replicas[stage] == replica
            )
            assert Counter(order) == wanted
        for lookahead in (1, 3):
            lowered = lower(schedule, lookahead=lookahead)
            assert check(lowered) == ()
            oracle.Machine(lowered, seed=rounds).run()


@pytest.mark.parametrize("num_replicas", [(1, 3, 3), (1, 2, 2, 2)], ids=str)
def test_megatrons_warm_up_is_too_short_and_the_checker_says_so(num_replicas: tuple[int, ...]) -> None:
    """Stage s of P keeps P - s in flight there: too few on the narrow stage, whatever the wide stages do."""
    num_stages, num_microbatches = len(num_replicas), 4 * max(num_replicas)
    ours = one_f_one_b(chain(*num_replicas), num_microbatches)
    orders: list[tuple[Action, ...]] = []
    for (stage, _), order in zip(oracle.workers(ours.placement), ours.orders, strict=True):
        forwards, backwards = ([a for a in order if a.op is op] for op in (Op.F, Op.B))
        num_warmup = min(num_stages - 1 - stage, len(forwards))
        pairs = zip(forwards[num_warmup:], backwards, strict=False)
        rest = backwards[len(forwards) - num_warmup :]
        orders.append((*forwards[:num_warmup], *(action for pair in pairs for action in pair), *rest))
    (problem,) = check(replace(ours, orders=tuple(orders)))
    assert problem.startswith("deadlock: stage 0 stands before 0B0, which needs 1B0; stage 1 replica 0 stands before")


@pytest.mark.parametrize("num_replicas", LISTS, ids=str)
def test_one_f_one_b_is_close_to_the_bound_where_stages_are_balanced(num_replicas: tuple[int, ...]) -> None:
    placement = chain(*num_replicas)
    num_microbatches = 8 * math.lcm(*num_replicas)
    schedule = one_f_one_b(placement, num_microbatches)
    limits = [one_f_one_b_limits(chain(*num_replicas))[stage] for stage, _ in oracle.workers(placement)]
    bound = lower_bound(make_route(placement, balanced(placement)), num_microbatches, limits)
    assert bound <= simulate(schedule, balanced(placement)).makespan <= 1.02 * bound


@pytest.mark.parametrize("num_replicas", LISTS, ids=str)
@pytest.mark.parametrize("latency", [0, 4])
def test_u_shape_reaches_the_bound_without_a_limit(num_replicas: tuple[int, ...], latency: float) -> None:
    num_stages, num_microbatches = len(num_replicas), 4 * math.lcm(*num_replicas)
    for cloud in (2.0, 2.0 * max(num_replicas)):
        costs = u_costs(num_stages, cloud=cloud, latency=latency)
        plan = plan_u_shape(num_stages, num_microbatches, costs, num_replicas=num_replicas)
        assert plan.lower_bound <= plan.makespan <= 1.03 * plan.lower_bound
        assert plan.makespan == oracle.makespan(plan.schedule, costs) == simulate(plan.schedule, costs).makespan


def test_more_in_flight_on_the_narrow_stage_hide_latency() -> None:
    placement = chain(1, 4, 4)
    costs = balanced(placement, latency=1.0)
    times = [
        simulate(one_f_one_b(chain(1, 4, 4), 32, in_flight=(edge, 2, 1)), costs).makespan
        for edge in (one_f_one_b_limits(chain(1, 4, 4))[0], 12)
    ]
    assert times[1] < 0.95 * times[0]


def test_need_counts_the_microbatches_of_one_worker() -> None:
    """A round trip of 12 + 12 + 6; the edge takes 6 for a microbatch, a cloud stage 12 on two replicas."""
    costs = u_costs(3, cloud=4.0)
    assert in_flight_needed(u_placement(3, num_replicas=(1, 2, 2)), costs) == 5
    assert in_flight_needed(u_placement(3, num_replicas=(2, 1, 1)), costs) == math.ceil(30 / 12 / 2)
    assert in_flight_needed(u_placement(3), costs) == 3


def test_replicas_of_equal_number_are_as_many_pipelines() -> None:
    placement = chain(2, 2, 2)
    wide = one_f_one_b(chain(2, 2, 2), 12)
    alone = one_f_one_b(3, 6)
    for worker, (stage, replica) in enumerate(oracle.workers(placement)):
        renumbered = [replace(action, microbatch=2 * action.microbatch + replica) for action in alone.orders[stage]]
        assert list(wide.orders[worker]) == renumbered
    costs = uniform_costs(alone.placement, latency=1.0)
    assert simulate(wide, costs).makespan == simulate(alone, costs).makespan
    # Nothing is narrow, so the mode split joins nothing.
    assert split_costs(placement, costs) == costs


@pytest.mark.parametrize("num_replicas", LISTS, ids=str)
def test_split_does_the_same_work_and_moves_the_same_bytes(num_replicas: tuple[int, ...]) -> None:
    placement = chain(*num_replicas)
    num_links = placement.num_vstages - 1
    costs = replace(balanced(placement), message_bytes=(24,) * num_links, bandwidth=(8.0,) * num_links)
    num_microbatches = 4 * math.lcm(*num_replicas)
    in_turn = simulate(one_f_one_b(chain(*num_replicas), num_microbatches), costs)
    split = split_costs(placement, costs)
    at_once = simulate(one_f_one_b(len(num_replicas), num_microbatches // math.lcm(*num_replicas)), split)
    for worker, (stage, _) in enumerate(oracle.workers(placement)):
        assert in_turn.busy[worker] == at_once.busy[stage]
    sizes = dict(at_once.bytes_by_channel)
    for channel, size in in_turn.bytes_by_channel:
        ends = [oracle.workers(placement)[worker][0] for worker in (channel.upstream, channel.downstream)]
        assert size == sizes[ChannelId.between(*ends, channel.direction)]


def test_pairs_of_workers_do_not_wait_for_each_others_messages() -> None:
    """Each message keeps its pair's link for 2; two replicas get theirs side by side."""
    costs = Costs(forward=(1.0, 1.0), backward=(0.0, 0.0), latency=(0.5,), bandwidth=(50.0,), message_bytes=(100,))
    timeline = simulate(plain_forward_only(chain(1, 2), 4), costs)
    starts = {str(flight.action): (flight.sent, flight.start, flight.end) for flight in timeline.flights}
    assert starts == {f"0SEND_F{n}": (n + 1, n + 1, n + 3.5) for n in range(4)}
    assert [[span.start for span in row] for row in timeline.spans[1:]] == [[3.5, 5.5], [4.5, 6.5]]


def test_texts_name_replicas_only_where_there_are_several() -> None:
    schedule = one_f_one_b(chain(1, 2), 4)
    assert schedule.describe().splitlines() == [
        "stage 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "stage 1 replica 0: 1F0 1B0 1F2 1B2",
        "stage 1 replica 1: 1F1 1B1 1F3 1B3",
    ]
    timeline = simulate(schedule, uniform_costs(schedule.placement))
    rows = draw_text(timeline, columns=60).splitlines()
    assert [row.split("|")[0].strip() for row in rows[:3]] == ["stage 0", "stage 1 replica 0", "stage 1 replica 1"]
    assert len({row.index("|") for row in rows[:3]}) == 1
    svg = ET.fromstring(draw_svg(timeline, title="wide"))
    texts = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert "stage 1 replica 1" in texts and "stage 0" in texts
    assert '"boundary stage 0->stage 1 replica 1, backward"' in chrome_trace(timeline)


def test_digest_tells_replicas_apart() -> None:
    lists = [(1, 2, 2), (1, 1, 2), (2, 2, 2), (2, 1, 2), (1, 1, 1)]
    assert len({one_f_one_b(chain(*num_replicas), 4).digest for num_replicas in lists}) == len(lists)
    assert one_f_one_b(chain(1, 1, 1), 4) == one_f_one_b(3, 4)


def test_checker_names_the_replica() -> None:
    schedule = lower(one_f_one_b(chain(1, 2), 4))
    swapped = replace(schedule, orders=(schedule.orders[0], schedule.orders[2], schedule.orders[1]))
    problems = check(swapped)
    assert "stage 1 replica 0: 1F1 does not belong there" in problems
    assert "3 orders for 2 workers" in check(replace(schedule, placement=plain_placement(2)))
    order = list(schedule.orders[1])
    first, second = (order.index(action) for action in parse_actions("1RECV_F0 1RECV_F2"))
    order[first], order[second] = order[second], order[first]
    problems = check(replace(schedule, orders=(schedule.orders[0], tuple(order), schedule.orders[2])))
    assert any(problem.startswith("stage 1 replica 0: 1WAIT_RECV_F0 comes before 1RECV_F0") for problem in problems)
    (problem,) = check(schedule, limits=(3, 1, 0))
    assert problem == "stage 1 replica 1: 1 microbatches in flight at 1F1, the limit is 0"


def test_receives_in_the_order_of_another_replica_are_found() -> None:
    """The first replica sends its gradient of 0 before that of 2; the other's gradient of 1 does not matter."""
    schedule = lower(one_f_one_b(chain(1, 2), 4), lookahead=4)
    order = list(schedule.orders[0])
    places = [order.index(action) for action in parse_actions("0RECV_B0 0RECV_B2")]
    assert places[1] < order.index(parse_actions("0WAIT_RECV_B0")[0])
    order[places[0]], order[places[1]] = order[places[1]], order[places[0]]
    (problem,) = check(replace(schedule, orders=(tuple(order), *schedule.orders[1:])))
    assert problem == "boundary stage 0->stage 1 replica 0, backward: 1SEND_B0 is sent where 0RECV_B2 is received"
    order = list(schedule.orders[0])
    places = [order.index(action) for action in parse_actions("0RECV_B0 0RECV_B1")]
    assert places[1] < order.index(parse_actions("0WAIT_RECV_B0")[0])
    order[places[0]], order[places[1]] = order[places[1]], order[places[0]]
    assert check(replace(schedule, orders=(tuple(order), *schedule.orders[1:]))) == ()


def test_channels_come_in_one_order() -> None:
    names = [str(channel) for channel in channels(u_placement(2, num_replicas=(1, 2)))]
    assert names == [
        f"boundary {pair}, {way}" for pair in ("0->1", "0->2", "1->0", "2->0") for way in ("forward", "backward")
    ]
    assert Placement(stages=(0, 1, 0, 1)) == interleaved_placement(2, 2)
