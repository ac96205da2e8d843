"""What belongs to one start goes with it, and a process group says which pipeline is meant."""

from __future__ import annotations

from typing import Any

import pytest

from vtp_plugin.config import VtpConfig
from vtp_plugin.errors import PlanError
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.session import Pipeline, Session
from vtp_plugin.session.planned_run import PipelinePlan, plan_module
from vtp_plugin.session.session import AppliedSets

CONFIG = VtpConfig(size_list=(1, 2))


def planned_session() -> Session:
    session = Session(CONFIG, platform=CpuPlatform("of the test"))
    session.plan(world_size=3, pipeline_size=1, tensor_size=None, cp=1, order="tp-cp-ep-dp-pp")
    return session


def open_one(plan: PipelinePlan, *groups: Any) -> Pipeline:
    return Pipeline(plan=plan, stage_group=None, pipeline_groups=groups, agree=lambda state: None)


@pytest.mark.parametrize("has_arguments", [False, True])
def test_a_start_ends_as_a_whole(has_arguments: bool) -> None:
    session, ended = planned_session(), list[str]()
    session.learn(has_arguments=has_arguments)
    own = open_one(session.planned.pipeline(num_chunks=1))
    for name in ("groups", "channels"):
        session.start.ending.callback(ended.append, name)
    session.pipelines.add(own)
    session.start.ending.callback(session.pipelines.close, own)
    assert session.is_running and session.running is own
    session.release()
    assert ended == ["channels", "groups"]
    assert not session.is_running
    # Validated arguments last longer than the groups that are made by them.
    assert session.is_planned is has_arguments is session.has_arguments
    with pytest.raises(PlanError, match="used before it is open"):
        _ = session.running
    session.release()
    assert ended == ["channels", "groups"]


def test_the_next_start_begins_clean() -> None:
    session = planned_session()
    first = session.start.ending
    session.release()
    session.plan(world_size=6, pipeline_size=1, tensor_size=None, cp=1, order="tp-cp-ep-dp-pp")
    assert session.planned.layout.dp_sizes == (2, 2) and session.planned.notes == ()
    assert session.start.ending is not first


def test_a_group_says_which_pipeline_is_meant() -> None:
    session, mine, other = planned_session(), object(), object()
    pipelines: Any = session.pipelines
    assert pipelines.of(mine) is None
    layout = PipelineLayout.from_sizes((2, 1), world_size=3)
    module = open_one(plan_module(CONFIG, layout, device="cpu"), mine)
    pipelines.add(module)
    assert pipelines.of(mine) is pipelines.of_module(mine) is module
    assert pipelines.of(other) is pipelines.own is None
    own = open_one(session.planned.pipeline(num_chunks=1), other)
    pipelines.add(own)
    assert pipelines.own is pipelines.of(other) is pipelines.of(None) is own
    assert pipelines.of_module(other) is None and pipelines.of(mine) is module
    session.close_module(other)  # none of a module
    session.close_module(mine)
    assert list(pipelines) == [own]


def test_a_module_joins_its_stages_and_nothing_else() -> None:
    plan = plan_module(CONFIG, PipelineLayout.from_sizes((2, 1), world_size=6, dp=(1, 4)), device="cpu")
    assert plan.ends.are_bridged and not plan.ends.are_stock
    assert [spec.name for spec in plan.specs] == ["boundary 0->1, forward", "boundary 0->1, backward"]
    assert plan.orders is None and plan.gradient_share(0) == plan.gradient_share(1) == 1.0
    assert plan.sizes == "2,1" and list(plan.members) == list(range(6))


def test_the_runs_own_pipeline_ties_its_ends() -> None:
    session = Session(VtpConfig(size_list=(1, 2, 1), dp_list=(2, 1, 1)), platform=CpuPlatform("of the test"))
    session.plan(world_size=5, pipeline_size=1, tensor_size=None, cp=1, order="tp-cp-ep-dp-pp")
    plan = session.planned.pipeline(num_chunks=1)
    assert plan.ends.tied_stages == (0, 2) and plan.tied_specs == plan.specs[-len(plan.tied_specs) :] != ()
    assert [plan.gradient_share(stage) for stage in range(3)] == [2.0, 1.0, 1.0]
    assert session.planned.pipeline(num_chunks=1, embedding_stages=[0, 1, 2]).ends.tied_stages == (0, 1, 2)


def test_sets_are_undone_in_turn_and_decisions_fall_once() -> None:
    calls: list[str] = []

    class Applied:
        def __init__(self, name: str) -> None:
            self.name = name

        def revert(self) -> None:
            calls.append(self.name)

    sets: Any = AppliedSets()
    assert not sets.has_list and not sets.has_bridges
    assert sets.begin_list() and not sets.begin_list() and sets.has_list
    sets.begin_bridges()
    assert sets.has_bridges
    sets.add(Applied("first"))
    sets.before_revert(lambda: calls.append("before"))
    sets.add(Applied("second"))
    sets.revert()
    assert len(sets) == 2 and calls == ["before", "second", "first"]
