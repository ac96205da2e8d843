"""Shared embeddings over stages of unequal tensor-parallel size: one weight, cut differently where it is copied."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.runtime.comm.channel import Channel
from vtp_plugin.runtime.comm.link import ChannelLink
from vtp_plugin.runtime.comm.pending_receives import RecvWork
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.comm.work import SendWork


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedWeight:
    """One rank's part of a word embedding of which several stages hold a copy.

    The first stage has the original. The last stage has a copy where it shares the weight with its output layer, and so
    has the stage of multi-token prediction. Every slice goes straight to the rank whose slice overlaps it, without
    gathering on either stage, so no rank ever holds more than its slice ``[V / tp, H]``. If two stages have different
    numbers of replicas, a replica of the smaller one sends to several of the larger one and receives from one.

    Attributes:
        stage: stage of this rank.
        outgoing: channels to the replicas that receive this one's values, each with the replica's stage.
        incoming: channels from one replica of each other stage, by that stage.
    """

    stage: int
    outgoing: tuple[tuple[int, Channel], ...]
    incoming: Mapping[int, Channel]

    @property
    def is_first(self) -> bool:
        """Whether the rank is in the first stage, whose weight is the original."""
        return self.stage == 0

    def reaches(self, stages: Collection[int]) -> bool:
        """Tell whether there are channels to all of these stages but this rank's own."""
        return set(stages) <= {self.stage, *self.incoming}

    def copy_from_first(self, weight: torch.Tensor, stages: Collection[int]) -> None:
        """Give the other stages the first stage's values, in place; called once by all ranks of ``stages``."""
        if self.is_first:
            for send in [_link(channel, weight).send(weight) for stage, channel in self.outgoing if stage in stages]:
                send.wait()
        else:
            weight.copy_(_link(self.incoming[0], weight).post().take())

    def sum_gradients(self, gradient: torch.Tensor, stages: Collection[int]) -> None:
        """Add the other stages' gradients, in place; called once a step by all ranks of ``stages``.

        The replicas of a stage hold the same gradient. All add the same numbers in the order of the stages, so the
        copies of the weight stay equal to the last bit.
        """
        incoming = [channel for stage, channel in sorted(self.incoming.items()) if stage in stages]
        outgoing = [channel for stage, channel in self.outgoing if stage in stages]
        # Post in the order of the run's channels, as in every exchange: a device may run one operation after another.
        receives: dict[Channel, RecvWork] = {}
        sends: list[SendWork] = []
        for channel in sorted((*outgoing, *incoming), key=lambda channel: channel.order):
            link = _link(channel, gradient)
            if channel in incoming:
                receives[channel] = link.post()
            else:
                sends.append(link.send(gradient))
        received = [receives[channel].take() for channel in incoming]
        for send in sends:
            send.wait()  # the sends read the gradient's memory
        # A sum of two numbers does not depend on their order.
        num_ahead = max(sum(stage < self.stage for stage in stages), 1)
        if received:
            ahead, *others = received[:num_ahead]
            for other in others:
                ahead.add_(other)
            for part in (ahead, *received[num_ahead:]):
                gradient.add_(part)


def _link(channel: Channel, weight: torch.Tensor) -> ChannelLink:
    """Bind a channel to a weight `[V, H]` of which each rank holds a slice of rows: V divides by all sizes."""
    form = TensorFormat(dtype=weight.dtype, src_sharded=True, dst_sharded=True, requires_grad=False)
    return ChannelLink(channel, form, weight.shape)


def join_tied_weight(channels: Sequence[Channel], layout: PipelineLayout) -> TiedWeight:
    """Make this rank's part of the shared embedding.

    Args:
        channels: channels of this rank, opened from :func:`vtp_plugin.plan.boundary.tied_channels.tied_weight_specs`.
        layout: stages and ranks of the pipeline.
    """
    rank, stage_of = dist.get_rank(), layout.stage_of
    outgoing = [(stage_of(c.spec.dst.ranks[0]), c) for c in channels if rank in c.spec.src.ranks]
    incoming = {stage_of(c.spec.src.ranks[0]): c for c in channels if rank in c.spec.dst.ranks}
    return TiedWeight(stage=stage_of(rank), outgoing=tuple(outgoing), incoming=incoming)
