"""One pipeline as it is planned: its stages, what crosses between them, and what is before and after it.

A run has one, and every module with a grid of its own has one more. Nothing here communicates.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from vtp_plugin.runtime.step.companions import Companion


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Who is before a pipeline and after it, and what joins its first stage and its last one.

    Attributes:
        are_bridged: other modules may be before it and after it, and it lies on a grid of its own. Then nothing joins
            its ends: no ring, no copy of a weight. Its gradients are sums, and groups are those of its grid.
        are_stock: Megatron's own code fits what joins them: tied weights, the token count.
        loss_stage: stage that computes the loss; the last one of a bridged pipeline may, or hand on its output.
        tied_stages: those that may hold a copy of the word embedding, where copies lie on several stages.
    """

    are_bridged: bool
    are_stock: bool
    loss_stage: int
    tied_stages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """A pipeline before its channels are open.

    Attributes:
        layout: who is where.
        ends: what is before it and after it, and what joins its ends.
        placement: which stage holds which part of the model.
        replicas: which replicas of its stages work together.
        boundaries: its neighbouring stages; none where Megatron's own communicator is in use.
        context: what Megatron's options are checked against.
        is_active: the plugin's channels are in use.
        is_sharded: ranks hold slices of activations (sequence parallelism), as far as is known beforehand.
        orders: what its steps are planned for; None where Megatron's schedules run, or one for several modules.
        companion: what crosses with activations, such as the lengths of packed samples; None for nothing.
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
    companion: Companion | None = None

    @property
    def members(self) -> range:
        """Its ranks."""
        return range(self.layout.first_rank, self.layout.first_rank + self.layout.world_size)

    @property
    def sizes(self) -> str:
        """Tensor-parallel size of every stage: `1,4,4`."""
        return ",".join(map(str, self.layout.tp_sizes))

    @property
    def specs(self) -> tuple[ChannelSpec, ...]:
        """Its channels, in the order in which all ranks open them: both directions of every boundary, then tied ones.

        Those of a word embedding that stages share come last; there are none where its copies are together, or Megatron
        sums them.
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
        place = self.layout.coord(rank)
        return self.replicas.worker(place.stage, place.dp_rank)

    def gradient_share(self, stage: int) -> float:
        """Copies of a stage's weights (cp * dp) over those of the stage with the loss, whose average counts.

        Between bridges gradients are sums, which nobody averages.
        """
        if self.ends.are_bridged:
            return 1.0
        here, loss = self.layout.stages[stage], self.layout.stages[self.ends.loss_stage]
        return here.cp * here.dp / (loss.cp * loss.dp)

    def check_model_config(self, stage: int, tensor_model_parallel_size: int, context_parallel_size: int) -> None:
        """Refuse a model configuration that was made for another stage's sizes.

        Raises:
            ConfigError: the configuration does not say its stage's size.
        """
        own_size = self.layout.tp_sizes[stage]
        if tensor_model_parallel_size != own_size:
            raise ConfigError(
                f"the model's config says tensor_model_parallel_size={tensor_model_parallel_size}, but stage "
                f"{stage} has {own_size}; build the config with "
                "parallel_state.get_tensor_model_parallel_world_size()"
            )
        own_cp = self.layout.cp_sizes[stage]
        if len(set(self.layout.cp_sizes)) > 1 and context_parallel_size != own_cp:
            raise ConfigError(
                f"the model's config says context_parallel_size={context_parallel_size}, but stage {stage} "
                f"has {own_cp}; build the config with parallel_state.get_context_parallel_world_size()"
            )


def plan_module(config: VtpConfig, layout: PipelineLayout, *, device: str) -> PipelinePlan:
    """Plan the pipeline of a module with a grid of its own.

    Every stage runs every microbatch; where replicas differ, each has its even share of the samples.

    Args:
        config: what was asked for.
        layout: the module's stages.
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
