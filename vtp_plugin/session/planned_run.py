"""The plan of a run: its layout, what crosses, and what all ranks state about it. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from vtp_plugin.config import VtpConfig
from vtp_plugin.config.resolve import (
    ScheduleOptions,
    is_active,
    option_context,
    read_schedule_options,
    replica_map,
    reporting_ranks,
    stage_boundaries,
    stage_sites,
    transport_rules,
)
from vtp_plugin.config.vtp_flags import check_edge_seed
from vtp_plugin.errors import ConfigError, LayoutError, refuse
from vtp_plugin.host.mindspeed import problems_of_unknown_adaptor
from vtp_plugin.host.rules.context import OptionContext
from vtp_plugin.host.versions import capability, find_host
from vtp_plugin.plan.boundary.pipeline_boundaries import pipeline_boundaries
from vtp_plugin.plan.boundary.strategies.transport_rules import TransportRules
from vtp_plugin.plan.layout.chunks import u_chunks
from vtp_plugin.plan.layout.describe import describe_layout, format_layers
from vtp_plugin.plan.layout.pipeline_layout import Coord, PipelineLayout
from vtp_plugin.plan.layout.replica_map import ReplicaMap
from vtp_plugin.plan.layout.share import expert_spans
from vtp_plugin.plan.layout.u_layers import FirstRing, check_layers, check_two_rings
from vtp_plugin.plan.schedule.order.placement import Placement, place_workers
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.step.companion_tensors import Companion
from vtp_plugin.session.pipeline_plan import Ends, PipelinePlan
from vtp_plugin.session.startup_statement import digest_of, state_run
from vtp_plugin.util.version import __version__


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
