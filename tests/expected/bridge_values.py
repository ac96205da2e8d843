"""What a bridge must do, restated without the plugin's plans: one process cuts, adds up and joins whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vtp_plugin.plan.boundary.endpoint import BridgeEndpoint, SequenceCut

Arrays = dict[int, np.ndarray]
"""Tensor of every rank: `[S, B, H]`, or `[tokens, H]`."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A module's grid at a bridge; tensor-parallel ranks are next to each other, then context-parallel ones.

    Attributes:
        tp, cp, dp: its sizes.
        sequence, is_sharded: what its ranks hold.
    """

    tp: int
    cp: int
    dp: int
    sequence: str = "whole"
    is_sharded: bool = False

    @property
    def num_ranks(self) -> int:
        return self.tp * self.cp * self.dp

    def end(self, first_rank: int) -> BridgeEndpoint:
        ranks = np.arange(first_rank, first_rank + self.num_ranks).reshape(self.dp, self.cp, self.tp).tolist()
        return BridgeEndpoint(
            ranks=tuple(tuple(tuple(row) for row in rows) for rows in ranks),
            sequence=SequenceCut(self.sequence),
            is_sharded=self.is_sharded,
        )

    def num_shares(self, num_dims: int) -> int:
        """Count the parts into which the batch is cut: of `[tokens, H]` slices are parts of the batch as well."""
        cuts = (self.cp if self.sequence != "whole" else 1) * (self.tp if self.is_sharded else 1)
        return self.dp * (cuts if num_dims == 2 else 1)

    def step(self) -> int:
        """Return what a sequence must be a multiple of."""
        zigzag = 2 if self.sequence == "zigzag" and self.cp > 1 else 1
        return zigzag * (self.cp if self.sequence != "whole" else 1) * (self.tp if self.is_sharded else 1)

    def coordinates(self, first_rank: int) -> list[tuple[int, int, int, int]]:
        """List rank, data-parallel, context-parallel and tensor-parallel rank."""
        places = [(d, c, t) for d in range(self.dp) for c in range(self.cp) for t in range(self.tp)]
        return [(first_rank + index, *place) for index, place in enumerate(places)]

    def share(self, d: int, c: int, t: int, num_dims: int) -> int:
        if num_dims == 3:
            return d
        index = d * self.cp + c if self.sequence != "whole" else d
        return index * self.tp + t if self.is_sharded else index


def cut(units: Sequence[np.ndarray], sizes: Sizes, first_rank: int) -> Arrays:
    """Give every rank its part of a tensor whose batch consists of these units."""
    num_dims = units[0].ndim
    found: Arrays = {}
    for rank, d, c, t in sizes.coordinates(first_rank):
        index = sizes.share(d, c, t, num_dims)
        per_share = len(units) // sizes.num_shares(num_dims)
        own = np.concatenate(units[index * per_share : (index + 1) * per_share], axis=1 if num_dims == 3 else 0)
        found[rank] = _rows(own, sizes, c, t)[0] if num_dims == 3 else own
    return found


def _rows(own: np.ndarray, sizes: Sizes, c: int, t: int) -> tuple[np.ndarray, list[int]]:
    """Return a rank's rows of its replica's sequence, and their numbers."""
    rows = np.arange(len(own))
    if sizes.sequence == "plain":
        rows = np.split(rows, sizes.cp)[c]
    elif sizes.sequence == "zigzag" and sizes.cp > 1:
        chunks = np.split(rows, 2 * sizes.cp)
        rows = np.concatenate([chunks[c], chunks[-1 - c]])
    if sizes.is_sharded:
        rows = np.split(rows, sizes.tp)[t]
    return own[rows], rows.tolist()


def cotangents(
    units: Sequence[np.ndarray], sizes: Sizes, first_rank: int, draw: Callable[[tuple[int, ...]], np.ndarray]
) -> Arrays:
    """Draw a gradient for every rank: equal on tensor-parallel copies, not on context-parallel ones."""
    parts = cut(units, sizes, first_rank)
    made: dict[tuple[int, ...], np.ndarray] = {}
    found: Arrays = {}
    for rank, d, c, t in sizes.coordinates(first_rank):
        key = (d, c, t if sizes.is_sharded else 0)
        if key not in made:
            made[key] = draw(parts[rank].shape)
        found[rank] = made[key]
    return found


def gradient(units: Sequence[np.ndarray], sizes: Sizes, first_rank: int, grads: Arrays) -> list[np.ndarray]:
    """Add up what the ranks have: the gradient of the whole tensor, unit by unit; each element in the ranks' order."""
    num_dims = units[0].ndim
    axis = 1 if num_dims == 3 else 0
    lengths = [unit.shape[axis] for unit in units]
    whole = [np.zeros_like(unit) for unit in units]
    for rank, d, c, t in sizes.coordinates(first_rank):
        if t > 0 and not sizes.is_sharded:
            continue  # a copy
        index = sizes.share(d, c, t, num_dims)
        per_share = len(units) // sizes.num_shares(num_dims)
        own = range(index * per_share, (index + 1) * per_share)
        pieces = np.split(grads[rank], np.cumsum([lengths[unit] for unit in own])[:-1], axis=axis)
        for unit, piece in zip(own, pieces, strict=True):
            if num_dims == 3:
                whole[unit][_rows(whole[unit], sizes, c, t)[1]] += piece
            else:
                whole[unit] += piece
    return whole


def inner(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> int:
    """Return the inner product of two tensors."""
    return sum(int((a * b).sum()) for a, b in zip(first, second, strict=True))


def dst_inner(forwarded: Arrays, grads: Arrays, sizes: Sizes, first_rank: int) -> int:
    """Return the inner product at the destination: copies of tensor-parallel ranks count once."""
    total = 0
    for rank, _, _, t in sizes.coordinates(first_rank):
        if t == 0 or sizes.is_sharded:
            total += int((forwarded[rank] * grads[rank]).sum())
    return total
