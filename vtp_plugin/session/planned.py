"""What is planned: who is where, what crosses, and what all ranks state about it. Nothing here communicates."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from vtp_plugin.boundary.strategies.rules import TransportRules
from vtp_plugin.config import VtpConfig
from vtp_plugin.errors import ConfigError
from vtp_plugin.ground.version import __version__
from vtp_plugin.layout.pipeline import Coord, PipelineLayout
from vtp_plugin.layout.replicas import ReplicaMap
from vtp_plugin.layout.show import describe_layout
from vtp_plugin.layout.u_layers import check_layers, check_two_rings
from vtp_plugin.options.context import OptionContext
from vtp_plugin.options.derived import (
    is_active,
    option_context,
    read_schedule_options,
    replica_map,
    reporting_ranks,
    stage_boundaries,
    stage_sites,
    transport_rules,
)
from vtp_plugin.platform.base import Platform
from vtp_plugin.session.statement import digest_of, state_run


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A run whose layout is known, before its channels are open.

    Attributes:
        config: what was asked for.
        layout: who is where.
        platform: where it runs.
        tensor_bytes: size of the tensor that crosses a boundary; None where it is not known beforehand.
        is_sharded: ranks hold slices of activations (sequence parallelism), as far as is known beforehand.
        log_interval_steps: training steps from one line about real and planned times to the next.
        packed_length: tokens of a row of packed samples; None without them.
        notes: lines that the start-up summary ends with.
    """

    config: VtpConfig
    layout: PipelineLayout
    platform: Platform
    tensor_bytes: int | None = None
    is_sharded: bool = False
    log_interval_steps: int = 100
    packed_length: int | None = None
    notes: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse stages that do not fit together.

        Raises:
            ConfigError: replicas do not divide, or layers, limits, costs or the transport do not fit the pipeline.
        """
        if self.config.num_layer_list is not None:
            layers, num_stages = self.config.num_layer_list, self.layout.num_stages
            check_layers(layers, num_stages=num_stages, num_layers=None, option="--num-layer-list")
        if self.config.encoder_layer_list is not None:
            check_two_rings(self.config.encoder_layer_list, self.layout.cp_sizes, self.layout.dp_sizes)
        self.replicas.check(self.boundaries)
        read_schedule_options(self.config, self.layout.num_stages, 0)  # the size of an activation is not known yet
        for upstream, downstream in self.boundaries:
            self.transport_rules.choose(self.layout, upstream, downstream)

    @property
    def is_active(self) -> bool:
        """Whether the plugin's groups and communicator are in use: stages differ, or something asks for them."""
        return is_active(self.config, self.layout)

    @property
    def has_stock_ends(self) -> bool:
        """Whether Megatron's own code fits what joins the first and the last stage: tied weights, the token count."""
        return self.layout.is_uniform and not self.config.layerwise_disaggregated

    @property
    def loss_stage(self) -> int:
        """Stage that computes the loss."""
        return 0 if self.config.layerwise_disaggregated else self.layout.num_stages - 1

    @property
    def gradient_share(self) -> float:
        """Copies of this rank's weights (cp * dp) over those of the stage with the loss, whose average counts."""
        here, loss = self.layout.stages[self.own.stage], self.layout.stages[self.loss_stage]
        return here.cp * here.dp / (loss.cp * loss.dp)

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
        """Neighbouring stages, the way from the end of a U back to its edge included."""
        return stage_boundaries(self.config, self.layout.num_stages)

    @property
    def transport_rules(self) -> TransportRules:
        """What decides how the boundaries are crossed."""
        return transport_rules(self.config, self.tensor_bytes, is_sharded=self.is_sharded)

    @property
    def own(self) -> Coord:
        """Place of this rank."""
        return self.layout.coord(dist.get_rank())

    @property
    def reporting_ranks(self) -> dict[str, int]:
        """Rank of every site that shows what the plugin says."""
        return reporting_ranks(self.layout, stage_sites(self.config, self.layout.num_stages))

    def site_of(self, rank: int) -> str:
        """Return the site of a rank; the empty string where all are at one."""
        return stage_sites(self.config, self.layout.num_stages)[self.layout.stage_of(rank)]

    def statement(self) -> dict[str, object]:
        """Say what this rank is about to run; every rank must say the same."""
        return state_run(self.config, self.layout, self.platform.name)

    def describe(self) -> str:
        """Say that the plugin is active, with a digest of what was agreed on; then who is where and what crosses."""
        sizes = ",".join(map(str, self.layout.tp_sizes))
        lines = [
            f"vtp_plugin {__version__} is active: vtp_size_list {sizes} on {self.layout.world_size} ranks, "
            f"digest {digest_of(self.statement())}",
            describe_layout(self.layout, writer_rank=self.writer_rank),
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
    def option_context(self) -> OptionContext:
        """What Megatron's options are checked against."""
        return option_context(self.config, self.layout, device=self.platform.name)

    def check_model_config(self, tensor_model_parallel_size: int, context_parallel_size: int) -> None:
        """Refuse a model configuration that was made for another stage's sizes; see :func:`check_sizes`."""
        check_sizes(self.layout, self.own.stage, tensor_model_parallel_size, context_parallel_size)


def check_sizes(
    layout: PipelineLayout, stage: int, tensor_model_parallel_size: int, context_parallel_size: int
) -> None:
    """Refuse a model configuration that was made for another stage's sizes.

    Raises:
        ConfigError: the configuration does not say its stage's size.
    """
    own_size = layout.tp_sizes[stage]
    if tensor_model_parallel_size != own_size:
        raise ConfigError(
            f"the model's config says tensor_model_parallel_size={tensor_model_parallel_size}, but stage "
            f"{stage} has {own_size}; build the config with "
            "parallel_state.get_tensor_model_parallel_world_size()"
        )
    own_cp = layout.cp_sizes[stage]
    if len(set(layout.cp_sizes)) > 1 and context_parallel_size != own_cp:
        raise ConfigError(
            f"the model's config says context_parallel_size={context_parallel_size}, but stage {stage} "
            f"has {own_cp}; build the config with parallel_state.get_context_parallel_world_size()"
        )
