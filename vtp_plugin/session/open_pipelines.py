"""The open pipelines of this process: how they are opened, agreed on and closed.

A run has one pipeline, the first; every module with a grid of its own has one more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from vtp_plugin.errors import PlanError
from vtp_plugin.plan.boundary.channel_spec import distinct_plans
from vtp_plugin.plan.boundary.check_boundary import require_valid
from vtp_plugin.plan.layout.channel_id import ChannelId, Direction
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.audit import Audit
from vtp_plugin.runtime.comm.channel import Channel
from vtp_plugin.runtime.comm.recorder import Recorder
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.step.communicator import PipelineCommunicator, join_channels, open_channels, own_channels
from vtp_plugin.runtime.step.companion_tensors import join_companions
from vtp_plugin.runtime.step.schedule_runner import ScheduleRunner
from vtp_plugin.runtime.step.tied_weight import TiedWeight, join_tied_weight
from vtp_plugin.runtime.step.try_transports import settle, try_strategies
from vtp_plugin.runtime.step.weight_gradients import WeightGradients
from vtp_plugin.session.pipeline_plan import PipelinePlan
from vtp_plugin.session.ranks import Agree, AllRanks
from vtp_plugin.util import log


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
