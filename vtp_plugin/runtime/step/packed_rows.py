"""The lengths of packed samples, as companions of activations: attention has to know where a sample ends."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.boundary.message_kind import MessageKind
from vtp_plugin.runtime.step.companion_tensors import Companion, CompanionError

_WAY_OUT = "give rows as Megatron's data sets do, with --micro-batch-size 1"


def packed_rows(row_length: int) -> Companion:
    """Return the companion by which the lengths of packed samples cross.

    Args:
        row_length: number of tokens of a row.
    """
    return Companion(
        kind=MessageKind.LENGTHS,
        shape=(row_length + 1, 1, 1),
        read=lambda row: padded_ends(row, row_length + 1),
        give=_row,
        unit="row",
        says="where its samples end",
        way_out=_WAY_OUT,
    )


def _row(ends: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a row's lengths in the form of Megatron's data sets.

    Kernels read memory at these positions, so they are checked. That waits for the device, as Megatron does a moment
    later for the longest sample.

    Raises:
        CompanionError: they do not count up inside the row.

    >>> _row(torch.tensor([0, 2, 3, 3]))
    {'cu_seqlens': tensor([[0, 2, 3, 3]]), 'max_seqlen': tensor([2])}
    """
    row = ends.flatten()
    lengths = row.diff()
    # A difference of two int32 may overflow, so the ends are looked at first.
    if bool((row[:1] != 0).any() | (row < 0).any() | (row >= row.numel()).any() | (lengths < 0).any()):
        raise CompanionError(
            "lengths of packed samples that do not count up inside their row",
            f"they start at 0 and end at {row.numel() - 1}, the tokens of a row, at most",
        )
    return {"cu_seqlens": row.view(1, -1), "max_seqlen": lengths.amax(dim=0, keepdim=True)}


def padded_ends(row: Any, length: int) -> torch.Tensor:
    """Return the ends of a row's samples, as int32 of a fixed length, padded with the last end.

    Args:
        row: a microbatch as data loaders give it; ``cu_seqlens`` is ``[1, n]``, counts up from 0, may be padded.
        length: length of the result: one more than a row has tokens.

    Raises:
        ConfigError: the row has no ``cu_seqlens`` in this form.

    >>> padded_ends({"cu_seqlens": torch.tensor([[0, 2, 5, 5]])}, 6).tolist()
    [0, 2, 5, 5, 5, 5]
    """
    given = row if isinstance(row, Mapping) else {}
    ends, padded = given.get("cu_seqlens"), given.get("cu_seqlens_padded")
    if not isinstance(ends, torch.Tensor) or padded is not None:
        what = "a row without cu_seqlens" if padded is None else "a row with cu_seqlens_padded"
        raise ConfigError(f"{what}; the cloud needs the lengths of the samples, as cu_seqlens only; {_WAY_OUT}")
    values = ends.detach().flatten().tolist()
    is_ascending = all(a <= b for a, b in pairwise(values))
    # Where a row is padded, the last end stands there several times.
    values = values[: values.index(values[-1]) + 1] if values else values
    if not 1 < len(values) <= length or values[0] != 0 or values[-1] >= length or not is_ascending:
        raise ConfigError(
            f"cu_seqlens of the shape {tuple(ends.shape)}; they must count up from 0 to at most {length - 1}, the "
            f"tokens of one row; {_WAY_OUT}"
        )
    return torch.tensor(values + values[-1:] * (length - len(values)), dtype=torch.int32)
