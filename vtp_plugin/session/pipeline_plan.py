"""One pipeline as it is planned: its stages, what crosses between them, and what is before and after it.

A run has one, and every module with a grid of its own has one more. Nothing here communicates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vtp_plugin.config import VtpConfig
from vtp_plugin.config.resolve import ScheduleOptions, option_context
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.rules.context import OptionContext
from vtp_plugin.plan.boundary.channel_spec import ChannelSpec
from vtp_plugin.plan.boundary.pipeline_boundaries import PipelineBoundary, pipeline_boundaries
from vtp_plugin.plan.boundary.tied_channels import tied_weight_specs
from vtp_plugin.plan.layout.channel_id import Direction
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.layout.replica_map import DpMode, ReplicaMap
from vtp_plugin.plan.schedule.order.placement import Placement, place_workers
from vtp_plugin.runtime.step.companion_tensors import Companion


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
