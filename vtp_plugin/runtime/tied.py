"""Tied embeddings over stages of unequal tensor-parallel size: one weight, cut differently on its two ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vtp_plugin.boundary.pipeline import plan_vocabulary_exchange
from vtp_plugin.layout.pipeline import PipelineLayout
from vtp_plugin.runtime.transport import Channel, ChannelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedWeight:
    """One rank's side of the word embedding that the first and the last stage share.

    Only ranks of these two stages have it. Every slice crosses straight to the rank whose slice overlaps it, with no
    gather on either side, so neither end ever holds more than its own slice ``[V / tp, H]``.

    Attributes:
        is_first: the rank is in the first stage, whose weight is the original.
        to_last: channel first -> last.
        to_first: channel last -> first.
        tp_size: of the own stage.
    """

    is_first: bool
    to_last: Channel
    to_first: Channel
    tp_size: int

    def copy_from_first(self, weight: torch.Tensor) -> None:
        """Give the last stage the first stage's values, in place; called once by all ranks of both stages."""
        channel = self.to_last
        plan = channel.plan(self._whole_shape(weight), is_sharded=True)
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
        shape = self._whole_shape(gradient)
        received, receive = other.post_recv(other.plan(shape, is_sharded=True), gradient.dtype, requires_grad=False)
        send = own.post_send(gradient, own.plan(shape, is_sharded=True), gradient.dtype)
        receive.wait()
        # The send reads the gradient's own memory.
        send.wait()
        gradient.add_(received)

    def _whole_shape(self, part: torch.Tensor) -> tuple[int, int]:
        rows, columns = part.shape
        return rows * self.tp_size, columns


def tied_weight_specs(layout: PipelineLayout) -> tuple[tuple[ChannelSpec, ChannelSpec], ...]:
    """Plan the channels between the first and the last stage, one pair per replica, in one order for all ranks.

    Returns:
        Pairs (first -> last, last -> first).
    """
    pairs = []
    for dp_rank, cp_rank in layout.replicas:
        first = layout.tp_ranks(0, dp_rank, cp_rank)
        last = layout.tp_ranks(layout.num_stages - 1, dp_rank, cp_rank)
        pairs.append(
            (_spec("tied embedding, first->last", first, last), _spec("tied embedding, last->first", last, first))
        )
    return tuple(pairs)


def _spec(name: str, src: tuple[int, ...], dst: tuple[int, ...]) -> ChannelSpec:
    probe_rows = len(src) * len(dst)
    return ChannelSpec(
        name=name,
        unit="step",
        plan_for=lambda shape, is_sharded: plan_vocabulary_exchange(shape, src, dst),
        probe=plan_vocabulary_exchange((probe_rows, 1), src, dst),
    )
