"""Both sides of a boundary: how each cuts a tensor, and which part each rank holds.

How one global tensor is sharded over the ranks of a stage.

Everything is in global coordinates: a box is a half-open index interval per dimension of the global tensor, for
activations ``[S, B, H]`` (sequence, batch, hidden), for a weight ``[V, H]``. A :class:`Sharding` says which boxes each
rank holds; it does not know why (tensor, sequence, context or data parallelism), and nothing about processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import floordiv, mul

from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.util.index_boxes import Box, box_shape, format_box, intersect, overlaps, volume, whole_box
from vtp_plugin.util.text import TextEnum


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


Widths = Sequence[int]
"""Length in memory of every unit of the second dimension, where a plan counts units and not elements; see
:class:`vtp_plugin.plan.boundary.bridge_spec.BridgeSpec`."""


def local_slices(box: Box, holding: LocalBoxes, widths: Widths | None = None) -> tuple[slice, ...]:
    """Find a global box in the local tensor of a rank.

    Args:
        box: Box in global coordinates, inside one that the rank holds.
        holding: What the rank holds; in the local tensor the boxes follow each other along the first dimension.
        widths: Length of every unit of the second dimension, in elements; None if each unit is one element.

    Returns:
        One slice per dimension that indexes the local tensor.

    >>> local_slices(((3, 4), (0, 2)), LocalBoxes(rank=1, boxes=(((2, 4), (0, 2)),)))
    (slice(1, 2, None), slice(0, 2, None))
    >>> local_slices(((7, 8),), LocalBoxes(rank=1, boxes=(((0, 2),), ((6, 8),))))
    (slice(3, 4, None),)
    >>> local_slices(((0, 2), (2, 3)), LocalBoxes(rank=1, boxes=(((0, 2), (1, 3)),)), widths=(5, 4, 3))
    (slice(0, 2, None), slice(4, 7, None))
    """
    base = 0
    for held in holding.boxes:
        if intersect(box, held) == box:
            first, *rest = (
                slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, held, strict=True)
            )
            if widths is not None:
                (start, stop), (origin, _) = box[1], held[1]
                rest[0] = slice(sum(widths[origin:start]), sum(widths[origin:stop]))
            return (slice(first.start + base, first.stop + base), *rest)
        base += held[0][1] - held[0][0]
    raise PlanError(f"rank {holding.rank} holds {holding.boxes}, not {format_box(box)}")


def local_shape(holding: LocalBoxes, widths: Widths | None = None) -> tuple[int, ...]:
    """Return the shape of a rank's local tensor; the arguments are those of :func:`local_slices`.

    >>> local_shape(LocalBoxes(rank=0, boxes=(((0, 2), (1, 3), (0, 7)),)), widths=(5, 4, 3))
    (2, 7, 7)
    """
    shape = holding.local_shape
    if widths is None:
        return shape
    (start, stop) = holding.boxes[0][1]
    return (shape[0], sum(widths[start:stop]), *shape[2:])


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


class SequenceCut(TextEnum):
    """How the context-parallel ranks of a replica cut a sequence.

    WHOLE: not at all; each rank holds all of it, and the gradients of the ranks add up. PLAIN: consecutive pieces.
    ZIGZAG: a chunk from each end, as Megatron cuts under a causal mask.
    """

    WHOLE = "whole"
    PLAIN = "plain"
    ZIGZAG = "zigzag"


@dataclass(frozen=True, kw_only=True)
class BridgeEndpoint:
    """One module's ranks at a bridge, and how they hold the tensor.

    Attributes:
        ranks: Global ranks by data-parallel, context-parallel and tensor-parallel rank.
        sequence: How context-parallel ranks cut the sequence.
        is_sharded: Whether tensor-parallel ranks hold slices of the sequence (sequence parallelism), not copies.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    sequence: SequenceCut = SequenceCut.WHOLE
    is_sharded: bool = False

    @property
    def members(self) -> tuple[int, ...]:
        """All ranks, replica after replica.

        >>> BridgeEndpoint(ranks=(((4, 5),), ((6, 7),))).members
        (4, 5, 6, 7)
        """
        return tuple(chain.from_iterable(self.replicas))

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every data-parallel replica."""
        return tuple(tuple(chain.from_iterable(rows)) for rows in self.ranks)

    @property
    def summands(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks whose gradients add up: those that use the same tensor at different positions of the
        sequence.

        Tensor-parallel ranks are never among them: each of them has the complete gradient of what it holds.

        >>> BridgeEndpoint(ranks=(((0, 1), (2, 3)),)).summands
        ((0, 2), (1, 3))
        """
        if self.sequence is not SequenceCut.WHOLE or len(self.ranks[0]) == 1:
            return ()
        return tuple(column for rows in self.ranks for column in zip(*rows, strict=True))

    def endpoint(self, *, num_dims: int) -> Endpoint:
        """Return the ranks as an endpoint of a boundary: rows of ranks that hold copies of one part of the tensor.

        Args:
            num_dims: Number of the tensor's dimensions: 3 for `[S, B, H]`; 2 for `[tokens, H]`, whose first dimension
                is the batch.

        Raises:
            ConfigError: The tokens of a batch cannot be cut in zig-zag.
        """
        if num_dims == 2 and self.sequence is SequenceCut.ZIGZAG and len(self.ranks[0]) > 1:
            raise ConfigError(
                "a bridge of tensors [tokens, H] cannot cut in zig-zag: one tensor holds several samples; name a plain "
                "cut, or send [S, B, H]"
            )
        if self.sequence is SequenceCut.WHOLE:
            # Slices of one context-parallel rank are copies of those of the others.
            rows = tuple(zip(*replica, strict=True) for replica in self.ranks) if self.is_sharded else ()
            lists = tuple(tuple(one) for one in rows) if rows else tuple((ranks,) for ranks in self.replicas)
        elif num_dims == 2 and self.is_sharded:
            lists = tuple(tuple((rank,) for rank in ranks) for ranks in self.replicas)
        else:
            lists = self.ranks
        num_replicas = len(lists) * (len(lists[0]) if num_dims == 2 else 1)
        is_zigzag = self.sequence is SequenceCut.ZIGZAG
        return Endpoint(ranks_by_cp=tuple(chain.from_iterable(lists)), num_replicas=num_replicas, is_zigzag=is_zigzag)

    def is_sliced(self, *, num_dims: int) -> bool:
        """Whether the ranks of a row of :meth:`endpoint` hold slices of the row's part, not copies."""
        return self.is_sharded and self.sequence is not SequenceCut.WHOLE and num_dims == 3


def require_disjoint(src: range, dst: range) -> None:
    """Refuse two modules that have some ranks in common, but not all.

    Raises:
        ConfigError: The modules share some of their ranks.

    >>> require_disjoint(range(4), range(4, 8)), require_disjoint(range(4), range(4))
    (None, None)
    """
    common = range(max(src.start, dst.start), min(src.stop, dst.stop))
    if common and src != dst:
        raise ConfigError(
            f"the modules at a bridge, of the ranks {src.start} to {src.stop - 1} and {dst.start} to {dst.stop - 1}, "
            f"have the ranks {', '.join(map(str, common))} in common; give them disjoint grids, or the same ranks and "
            "a ColocatedBridgeCommunicator"
        )


def boundary_ranks(
    shape: Sequence[int], dim_names: Sequence[str], first_rank: int, *, is_last: bool
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """List the ranks of one stage of a grid, by data-parallel, context-parallel and tensor-parallel rank.

    Args:
        shape: Length of every dimension, the first changing fastest.
        dim_names: Name of every dimension: `tp`, `cp`, `pp`, `dp`, or others of length 1.
        first_rank: Lowest global rank of the grid.
        is_last: Take the last stage, not the first.

    Raises:
        ConfigError: The grid has ranks along another dimension.

    >>> boundary_ranks([2, 1, 2, 2], ["tp", "cp", "pp", "dp"], 8, is_last=True)
    (((10, 11),), ((14, 15),))
    """
    length = dict(zip(dim_names, shape, strict=True))
    stride = {name: math.prod(shape[:index]) for index, name in enumerate(dim_names)}
    if others := [name for name in dim_names if name not in ("tp", "cp", "pp", "dp") and length[name] > 1]:
        raise ConfigError(
            f"a bridge's grid has the dimensions {dict(zip(dim_names, shape, strict=True))}; beside tp, cp, pp and dp "
            f"all must be 1, but {', '.join(others)} is not; use a grid without it"
        )
    start = first_rank + (length.get("pp", 1) - 1) * stride.get("pp", 0) * is_last
    dp, cp, tp = ([i * stride.get(name, 0) for i in range(length.get(name, 1))] for name in ("dp", "cp", "tp"))
    return tuple(tuple(tuple(start + d + c + t for t in tp) for c in cp) for d in dp)
