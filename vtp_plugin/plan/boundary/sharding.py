"""How one global tensor is sharded over the ranks of a stage.

Everything is in global coordinates: a box is a half-open index interval per dimension of the global tensor, for
activations ``[S, B, H]`` (sequence, batch, hidden), for a weight ``[V, H]``. A :class:`Sharding` says which boxes each
rank holds; it does not know why (tensor, sequence, context or data parallelism), and nothing about processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vtp_plugin.errors import PlanError
from vtp_plugin.util.index_boxes import Box, box_shape, format_box, overlaps, volume, whole_box


def rows_of(boxes: Sequence[Box], start: int, stop: int) -> tuple[Box, ...]:
    """Return the boxes that fill the rows `start:stop` of a rank's local tensor, where the rank holds `boxes`.

    In the local tensor the boxes follow each other along the first dimension.

    >>> rows_of([((0, 2), (0, 3)), ((6, 8), (0, 3))], 1, 3)
    (((1, 2), (0, 3)), ((6, 7), (0, 3)))
    """
    found: list[Box] = []
    base = 0
    for (first, last), *rest in boxes:
        inside = (first + max(start - base, 0), min(last, first + stop - base))
        if inside[0] < inside[1]:
            found.append((inside, *rest))
        base += last - first
    return tuple(found)


def num_rows(boxes: Sequence[Box]) -> int:
    """Count the rows of a rank's local tensor: the sum of the boxes' lengths along the first dimension.

    >>> num_rows([((0, 2), (0, 3)), ((6, 8), (0, 3))])
    4
    """
    return sum(box[0][1] - box[0][0] for box in boxes)


def even_cuts(length: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Cut ``range(length)`` into `parts` consecutive intervals; sizes differ by at most one, none exceeds the first.

    Cuts lie at the fractions ``k / parts`` of the length, rounded up. Rounding keeps their order, so if one length is
    cut into 4 and into 6 parts, two pieces overlap only if the same fractions of the whole overlap, whatever the
    length: the links of a plan do not depend on the shape. With more parts than elements some intervals are empty.

    >>> even_cuts(7, 3)
    ((0, 3), (3, 5), (5, 7))
    >>> even_cuts(4, 8)[:3]
    ((0, 1), (1, 1), (1, 2))
    """
    if length < 0 or parts < 1:
        raise PlanError(f"cannot cut {length} elements into {parts} parts")
    bounds = [-(-length * part // parts) for part in range(parts + 1)]
    return tuple(zip(bounds, bounds[1:], strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBoxes:
    """What one rank holds of the global tensor.

    Attributes:
        rank: Global rank.
        boxes: Disjoint boxes of the global tensor, in the order in which they follow each other along the first
            dimension of the local tensor: normally one, several under context parallelism, none if there are more
            ranks than slices.
    """

    rank: int
    boxes: tuple[Box, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the rank's tensor; the boxes must have equal lengths beyond the first dimension.

        >>> LocalBoxes(rank=0, boxes=(((0, 2), (0, 3)), ((6, 8), (0, 3)))).local_shape
        (4, 3)
        """
        rest = {box_shape(box[1:]) for box in self.boxes}
        if len(rest) != 1:
            raise PlanError(f"rank {self.rank} holds boxes of different widths: {self.boxes}")
        return (num_rows(self.boxes), *rest.pop())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """A global tensor cut into disjoint boxes, each held by one or more ranks.

    The constructor checks two invariants: some rank holds every element, and two boxes of any two ranks are either the
    same box or share no element (a sharding is one partition, not several that overlap).

    Attributes:
        shape: Shape of the global tensor, every length positive.
        holdings: What each rank holds, in the order of the stage's ranks; the first is the leader.
        summands: Disjoint groups of ranks that hold partial sums of the same boxes: the sum over a group is the tensor
            (`Partial` of a ``DTensor``). Either all ranks that hold anything are in a group, or there is none.
    """

    shape: tuple[int, ...]
    holdings: tuple[LocalBoxes, ...]
    summands: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise PlanError(f"empty global shape {self.shape}")
        if not self.holdings:
            raise PlanError("a spread needs at least one rank")
        if len(set(self.ranks)) != len(self.ranks):
            raise PlanError(f"rank listed twice in {self.ranks}")
        for holding in self.holdings:
            if len(set(holding.boxes)) != len(holding.boxes):
                raise PlanError(f"rank {holding.rank} lists a box twice")
        _require_alike(self)
        _require_partition(self.shape, list({box for holding in self.holdings for box in holding.boxes}))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks in the order of the holdings."""
        return tuple(holding.rank for holding in self.holdings)

    def boxes_of(self, rank: int) -> tuple[Box, ...]:
        """Return the boxes that `rank` holds, in the order of its local tensor.

        Raises:
            KeyError: `rank` is not in this sharding.

        >>> sharded((4, 2), (6, 7), dim=0).boxes_of(7)
        (((2, 4), (0, 2)),)
        """
        for holding in self.holdings:
            if holding.rank == rank:
                return holding.boxes
        raise KeyError(rank)

    @property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that hold the same boxes, in the order of the ranks.

        >>> replicated((4,), (0, 1)).copies, sharded((4,), (0, 1), dim=0).copies
        (((0, 1),), ((0,), (1,)))
        """
        return _grouped((holding.boxes, holding.rank) for holding in self.holdings)

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks whose boxes are equal beyond the first dimension, in the order of the ranks.

        Each group is a replica with different samples of a batch. A rank that holds nothing is in no group.

        >>> halves = [((0, 4), (0, 2)), ((0, 4), (2, 3))]
        >>> holdings = tuple(LocalBoxes(rank=rank, boxes=(box,)) for rank, box in enumerate(halves))
        >>> Sharding(shape=(4, 3), holdings=holdings).columns, sharded((4, 3), (0, 1), dim=0).columns
        (((0,), (1,)), ((0, 1),))
        """
        return _grouped((holding.boxes[0][1:], holding.rank) for holding in self.holdings if holding.boxes)

    def column_box(self, rank: int) -> Box:
        """Return the box of a rank's whole column: all rows, and the rank's interval in the other dimensions."""
        return ((0, self.shape[0]), *self.boxes_of(rank)[0][1:])

    def divided(self) -> Sharding:
        """Divide the boxes that several ranks hold copies of evenly among these ranks, by rows of the local tensor.

        In the result exactly one rank holds each element. Two ranks must hold the same boxes, or no common box.

        >>> replicated((5,), (0, 1)).divided() == sharded((5,), (0, 1), dim=0)
        True
        """
        boxes_of: dict[int, tuple[Box, ...]] = {}
        for ranks in self.copies:
            boxes = self.boxes_of(ranks[0])
            for rank, cut in zip(ranks, even_cuts(num_rows(boxes), len(ranks)), strict=True):
                boxes_of[rank] = rows_of(boxes, *cut)
        holdings = tuple(LocalBoxes(rank=rank, boxes=boxes_of[rank]) for rank in self.ranks)
        divided = Sharding(shape=self.shape, holdings=holdings)
        held = sum(volume(box) for holding in holdings for box in holding.boxes)
        if held != math.prod(self.shape):
            raise PlanError(f"ranks share some of their boxes, but not all: {self.holdings}")
        return divided


def _require_alike(sharding: Sharding) -> None:
    """Refuse summands that do not hold the same boxes, or leave a rank out."""
    members = sorted(rank for group in sharding.summands for rank in group)
    if members and members != sorted(holding.rank for holding in sharding.holdings if holding.boxes):
        raise PlanError(f"summands {sharding.summands} of the ranks {sharding.ranks}")
    for group in sharding.summands:
        if len({sharding.boxes_of(rank) for rank in group}) > 1:
            raise PlanError(f"summands {group} hold different boxes")


def _grouped(keyed_ranks: Iterable[tuple[object, int]]) -> tuple[tuple[int, ...], ...]:
    """Group ranks by their keys; groups and members keep the order of the ranks."""
    groups: dict[object, list[int]] = {}
    for key, rank in keyed_ranks:
        groups.setdefault(key, []).append(rank)
    return tuple(map(tuple, groups.values()))


def _require_partition(shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Refuse distinct `boxes` that leave a gap in the tensor, or overlap."""
    for box in boxes:
        if len(box) != len(shape):
            raise PlanError(f"box {format_box(box)} does not have the dimensions of {shape}")
        inside = all(0 <= start < stop <= length for (start, stop), length in zip(box, shape, strict=True))
        if not inside:
            raise PlanError(f"box {format_box(box)} is empty or leaves the tensor {shape}")
    for i, j in overlaps(boxes):
        raise PlanError(f"boxes {format_box(boxes[i])} and {format_box(boxes[j])} overlap but differ")
    # Disjoint boxes inside the tensor cover it if and only if they have as many elements as the tensor.
    held = sum(volume(box) for box in boxes)
    if held != math.prod(shape):
        raise PlanError(f"{held} elements are held, the tensor {shape} has {math.prod(shape)}")


def replicated(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Sharding:
    """Give each of `ranks` the whole tensor, as tensor parallelism does with activations.

    >>> [h.boxes for h in replicated((4,), (0, 1)).holdings]
    [(((0, 4),),), (((0, 4),),)]
    """
    return Sharding(shape=shape, holdings=tuple(LocalBoxes(rank=rank, boxes=(whole_box(shape),)) for rank in ranks))


def sharded(shape: tuple[int, ...], ranks: tuple[int, ...], dim: int) -> Sharding:
    """Cut a tensor along `dim` by :func:`even_cuts`, one piece for each of `ranks` in their order.

    If there are more ranks than slices, some ranks hold nothing.

    Args:
        shape: Global shape.
        ranks: Global ranks in the order of the pieces.
        dim: Dimension that is cut, from 0 to ``len(shape) - 1``: 0 for sequence parallelism ``[S, B, H]`` and for a
            vocabulary-parallel weight ``[V, H]``.

    >>> [h.boxes for h in sharded((5,), (3, 4), dim=0).holdings]
    [(((0, 3),),), (((3, 5),),)]
    """
    if not 0 <= dim < len(shape):
        raise PlanError(f"dimension {dim} of shape {shape}")
    whole = whole_box(shape)
    pieces = [(*whole[:dim], cut, *whole[dim + 1 :]) for cut in even_cuts(shape[dim], len(ranks))]
    return Sharding(
        shape=shape,
        holdings=tuple(
            LocalBoxes(rank=rank, boxes=(piece,) if volume(piece) else ())
            for rank, piece in zip(ranks, pieces, strict=True)
        ),
    )
