"""One side of a boundary: which ranks of a stage take part, and what each of them holds of the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from vtp_plugin.boundary.spread import Box, Holding, Spread, even_cuts, num_rows, rows_of
from vtp_plugin.errors import ConfigError

Shape = tuple[int, ...]
Sizes = tuple[int, int, int]
"""Of a side: its tensor-parallel ranks, its rows of them, and its replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The ranks of one stage that take part in a boundary, and how they hold a tensor `[S, B, H]`.

    Attributes:
        ranks_by_cp: Global ranks by tensor-parallel rank, for every context-parallel rank that the boundary joins: one
            row where both stages have the same context-parallel size, since their replicas do not mix then. Of
            several replicas the rows of the first one come first.
        num_replicas: Data-parallel replicas that are joined; each holds an even part of the batch.
    """

    ranks_by_cp: tuple[tuple[int, ...], ...]
    num_replicas: int = 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, the leader first."""
        return self.ranks_by_cp[0] if len(self.ranks_by_cp) == 1 else tuple(chain.from_iterable(self.ranks_by_cp))

    @property
    def sizes(self) -> Sizes:
        """What plans depend on: two sides of equal sizes differ only in the numbers of their ranks."""
        return len(self.ranks_by_cp[0]), len(self.ranks_by_cp), self.num_replicas

    @property
    def cp(self) -> int:
        """Context-parallel ranks that the boundary joins."""
        return len(self.ranks_by_cp) // self.num_replicas

    def num_parts(self, *, is_sharded: bool) -> int:
        """Count into how many parts the sequence is cut over the ranks.

        >>> side = Side(ranks_by_cp=((0, 1), (2, 3)))
        >>> side.num_parts(is_sharded=False), side.num_parts(is_sharded=True)
        (2, 4)
        """
        return self.cp * (len(self.ranks_by_cp[0]) if is_sharded else 1)

    def whole_shape(self, local: Sequence[int], *, is_sharded: bool) -> Shape:
        """Give the shape of the whole tensor for the part `[S, B, ...]` of one rank.

        >>> Side(ranks_by_cp=((0,), (1,)), num_replicas=2).whole_shape((8, 2, 4), is_sharded=False)
        (8, 4, 4)
        """
        first, *rest = local
        if self.num_replicas > 1:
            rest[0] *= self.num_replicas
        return (first * self.num_parts(is_sharded=is_sharded), *rest)

    def local_shape(self, whole: Sequence[int], *, is_sharded: bool) -> Shape:
        """Give the shape of the part of one rank; inverse of :meth:`whole_shape`."""
        first, *rest = whole
        if self.num_replicas > 1:
            rest[0] //= self.num_replicas
        return (first // self.num_parts(is_sharded=is_sharded), *rest)

    def spread(self, shape: Shape, *, is_sharded: bool) -> Spread:
        """Say what each rank holds of a tensor.

        Under context parallelism a rank has a chunk from the front and its counterpart from the back, one behind the
        other (Megatron 0.19, `get_batch_on_this_cp_rank`); sequence parallelism cuts these rows evenly. Replicas have
        the parts of the batch in their order.

        Args:
            shape: Of the whole tensor, the first dimension being the sequence, or the rows of a weight; the second the
                batch, where there are several replicas.
            is_sharded: Tensor-parallel ranks hold slices, not copies (sequence parallelism).

        Raises:
            ConfigError: The sequence does not divide, or the batch.

        >>> Side(ranks_by_cp=((0,), (1,))).spread((8,), is_sharded=False).boxes_of(0)
        (((0, 2),), ((6, 8),))
        """
        cp, tp = self.cp, len(self.ranks_by_cp[0])
        batches = even_cuts(shape[1], self.num_replicas) if self.num_replicas > 1 else ()
        if len({stop - start for start, stop in batches}) > 1:
            raise ConfigError(
                f"batch {shape[1]} cannot be cut for the {self.num_replicas} replicas of ranks {self.ranks}: use "
                f"a multiple of {self.num_replicas}"
            )
        rows = num_rows(_chunks(shape, 0, cp))
        if shape[0] % (2 * cp if cp > 1 else 1) or (is_sharded and rows % tp):
            multiple = (2 * cp if cp > 1 else 1) * (tp if is_sharded else 1)
            raise ConfigError(
                f"sequence length {shape[0]} cannot be cut for ranks {self.ranks} (context-parallel size {cp}, "
                f"tensor-parallel size {tp}{', sequence parallel' if is_sharded else ''}): use a multiple of {multiple}"
            )
        holdings = []
        for row, ranks in enumerate(self.ranks_by_cp):
            replica, cp_rank = divmod(row, cp)
            boxes = _chunks(shape, cp_rank, cp)
            if batches:
                boxes = tuple((box[0], batches[replica], *box[2:]) for box in boxes)
            cuts = even_cuts(rows, tp) if is_sharded else ((0, rows),) * tp
            holdings += [Holding(rank=rank, boxes=rows_of(boxes, *cut)) for rank, cut in zip(ranks, cuts, strict=True)]
        return Spread(shape=shape, holdings=tuple(holdings))


def _chunks(shape: Shape, cp_rank: int, cp: int) -> tuple[Box, ...]:
    """Return what a context-parallel rank holds, in the order of its memory."""
    rest = tuple((0, length) for length in shape[1:])
    if cp == 1:
        return (((0, shape[0]), *rest),)
    chunks = even_cuts(shape[0], 2 * cp)
    return tuple((chunks[index], *rest) for index in (cp_rank, 2 * cp - 1 - cp_rank))


def number_ranks(sizes: Sizes, *, first: int) -> Side:
    """Make a side whose ranks are counted from `first`.

    >>> number_ranks((2, 2, 1), first=4).ranks_by_cp
    ((4, 5), (6, 7))
    """
    tp, num_rows, num_replicas = sizes
    rows = (range(start, start + tp) for start in range(first, first + tp * num_rows, tp))
    return Side(ranks_by_cp=tuple(map(tuple, rows)), num_replicas=num_replicas)
