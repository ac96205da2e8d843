"""Modules with grids of their own: the groups of their stages, and what joins them.

A grid whose stages differ in size, bound to torch.distributed and to the plugin's channels.

Stages may differ in all three sizes. Where their numbers of replicas differ, the batch of a microbatch is cut among the
replicas of every stage again, as at a bridge: each has its even share of the samples.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from vtp_plugin.config.resolve import ScheduleOptions, option_context
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.host.patching import Writes
from vtp_plugin.host.rules.table.rows import check_config
from vtp_plugin.plan.layout.pipeline_layout import ChannelId, Direction, PipelineLayout
from vtp_plugin.plan.layout.stage_grid import StageRanks
from vtp_plugin.plan.schedule.make.u_shape import by_stage, check_in_flight
from vtp_plugin.plan.schedule.order.placement import ModulePlacement, place_modules
from vtp_plugin.runtime.bridges.separate import Bridge
from vtp_plugin.runtime.comm.channel import BoundChannel
from vtp_plugin.runtime.comm.collectives import ModelGroup, close_groups, settle
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.health.redaction import Redaction
from vtp_plugin.runtime.step.schedule_runner import ScheduleRunner
from vtp_plugin.runtime.step.stage_channels import (
    ActivationChannel,
    CrossingId,
    GradientChannel,
    ModuleChannel,
    SplitSizes,
    StageChannel,
)
from vtp_plugin.session.ranks import state_request
from vtp_plugin.session.session import Pipeline, Session

if TYPE_CHECKING:
    from vtp_plugin.session.session import Session


def meet(session: Session, prepare: Callable[[], None]) -> None:
    """Wait for all ranks that the launcher started, if it says where they meet, and compare their requests.

    Args:
        session: session of this rank.
        prepare: called first; if it raises, all ranks leave.

    Raises:
        ConfigError: a rank has another request, or could not prepare.
        PeerError: a rank did not come within the timeout.
    """
    is_unsure = may_name_sites(sys.argv)
    _note_sites(session, is_one_site=not is_unsure and not session.config.has_several_sites)

    def state() -> dict[str, object]:
        prepare()
        return {**state_request(session.config), "--vtp-sites on the command line": is_unsure}

    session.ranks.meet(os.environ, state)
    if session.ranks.store is not None and not is_unsure:
        _settle_redaction(session)


def may_name_sites(argv: Sequence[str]) -> bool:
    """Tell whether a command line may name sites, where its flags have not been read.

    >>> may_name_sites(["script.py", "--vtp-sites=edge,cloud"]), may_name_sites(["script.py", "--vtp-size-list", "1,2"])
    (True, False)
    """
    return any(word.startswith(("--vtp-sit", "--yaml")) for word in argv)


def _settle_redaction(session: Session) -> None:
    config = session.config
    session.ranks.set_redaction(Redaction(is_one_site=not config.has_several_sites, is_opted_in=config.share_errors))


def _note_sites(session: Session, *, is_one_site: bool) -> None:
    """Note whether there is one site by this rank's own request, before all requests are known to be equal."""
    session.ranks.set_redaction(replace(session.ranks.redaction, names_one_site=is_one_site))


def agree_on_request(
    session: Session,
    store: dist.Store,
    read: Callable[[], None],
    *,
    rank: int,
    world_size: int,
    timeout_s: float | None = None,
) -> None:
    """Compare the requests of all ranks, and note what this rank may tell the others from then on.

    Args:
        session: session of this rank.
        store: reaches all ranks.
        read: adds the rest of this rank's request to the session's ``config``.
        rank: this rank.
        world_size: number of ranks.
        timeout_s: limit of the check, in seconds; default is the configured one.

    Raises:
        ConfigError: a rank has another request, or a wrong one.
        PeerError: a rank did not come within the timeout.
    """

    def prepare() -> dict[str, object]:
        read()
        _note_sites(session, is_one_site=not session.config.has_several_sites)
        return state_request(session.config)

    _note_sites(session, is_one_site=not may_name_sites(sys.argv) and not session.config.has_several_sites)
    session.ranks.join(store, rank, world_size)
    session.ranks.agree("start", prepare, timeout_s=timeout_s)
    _settle_redaction(session)


def watch_for_modules(session: Session) -> None:
    """Watch the other ranks from a module's first groups on; all ranks of the world call this at the same point.

    With a list of sizes they watch each other anyway, from Megatron's first groups on. A script that takes bridges
    without ``apply()`` watches nobody.

    Raises:
        ConfigError: a rank has another request.
        PeerError: a rank did not come within the timeout.
    """
    is_alone = dist.get_world_size() == 1 or dist.get_backend() == "fake"
    is_watched = session.ranks.store is not None or session.config.size_list is not None
    if is_alone or is_watched or not session.applied:
        return
    session.watch_failures()
    sizes = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    agree_on_request(session, _get_default_store(), lambda: None, **sizes)


def learn_site(session: Session, rank: int) -> None:
    """Note the site of this rank, which its messages to others name; called once the layout is known."""
    if session.is_planned and session.config.sites:
        site = session.config.sites[session.planned.layout.stage_of(rank)]
        session.ranks.set_redaction(replace(session.ranks.redaction, site=site))


class StageCommGrid(StageRanks):
    """The grid of a module whose pipeline stages have sizes of their own.

    It has the interface of Megatron's ``HyperCommGrid``, which it replaces in ``module_to_grid_map``. ``shape``
    is that of this rank's stage, with the module's number of stages; on ranks outside it is that of the first stage.
    ``size`` counts all ranks of the module. A group along ``pp`` has one rank of every stage; one along ``tp`` and
    ``pp`` holds the module once, and is a :class:`~vtp_plugin.runtime.comm.collectives.ModelGroup` where the stages
    have different numbers of replicas. All ranks of the world create the same groups in the same order.

    Attributes:
        shape: lengths of ``tp``, ``cp``, ``dp`` and ``pp``.
        backend: backend of the groups; None is the world's.
    """

    # Set by the subclass.
    get_session: Callable[[], Session]
    know_group: Callable[[Writes, dist.ProcessGroup, Sequence[int], dist.ProcessGroup], AbstractContextManager[None]]

    def __init__(self, stages: Sequence[Sequence[int]], rank_offset: int = 0, backend: str | None = None) -> None:
        """Describe the grid.

        Args:
            stages: tensor-, context- and data-parallel size of every stage.
            rank_offset: first global rank of the grid.
            backend: backend of the groups; None is the world's.

        Raises:
            ConfigError: the sizes are wrong, or the plugin's bridges are not applied.
            RuntimeError: torch.distributed is not initialised, or the grid does not fit the world.
        """
        super().__init__(stages, rank_offset)
        session = self.get_session()
        if not session.applied.has_bridges:
            raise ConfigError(
                "StageCommGrid needs the plugin's communicator between stages; call vtp_plugin.apply(bridges=True) "
                "first"
            )
        if not dist.is_initialized():
            raise RuntimeError("a grid needs the world: call torch.distributed.init_process_group first")
        if rank_offset + self.size > dist.get_world_size():
            raise RuntimeError(
                f"the grid {self.describe()} does not fit a world of {dist.get_world_size()} ranks: make it smaller or "
                "start more processes"
            )
        self._session = session
        self._known_groups = ExitStack()
        self.shape = self.shape_at(dist.get_rank())
        self.backend = backend
        self._pgs: dict[tuple[str, frozenset[str]], dist.ProcessGroup | None] = {}
        self._pipelines: list[dist.ProcessGroup] = []
        self._whole_stages: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] | None = None
        self._has_own_tp = False

    def create_pg(self, dims: str | Sequence[str], *, view: str | None = None, **kwargs: Any) -> Any:
        """Create the groups along some dimensions, and return this rank's; along `pp` open the channels as well.

        Args:
            dims: one dimension or several, in any order.
            view: a registered view.
            kwargs: options for torch's ``new_group`` (timeout, pg_options, group_desc).

        Raises:
            KeyError: the groups have been created, or the view is unknown.
            ConfigError: a dimension is unknown.
        """
        key = self.stored_under(dims, view)
        if key in self._pgs and not (key == _TP and self._has_own_tp):
            raise KeyError(f"process group {dims} of view {key[0]!r} has already been created: use get_pg")
        ranks = self.get_rank_enum(dims, view=view)
        if key == _TP and self._has_own_tp:
            self._has_own_tp = False
        elif key == _PP:
            self._pgs[key] = self._create_pipelines(ranks, kwargs)
        elif self.place(dims, self.rank_offset, view=view) is not None:
            self._pgs[key] = self._create_model_group(dims, view)
        else:
            own, _ = dist.new_subgroups_by_enumeration(ranks, backend=self.backend, **kwargs)
            self._pgs[key] = own if isinstance(own, dist.ProcessGroup) else None
        return self._pgs[key]

    def get_pg(self, dims: str | Sequence[str], *, view: str | None = None) -> Any:
        """Return this rank's group along some dimensions; along `pp` the first that it is in.

        Raises:
            KeyError: the group has not been created, or the view is unknown.
        """
        key = self.stored_under(dims, view)
        if key not in self._pgs:
            raise KeyError(f"process group {dims} of view {key[0]!r} has not been created: call create_pg first")
        return self._pgs[key]

    def is_current_rank_in_grid(self) -> bool:
        """Whether this rank belongs to the grid."""
        return self.contains(dist.get_rank())

    def destroy(self) -> None:
        """End all groups and channels of this rank."""
        self._session.close_module(self._pgs.pop(_PP, None))
        self._known_groups.close()
        groups = [*self._pgs.values(), *self._pipelines, *(self._whole_stages or ())]
        settle(self._session.choose_platform())
        close_groups(group for group in groups if not isinstance(group, ModelGroup))
        self._pipelines.clear()
        self._pgs.clear()
        self._whole_stages = None

    def _create_model_group(self, dims: str | Sequence[str], view: str | None) -> ModelGroup | None:
        """Make the group that counts every stage once, out of the groups of each whole stage and of their leaders."""
        if self._whole_stages is None:
            inside = [list(self.layout.stage_ranks(stage)) for stage in range(self.layout.num_stages)]
            own, _ = dist.new_subgroups_by_enumeration(inside, backend=self.backend)
            leaders = dist.new_group([self.layout.leader(stage) for stage in range(len(inside))], backend=self.backend)
            self._whole_stages = (
                own if isinstance(own, dist.ProcessGroup) else None,
                leaders if isinstance(leaders, dist.ProcessGroup) else None,
            )
        whole_stage, leaders = self._whole_stages
        rank = dist.get_rank()
        place = self.place(dims, rank, view=view) if self.contains(rank) else None
        if place is None or whole_stage is None:
            return None
        group = ModelGroup(
            place,
            stage_leader=self.layout.leader(self.layout.stage_of(rank)),
            whole_stage_group=whole_stage,
            leaders_group=leaders,
        )
        self._known_groups.enter_context(self.know_group(self._session.writes, group, group.ranks, whole_stage))
        return group

    def _create_pipelines(self, ranks: Sequence[Sequence[int]], options: Any) -> dist.ProcessGroup | None:
        """Make the pipeline groups, and the channels, whose collectives run in the tensor-parallel group."""
        if _TP not in self._pgs:
            self.create_pg("tp")
            self._has_own_tp = True
        for pipeline in ranks:
            group = dist.new_group(list(pipeline), backend=self.backend, **options)
            if isinstance(group, dist.ProcessGroup):
                self._pipelines.append(group)
        watch_for_modules(self._session)
        self._session.open_module(self.layout, stage_group=self._pgs[_TP], pipeline_groups=tuple(self._pipelines))
        return next(iter(self._pipelines), None)


_TP, _PP = (("base", frozenset({name})) for name in ("tp", "pp"))


@dataclass(frozen=True, kw_only=True)
class JoinedModules:
    """This rank's part of several modules, for all steps.

    Attributes:
        runner: runs the planned steps.
        channels: channels of this rank.
        name: name of this rank's module.
        inputs: names of the modules whose outputs this rank's stage takes, in the order of the placement.
    """

    runner: ScheduleRunner
    channels: Mapping[CrossingId, StageChannel]
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
    """Make this rank's channels and the runner of the joint steps.

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
        channels=_channels(placed, joints, stage),
        name=joints.name,
        inputs=placed.inputs(stage),
    )


def _channels(placed: ModulePlacement, joints: Joints, stage: int) -> dict[CrossingId, StageChannel]:
    """Return this rank's channels: those inside its module, and bridges to others."""
    channels: dict[CrossingId, StageChannel] = {}
    communicator = None if joints.pipeline is None else joints.pipeline.communicator
    for way, ends, direction in (
        ("recv_prev", (stage - 1, stage), Direction.FORWARD),
        ("send_prev", (stage - 1, stage), Direction.BACKWARD),
        ("send_next", (stage, stage + 1), Direction.FORWARD),
        ("recv_next", (stage, stage + 1), Direction.BACKWARD),
    ):
        if communicator is not None and joints.form is not None and communicator.reaches(way):
            channel = ModuleChannel(BoundChannel(communicator.channel(way), joints.form))
            channels[ChannelId.between(*ends, direction), ends[0]] = channel
    by_source = {placed.module_of(before): before for before in placed.placement.predecessors(stage)}
    for source, bridge in joints.before.items():
        channels.update(_bridge_channels(bridge, (by_source[source], stage), joints.split_sizes))
    for bridge in joints.after:
        channels.update(_bridge_channels(bridge, (stage, placed.placement.successors[stage]), joints.split_sizes))
    return channels


def _bridge_channels(bridge: Bridge, ends: tuple[int, int], split_sizes: SplitSizes) -> dict[CrossingId, StageChannel]:
    return {
        (ChannelId.between(*ends, Direction.FORWARD), ends[0]): ActivationChannel(bridge, split_sizes),
        (ChannelId.between(*ends, Direction.BACKWARD), ends[0]): GradientChannel(bridge, split_sizes),
    }
