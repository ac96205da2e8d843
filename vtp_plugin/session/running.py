"""What is running: the channels of this rank, and what works on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from vtp_plugin.boundary.channel_spec import ChannelSpec, distinct_plans
from vtp_plugin.boundary.check import require_valid
from vtp_plugin.boundary.pipeline import PipelineBoundary, pipeline_boundaries
from vtp_plugin.boundary.tied import tied_weight_specs
from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.ground import log
from vtp_plugin.layout.channel import ChannelId, Direction
from vtp_plugin.options.derived import read_schedule_options
from vtp_plugin.runtime.step.communicator import PipelineCommunicator, join_channels, open_channels, own_channels
from vtp_plugin.runtime.step.lengths import Lengths
from vtp_plugin.runtime.step.probe import settle, try_strategies
from vtp_plugin.runtime.step.schedule_runner import ScheduleRunner
from vtp_plugin.runtime.step.tied import TiedWeight, join_tied_weight
from vtp_plugin.runtime.wire.audit import Audit
from vtp_plugin.runtime.wire.channel import Channel
from vtp_plugin.schedule.order.placement import place_workers
from vtp_plugin.session.planned import PlannedRun
from vtp_plugin.session.ranks import AllRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPipeline:
    """A run whose process groups and channels are open on this rank.

    Attributes:
        stage_group: tensor-parallel group of this rank's stage.
        pipeline_groups: this rank's pipeline group in each replica of the pipeline that this rank works in.
        opened: all channels that this rank has opened, in that order; those of tied weights, too.
        communicators: they move activations, one for each of these replicas; several only where a neighbour has more
            replicas than this rank's stage, none while Megatron's own is in use.
        channels: of this rank, by the schedule's names.
        schedule_runner: runs planned schedules; None with Megatron's own.
        tied_weight: exchange of a shared embedding; None on ranks that hold no copy of it, or with Megatron's own.
        num_loss_chunks: model chunks of the stage with the loss.
    """

    stage_group: dist.ProcessGroup
    pipeline_groups: tuple[dist.ProcessGroup, ...]
    opened: tuple[Channel, ...] = ()
    communicators: tuple[PipelineCommunicator, ...] = ()
    channels: Mapping[ChannelId, Channel] = field(default_factory=dict[ChannelId, Channel])
    schedule_runner: ScheduleRunner | None = None
    tied_weight: TiedWeight | None = None
    num_loss_chunks: int = 1

    @property
    def communicator(self) -> PipelineCommunicator | None:
        """Communicator of the first replica of the pipeline; None while Megatron's own is in use."""
        return self.communicators[0] if self.communicators else None

    def require_schedule_runner(self) -> ScheduleRunner:
        """Return what runs planned schedules.

        Raises:
            PlanError: Megatron's own schedules run.
        """
        if self.schedule_runner is None:
            raise PlanError("a planned schedule is asked for in a run of Megatron's own schedules")
        return self.schedule_runner

    def finish_step(self) -> None:
        """Wait for the sends that nobody waited for."""
        for communicator in self.communicators:
            communicator.finish_step()

    def close(self) -> None:
        """End the channels; every rank does so once its last step is finished."""
        for channel in self.opened:
            channel.close()


def open_pipeline(
    planned: PlannedRun,
    ranks: AllRanks,
    *,
    stage_group: dist.ProcessGroup,
    pipeline_groups: tuple[dist.ProcessGroup, ...],
    num_chunks: int,
    embedding_stages: Sequence[int] | None = None,
    audit: Audit | None,
) -> RunningPipeline:
    """Open the channels of this rank. All ranks call this at the same point, after Megatron made its groups.

    Args:
        planned: the run.
        ranks: all of them.
        stage_group: tensor-parallel group of this rank's stage.
        pipeline_groups: this rank's pipeline group in each replica that this rank works in.
        num_chunks: model chunks of every stage, Megatron's virtual pipeline size.
        embedding_stages: those that may hold a copy of the word embedding; None for the ends.
        audit: record of what crosses; None unless asked for.

    Raises:
        ConfigError: no placement of so many chunks fits the stages.
    """
    layout, config, replicas = planned.layout, planned.config, planned.replicas
    num_stages = layout.num_stages
    placement = place_workers(replicas, num_chunks=num_chunks, num_rings=config.num_rings)
    if config.num_rings > 1 and num_chunks != config.num_rings + 1:
        raise ConfigError(
            f"--vtp-encoder-layer-list with {num_chunks} model chunks: the edge has {config.num_rings + 1}; give "
            f"initialize_model_parallel virtual_pipeline_model_parallel_size={config.num_rings + 1}"
        )
    if not planned.is_active:
        return RunningPipeline(stage_group=stage_group, pipeline_groups=pipeline_groups)
    own = planned.own
    boundaries = pipeline_boundaries(
        layout, is_ring=placement.num_vstages > num_stages, rules=planned.transport_rules, dp_mode=replicas.mode
    )
    tied = _tied_specs(planned, embedding_stages)
    specs = [boundary.channel(direction) for boundary in boundaries for direction in Direction]
    specs += tied
    for plan in distinct_plans(specs):
        require_valid(plan)
    opened = open_channels(
        specs,
        stage_group=stage_group,
        platform=planned.platform,
        monitor=ranks.monitor,
        timeout_s=config.timeout_s,
        audit=audit,
    )
    channels = _settle_transport(planned, ranks, boundaries, own_channels(boundaries, opened))
    worker = replicas.worker(own.stage, own.dp_rank)
    schedule_runner = tied_weight = None
    if config.has_planned_schedule and num_stages > 1:
        orders = read_schedule_options(
            config, num_stages, planned.tensor_bytes, report_interval_steps=planned.log_interval_steps
        )
        lengths = None
        if config.layerwise_disaggregated and planned.packed_length is not None:
            lengths = Lengths(placement, own.stage, channels, planned.packed_length, planned.platform)
        schedule_runner = ScheduleRunner(placement, worker, ranks, planned.platform, orders, lengths)
    if tied and own.stage in (embedding_stages or (0, num_stages - 1)):
        tied_weight = join_tied_weight([one for one in opened[-len(tied) :] if one is not None], layout)
    return RunningPipeline(
        stage_group=stage_group,
        pipeline_groups=pipeline_groups,
        opened=tuple(channel for channel in opened if channel is not None),
        communicators=join_channels(channels, worker),
        channels=channels,
        schedule_runner=schedule_runner,
        tied_weight=tied_weight,
        num_loss_chunks=len(placement.vstages(placement.stages[-1])),
    )


def _tied_specs(planned: PlannedRun, embedding_stages: Sequence[int] | None) -> Sequence[ChannelSpec]:
    """Give the channels of a word embedding that stages share; none where its copies are together, or Megatron sums."""
    layout = planned.layout
    is_local = planned.has_stock_ends or planned.config.layerwise_disaggregated or layout.num_stages == 1
    return () if is_local else tied_weight_specs(layout, embedding_stages)


def _settle_transport(
    planned: PlannedRun, ranks: AllRanks, boundaries: Sequence[PipelineBoundary], channels: dict[ChannelId, Channel]
) -> dict[ChannelId, Channel]:
    """Try the strategies where the rules leave it open, and let the channels cross by the fastest one."""
    tried = [boundary for boundary in boundaries if boundary.rivals]
    if not tried or dist.get_backend() == "fake":
        return channels
    choices = try_strategies(
        tried,
        channels,
        share_reports=ranks.share_reports,
        platform=planned.platform,
        is_sharded=planned.is_sharded,
    )
    log.info("\n".join(map(str, choices.values())))
    return settle(tried, channels, choices)
