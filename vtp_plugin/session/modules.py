"""A module's pipeline among several in one world: its stages differ in size, and its channels are its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from vtp_plugin.boundary.channel_spec import distinct_plans
from vtp_plugin.boundary.check import require_valid
from vtp_plugin.boundary.pipeline import pipeline_boundaries
from vtp_plugin.layout.channel import Direction
from vtp_plugin.layout.pipeline import PipelineLayout
from vtp_plugin.layout.replicas import DpMode
from vtp_plugin.runtime.step.communicator import PipelineCommunicator, join_channels, open_channels, own_channels
from vtp_plugin.runtime.wire.channel import Channel
from vtp_plugin.runtime.wire.tensor_format import TensorFormat
from vtp_plugin.session.session import state_format
from vtp_plugin.session.surroundings import Surroundings


@dataclass(kw_only=True, eq=False)
class ModulePipeline:
    """This rank's part of a module's pipeline.

    Attributes:
        layout: the module's stages and ranks.
        channels: all that this rank has opened, in that order.
        communicator: moves activations and gradients between the stages.
        agree: compares statements over the module's ranks.
    """

    layout: PipelineLayout
    channels: Sequence[Channel]
    communicator: PipelineCommunicator
    agree: Callable[[Callable[[], Mapping[str, object]]], None]
    _form: TensorFormat | None = field(default=None, init=False)

    @property
    def stage(self) -> int:
        """Stage of this rank."""
        return self.layout.stage_of(dist.get_rank())

    @property
    def sizes(self) -> str:
        """Tensor-parallel size of every stage: `1,4,4`."""
        return ",".join(map(str, self.layout.tp_sizes))

    def tensor_format(self, read: Callable[[], TensorFormat]) -> TensorFormat:
        """Read how tensors cross; the first time all ranks of the module compare it.

        Args:
            read: reads and checks the module's configuration.

        Raises:
            ConfigError: a rank's configuration is wrong, or two differ.
        """
        if self._form is not None:
            return read()
        found: list[TensorFormat] = []

        def state() -> Mapping[str, object]:
            found.append(read())
            return state_format(found[0], self.layout.tp_sizes[self.stage])

        self.agree(state)
        self._form = found[0]
        return found[0]


def open_module(
    layout: PipelineLayout, surroundings: Surroundings, *, stage_group: dist.ProcessGroup | None
) -> ModulePipeline | None:
    """Open the channels between a module's stages. All ranks of the world call this at the same point.

    Args:
        layout: the module's stages.
        surroundings: the run.
        stage_group: tensor-parallel group of this rank's stage.

    Returns:
        This rank's part; None outside the module.
    """
    # Every stage runs every microbatch; where replicas differ, each has its even share of the samples.
    boundaries = pipeline_boundaries(layout, is_ring=False, dp_mode=DpMode.SPLIT)
    specs = [boundary.channel(direction) for boundary in boundaries for direction in Direction]
    for plan in distinct_plans(specs):
        require_valid(plan)
    opened = open_channels(
        specs,
        stage_group=stage_group,
        platform=surroundings.platform(),
        monitor=surroundings.monitor(),
        timeout_s=surroundings.timeout_s(),
        audit=surroundings.audit(),
    )
    rank = dist.get_rank()
    members = range(layout.first_rank, layout.first_rank + layout.world_size)
    if rank not in members:
        return None
    (communicator,) = join_channels(own_channels(boundaries, opened), layout.stage_of(rank))
    return ModulePipeline(
        layout=layout,
        channels=[channel for channel in opened if channel is not None],
        communicator=communicator,
        agree=surroundings.agreement(f"the first step of the module on ranks {members[0]} to {members[-1]}", members),
    )


def close_module(modules: MutableMapping[dist.ProcessGroup, ModulePipeline], pipeline: dist.ProcessGroup) -> None:
    """End a module's channels, and forget it.

    Args:
        modules: this rank's, by their pipeline group; one that has no channels is not there.
        pipeline: the module's.
    """
    module = modules.pop(pipeline, None)
    if module is not None:
        module.communicator.finish_step()
        for channel in module.channels:
            channel.close()
