"""Tied embeddings over stages of unequal tensor-parallel size: one weight, cut differently on its two ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vtp_plugin.boundary.pipeline import Crossing, Side
from vtp_plugin.boundary.plan import BoundaryPlan
from vtp_plugin.layout.pipeline import PipelineLayout
from vtp_plugin.runtime.transport import Channel


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedWeight:
    """One rank's side of the word embedding that the first and the last stage share.

    Only ranks of these two stages have it. Every slice crosses straight to the rank whose slice overlaps it, with no
    gather on either side, so neither end ever holds more than its own slice ``[V / tp, H]``.

    Attributes:
        is_first: the rank is in the first stage, whose weight is the original.
        to_last: channel first -> last.
        to_first: channel last -> first.
    """

    is_first: bool
    to_last: Channel
    to_first: Channel

    def copy_from_first(self, weight: torch.Tensor) -> None:
        """Give the last stage the first stage's values, in place; called once by all ranks of both stages."""
        channel = self.to_last
        plan = _plan(channel, weight)
        if self.is_first:
            channel.post_send(weight, plan, weight.dtype).wait()
        else:
            received, work = channel.post_recv(plan, weight.dtype, requires_grad=False)
            work.wait()
            weight.copy_(received)

    def sum_gradients(self, gradient: torch.Tensor) -> None:
        """Add the other end's gradient, in place; called once a step by all ranks of both stages.

        Both ends add the same two numbers, so they stay equal to the last bit.
        """
        own, other = (self.to_last, self.to_first) if self.is_first else (self.to_first, self.to_last)
        # In the order of the channels, as everywhere: the last stage receives first.
        if self.is_first:
            send = own.post_send(gradient, _plan(own, gradient), gradient.dtype)
        received, receive = other.post_recv(_plan(other, gradient), gradient.dtype, requires_grad=False)
        if not self.is_first:
            send = own.post_send(gradient, _plan(own, gradient), gradient.dtype)
        receive.wait()
        # The send reads the gradient's own memory.
        send.wait()
        gradient.add_(received)


def _plan(channel: Channel, part: torch.Tensor) -> BoundaryPlan:
    """Plan for a weight `[V, H]` of which each rank holds a slice of the vocabulary: V divides by both sizes."""
    return channel.plan(channel.whole_shape(part.shape, is_sharded=True), src_sharded=True, dst_sharded=True)


def tied_weight_crossings(layout: PipelineLayout) -> tuple[tuple[Crossing, Crossing], ...]:
    """Plan the channels between the first and the last stage, one pair per replica, in one order for all ranks.

    Returns:
        Pairs (first -> last, last -> first).
    """
    pairs = []
    for dp_rank, cp_rank in layout.replicas:
        first = Side(ranks_by_cp=(layout.tp_ranks(0, dp_rank, cp_rank),))
        last = Side(ranks_by_cp=(layout.tp_ranks(layout.num_stages - 1, dp_rank, cp_rank),))
        pairs.append(
            (
                Crossing(name="tied embedding, first->last", src=first, dst=last, strategy="sliced", unit="step"),
                Crossing(name="tied embedding, last->first", src=last, dst=first, strategy="sliced", unit="step"),
            )
        )
    return tuple(pairs)
