"""The plan of a run: its pipelines and their plans.

One pipeline as it is planned: its stages, what crosses between them, and what is before and after it.

A run has one, and every module with a grid of its own has one more. Nothing here communicates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from vtp_plugin.config import VtpConfig
from vtp_plugin.config.resolve import (
    ScheduleOptions,
    check_edge_seed,
    is_active,
    option_context,
    read_schedule_options,
    replica_map,
    reporting_ranks,
    stage_boundaries,
    stage_sites,
    transport_rules,
)
from vtp_plugin.errors import ConfigError, LayoutError, refuse
from vtp_plugin.host.mindspeed import problems_of_unknown_adaptor
from vtp_plugin.host.rules.rule import OptionContext
from vtp_plugin.host.versions import capability, find_host
from vtp_plugin.plan.boundary.channel_spec import ChannelSpec, PipelineBoundary, pipeline_boundaries, tied_weight_specs
from vtp_plugin.plan.boundary.strategies.known_strategies import TransportRules
from vtp_plugin.plan.layout.layer_lists import FirstRing, check_layers, check_two_rings, u_chunks
from vtp_plugin.plan.layout.pipeline_layout import Coord, Direction, PipelineLayout, describe_layout, format_layers
from vtp_plugin.plan.layout.replica_map import DpMode, ReplicaMap, expert_spans
from vtp_plugin.plan.schedule.order.placement import Placement, place_workers
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.transfers import Audit
from vtp_plugin.runtime.comm.work import Recorder, name_network
from vtp_plugin.runtime.health.redaction import LineFile
from vtp_plugin.runtime.step.companion_tensors import Companion
from vtp_plugin.runtime.step.step_times import Line, Timing, Tracing
from vtp_plugin.session.ranks import AllRanks, digest_of, state_run
from vtp_plugin.trace.stretches import Owner, trace_path
from vtp_plugin.util.text import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """How the first and the last stage of a pipeline are joined, to each other or to other modules.

    Attributes:
        are_bridged: whether the pipeline has a grid of its own, and other modules may be before and after it. Then
            nothing joins its ends: no ring, no copy of a weight. Its gradients are sums, and groups are those of its
            grid.
        are_stock: whether Megatron's own code for the ends works: tied weights, the token count.
        loss_stage: stage that computes the loss; in a bridged pipeline the last one, which may hand on its output.
        tied_stages: stages that may hold a copy of the word embedding, if there are several.
    """

    are_bridged: bool
    are_stock: bool
    loss_stage: int
    tied_stages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """A pipeline before its channels are open.

    Attributes:
        layout: stages and ranks of the pipeline.
        ends: how its first and its last stage are joined.
        placement: which stage holds which part of the model.
        replicas: which replicas of its stages work together.
        boundaries: boundaries between its stages; none if Megatron's own communicator is in use.
        context: what Megatron's options are checked against.
        is_active: whether the plugin's channels are in use.
        is_sharded: whether ranks hold slices of activations (sequence parallelism), as far as is known beforehand.
        orders: options for which its steps are planned; None if Megatron's schedules run, or one schedule runs several
            modules.
        companions: kinds of tensors that cross with activations, such as the lengths of packed samples.
    """

    layout: PipelineLayout
    ends: Ends
    placement: Placement
    replicas: ReplicaMap
    boundaries: tuple[PipelineBoundary, ...]
    context: OptionContext
    is_active: bool = True
    is_sharded: bool = False
    orders: ScheduleOptions | None = None
    companions: tuple[Companion, ...] = ()

    @property
    def members(self) -> range:
        """Global ranks of the pipeline."""
        return range(self.layout.first_rank, self.layout.first_rank + self.layout.world_size)

    @property
    def sizes(self) -> str:
        """Tensor-parallel size of every stage: `1,4,4`."""
        return ",".join(map(str, self.layout.tp_sizes))

    @property
    def specs(self) -> tuple[ChannelSpec, ...]:
        """Its channels, in the order in which all ranks open them: both directions of every boundary, then tied ones.

        The channels of a shared word embedding come last; there are none if its copies are on one stage, or Megatron
        sums their gradients.
        """
        return (
            *(boundary.channel(direction) for boundary in self.boundaries for direction in Direction),
            *self.tied_specs,
        )

    @property
    def tied_specs(self) -> tuple[ChannelSpec, ...]:
        """The channels of a word embedding that stages share."""
        return tied_weight_specs(self.layout, self.ends.tied_stages) if self.ends.tied_stages else ()

    @property
    def num_loss_chunks(self) -> int:
        """Model chunks of the stage with the loss."""
        return len(self.placement.vstages(self.placement.stages[-1]))

    def worker(self, rank: int) -> int:
        """Return a rank's number in the schedules of this pipeline."""
        coord = self.layout.coord(rank)
        return self.replicas.worker(coord.stage, coord.dp_rank)

    def gradient_share(self, stage: int) -> float:
        """Return the copies of a stage's weights (cp * dp), divided by those of the stage with the loss.

        Between bridges gradients are sums, which nobody averages; there it is 1.
        """
        if self.ends.are_bridged:
            return 1.0
        here, loss = self.layout.stages[stage], self.layout.stages[self.ends.loss_stage]
        return here.cp * here.dp / (loss.cp * loss.dp)

    def check_model_config(self, stage: int, config: Any) -> None:
        """Refuse a model configuration of Megatron's that was made for another stage's sizes.

        Raises:
            ConfigError: the configuration has another size than its stage.
        """
        tp, own_size = config.tensor_model_parallel_size, self.layout.tp_sizes[stage]
        if tp != own_size:
            raise ConfigError(
                f"the model's config says tensor_model_parallel_size={tp}, but stage {stage} has {own_size}; build the "
                "config with parallel_state.get_tensor_model_parallel_world_size()"
            )
        cp, own_cp = config.context_parallel_size, self.layout.cp_sizes[stage]
        if len(set(self.layout.cp_sizes)) > 1 and cp != own_cp:
            raise ConfigError(
                f"the model's config says context_parallel_size={cp}, but stage {stage} has {own_cp}; build the config "
                "with parallel_state.get_context_parallel_world_size()"
            )


def plan_module(config: VtpConfig, layout: PipelineLayout, *, device: str) -> PipelinePlan:
    """Plan the pipeline of a module with a grid of its own.

    Every stage runs every microbatch; where replicas differ, each has its even share of the samples.

    Args:
        config: the plugin's configuration.
        layout: stages and ranks of the module.
        device: name of the platform.
    """
    replicas = ReplicaMap(dp_sizes=layout.dp_sizes, mode=DpMode.SPLIT)
    return PipelinePlan(
        layout=layout,
        ends=Ends(are_bridged=True, are_stock=False, loss_stage=layout.num_stages - 1),
        placement=place_workers(replicas, num_chunks=1, num_rings=0),
        replicas=replicas,
        boundaries=pipeline_boundaries(layout, is_ring=False, dp_mode=replicas.mode),
        context=option_context(config, layout, device=device),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A run whose layout is known, before its channels are open.

    Attributes:
        config: the plugin's configuration.
        layout: stages and ranks of the run.
        platform: platform on which it runs.
        tensor_bytes: size of the tensor that crosses a boundary; None if it is not known beforehand.
        is_sharded: whether ranks hold slices of activations (sequence parallelism), as far as is known beforehand.
        log_interval_steps: number of training steps from one line about real and planned times to the next.
        has_packed_rows: whether a microbatch is a row of packed samples.
        companions: kinds of tensors that later stages need beside activations.
        first_ring: what crosses in the first of two rings, where MindSpeed-MM's JSON says it; else chunks of the model
            do.
        layers: number of layers of every virtual stage, along the model; empty where it is not known.
        check_batch: raises an error if the script must not read such a batch; None allows any.
        notes: lines at the end of the start-up summary.
        has_arguments: whether the plan follows from arguments that megatron.training has validated, and lasts as long
            as they do; otherwise the end of a start forgets it.
    """

    config: VtpConfig
    layout: PipelineLayout
    platform: Platform
    tensor_bytes: int | None = None
    is_sharded: bool = False
    log_interval_steps: int = 100
    has_packed_rows: bool = False
    companions: tuple[Companion, ...] = ()
    first_ring: FirstRing | None = None
    layers: tuple[int, ...] = ()
    check_batch: Callable[[Any], None] | None = None
    notes: tuple[str, ...] = ()
    has_arguments: bool = False

    def check(self) -> None:
        """Refuse stages that do not fit together.

        Raises:
            ConfigError: replicas do not divide, or layers, limits, costs or the transport do not fit the pipeline; or
                what has patched this Megatron is unknown.
        """
        if self.is_active:
            refuse(problems_of_unknown_adaptor())
        refuse(check_edge_seed(self.config), LayoutError)
        if self.config.num_layer_list is not None:
            check_layers(
                self.config.num_layer_list,
                num_stages=self.layout.num_stages,
                num_layers=None,
                option="--num-layer-list",
                least_on_edge=self.config.least_on_edge,
            )
        if self.config.encoder_layer_list is not None:
            check_two_rings(self.config.encoder_layer_list, self.layout.cp_sizes, is_split=self.replicas.is_split)
        self.replicas.check(self.boundaries)
        read_schedule_options(self.config, self.layout.num_stages, 0)  # the size of an activation is not known yet
        for upstream, downstream in self.boundaries:
            self.transport_rules.choose(self.layout, upstream, downstream)

    @property
    def is_active(self) -> bool:
        """Whether the plugin's groups and communicator are in use: stages differ, or an option needs them."""
        return is_active(self.config, self.layout)

    @property
    def is_recorded(self) -> bool:
        """Whether the trace or the timing is asked for."""
        return self.config.timing or self.config.trace is not None

    @property
    def has_stock_ends(self) -> bool:
        """Whether Megatron's own code for the first and the last stage works: tied weights, the token count."""
        return self.layout.is_uniform and not self.config.layerwise_disaggregated

    @property
    def loss_stage(self) -> int:
        """Stage that computes the loss."""
        return 0 if self.config.layerwise_disaggregated else self.layout.num_stages - 1

    @property
    def replicas(self) -> ReplicaMap:
        """Which replicas of the stages work together."""
        return replica_map(self.config, self.layout)

    @property
    def writer_rank(self) -> int:
        """Rank that reports: in a U-shaped pipeline the edge's leader, else the world's last one, as in Megatron."""
        return self.layout.leader(0, 0, 0) if self.config.layerwise_disaggregated else self.layout.writer_rank

    @property
    def boundaries(self) -> tuple[tuple[int, int], ...]:
        """Pairs of neighbouring stages, that from the end of a U back to its edge included."""
        return stage_boundaries(self.config, self.layout.num_stages)

    @property
    def transport_rules(self) -> TransportRules:
        """Rules that choose the strategy of every boundary."""
        return transport_rules(self.config, self.tensor_bytes, is_sharded=self.is_sharded)

    @property
    def own(self) -> Coord:
        """Coordinates of this rank."""
        return self.layout.coord(dist.get_rank())

    @property
    def reporting_ranks(self) -> dict[str, int]:
        """Rank of every site that logs for it."""
        return reporting_ranks(self.layout, stage_sites(self.config, self.layout.num_stages))

    def site_of(self, rank: int) -> str:
        """Return the site of a rank; the empty string where all are at one."""
        return stage_sites(self.config, self.layout.num_stages)[self.layout.stage_of(rank)]

    def pipeline(self, *, num_chunks: int, embedding_stages: Sequence[int] | None = None) -> PipelinePlan:
        """Plan the run's own pipeline, once it is known how the model is cut.

        Args:
            num_chunks: number of model chunks of every stage, Megatron's virtual pipeline size.
            embedding_stages: stages that may hold a copy of the word embedding; None for the first and the last.

        Raises:
            ConfigError: no placement of so many chunks fits the stages.
        """
        config, layout, replicas = self.config, self.layout, self.replicas
        num_stages, is_u_shaped = layout.num_stages, config.layerwise_disaggregated
        placement = place_workers(
            replicas,
            num_chunks=num_chunks,
            num_rings=config.num_rings,
            expert_spans=expert_spans(layout, replicas),
            is_loss_summed=capability("loss_summed_over_replicas").has(find_host()[1].version),
        )
        if self.first_ring is not None and not self.first_ring.is_trained:
            # It ends where the edge's second chunk begins.
            placement = replace(placement, num_frozen=num_stages)
        if config.lora is not None and config.has_planned_schedule:
            placement = replace(placement, num_frozen=config.lora.num_frozen(self.layers))
        if self.is_recorded and (num_stages == 1 or not self.is_active):
            option = "--vtp-timing" if config.trace is None else f"--vtp-trace {config.trace}"
            sizes = ",".join(map(str, layout.tp_sizes))
            raise ConfigError(
                f"{option}: with --vtp-size-list {sizes} nothing crosses over the plugin's channels; give "
                f"{'--vtp-force' if num_stages > 1 else 'more stages'}, or leave it out"
            )
        if config.num_rings > 1 and num_chunks != config.num_rings + 1:
            raise ConfigError(
                f"--vtp-encoder-layer-list with {num_chunks} model chunks: the edge has {config.num_rings + 1}; give "
                f"initialize_model_parallel virtual_pipeline_model_parallel_size={config.num_rings + 1}"
            )
        # In a U both copies are on the edge.
        is_tied = not (self.has_stock_ends or is_u_shaped or num_stages == 1)
        orders = self._orders(placement, num_chunks)
        if self.companions and orders is None:
            kinds = ", ".join(companion.kind for companion in self.companions)
            raise ConfigError(
                f"{kinds} beside activations; only a planned pipeline of several stages carries them; give "
                "--vtp-schedule planned"
            )
        is_ring = placement.num_vstages > num_stages
        rules = self.transport_rules
        return PipelinePlan(
            layout=layout,
            ends=Ends(
                are_bridged=False,
                are_stock=self.has_stock_ends,
                loss_stage=self.loss_stage,
                tied_stages=tuple(embedding_stages or (0, num_stages - 1)) if is_tied else (),
            ),
            placement=placement,
            replicas=replicas,
            boundaries=pipeline_boundaries(layout, is_ring=is_ring, rules=rules, dp_mode=replicas.mode)
            if self.is_active
            else (),
            context=self.option_context,
            is_active=self.is_active,
            is_sharded=self.is_sharded,
            orders=orders,
            companions=self.companions,
        )

    def _orders(self, placement: Placement, num_chunks: int) -> ScheduleOptions | None:
        """Read the options of a planned order; None where Megatron's schedules run."""
        config, num_stages = self.config, self.layout.num_stages
        if not (self.is_active and config.has_planned_schedule and num_stages > 1):
            return None
        return read_schedule_options(
            config,
            num_stages,
            self.tensor_bytes,
            num_chunks=num_chunks,
            fixed=placement if config.split_backward else None,
            report_interval_steps=self.log_interval_steps,
        )

    def statement(self) -> dict[str, object]:
        """Return what this rank is about to run; it must be equal on all ranks."""
        return state_run(self.config, self.layout, self.platform.name)

    def describe(self, layers: Sequence[str] = (), *, is_behind_banner: bool = False) -> str:
        """Return the start-up summary: the ranks, the stages with their layers, and what crosses.

        Args:
            layers: numbers of layers of every stage; empty if they are not known.
            is_behind_banner: whether Megatron has just printed a world size, and prints its arguments next.
        """
        if self.config.num_layer_list is not None:
            layers = format_layers(u_chunks(self.config.num_layer_list))
        sizes = ",".join(map(str, self.layout.tp_sizes))
        is_told_apart = is_behind_banner and not self.layout.is_uniform
        about = "; Megatron's lines above, and its arguments below, show rank 0's stage" if is_told_apart else ""
        lines = [
            f"vtp_plugin {__version__}: {self.layout.world_size} ranks, TP sizes {sizes}{about}",
            describe_layout(self.layout, writer_rank=self.writer_rank, layers=layers),
        ]
        if not self.is_active:
            lines.append("all stages have one size: Megatron's own groups and communicator")
        if not self.replicas.is_equal:
            lines.append(f"data-parallel sizes differ: {self.config.dp_mode}, run by the planned schedule")
        for upstream, downstream in self.boundaries if self.is_active else ():
            strategy, reason = self.transport_rules.choose(self.layout, upstream, downstream)
            lines.append(f"boundary {upstream}->{downstream}: {strategy} ({reason})")
        lines.append(f"platform: {self.platform.name} ({self.platform.reason})")
        return "\n".join([*lines, *self.notes])

    @property
    def digest(self) -> str:
        """Short digest of what all ranks have agreed on, to compare logs."""
        return digest_of(self.statement())

    @property
    def option_context(self) -> OptionContext:
        """Context against which Megatron's options are checked."""
        return option_context(self.config, self.layout, device=self.platform.name)


class Start:
    """What one start has opened on this rank. It ends at once; the next start is new.

    Attributes:
        audit: record of all messages; None unless asked for, or before it begins.
        is_described: whether the log has its summary.
        tracing: trace of this rank's steps; None unless asked for, or before it begins.
        timing: times of all ranks' steps; None unless asked for, or before it begins.
        ending: stack of what is closed when this start ends: channels, groups, entries in torch's tables, files.
    """

    def __init__(self) -> None:
        self.audit: Audit | None = None
        self.is_described = False
        self.tracing: Tracing | None = None
        self.timing: Timing | None = None
        self.ending = ExitStack()

    def open_audit(self, config: VtpConfig, rank: int) -> Audit | None:
        """Open the audit, if it is asked for; idempotent.

        Raises:
            ConfigError: the audit's file cannot be written.
        """
        if config.audit is not None and self.audit is None:
            self.audit = Audit(config.audit, rank)
            self.ending.callback(self.audit.close)
        return self.audit

    def open_records(self, planned: PlannedRun, rank: int, ranks: AllRanks, recorder: Recorder) -> None:
        """Open the trace and the timing, if they are asked for; idempotent.

        Args:
            planned: the run.
            rank: this rank.
            ranks: all ranks of the run, which have met.
            recorder: notes what this rank does.

        Raises:
            ConfigError: the trace cannot be written.
        """
        if not planned.is_recorded:
            return
        config, coord = planned.config, planned.layout.coord(rank)
        recorder.counts_resent = config.has_several_sites
        recorder.counts_traffic = config.has_several_sites or config.trace is not None
        owner = Owner(
            run=ranks.name_run(),
            rank=rank,
            world_size=planned.layout.world_size,
            stage=coord.stage,
            worker=planned.replicas.worker(coord.stage, coord.dp_rank),
            site=planned.site_of(rank) if config.has_several_sites else "",
            network=name_network() if config.has_several_sites else "",
        )
        compare_clocks = ranks.compare_clocks
        if config.trace is not None and self.tracing is None:
            path, option = trace_path(config.trace, rank), f"--vtp-trace {config.trace}"
            file = LineFile(path, option=option, is_continued=False)
            steps = config.trace_steps
            self.tracing = Tracing(file, owner, recorder, steps=steps, compare_clocks=compare_clocks)
            self.ending.callback(self.tracing.close)
        if config.timing and self.timing is None:
            share = functools.partial(ranks.share_reports, kind=Line)
            self.timing = Timing(owner, recorder, share_lines=share, compare_clocks=compare_clocks)
            self.ending.callback(self.timing.close)

    def begin_step(self) -> None:
        """Tell the trace and the timing that a training step begins."""
        if self.tracing is not None:
            self.tracing.begin_step()
        if self.timing is not None:
            self.timing.begin_step()
