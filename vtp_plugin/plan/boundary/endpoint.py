"""One endpoint of a boundary: the ranks of a stage that take part, and what each of them holds of the tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import floordiv, mul

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.boundary.sharding import LocalBoxes, Sharding, even_cuts, num_rows, rows_of
from vtp_plugin.util.index_boxes import Box

Shape = tuple[int, ...]
Sizes = tuple[int, int, int]
"""Sizes of an endpoint: tensor-parallel ranks in a row, rows, and replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The ranks of one stage that take part in a boundary, and how they hold a tensor `[S, B, H]`.

    Attributes:
        ranks_by_cp: Global ranks by tensor-parallel rank, one row for every context-parallel rank that the boundary
            joins: a single row if both stages have the same context-parallel size, because then context-parallel ranks
            do not mix. With several replicas, the rows of the first one come first.
        num_replicas: Data-parallel replicas that the boundary joins; each holds an even part of the batch.
        is_zigzag: Whether a row holds a chunk from each end of the sequence, as Megatron's context-parallel ranks do;
            else one piece.
    """

    ranks_by_cp: tuple[tuple[int, ...], ...]
    num_replicas: int = 1
    is_zigzag: bool = True

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, the leader first."""
        return self.ranks_by_cp[0] if len(self.ranks_by_cp) == 1 else tuple(chain.from_iterable(self.ranks_by_cp))

    @property
    def sizes(self) -> Sizes:
        """What plans depend on: between endpoints of equal sizes, plans differ only in the numbers of the ranks."""
        return len(self.ranks_by_cp[0]), len(self.ranks_by_cp), self.num_replicas

    @property
    def cp(self) -> int:
        """Number of context-parallel ranks that the boundary joins."""
        return len(self.ranks_by_cp) // self.num_replicas

    @property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of every replica.

        >>> Endpoint(ranks_by_cp=((0, 1), (2, 3), (4, 5), (6, 7)), num_replicas=2).shares
        ((0, 1, 2, 3), (4, 5, 6, 7))
        """
        starts = range(0, len(self.ranks_by_cp), self.cp)
        return tuple(tuple(chain.from_iterable(self.ranks_by_cp[start : start + self.cp])) for start in starts)

    def num_parts(self, *, is_sharded: bool) -> int:
        """Return the number of parts into which the ranks cut the sequence.

        >>> endpoint = Endpoint(ranks_by_cp=((0, 1), (2, 3)))
        >>> endpoint.num_parts(is_sharded=False), endpoint.num_parts(is_sharded=True)
        (2, 4)
        """
        return self.cp * (len(self.ranks_by_cp[0]) if is_sharded else 1)

    def whole_shape(self, local: Sequence[int], *, is_sharded: bool) -> Shape:
        """Return the shape `[S, B, ...]` of the whole tensor, given the shape of one rank's part.

        >>> Endpoint(ranks_by_cp=((0,), (1,)), num_replicas=2).whole_shape((8, 2, 4), is_sharded=False)
        (8, 4, 4)
        """
        return tuple(map(mul, local, self._num_parts_by_dim(is_sharded)))

    def local_shape(self, whole: Sequence[int], *, is_sharded: bool) -> Shape:
        """Return the shape of one rank's part, given that of the whole tensor; inverse of :meth:`whole_shape`."""
        return tuple(map(floordiv, whole, self._num_parts_by_dim(is_sharded)))

    def _num_parts_by_dim(self, is_sharded: bool) -> Iterator[int]:
        return chain((self.num_parts(is_sharded=is_sharded), self.num_replicas), repeat(1))

    def sharding(self, shape: Shape, *, is_sharded: bool) -> Sharding:
        """Return what each rank holds of a tensor.

        Under context parallelism a rank has a chunk from the front of the sequence, followed by its counterpart from
        the back (Megatron 0.19, `get_batch_on_this_cp_rank`), unless `is_zigzag` is false; sequence parallelism cuts
        these rows evenly. Replicas hold the parts of the batch in their order.

        Args:
            shape: Shape of the whole tensor: first the sequence, or the rows of a weight; second the batch, if there
                are several replicas.
            is_sharded: Whether tensor-parallel ranks hold slices, not copies (sequence parallelism).

        Raises:
            ConfigError: The sequence or the batch does not divide evenly.

        >>> Endpoint(ranks_by_cp=((0,), (1,))).sharding((8,), is_sharded=False).boxes_of(0)
        (((0, 2),), ((6, 8),))
        """
        cp, tp = self.cp, len(self.ranks_by_cp[0])
        batches = even_cuts(shape[1], self.num_replicas) if self.num_replicas > 1 else ()
        if len({stop - start for start, stop in batches}) > 1:
            raise ConfigError(
                f"batch {shape[1]} cannot be cut for the {self.num_replicas} replicas of ranks {self.ranks}: use "
                f"a multiple of {self.num_replicas}"
            )
        num_chunks = cp * (2 if self.is_zigzag and cp > 1 else 1)
        rows = num_rows(_chunks(shape, 0, cp, self.is_zigzag))
        if shape[0] % num_chunks or (is_sharded and rows % tp):
            multiple = num_chunks * (tp if is_sharded else 1)
            raise ConfigError(
                f"sequence length {shape[0]} cannot be cut for ranks {self.ranks} (context-parallel size {cp}, "
                f"tensor-parallel size {tp}{', sequence parallel' if is_sharded else ''}): use a multiple of {multiple}"
            )
        holdings = []
        for row, ranks in enumerate(self.ranks_by_cp):
            replica, cp_rank = divmod(row, cp)
            boxes = _chunks(shape, cp_rank, cp, self.is_zigzag)
            if batches:
                boxes = tuple((box[0], batches[replica], *box[2:]) for box in boxes)
            cuts = even_cuts(rows, tp) if is_sharded else ((0, rows),) * tp
            holdings += [
                LocalBoxes(rank=rank, boxes=rows_of(boxes, *cut)) for rank, cut in zip(ranks, cuts, strict=True)
            ]
        return Sharding(shape=shape, holdings=tuple(holdings))


def _chunks(shape: Shape, cp_rank: int, cp: int, is_zigzag: bool) -> tuple[Box, ...]:
    """Return the boxes of a context-parallel rank, in the order of its local tensor.

    Under a causal mask late rows cost more than early ones; a chunk from each end gives all ranks equal work.
    """
    rest = tuple((0, length) for length in shape[1:])
    if cp == 1:
        return (((0, shape[0]), *rest),)
    if not is_zigzag:
        return ((even_cuts(shape[0], cp)[cp_rank], *rest),)
    chunks = even_cuts(shape[0], 2 * cp)
    return tuple((chunks[index], *rest) for index in (cp_rank, 2 * cp - 1 - cp_rank))


def number_ranks(sizes: Sizes, *, first: int) -> Endpoint:
    """Make an endpoint of these sizes whose ranks count up from `first`.

    >>> number_ranks((2, 2, 1), first=4).ranks_by_cp
    ((4, 5), (6, 7))
    """
    tp, num_rows, num_replicas = sizes
    rows = (range(start, start + tp) for start in range(first, first + tp * num_rows, tp))
    return Endpoint(ranks_by_cp=tuple(map(tuple, rows)), num_replicas=num_replicas)
