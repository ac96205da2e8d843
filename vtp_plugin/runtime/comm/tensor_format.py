"""The format of the tensors that cross a channel: their type, and how the ranks of both endpoints hold them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFormat:
    """What both endpoints of a channel know about its tensors.

    Attributes:
        dtype: type of every tensor.
        src_sharded: whether the sending ranks hold slices of dimension 0 (sequence parallelism, or a cut weight), not
            copies.
        dst_sharded: whether the receiving ranks want slices.
        has_variable_shapes: whether a header with the shape crosses before every tensor.
        most_tokens: largest `S * B` of a whole tensor that this rank's arguments allow; None if they set no limit.
        width: last dimension of every tensor, to check headers against; None if it is not known.
        is_batched: whether messages are coalesced into one call of the backend.
        requires_grad: whether the received tensor is a leaf that gets a gradient.
    """

    dtype: torch.dtype
    src_sharded: bool = False
    dst_sharded: bool = False
    has_variable_shapes: bool = False
    width: int | None = None
    most_tokens: int | None = None
    is_batched: bool = False
    requires_grad: bool = True
