"""How tensors cross a channel, as far as both sides know it before the first one."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFormat:
    """What both sides of a channel know about its tensors.

    Attributes:
        dtype: of every tensor.
        src_sharded: the sending ranks hold slices of dimension 0 (sequence parallelism, or a cut weight), not copies.
        dst_sharded: the receiving ranks want slices.
        has_variable_shapes: a header with the shape crosses before every tensor.
        most_tokens: of a whole tensor, `S * B`, as this rank's arguments allow; None if it has none.
        width: last dimension of every tensor, to check headers against; None if it is not known.
        is_batched: coalesce messages into one call of the backend.
        requires_grad: the received tensor is a leaf that autograd needs.
    """

    dtype: torch.dtype
    src_sharded: bool = False
    dst_sharded: bool = False
    has_variable_shapes: bool = False
    width: int | None = None
    most_tokens: int | None = None
    is_batched: bool = False
    requires_grad: bool = True
