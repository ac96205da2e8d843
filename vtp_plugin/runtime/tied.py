"""Tied embeddings over stages of unequal tensor-parallel size: one weight, cut differently on its two ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vtp_plugin.runtime.channel import Channel, TensorFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedWeight:
    """One rank's side of the word embedding that the first and the last stage share.

    Only ranks of these two stages have one. Every slice goes straight to the rank whose slice overlaps it, with no
    gather on either side, so no rank ever holds more than its slice ``[V / tp, H]``. If the stages have different
    numbers of replicas, a replica of the smaller stage sends to several of the larger stage and receives from one.

    Attributes:
        is_first: the rank is in the first stage, whose weight is the original.
        outgoing: channels to the replicas of the other end that take this one's values.
        incoming: channel from one replica of the other end.
    """

    is_first: bool
    outgoing: tuple[Channel, ...]
    incoming: Channel

    def copy_from_first(self, weight: torch.Tensor) -> None:
        """Give the last stage the first stage's values, in place; called once by all ranks of both stages."""
        form = _format(weight)
        if self.is_first:
            for send in [channel.send(weight, form) for channel in self.outgoing]:
                send.wait()
        else:
            weight.copy_(self.incoming.post(form, weight.shape).take())

    def sum_gradients(self, gradient: torch.Tensor) -> None:
        """Add the other end's gradient, in place; called once a step by all ranks of both stages.

        The replicas of an end hold the same gradient. Both ends add the same two numbers, so the two copies of the
        weight stay equal to the last bit.
        """
        form = _format(gradient)
        # Post in the order of the run's channels, as in every exchange: a device may run one operation after another.
        works = [
            channel.post(form, gradient.shape) if channel is self.incoming else channel.send(gradient, form)
            for channel in sorted((*self.outgoing, self.incoming), key=lambda channel: channel.order)
        ]
        received = self.incoming.take()
        for work in works:
            work.wait()  # the sends read the gradient's memory
        gradient.add_(received)


def _format(weight: torch.Tensor) -> TensorFormat:
    """Describe a weight `[V, H]` of which each rank holds a slice of the vocabulary: V divides by both sizes."""
    return TensorFormat(dtype=weight.dtype, src_sharded=True, dst_sharded=True, requires_grad=False)


def join_tied_weight(channels: Sequence[Channel], *, is_first: bool) -> TiedWeight:
    """Make this rank's side of the shared embedding.

    Args:
        channels: of this rank, opened from :func:`vtp_plugin.boundary.tied.tied_weight_specs`.
        is_first: the rank is in the first stage, not in the last.
    """
    rank = dist.get_rank()
    (incoming,) = (channel for channel in channels if rank in channel.spec.dst.ranks)
    outgoing = tuple(channel for channel in channels if rank in channel.spec.src.ranks)
    return TiedWeight(is_first=is_first, outgoing=outgoing, incoming=incoming)
