"""What a step is planned for: stated and measured costs, limits in flight, and what is printed about the choice."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.expected import schedule_oracle as oracle
from vtp_plugin.config import VtpConfig
from vtp_plugin.config.flag import parse_cost_words, parse_in_flight
from vtp_plugin.config.resolve import merge
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.schedule.cost.costs import Costs, combine_reports, format_costs, parse_costs, u_costs
from vtp_plugin.plan.schedule.cost.simulator import simulate
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
from vtp_plugin.plan.schedule.make.u_shape import check_in_flight, choose_limits, plan_u_shape
from vtp_plugin.plan.schedule.order.actions import Op
from vtp_plugin.plan.schedule.order.placement import (
    Placement,
    interleaved_placement,
    num_rings,
    plain_placement,
    u_placement,
)
from vtp_plugin.plan.schedule.proof.check_schedule import check, peak_in_flight

# Four digits, as they are printed.
FOUR_DIGITS = st.floats(0, 1e6, allow_nan=False).map(lambda number: float(f"{number:.4g}"))


@st.composite
def all_costs(draw: st.DrawFn) -> Costs:
    num_vstages = draw(st.integers(3, 6))
    times = st.tuples(*[FOUR_DIGITS] * num_vstages)
    links = st.tuples(*[FOUR_DIGITS] * (num_vstages - 1))
    rates = st.tuples(
        *[st.one_of(st.just(math.inf), st.integers(1, 9999).map(lambda n: 125.0 * n))] * (num_vstages - 1)
    )
    size = 1024 * draw(st.integers(0, 9999))
    return Costs(
        forward=draw(times),
        backward=draw(times),
        latency=draw(links),
        bandwidth=draw(rates),
        message_bytes=(size,) * (num_vstages - 1),
    )


@given(all_costs())
def test_what_is_printed_is_read_as_the_same(costs: Costs) -> None:
    placement = u_placement(len(costs.forward) - 1)
    text = format_costs(costs)
    assert parse_costs(text.split(), placement) == costs
    # An endless rate cannot be measured, and says nothing to a user.
    assert "inf" not in text and ("mbit=" in text) == (min(costs.bandwidth) < math.inf)


def test_defaults_of_stated_costs() -> None:
    costs = parse_costs(("forward_ms=4,8,4",), u_placement(2))
    assert costs == u_costs(2, cloud=8.0, edge=4.0)


def test_one_number_counts_between_edge_and_cloud() -> None:
    words = ("forward_ms=4,8,8,8,4", "latency_ms=20", "mbit=80")
    costs = parse_costs(words, u_placement(4), message_bytes=30_000)
    assert costs.latency == (20, 0, 0, 20)
    assert [costs.transfer_time(v) for v in range(4)] == [3.0, 0.0, 0.0, 3.0]
    each = parse_costs((words[0], "latency_ms=1,2,3,4", "mbit=8,inf,80,800", "message_kib=1"), u_placement(4))
    assert each.latency == (1, 2, 3, 4)
    assert [round(each.transfer_time(v), 4) for v in range(4)] == [1.024, 0.0, 0.1024, 0.0102]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("latency_ms=2", "forward_ms has 0 entries; this pipeline has 3 virtual stages"),
        ("forward_ms=4,8", "forward_ms has 2 entries; this pipeline has 3 virtual stages"),
        ("forward_ms=4,8,4 backward_ms=8", "backward_ms has 1 entries"),
        ("forward_ms=4,8,4 latency_ms=1,2,3", "latency_ms has 3 entries; this pipeline has 2 links"),
        ("forward_ms=4,8,x", "forward_ms=4,8,x is not a list of numbers"),
        ("forward_ms=4,8,-1", "forward_ms=4,8,-1: every entry must be finite and not negative"),
        ("forward_ms=4,8,inf", "forward_ms=4,8,inf: every entry must be finite and not negative"),
        ("forward_ms=4,8,nan", "forward_ms=4,8,nan: every entry must be finite and not negative"),
        ("forward_ms=4,8,4 mbit=0", "mbit=0: every entry must be above 0"),
        ("forward_ms=4,8,4 mbit=100", "give message_kib="),
        ("forward_ms=4,8,4 forward_ms=4,8,4", "each at most once"),
        ("forward=4,8,4", "'forward=4,8,4' is not one of forward_ms="),
    ],
)
def test_bad_costs_are_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_costs(words.split(), u_placement(2))


def test_the_slowest_rank_counts() -> None:
    """Stages of several ranks, replicas, and figures that only some ranks have."""
    reports = [
        {"forward_ms": {"0": 4.0, "2": 5.0}, "backward_ms": {"0": 8.0, "2": 9.0}, "latency_ms": {"0": 20.0}},
        {"forward_ms": {"1": 7.0}, "backward_ms": {"1": 15.0}, "latency_ms": {"1": 21.0}},
        {"forward_ms": {"1": 8.0}, "backward_ms": {"1": 14.0}, "latency_ms": {"1": 19.0}},
    ]
    for number, report in enumerate(reports):
        link = "0" if number == 0 else "1"
        report |= {"transfer_ms": {link: 2.0 + number}, "message_bytes": {link: 1000}}
    costs = combine_reports(reports, u_placement(2))
    assert (costs.forward, costs.backward, costs.latency) == ((4, 8, 5), (8, 15, 9), (20, 21))
    assert costs.bandwidth == (500, 250)
    assert combine_reports(reports[::-1], u_placement(2)) == costs


def test_gradients_of_weights_that_were_never_apart_count_as_half() -> None:
    reports = [
        {"forward_ms": {"0": 4.0}, "backward_ms": {"0": 8.0}},
        {"forward_ms": {"1": 5.0}, "backward_ms": {"1": 9.0}, "weights_ms": {"1": 3.0}},
        {"forward_ms": {"1": 5.0}, "backward_ms": {"1": 7.0}, "weights_ms": {"1": 3.5}},
    ]
    costs = combine_reports(reports, plain_placement(2))
    assert (costs.backward, costs.weights) == ((8, 9), (4, 3.5))
    assert combine_reports(reports[:1], plain_placement(1)).weights == ()


def test_links_too_fast_to_measure_have_no_limit() -> None:
    costs = combine_reports([{"transfer_ms": {"0": 0.0}, "message_bytes": {"0": 1000}}], plain_placement(2))
    assert costs.bandwidth == (math.inf,)


@pytest.mark.parametrize(("num_stages", "latency"), [(2, 0), (3, 2), (4, 4), (8, 1)])
def test_default_limit_is_need_and_two(num_stages: int, latency: float) -> None:
    costs = u_costs(num_stages, latency=latency)
    need = math.ceil((6 + 4 * latency + 6 * (num_stages - 1)) / 6)
    for num_microbatches in (1, 4, 64):
        limits, why = choose_limits(None, u_placement(num_stages), costs, num_microbatches)
        assert limits == (min(need + 2, num_microbatches),) * num_stages
        assert why == f"need {need} + 2"


@pytest.mark.parametrize(("asked", "words"), [((0,), "no microbatch could ever start"), ((4, 4), "one number for all")])
def test_limits_that_fit_nothing_are_refused(asked: tuple[int, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_in_flight(asked, 3)
    with pytest.raises(ConfigError, match=words):
        make_schedule(ScheduleRequest(placement=u_placement(3), num_microbatches=4, in_flight=asked))


def test_a_limit_is_kept_and_printed() -> None:
    step = ScheduleRequest(
        placement=u_placement(3), num_microbatches=8, costs=u_costs(3, latency=2.0), in_flight=(4, 3, 3)
    )
    schedule, reason = make_schedule(step)
    assert check(schedule, limits=(4, 3, 3)) == ()
    timeline = simulate(schedule, u_costs(3, latency=2.0))
    edge, first, second, last = timeline.activations
    for part in (schedule.digest, "limit 4,3,3 (as asked)", f"{edge}+{last},{first},{second}", "times in ms"):
        assert part in reason
    assert "\n" not in reason


def test_costs_choose_the_order() -> None:
    """With latency the order is another one, and better: here by more than a tenth."""
    blind, hiding = (
        make_schedule(ScheduleRequest(placement=u_placement(3), num_microbatches=16, costs=costs))[0]
        for costs in (None, u_costs(3, latency=4.0))
    )
    costs = u_costs(3, latency=4.0)
    times = [simulate(schedule, costs, mode="rendezvous").makespan for schedule in (blind, hiding)]
    assert times[1] * 1.1 < times[0]
    assert simulate(hiding, costs).makespan <= 1.2 * plan_u_shape(3, 16, u_costs(3)).makespan


@settings(max_examples=12)
@given(st.integers(2, 3), st.integers(1, 4), st.booleans(), st.data())
def test_every_step_runs_for_any_costs(
    num_stages: int, num_microbatches: int, forward_only: bool, data: st.DataObject
) -> None:
    """Measured figures are any: free compute, slow links, one slow stage."""
    times = st.sampled_from([0.0, 0.01, 1.0, 250.0])
    costs = Costs(
        forward=data.draw(st.tuples(*[times] * (num_stages + 1))),
        backward=data.draw(st.tuples(*[times] * (num_stages + 1))),
        latency=data.draw(st.tuples(*[times] * num_stages)),
        bandwidth=data.draw(st.tuples(*[st.sampled_from([math.inf, 0.5])] * num_stages)),
        message_bytes=(100,) * num_stages,
    )
    in_flight = data.draw(st.none() | st.tuples(*[st.integers(1, 3)] * num_stages))
    step = ScheduleRequest(
        placement=u_placement(num_stages),
        num_microbatches=num_microbatches,
        forward_only=forward_only,
        costs=costs,
        in_flight=in_flight,
    )
    schedule, _ = make_schedule(step)
    assert make_schedule(step)[0] == schedule
    computes = [action for order in schedule.orders for action in order if action.op is Op.F]
    assert len(computes) == num_microbatches * (num_stages + 1)
    if in_flight is not None:
        assert check(schedule, limits=in_flight) == ()
    oracle.Machine(schedule, seed=num_microbatches).run()


def test_other_placements_have_no_choice() -> None:
    assert num_rings(u_placement(2)) == 1 and num_rings(plain_placement(2)) == num_rings(plain_placement(1)) == 0
    step = ScheduleRequest(placement=interleaved_placement(2, 2), num_microbatches=4)
    assert make_schedule(step)[0] == make_schedule(replace(step, in_flight=(1,)))[0]


def test_encoders_run_ahead_as_far_as_they_are_let() -> None:
    """Two encoders in front of two stages; by default each is as far ahead as 1F1B needs."""
    step = ScheduleRequest(placement=Placement(stages=(0, 1, 2, 3), successors=(2, 2, 3)), num_microbatches=8)
    usual, why = make_schedule(step)
    assert [peak_in_flight(usual, worker) for worker in range(4)] == [3, 3, 2, 1]
    assert why.endswith("kept activations by stage 3,3,2,1")
    ahead, _ = make_schedule(replace(step, in_flight=(6, 4, 2, 1)))
    assert [peak_in_flight(ahead, worker) for worker in range(4)] == [6, 4, 2, 1]
    with pytest.raises(ConfigError, match="would deadlock"):
        make_schedule(replace(step, in_flight=(1, 4, 2, 1)))


def test_config_reads_limits_and_costs() -> None:
    assert parse_in_flight(8) == parse_in_flight("8") == parse_in_flight([8]) == (8,)
    assert parse_in_flight("8, 4,4") == (8, 4, 4)
    assert parse_cost_words(["forward_ms=4,8,4", "latency_ms=2"]) == parse_cost_words("forward_ms=4,8,4  latency_ms=2")
    base = VtpConfig(in_flight=(8,))
    with pytest.raises(ConfigError, match="given in_flight=8, the command line says 9"):
        merge(base, {"in_flight": (9,)})


@pytest.mark.parametrize("make", [lambda: parse_in_flight("a"), lambda: parse_in_flight("1,,2")])
def test_config_refuses_limits_that_are_no_numbers(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match="not a list of whole numbers"):
        make()
