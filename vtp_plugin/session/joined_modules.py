"""Several modules with grids of their own, joined for steps in one planned order: who sends to whom, and over what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vtp_plugin.config.resolve import ScheduleOptions, option_context
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.host.rules.table.check_options import check_config
from vtp_plugin.plan.layout.channel_id import ChannelId, Direction
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.schedule.make.limits import by_stage, check_in_flight
from vtp_plugin.plan.schedule.order.modules import ModulePlacement, place_modules
from vtp_plugin.runtime.bridges.separate import Bridge
from vtp_plugin.runtime.comm.link import ChannelLink
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.step.links import (
    ActivationLink,
    GradientLink,
    LinkId,
    ModuleLink,
    SplitSizes,
    StageLink,
)
from vtp_plugin.runtime.step.schedule_runner import ScheduleRunner
from vtp_plugin.session.open_pipelines import Pipeline
from vtp_plugin.session.session import Session


@dataclass(frozen=True, kw_only=True)
class JoinedModules:
    """This rank's part of several modules, for all steps.

    Attributes:
        runner: runs the planned steps.
        links: links of this rank.
        name: name of this rank's module.
        inputs: names of the modules whose outputs this rank's stage takes, in the order of the placement.
    """

    runner: ScheduleRunner
    links: Mapping[LinkId, StageLink]
    name: str
    inputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Joints:
    """The channels and bridges that join this rank's stage to others.

    Attributes:
        name: name of this rank's module.
        stage: stage of this rank in its module.
        pipeline: pipeline of the module; None if it has one stage.
        form: type and layout of the tensors in that pipeline; None without a pipeline.
        before: bridges from other modules, by the modules' names.
        after: bridges to other modules.
        split_sizes: returns the number of tokens of each sample of a tensor.
    """

    name: str
    stage: int
    pipeline: Pipeline | None
    form: TensorFormat | None
    before: Mapping[str, Bridge]
    after: Sequence[Bridge]
    split_sizes: SplitSizes


def plan_modules(
    session: Session,
    read: Callable[[], Mapping[str, PipelineLayout]],
    topology: Mapping[str, Sequence[str]],
    own: Sequence[str],
    config: Any,
) -> ModulePlacement:
    """Plan who sends to whom, and compare it over all ranks.

    Args:
        session: the applied plugin.
        read: returns the layout of every module.
        topology: names of the modules that take a module's output, by the name of that module.
        own: names of this rank's modules.
        config: Megatron's configuration of this rank's model.

    Raises:
        ConfigError: there is no order for such modules, or a configuration asks for something that is not supported.
    """
    found: list[ModulePlacement] = []

    def prepare() -> Mapping[str, object]:
        layouts = read()
        placed = place_modules({name: one.num_stages for name, one in layouts.items()}, topology)
        if len(own) != 1:
            raise ConfigError(
                f"this rank holds {len(own)} modules; a planned schedule needs modules on "
                "ranks of their own: use Megatron's schedule (leave schedule='planned' out)"
            )
        if session.config.in_flight is not None:
            check_in_flight(session.config.in_flight, placed.placement.num_stages)
        if not config.variable_seq_lengths:
            raise ConfigError("variable_seq_lengths=False; modules have tensors of different shapes: set it to True")
        context = option_context(session.config, layouts[own[0]], device=session.choose_platform().name)
        refuse(check_config(config, context))
        found.append(placed)
        return {"stages of the modules": str(placed.first_stages), "order": str(placed.placement.successors)}

    session.ranks.agree("planning of the modules", prepare)
    return found[0]


def join_modules(session: Session, placed: ModulePlacement, joints: Joints) -> JoinedModules:
    """Make this rank's links and the runner of the joint steps.

    Args:
        session: the applied plugin.
        placed: placement of the stages of all modules.
        joints: channels and bridges of this rank's stage.
    """
    stage = placed.first_stages[joints.name] + joints.stage
    in_flight = by_stage(session.config.in_flight, placed.placement.num_stages)
    options = ScheduleOptions(costs=None, in_flight=in_flight)
    runner = ScheduleRunner(placed.placement, stage, session.ranks, session.choose_platform(), options)
    return JoinedModules(
        runner=runner,
        links=_links(placed, joints, stage),
        name=joints.name,
        inputs=placed.inputs(stage),
    )


def _links(placed: ModulePlacement, joints: Joints, stage: int) -> dict[LinkId, StageLink]:
    """Return this rank's links: channels inside its module, bridges to other modules."""
    links: dict[LinkId, StageLink] = {}
    communicator = None if joints.pipeline is None else joints.pipeline.communicator
    for way, ends, direction in (
        ("recv_prev", (stage - 1, stage), Direction.FORWARD),
        ("send_prev", (stage - 1, stage), Direction.BACKWARD),
        ("send_next", (stage, stage + 1), Direction.FORWARD),
        ("recv_next", (stage, stage + 1), Direction.BACKWARD),
    ):
        if communicator is not None and joints.form is not None and communicator.reaches(way):
            link = ModuleLink(ChannelLink(communicator.channel(way), joints.form))
            links[ChannelId.between(*ends, direction), ends[0]] = link
    by_source = {placed.module_of(before): before for before in placed.placement.predecessors(stage)}
    for source, bridge in joints.before.items():
        links.update(_bridge_links(bridge, (by_source[source], stage), joints.split_sizes))
    for bridge in joints.after:
        links.update(_bridge_links(bridge, (stage, placed.placement.successors[stage]), joints.split_sizes))
    return links


def _bridge_links(bridge: Bridge, ends: tuple[int, int], split_sizes: SplitSizes) -> dict[LinkId, StageLink]:
    return {
        (ChannelId.between(*ends, Direction.FORWARD), ends[0]): ActivationLink(bridge, split_sizes),
        (ChannelId.between(*ends, Direction.BACKWARD), ends[0]): GradientLink(bridge, split_sizes),
    }
