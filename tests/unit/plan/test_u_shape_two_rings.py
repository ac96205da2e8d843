"""U-shaped pipelines of two rings: orders, against the best there is, their costs, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.expected import schedule_oracle as oracle
from tests.unit.plan.test_schedule_u_shape import all_schedules
from vtp_plugin.cli.main import main
from vtp_plugin.host.rules.checks.stage_layers import check_u_layers
from vtp_plugin.plan.schedule.cost.costs import (
    combine_reports,
    format_costs,
    lower_bound,
    make_route,
    parse_costs,
    u_costs,
)
from vtp_plugin.plan.schedule.cost.simulator import CompiledSchedule
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
from vtp_plugin.plan.schedule.make.u_shape import plan_u_shape
from vtp_plugin.plan.schedule.order.actions import Op
from vtp_plugin.plan.schedule.order.add_communication import lower
from vtp_plugin.plan.schedule.order.placement import u_placement
from vtp_plugin.plan.schedule.proof.check_schedule import check


def test_small_plans_are_the_best_of_all() -> None:
    schedules = [(s, oracle.peaks(s)) for s in all_schedules(u_placement(2, num_rings=2), 2) if check(s) == ()]
    assert len(schedules) > 100
    for cloud, latency in [(1, 0), (2, 1), (3, 4)]:
        costs = u_costs(2, cloud=cloud, latency=latency, num_rings=2)
        times = {s: oracle.makespan(s, costs) for s, _ in schedules}
        for limit in (1, 2):
            best = min(times[s] for s, peaks in schedules if max(peaks) <= limit)
            plan = plan_u_shape(2, 2, costs, num_rings=2, limits=(limit, limit))
            bound = lower_bound(make_route(u_placement(2, num_rings=2), costs), 2, (limit, limit))
            assert bound <= best == plan.makespan


@pytest.mark.parametrize("num_replicas", [(), (1, 2), (2, 1, 1)])
def test_a_frozen_encoder_has_no_backward_and_gets_no_gradient(num_replicas: tuple[int, ...]) -> None:
    """Its chunks are those of the first ring."""
    num_stages = len(num_replicas) or 2
    costs = u_costs(num_stages, latency=1, num_rings=2)
    for num_microbatches, forward_only in itertools.product((2, 6), (False, True)):
        options: dict[str, Any] = {"num_rings": 2, "num_replicas": num_replicas, "forward_only": forward_only}
        frozen = plan_u_shape(num_stages, num_microbatches, costs, num_frozen=num_stages, **options)
        trained = plan_u_shape(num_stages, num_microbatches, costs, **options)
        assert (frozen.makespan == trained.makespan) if forward_only else (frozen.makespan < trained.makespan)
        lowered = lower(frozen.schedule, lookahead=2)
        for schedule in (frozen.schedule, lowered):
            assert check(schedule, limits=frozen.in_flight) == ()
        backward = {action.vstage for order in lowered.orders for action in order if action.op is Op.B}
        sent = {action.vstage for order in lowered.orders for action in order if action.op is Op.SEND_B}
        last = range(num_stages, 2 * num_stages + 1)
        assert (backward, sent) == ((set(), set()) if forward_only else ({*last}, {*last[1:]}))
        assert frozen.lower_bound <= frozen.makespan
        assert CompiledSchedule(lowered).activations[:num_stages] == (0,) * num_stages


def test_the_plan_nears_the_bound() -> None:
    """16 microbatches: at most a tenth above what no order can beat, and latency is hidden."""
    for num_stages, latency in itertools.product((2, 3), (0, 1, 2)):
        placement, costs = u_placement(num_stages, num_rings=2), u_costs(num_stages, latency=latency, num_rings=2)
        schedule, reason = make_schedule(ScheduleRequest(placement=placement, num_microbatches=16, costs=costs))
        plan = plan_u_shape(num_stages, 16, costs, num_rings=2, limits=oracle.peaks(schedule))
        assert plan.makespan <= 1.1 * plan.lower_bound, reason
        assert "F1" in reason and "kept activations by chunk" in reason


def test_messages_of_the_rings_have_their_own_sizes() -> None:
    placement = u_placement(2, num_rings=2)
    words = ("forward_ms=1,2,3,4,5", "mbit=8,8,8,8", "message_kib=1,1,4,4")
    costs = parse_costs(words, placement)
    assert costs.message_bytes == (1024, 1024, 4096, 4096)
    assert parse_costs(format_costs(costs).split(), placement) == costs
    reports = [
        {"message_bytes": {"0": 1000.0, "2": 4000.0}},
        {"message_bytes": {"1": 1024.0, "3": 4096.0}, "transfer_ms": {"3": 1.0}},
    ]
    combined = combine_reports(reports, placement)
    assert (combined.message_bytes, combined.bandwidth[3]) == ((1024, 1024, 4096, 4096), 4096.0)


def test_the_language_models_layers_are_given_by_list() -> None:
    assert "give both" in check_u_layers(None, "Et|t|tL|", (1, 1, 1))[0]
    assert check_u_layers((1, 1, 1), None, (1, 1, 1)) == ()


FLAGS = "--vtp-size-list 1,2 --layerwise-disaggregated-training --vtp-encoder-layer-list 1,2,1 --num-layer-list 2,4,2"


def test_plan_and_draw_show_the_rings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["plan", *FLAGS.split(), "--vtp-sites", "edge,cloud"])
    text = capsys.readouterr().out
    assert "Two rings: layers of the encoder 1,2,1, then of the language model 2,4,2." in text
    assert "gradients together, in the language model's ring alone" in text
    main(["draw", *FLAGS.split(), "--output", str(tmp_path / "u.svg")])
    assert "back to the edge, twice" in (tmp_path / "u.svg").read_text()
    main(["simulate", *FLAGS.split(), "--num-microbatches", "4"])
    assert "activations kept, by chunk" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", *FLAGS.replace("1,2,1", "1,1").split()])
    assert "--vtp-encoder-layer-list has 2 parts" in capsys.readouterr().err
    for words, reason in [
        ("--context-parallel-size 2", "two rings were tested without context parallelism"),
        ("--vtp-dp-list 1,2 --vtp-dp-mode split", "cannot be cut by samples; use multiplex"),
    ]:
        with pytest.raises(SystemExit):
            main(["plan", *FLAGS.split(), *words.split()])
        assert reason in capsys.readouterr().err
