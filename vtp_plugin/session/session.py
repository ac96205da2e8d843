"""The applied plugin: what was asked for, what is applied, and what was said.

The open pipelines of this process: how they are opened, agreed on and closed.

A run has one pipeline, the first; every module with a grid of its own has one more.

The session: what is asked for, what is planned, and what is running.

One :class:`Session` exists between ``apply()`` and ``revert()``. The patches are built around it; nothing else of the
plugin keeps state. What is planned is a :class:`~vtp_plugin.session.planned_run.PlannedRun`, what is running a
:class:`~vtp_plugin.session.session.Pipeline`; a function that needs one of them takes it as an argument, or asks
the session for it where Megatron calls it. What belongs to one start of model parallelism ends with it: the session
holds one :class:`~vtp_plugin.session.planned_run.Start` after another.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from vtp_plugin.checkpoint.save.saving import Savings
from vtp_plugin.config import VtpConfig
from vtp_plugin.config.resolve import plan_layout
from vtp_plugin.elastic.progress import RUN_FOLDER_VARIABLE, Progress
from vtp_plugin.errors import PatchError, PlanError
from vtp_plugin.host.patching import Writes, unreached
from vtp_plugin.host.rules.table.rows import option_warnings
from vtp_plugin.host.versions import host_named, untried
from vtp_plugin.plan.boundary.channel_spec import distinct_plans
from vtp_plugin.plan.boundary.check_boundary import require_valid
from vtp_plugin.plan.layout.layer_lists import FirstRing
from vtp_plugin.plan.layout.pipeline_layout import ChannelId, Direction, PipelineLayout
from vtp_plugin.platform.detect import detect
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.channel import Channel
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.comm.transfers import Audit, CrossingRecord
from vtp_plugin.runtime.comm.work import Recorder
from vtp_plugin.runtime.health.store import gather_node_sizes
from vtp_plugin.runtime.step.communicator import (
    PipelineCommunicator,
    join_channels,
    open_channels,
    own_channels,
    settle,
    try_strategies,
)
from vtp_plugin.runtime.step.companion_tensors import Companion, join_companions
from vtp_plugin.runtime.step.schedule_runner import ScheduleRunner
from vtp_plugin.runtime.step.step_times import StepSummary
from vtp_plugin.runtime.step.weight_gradients import TiedWeight, WeightGradients, join_tied_weight
from vtp_plugin.session.edge_seed import EdgeSeed, protected_link
from vtp_plugin.session.loading import Loading
from vtp_plugin.session.planned_run import PipelinePlan, PlannedRun, Start, plan_module
from vtp_plugin.session.ranks import Agree, AllRanks
from vtp_plugin.session.site_parts import SiteParts
from vtp_plugin.util import log

if TYPE_CHECKING:
    from vtp_plugin.host.patching import AppliedPatches
    from vtp_plugin.session.planned_run import PlannedRun


def warn_of_untried(name: str) -> None:
    """Warn, on one rank, of features that were never run with this Megatron."""
    parts = untried(host_named(name))
    if parts and os.environ.get("RANK", "0") == "0":
        log.warning(f"not yet run with Megatron {name}: {parts}; compare your first steps with a uniform run")


def warn_of_unreached(session: Session) -> None:
    """Warn of names that still hold a function of Megatron that was replaced."""
    # Each search asks for what refers to an object, among all objects of the process.
    places = unreached(applied for applied in session.applied if not applied.is_reached)
    if places:
        rest = f" and {len(places) - 8} more" if len(places) > 8 else ""
        log.warning(
            f"imported from Megatron before vtp_plugin.apply() and not replaced: {', '.join(places[:8])}{rest}; code "
            "that uses these bypasses the plugin; move vtp_plugin.apply() above the lines that import them"
        )


def warn_of_options(planned: PlannedRun, options: object, *, rank: int, version: str = "") -> None:
    """Warn, on one rank of each site, of options that work in another way than a user may expect.

    Args:
        planned: plan of the run.
        options: Megatron's arguments, or a model's configuration.
        rank: this rank.
        version: version of Megatron; empty takes only the rows for all versions.
    """
    if rank not in planned.reporting_ranks.values():
        return
    for line in option_warnings(options, replace(planned.option_context, version=version)):
        log.warning(line)


def refuse_late() -> None:
    """Refuse to patch a Megatron whose groups exist already: they have the sizes of a uniform run."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None and state.model_parallel_is_initialized():
        raise PatchError(
            "Megatron's parallel_state is already initialised; call vtp_plugin.apply() before initialize_model_parallel"
        )


class AppliedSets:
    """The sets of records that were applied, one after another; each decision between them is made once."""

    def __init__(self) -> None:
        self._sets: list[AppliedPatches] = []
        self._before_revert: list[Callable[[], None]] = []
        self._has_list = False
        self._has_bridges = False

    def __iter__(self) -> Iterator[AppliedPatches]:
        return iter(self._sets)

    def __len__(self) -> int:
        return len(self._sets)

    @property
    def has_list(self) -> bool:
        """Whether the records that depend on the command line are applied."""
        return self._has_list

    @property
    def has_bridges(self) -> bool:
        """Whether the plugin's bridges replace Megatron's."""
        return self._has_bridges

    def begin_list(self) -> bool:
        """Note that the records that depend on the command line are being applied; return False if they were before."""
        is_new, self._has_list = not self._has_list, True
        return is_new

    def begin_bridges(self) -> None:
        """Note that the plugin's bridges replace Megatron's."""
        self._has_bridges = True

    def add(self, applied: AppliedPatches) -> None:
        """Add a set that was applied."""
        self._sets.append(applied)

    def before_revert(self, call: Callable[[], None]) -> None:
        """Let a function be called before the sets are undone."""
        self._before_revert.append(call)

    def revert(self) -> None:
        """Undo all sets, the last one first."""
        for call in self._before_revert:
            call()
        for applied in reversed(self._sets):
            applied.revert()


@dataclass(kw_only=True, eq=False)
class Pipeline:
    """One pipeline, as it is open on this rank.

    Attributes:
        plan: plan of the pipeline.
        stage_group: tensor-parallel group of this rank's stage.
        pipeline_groups: this rank's pipeline group in each replica of the pipeline that this rank works in.
        opened: all channels that this rank has opened, in that order, those of tied weights included.
        communicators: one for each of these replicas, which moves activations; several only where a neighbour has more
            replicas than this rank's stage, none while Megatron's own is in use.
        channels: channels of this rank by their identity.
        schedule_runner: runs planned schedules of this pipeline alone; None with Megatron's schedules.
        tied_weight: exchange of a shared embedding; None on ranks that hold no copy of it, or with Megatron's own.
        agree: runs a function on all ranks of the pipeline, and returns only if it returns the same on all.
        form: type and layout of the tensors, from the model's configuration; None before all ranks have compared it, in
            the first step.
        is_warned: what Megatron's own schedules get wrong in this run was said.
    """

    plan: PipelinePlan
    stage_group: dist.ProcessGroup | None
    pipeline_groups: tuple[dist.ProcessGroup, ...]
    opened: tuple[Channel, ...] = ()
    communicators: tuple[PipelineCommunicator, ...] = ()
    channels: Mapping[ChannelId, Channel] = field(default_factory=dict[ChannelId, Channel])
    schedule_runner: ScheduleRunner | None = None
    tied_weight: TiedWeight | None = None
    agree: Agree
    form: TensorFormat | None = field(default=None, init=False)
    is_warned: bool = field(default=False, init=False)
    _num_data_calls: int = field(default=0, init=False)
    _embedding: weakref.ref[torch.nn.Parameter] | None = field(default=None, init=False)

    @property
    def stage(self) -> int:
        """Stage of this rank."""
        return self.plan.layout.stage_of(dist.get_rank())

    @property
    def communicator(self) -> PipelineCommunicator | None:
        """Communicator of the first replica of the pipeline; None while Megatron's own is in use."""
        return self.communicators[0] if self.communicators else None

    @property
    def gradient_share(self) -> float:
        """Copies of this rank's weights over those of the stage with the loss; see :class:`PipelinePlan`."""
        return self.plan.gradient_share(self.stage)

    def require_schedule_runner(self) -> ScheduleRunner:
        """Return the runner of planned schedules.

        Raises:
            PlanError: Megatron's own schedules run.
        """
        if self.schedule_runner is None:
            raise PlanError("a planned schedule is asked for in a run of Megatron's own schedules")
        return self.schedule_runner

    def extra_data_calls(self) -> int:
        """Return how many calls this rank makes besides its own one, where all ranks build what a chunk reads.

        The edge of a U makes one call for each of its chunks. A rank with fewer makes the others with its first one.
        """
        runner = self.require_schedule_runner()
        is_first = self._num_data_calls % runner.num_chunks == 0
        self._num_data_calls += 1
        return len(runner.placement.vstages(0)) - runner.num_chunks if is_first else 0

    def agree_on_formats(self, read: Callable[[], tuple[TensorFormat, ...]]) -> tuple[TensorFormat, ...]:
        """Read the type and layout of every ring's tensors; the first call compares them over all ranks, collectively.

        A tensor of another type or shape than the receiver expects would end a process inside the backend.

        Args:
            read: reads and checks the model's configuration.

        Raises:
            ConfigError: a rank's configuration is wrong, or two differ.
        """
        if self.form is not None or dist.get_backend() == "fake":
            return read()
        tp_size = self.plan.layout.tp_sizes[self.stage]
        found: list[tuple[TensorFormat, ...]] = []

        def prepare() -> dict[str, object]:
            found.append(read())
            forms = [state_format(form, tp_size) for form in found[0]]
            rings = ["", *(f" of ring {number}" for number in range(2, len(forms) + 1))]
            return {
                f"{name}{ring}": value for ring, form in zip(rings, forms, strict=True) for name, value in form.items()
            }

        self.agree(prepare)
        self.form = found[0][-1]
        return found[0]

    def remember_embedding(self, weight: torch.nn.Parameter) -> None:
        """Note the word embedding of the model that is being built, for its other end on the same stage."""
        self._embedding = weakref.ref(weight)

    @property
    def embedding(self) -> torch.nn.Parameter | None:
        """Word embedding of the model that was built last, on the edge of a U-shaped pipeline."""
        return None if self._embedding is None else self._embedding()

    def start_step(self) -> None:
        """Begin a pass over the microbatches of Megatron's own schedules, over the first replica's communicator."""
        if self.communicator is not None:
            self.communicator.start_step()

    def finish_step(self) -> None:
        """Wait for the sends that nobody waited for."""
        for communicator in self.communicators:
            communicator.finish_step()

    def close(self) -> None:
        """End the channels; every rank does so once its last step is finished."""
        for channel in self.opened:
            channel.close()


def open_pipeline(
    plan: PipelinePlan,
    ranks: AllRanks,
    platform: Platform,
    audit: Audit | None,
    recorder: Recorder,
    *,
    stage_group: dist.ProcessGroup | None,
    pipeline_groups: tuple[dist.ProcessGroup, ...],
    record_folder: str | None = None,
) -> Pipeline | None:
    """Open the channels of a pipeline. All ranks of the world call this at the same point, once its groups are made.

    Args:
        plan: plan of the pipeline.
        ranks: all ranks of the run.
        platform: where this rank computes.
        audit: record of what crosses; None unless asked for.
        recorder: notes what this rank does.
        stage_group: tensor-parallel group of this rank's stage.
        pipeline_groups: this rank's pipeline group in each replica that this rank works in.
        record_folder: where the cloud of a U keeps what comes from the edge; None unless asked for.

    Returns:
        This rank's part; None outside the pipeline.
    """
    rank, specs = dist.get_rank(), plan.specs if plan.is_active else ()
    for one in distinct_plans(specs):
        require_valid(one)
    opened = open_channels(
        specs,
        stage_group=stage_group,
        platform=platform,
        monitor=ranks.monitor,
        timeout_s=ranks.timeout_s,
        audit=audit,
        recorder=recorder,
    )
    if rank not in plan.members:
        return None
    agree = ranks.agreement(*_check_of(plan))
    if not plan.is_active:
        return Pipeline(plan=plan, stage_group=stage_group, pipeline_groups=pipeline_groups, agree=agree)
    worker = plan.worker(rank)
    channels = _settle_transport(plan, ranks, platform, own_channels(plan.boundaries, opened))
    for name, channel in channels.items():
        is_from_edge = name.direction is Direction.FORWARD and plan.placement.stage_of(name.src) == 0
        if record_folder is not None and is_from_edge and name.dst == worker:
            channel.receives.record = CrossingRecord(record_folder, rank)
    return Pipeline(
        plan=plan,
        stage_group=stage_group,
        pipeline_groups=pipeline_groups,
        opened=tuple(channel for channel in opened if channel is not None),
        communicators=join_channels(channels, worker),
        channels=channels,
        schedule_runner=_make_runner(plan, ranks, platform, channels, worker, recorder),
        tied_weight=_join_tied(plan, opened),
        agree=agree,
    )


def _check_of(plan: PipelinePlan) -> tuple[str, Sequence[int] | None]:
    """Name the check of the first step, and the ranks that take part where they are not all."""
    if not plan.ends.are_bridged:
        return "the first step's check", None
    members = plan.members
    return f"the first step of the module on ranks {members[0]} to {members[-1]}", members


def _make_runner(
    plan: PipelinePlan,
    ranks: AllRanks,
    platform: Platform,
    channels: Mapping[ChannelId, Channel],
    worker: int,
    recorder: Recorder,
) -> ScheduleRunner | None:
    """Make the runner of planned schedules of this pipeline alone; None if Megatron's schedules run."""
    if plan.orders is None:
        return None
    companions = join_companions(plan.placement, worker, channels, plan.companions, platform)
    return ScheduleRunner(plan.placement, worker, ranks, platform, plan.orders, companions, recorder)


def _join_tied(plan: PipelinePlan, opened: Sequence[Channel | None]) -> TiedWeight | None:
    """Join the channels of a word embedding that stages share, which were opened last."""
    if plan.layout.stage_of(dist.get_rank()) not in plan.ends.tied_stages:
        return None
    tied = opened[len(plan.boundaries) * len(Direction) :]
    return join_tied_weight([channel for channel in tied if channel is not None], plan.layout)


def _settle_transport(
    plan: PipelinePlan, ranks: AllRanks, platform: Platform, channels: dict[ChannelId, Channel]
) -> dict[ChannelId, Channel]:
    """Try the strategies where the rules leave the choice open, and return channels that use the fastest one."""
    tried = [boundary for boundary in plan.boundaries if boundary.rivals]
    if not tried or dist.get_backend() == "fake":
        return channels
    choices = try_strategies(
        tried, channels, share_reports=ranks.share_reports, platform=platform, is_sharded=plan.is_sharded
    )
    log.info("\n".join(map(str, choices.values())))
    return settle(tried, channels, choices)


def state_format(form: TensorFormat, tp_size: int) -> dict[str, object]:
    """Return what must be equal on all ranks; a stage of one tensor-parallel rank leaves sequence parallelism open."""
    sharding = {} if tp_size == 1 else {"sequence_parallel": form.src_sharded}
    return {
        "pipeline_dtype": str(form.dtype),
        "hidden_size": form.width,
        "variable_seq_lengths": form.has_variable_shapes,
        "batch_p2p_comm": form.is_batched,
        **sharding,
    }


class Pipelines:
    """The pipelines that this rank works in: the run's own, and those of modules, which end with their grids."""

    def __init__(self) -> None:
        self._open: list[Pipeline] = []
        self._timed = WeightGradients()

    def __iter__(self) -> Iterator[Pipeline]:
        return iter(self._open)

    @property
    def own(self) -> Pipeline | None:
        """The run's own; None before it is open, or without a list of sizes."""
        return next((one for one in self._open if not one.plan.ends.are_bridged), None)

    @property
    def weight_gradients(self) -> WeightGradients:
        """What split backwards leave for later: in the run's own planned steps, or without them in timed layers."""
        runner = None if self.own is None else self.own.schedule_runner
        return self._timed if runner is None else runner.weight_gradients

    def of_module(self, pipeline_group: dist.ProcessGroup | None) -> Pipeline | None:
        """Return the pipeline of the module that a group belongs to; None if there is none, or it has no channels."""
        modules = (one for one in self._open if one.plan.ends.are_bridged)
        return next((one for one in modules if any(group is pipeline_group for group in one.pipeline_groups)), None)

    def of(self, pipeline_group: dist.ProcessGroup | None) -> Pipeline | None:
        """Return the pipeline that a group belongs to: that of a module, or else the run's own."""
        return self.of_module(pipeline_group) or self.own

    def are_unequal(self, groups: object = None) -> bool:
        """Tell whether the stages of a layer's pipeline differ in their sizes; if not, Megatron stays as it is.

        Args:
            groups: the collection of process groups that the layer was given; None for the run's own.
        """
        pipeline = self.of(getattr(groups, "pp", None))
        return pipeline is not None and not pipeline.plan.layout.is_uniform

    def add(self, pipeline: Pipeline) -> None:
        """Add a pipeline that has been opened."""
        self._open.append(pipeline)

    def close(self, pipeline: Pipeline | None) -> None:
        """Close a pipeline, and forget it."""
        if pipeline is not None:
            self._open.remove(pipeline)
            pipeline.close()

    def finish_step(self) -> None:
        """Wait for the sends that nobody waited for."""
        for pipeline in self._open:
            pipeline.finish_step()


class Session:
    """State of the plugin in this process.

    Args:
        config: options that ``apply()`` was given.
        platform: platform on which it runs; None finds it.
        watch_failures: see the attribute.

    Attributes:
        watch_failures: installs what reports errors of this process in one line, and to other ranks; called once a list
            of sizes is asked for.
        ranks: what this rank does together with all others, outside the process groups.
        applied: sets of patches in the order of application.
        pipelines: pipelines that this rank works in: the run's own, and those of modules.
        savings, loading: checkpoints that are being written; what is known of one that is being read.
        parts: checkpoints of which each site keeps a part.
        edge_seed: what an edge's layers are drawn from. writes: names of Megatron and torch that patches may write.
        steps: the training steps of this process.
        progress: notes the steps of a fitted run; None in other runs.
        start: what this start of model parallelism has opened; after it has ended, a new one.
        until_revert: what ends with the session.
    """

    def __init__(
        self,
        config: VtpConfig,
        *,
        platform: Platform | None = None,
        watch_failures: Callable[[], None] = lambda: None,
    ) -> None:
        self.watch_failures = watch_failures
        self.pipelines = Pipelines()
        self.ranks = AllRanks(lambda: self.config.timeout_s, self._finish, self._how_to_resume)
        self.applied, self.writes = AppliedSets(), Writes()
        self.savings, self.loading, self.edge_seed = Savings(), Loading(), EdgeSeed()
        self.parts = SiteParts()
        self._config, self._platform = config, platform
        self._close_log: Callable[[], None] | None = None
        self._recorder: Recorder | None = None
        self.progress = Progress.of_process(os.environ)
        self.start, self.steps, self.until_revert = Start(), StepSummary(), ExitStack()
        self._planned: PlannedRun | None = None

    @property
    def config(self) -> VtpConfig:
        """Options that are known so far."""
        return self._config

    def ask(self, config: VtpConfig) -> None:
        """Set the options: those that ``apply()`` was given, and those that were read since."""
        self._config = config

    @property
    def is_planned(self) -> bool:
        """Whether the layout is known."""
        return self._planned is not None

    @property
    def planned(self) -> PlannedRun:
        """Plan of the run.

        Raises:
            PlanError: nothing is planned yet.
        """
        if self._planned is None:
            raise PlanError("the layout is used before it is planned")
        return self._planned

    @property
    def has_arguments(self) -> bool:
        """Whether the plan follows from arguments that megatron.training has validated."""
        return self._planned is not None and self._planned.has_arguments

    @property
    def is_running(self) -> bool:
        """Whether Megatron's groups exist, and the plugin's channels if there are any."""
        return self.pipelines.own is not None

    @property
    def running(self) -> Pipeline:
        """The run's own pipeline, once it is open.

        Raises:
            PlanError: the pipeline is not open.
        """
        own = self.pipelines.own
        if own is None:
            raise PlanError("the pipeline is used before it is open")
        return own

    @property
    def is_active(self) -> bool:
        """Whether the plugin's groups and communicator are in use."""
        return self.is_planned and self.planned.is_active

    @property
    def platform(self) -> Platform | None:
        """Platform on which it runs; None until :meth:`choose_platform`."""
        return self._platform

    def choose_platform(self) -> Platform:
        """Find the platform and, on CPU, map what Megatron calls on ``torch.cuda``; idempotent."""
        if self._platform is None:
            self._platform = detect(self.config.device)
            self._platform.install()
        return self._platform

    def plan(self, **sizes: Any) -> None:
        """Make the layout from Megatron's sizes, the arguments of :func:`~vtp_plugin.config.resolve.plan_layout`.

        Raises:
            ConfigError: the sizes contradict each other or the world, or the stages do not fit together.
        """
        layout = plan_layout(self.config, **sizes)
        planned = PlannedRun(config=self.config, layout=layout, platform=self.choose_platform())
        planned.check()
        self.until_revert.enter_context(protected_link(self.config, planned.platform.name))
        self._planned = planned

    def learn(
        self,
        *,
        tensor_bytes: int | None = None,
        is_sharded: bool | None = None,
        log_interval_steps: int | None = None,
        has_packed_rows: bool | None = None,
        check_batch: Callable[[Any], None] | None = None,
        has_arguments: bool | None = None,
        companion: Companion | None = None,
        first_ring: FirstRing | None = None,
        layers: tuple[int, ...] | None = None,
        note: str | None = None,
    ) -> None:
        """Add what the model's options say to the plan: attributes of ``PlannedRun``, a companion, a note."""
        known = {
            "tensor_bytes": tensor_bytes,
            "is_sharded": is_sharded,
            "log_interval_steps": log_interval_steps,
            "has_packed_rows": has_packed_rows,
            "check_batch": check_batch,
            "has_arguments": has_arguments,
            "first_ring": first_ring,
            "layers": layers,
        }
        changes: dict[str, object] = {name: value for name, value in known.items() if value is not None}
        if companion is not None:
            known_companions = {each.kind: each for each in (*self.planned.companions, companion)}
            changes["companions"] = tuple(known_companions.values())
        if note is not None:
            changes["notes"] = (*self.planned.notes, note)
        self._planned = dataclasses.replace(self.planned, **changes)

    def resolve_auto(self, cp: int) -> None:
        """Replace the list ``"auto"`` by one stage per node of the launcher.

        Raises:
            ConfigError: the launcher does not say which node this is, or a node's ranks do not divide.
        """
        if self.config.size_list != "auto":
            return
        self.config.refuse_to_fit()
        assert self.ranks.store is not None
        dp = self.config.data_parallel_size or 1
        sizes = gather_node_sizes(self.ranks.store, os.environ, divisor=dp * cp, timeout_s=self.config.timeout_s)
        self.ask(dataclasses.replace(self.config, size_list=sizes))

    @property
    def recorder(self) -> Recorder:
        """Recorder of what this rank does."""
        if self._recorder is None:
            self._recorder = Recorder(self.choose_platform())
        return self._recorder

    def open(
        self,
        *,
        stage_group: dist.ProcessGroup,
        pipeline_groups: tuple[dist.ProcessGroup, ...],
        num_chunks: int,
        embedding_stages: Sequence[int] | None = None,
    ) -> None:
        """Open the run's own pipeline. All ranks call this at the same point, after Megatron made its groups.

        Args:
            stage_group: tensor-parallel group of this rank's stage.
            pipeline_groups: this rank's pipeline group in each replica that this rank works in.
            num_chunks: number of model chunks of every stage, Megatron's virtual pipeline size.
            embedding_stages: stages that may hold a copy of the word embedding; None for the first and the last.

        Raises:
            ConfigError: no placement of so many chunks fits the stages.
        """
        plan = self.planned.pipeline(num_chunks=num_chunks, embedding_stages=embedding_stages)
        if dist.get_backend() != "fake":
            self.start.open_records(self.planned, dist.get_rank(), self.ranks, self.recorder)
        pipeline = self._open(plan, stage_group=stage_group, pipeline_groups=pipeline_groups)
        self.start.ending.callback(self.pipelines.close, pipeline)

    def open_module(
        self,
        layout: PipelineLayout,
        *,
        stage_group: dist.ProcessGroup | None,
        pipeline_groups: tuple[dist.ProcessGroup, ...],
    ) -> None:
        """Open the pipeline of a module. All ranks of the world call this at the same point.

        Args:
            layout: stages and ranks of the module.
            stage_group: tensor-parallel group of this rank's stage; None outside the module.
            pipeline_groups: this rank's pipeline groups in the module; none outside it.
        """
        plan = plan_module(self.config, layout, device=self.choose_platform().name)
        self._open(plan, stage_group=stage_group, pipeline_groups=pipeline_groups)

    def _open(self, plan: PipelinePlan, **groups: Any) -> Pipeline | None:
        audit = self.start.open_audit(self.config, dist.get_rank()) if plan.is_active else None
        folder = self.config.record_crossing if self.config.layerwise_disaggregated else None
        pipeline = open_pipeline(
            plan, self.ranks, self.choose_platform(), audit, self.recorder, record_folder=folder, **groups
        )
        if pipeline is not None:
            self.pipelines.add(pipeline)
        return pipeline

    def close_module(self, pipeline_group: dist.ProcessGroup | None) -> None:
        """Close a module's pipeline once all is sent, when its grid is destroyed; do nothing if it has no channels."""
        module = self.pipelines.of_module(pipeline_group)
        if module is not None:
            module.finish_step()
            self.pipelines.close(module)

    def close(self) -> None:
        """End this start once all is sent, with ``destroy_model_parallel``; the next start plans again."""
        self.pipelines.finish_step()
        self.release()

    def release(self) -> None:
        """End the groups and files of this start, and forget what was agreed on; idempotent."""
        self.start.ending.close()
        self.start = Start()
        # What follows from validated arguments lasts as long as they do.
        if not self.has_arguments:
            self._planned = None

    def open_log(self, rank: int | None = None) -> None:
        """Let the plugin's log be seen, INFO on one rank of each site; may be called again when more is known.

        Args:
            rank: this rank; None before the layout is known.
        """
        if self._close_log is None:
            self._close_log = log.install(self.config.log_level)
        log.set_level(self.config.log_level)
        if rank is not None and self.is_planned:
            log.set_reporter(rank=rank, is_reporter=rank in self.planned.reporting_ranks.values())

    def describe(self, rank: int, layers: Sequence[str] = (), *, is_behind_banner: bool = False) -> None:
        """Log the start-up summary, once for each start; arguments are those of ``PlannedRun.describe``."""
        if self.start.is_described:
            return
        self.start.is_described = True
        self.open_log(rank)
        log.info(self.planned.describe(layers, is_behind_banner=is_behind_banner))
        self.show(self.planned.describe(layers))
        log.debug(f"digest {self.planned.digest}: logs that show the same come from ranks with equal requests")

    def show(self, text: str) -> None:
        """Write to the terminal of a run with ``--brief``, on the rank that logs there."""
        if self.is_planned:
            log.to_terminal(text, self.planned.writer_rank)

    def begin_step(self) -> None:
        """Note that a training step begins."""
        self.steps.begin()
        self.edge_seed.warn_of_other_weights()
        self.start.begin_step()

    def _finish(self) -> None:
        """Wait for what is sent, and log what this process has done; called at a good end."""
        self.pipelines.finish_step()
        steps = self.steps.describe()
        if not steps:
            return
        saved = "" if self.savings.newest is None else f", checkpoint {self.savings.newest}"
        peak_bytes = None if self._platform is None else self._platform.peak_memory_bytes()
        memory = "" if peak_bytes is None else f", peak memory of this rank {peak_bytes / 2**30:.1f} GiB"
        text = f"done: {steps}{saved}{memory}"
        log.info(text)
        self.show(text)

    def _how_to_resume(self) -> str:
        """Say, on one rank of a machine, how a run resumes that nobody restarts, once it has saved a checkpoint."""
        newest, is_first = self.savings.newest, os.environ.get("LOCAL_RANK", "0") == "0"
        if newest is None or RUN_FOLDER_VARIABLE in os.environ or not is_first:
            return ""
        return f"; to resume from {newest.name}, start again with --load {newest.parent}"

    def close_log(self) -> None:
        """Restore the logger; do nothing if the plugin has not changed it."""
        close, self._close_log = self._close_log or (lambda: None), None
        close()

    def refuse_originals(self, name: str, value: object) -> None:
        """Refuse a function that goes past the patches.

        Args:
            name: the user's name for the function.
            value: the function: perhaps one of Megatron's that was imported before ``apply()``, or one that calls such.

        Raises:
            PatchError: the function goes past the patches.
        """
        for applied in self.applied:
            if line := applied.taken_before(value):
                raise PatchError(
                    f"{name} was imported from Megatron before vtp_plugin.apply() and would give wrong gradients; "
                    f"{line}: move vtp_plugin.apply() above that line"
                )
