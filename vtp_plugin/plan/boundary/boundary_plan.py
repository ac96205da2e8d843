"""Who sends which part to whom, as a plan and as the steps of one rank.

What crosses a boundary between two stages: transfers between ranks, with a collective before and after.

A plan is data. A planner of :mod:`vtp_plugin.plan.boundary.strategies` makes it from the
:class:`~vtp_plugin.plan.boundary.endpoint.Sharding` of one tensor upstream and the one downstream,
:mod:`vtp_plugin.plan.boundary.check_boundary` proves it, and the runtime carries it out without knowing which planner
made it. Gradients do not take the same plan in reverse: after a broadcast every destination has the whole gradient and
only one of them needs to send it, so the strategy plans each direction.

Portions of messages, so that a stage gathers what has come while the rest is still on its way.

A plan that ends with an all-gather takes two networks one after the other: the links between the stages, then those
inside the receiving stage. Cut into portions, the second works while the first does.

One rank's part of a plan, worked out once: carrying it out is nothing but indexing.

A plan says in global coordinates what all ranks do. :func:`compile_plan` reads from it what one rank does with a tensor
of one size: the shapes of its tensors, the slices of every message, which of them need a buffer, and its part in the
collectives inside its stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from vtp_plugin.errors import PlanError
from vtp_plugin.plan.boundary.endpoint import (
    LocalBoxes,
    Shape,
    Sharding,
    Widths,
    even_cuts,
    local_shape,
    local_slices,
    num_rows,
    rows_of,
)
from vtp_plugin.util.index_boxes import Box, format_box, volume, whole_box
from vtp_plugin.util.text import TextEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One point-to-point message.

    Attributes:
        src: Global rank that sends; every box lies inside one box that it holds.
        dst: Global rank that receives.
        boxes: What is sent, box after box in ascending order, in coordinates of the global tensor;
            :func:`vtp_plugin.plan.boundary.endpoint.local_slices` finds a box in a rank's local tensor.
    """

    src: int
    dst: int
    boxes: tuple[Box, ...]

    @property
    def num_elements(self) -> int:
        """Number of the message's elements."""
        return sum(volume(box) for box in self.boxes)

    def __str__(self) -> str:
        """Write source, destination and boxes: `0 -> 2 [0:4]`."""
        return f"{self.src} -> {self.dst} {' '.join(format_box(box) for box in self.boxes)}"


class CollectiveKind(TextEnum):
    """What ranks of one stage do together; the root of a group is its first rank.

    SUM: each member gets the sum, over all members, of what it is about to send (a reduce-scatter). GATHER: the root
    gets what all members hold. BROADCAST: the members get what arrived at the root. SCATTER: each member gets its boxes
    of what arrived at the root. ALL_GATHER: each member gets what arrived at all of them.
    """

    NONE = "none"
    SUM = "sum"
    GATHER = "gather"
    BROADCAST = "broadcast"
    SCATTER = "scatter"
    ALL_GATHER = "all-gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective inside one stage that prepares or completes an exchange.

    Attributes:
        kind: Which collective it is.
        groups: Disjoint groups of global ranks; each runs the collective among its members. Empty for NONE.
    """

    kind: CollectiveKind = CollectiveKind.NONE
    groups: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if bool(self.groups) != (self.kind is not CollectiveKind.NONE):
            raise PlanError(f"{self.kind} over {self.groups}")
        ranks = [rank for group in self.groups for rank in group]
        if len(set(ranks)) != len(ranks):
            raise PlanError(f"rank listed twice in {self.groups}")

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of all groups."""
        return tuple(rank for group in self.groups for rank in group)

    def group_of(self, rank: int) -> tuple[int, ...] | None:
        """Return the group of a rank; None if the rank does not take part."""
        return next((group for group in self.groups if rank in group), None)

    def describe(self) -> str:
        """Write one line per group; nothing for NONE."""
        return "\n".join(f"{self.kind} in {group}" for group in self.groups)


NO_COLLECTIVE = Collective()


@dataclass(frozen=True, kw_only=True)
class BoundaryPlan:
    """How one tensor gets from the ranks of one stage to the ranks of the next.

    It is for one shape, and for all ranks: a :class:`CompiledPlan` is what a single rank does of it.

    Attributes:
        src: Sharding of the tensor over the sending ranks.
        dst: Sharding over the receiving ranks, after the finish.
        start: What ranks of `src` do together before the transfers: nothing, GATHER, or SUM.
        transfers: All messages of one exchange, at most one for each pair of ranks.
        finish: What ranks of `dst` do together after the transfers.
        strategy: Key of :data:`~vtp_plugin.plan.boundary.strategies.known_strategies.STRATEGIES`; or `header` or `in
            place`, which promise nothing about their links.
    """

    src: Sharding
    dst: Sharding
    start: Collective
    transfers: tuple[Transfer, ...]
    finish: Collective
    strategy: str

    # Cached: all channels of equal sizes ask one prototype.
    @cached_property
    def participants(self) -> tuple[int, ...]:
        """Global ranks that send or receive a transfer, ascending; parts in collectives do not count."""
        return tuple(sorted({rank for transfer in self.transfers for rank in (transfer.src, transfer.dst)}))

    @cached_property
    def largest_transfer(self) -> int:
        """Number of elements of the largest transfer."""
        return max(transfer.num_elements for transfer in self.transfers)

    def sends_of(self, rank: int) -> tuple[Transfer, ...]:
        """Return what `rank` sends, in the order of the plan."""
        return tuple(transfer for transfer in self.transfers if transfer.src == rank)

    def receives_of(self, rank: int) -> tuple[Transfer, ...]:
        """Return what `rank` receives by transfers, in the order of the plan."""
        return tuple(transfer for transfer in self.transfers if transfer.dst == rank)

    def sent_from(self, rank: int) -> LocalBoxes:
        """Return the boxes that a source rank sends from: those it holds, or those it has gathered."""
        return _memory(self.src, self.start, CollectiveKind.GATHER, rank)

    def lands_in(self, rank: int) -> LocalBoxes:
        """Return the boxes that a destination rank receives into: those it holds, or those it will scatter."""
        return _memory(self.dst, self.finish, CollectiveKind.SCATTER, rank)

    def describe(self) -> str:
        """Write the start, one line for each transfer, and the finish.

        >>> from vtp_plugin.plan.boundary.endpoint import replicated
        >>> from vtp_plugin.plan.boundary.strategies.leaders import plan_rank0
        >>> print(plan_rank0(replicated((4, 2), (0,)), replicated((4, 2), (1, 2))).describe())
        0 -> 1 [0:4, 0:2]
        broadcast in (1, 2)
        """
        parts = [self.start.describe(), *(str(transfer) for transfer in self.transfers), self.finish.describe()]
        return "\n".join(part for part in parts if part)


def _memory(sharding: Sharding, collective: Collective, kind: CollectiveKind, rank: int) -> LocalBoxes:
    """Return the joint box of its group for the root of a collective of this kind, for other ranks what they hold."""
    group = collective.group_of(rank) if collective.kind is kind else None
    boxes = (_joint_box(sharding, group),) if group and group[0] == rank else sharding.boxes_of(rank)
    return LocalBoxes(rank=rank, boxes=boxes)


def _joint_box(sharding: Sharding, ranks: tuple[int, ...]) -> Box:
    """Return a box that contains what ranks hold together: all rows, and as much of the other dimensions as needed."""
    boxes = [box for rank in ranks for box in sharding.boxes_of(rank)]
    if not boxes:
        return whole_box(sharding.shape)
    rest = (zip(*intervals, strict=True) for intervals in zip(*(box[1:] for box in boxes), strict=True))
    return ((0, sharding.shape[0]), *((min(starts), max(stops)) for starts, stops in rest))


def inside(kind: CollectiveKind, sharding: Sharding) -> Collective:
    """Return a collective of this kind in every column of a sharding that has several ranks."""
    groups = tuple(ranks for ranks in sharding.columns if len(ranks) > 1)
    return Collective(kind=kind, groups=groups) if groups else NO_COLLECTIVE


def require_same_shape(src: Sharding, dst: Sharding) -> None:
    """Refuse shardings of tensors of different shapes."""
    if src.shape != dst.shape:
        raise PlanError(f"the shape is {src.shape} upstream and {dst.shape} downstream")


def egress_bytes(plan: BoundaryPlan, itemsize_bytes: int) -> dict[int, int]:
    """Return the bytes that each source rank sends in transfers.

    >>> from vtp_plugin.plan.boundary.strategies.leaders import plan_rank0
    >>> from vtp_plugin.plan.boundary.endpoint import replicated
    >>> egress_bytes(plan_rank0(replicated((4, 2), (0, 1)), replicated((4, 2), (2,))), itemsize_bytes=2)
    {0: 16, 1: 0}
    """
    return {rank: itemsize_bytes * sum(t.num_elements for t in plan.sends_of(rank)) for rank in plan.src.ranks}


def ingress_bytes(plan: BoundaryPlan, itemsize_bytes: int) -> dict[int, int]:
    """Return the bytes that each destination rank receives in transfers.

    >>> from vtp_plugin.plan.boundary.strategies.leaders import plan_rank0
    >>> from vtp_plugin.plan.boundary.endpoint import replicated
    >>> ingress_bytes(plan_rank0(replicated((4, 2), (0,)), replicated((4, 2), (1, 2))), itemsize_bytes=2)
    {1: 16, 2: 0}
    """
    return {rank: itemsize_bytes * sum(t.num_elements for t in plan.receives_of(rank)) for rank in plan.dst.ranks}


# Smaller ones cost more than they save: between stages of 2 and 3 ranks on loopback, portions of 256 KiB made 4 MiB a
# third slower (`python -m benchmarks.boundary`); on links of 200 Mbit/s they were not faster than those of 1 MiB.
MIN_PORTION_BYTES = 1 << 20
MAX_PORTIONS = 8


@dataclass(frozen=True, slots=True)
class Swap:
    """Rows that a rank passes on to the other ranks of its stage as soon as they have come.

    Attributes:
        start: First row in the rank's local tensor.
        stop: Row behind the last.
        num_arrived: Number of the rank's messages, in their order, that must have come before.
    """

    start: int
    stop: int
    num_arrived: int


def cut_into_portions(transfers: Sequence[Transfer], bytes_of: Callable[[Transfer], int]) -> tuple[Transfer, ...]:
    """Cut messages into portions of some size, in the order in which they are sent: first portions first.

    Args:
        transfers: All sends, or all receives, of one rank; sender and receiver cut a transfer alike.
        bytes_of: Gives the size of a transfer in bytes.

    >>> whole = Transfer(src=0, dst=1, boxes=(((0, 5), (0, 1)),))
    >>> small = Transfer(src=0, dst=2, boxes=(((5, 6), (0, 1)),))
    >>> for one in cut_into_portions([whole, small], lambda one: one.num_elements * MIN_PORTION_BYTES // 2):
    ...     print(one)
    0 -> 1 [0:3, 0:1]
    0 -> 2 [5:6, 0:1]
    0 -> 1 [3:5, 0:1]
    """
    cuts = [_portions(one, bytes_of(one)) for one in transfers]
    # By the fraction of the transfer that has been sent before a portion.
    order = sorted(
        (index / len(portions), number, index) for number, portions in enumerate(cuts) for index in range(len(portions))
    )
    return tuple(cuts[number][index] for _, number, index in order)


def _portions(transfer: Transfer, num_bytes: int) -> list[Transfer]:
    rows = num_rows(transfer.boxes)
    number = max(1, min(MAX_PORTIONS, rows, num_bytes // MIN_PORTION_BYTES))
    return [replace(transfer, boxes=rows_of(transfer.boxes, *cut)) for cut in even_cuts(rows, number)]


def swaps(messages: Sequence[Transfer], row_of: Callable[[Box], int]) -> tuple[Swap, ...]:
    """List the rows that a rank can pass on after each of its messages, in the order in which they are complete.

    Args:
        messages: Transfers to the rank, in order; together they fill all its rows.
        row_of: Gives the first row of a box in the rank's local tensor.

    >>> halves = [Transfer(src=0, dst=2, boxes=(((0, 4), (0, 1)),)), Transfer(src=1, dst=2, boxes=(((0, 4), (1, 2)),))]
    >>> messages = cut_into_portions(halves, lambda one: one.num_elements * MIN_PORTION_BYTES // 2)
    >>> swaps(messages, lambda box: box[0][0])
    (Swap(start=0, stop=2, num_arrived=2), Swap(start=2, stop=4, num_arrived=4))
    """
    filled = [
        (start, start + box[0][1] - box[0][0], number)
        for number, message in enumerate(messages, 1)
        for box in message.boxes
        for start in (row_of(box),)
    ]
    bounds = sorted({bound for start, stop, _ in filled for bound in (start, stop)})
    found = [
        Swap(start, stop, max((number for first, last, number in filled if first <= start and stop <= last), default=0))
        for start, stop in zip(bounds, bounds[1:], strict=False)
    ]
    return tuple(sorted((one for one in found if one.num_arrived), key=lambda one: (one.num_arrived, one.start)))


Slices = tuple[slice, ...]
_Each = TypeVar("_Each")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledMessage:
    """A message that a rank sends or receives.

    Attributes:
        peer: Global rank at the other end.
        parts: Where its boxes lie in the rank's tensor, one behind the other in the message; empty if it is the whole
            tensor.
        buffer: Shape of the dense memory that it is received into first; None if it is one block of the tensor, and in
            messages that are sent.
        lengths: Rows of the buffer that belong to each part.
    """

    peer: int
    parts: tuple[Slices, ...]
    buffer: Shape | None = None
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledSwaps:
    """A rank's part in an all-gather by messages.

    Attributes:
        passed_on: Rows that it passes on, in the order in which they are complete.
        receivers: Ranks that it passes them on to.
        arriving: What it gets, in the order in which it posts the receives: the rank that passes it on, the first row,
            and the row behind the last.
    """

    passed_on: tuple[Swap, ...]
    receivers: tuple[int, ...]
    arriving: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCollective:
    """A rank's part in the start or the finish of a plan.

    Attributes:
        kind: Which collective it is.
        ranks: Ranks that take part, the root first.
        joint: Shape of the tensor that the root gathers into, or scatters from; None on other ranks.
        parts: For each of the ranks, where its parts lie: in the joint tensor, or of a sum what that rank will send, in
            this rank's tensor.
        swaps: Of an all-gather by messages, what this rank does.
    """

    kind: CollectiveKind
    ranks: tuple[int, ...]
    joint: Shape | None = None
    parts: tuple[tuple[Slices, ...], ...] = ()
    swaps: CompiledSwaps | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPlan:
    """What one rank does for one tensor.

    Unlike a :class:`BoundaryPlan` it counts in the rank's own tensor, and names no other ranks' work; it is still
    plain data, of which the runtime makes a ``Transmission`` with tensors of a type.

    Attributes:
        whole: Shape of the whole tensor.
        held: Shape of what the rank holds before; None if it sends nothing of its own.
        start: Its part in the start; None if it has none.
        sends: What it sends, in order.
        wanted: Shape of what the rank holds afterwards; None if it gets nothing.
        receives: What it receives, in order.
        finish: Its part in the finish; None if it has none.
        kept: What it gets from itself: where that lies before and afterwards.
        memory_order: Dimensions in the order of the memory of tensors and messages, the slowest first; None is the
            plan's own order.
    """

    whole: Shape
    held: Shape | None
    start: CompiledCollective | None
    sends: tuple[CompiledMessage, ...]
    wanted: Shape | None
    receives: tuple[CompiledMessage, ...]
    finish: CompiledCollective | None
    kept: tuple[tuple[Slices, Slices], ...]
    memory_order: tuple[int, ...] | None


def compile_plan(
    plan: BoundaryPlan,
    rank: int,
    *,
    itemsize_bytes: int | None = None,
    widths: Widths | None = None,
    memory_order: tuple[int, ...] | None = None,
) -> CompiledPlan:
    """Work out one rank's part of a plan.

    Args:
        plan: Plan of the tensor.
        rank: Global rank, at either end.
        itemsize_bytes: Size of an element, if the ranks of the receiving stage swap what has come by messages while the
            rest is under way: then large messages are cut into portions. None leaves them whole.
        widths: Length of every unit of the plan's second dimension; None if the plan counts elements.
        memory_order: Dimensions in the order of memory; each transfer then has one box, and the plan has no start or
            finish.

    >>> from vtp_plugin.plan.boundary.endpoint import replicated
    >>> from vtp_plugin.plan.boundary.strategies.slices import plan_sliced
    >>> plan = plan_sliced(replicated((6, 2), (0,)), replicated((6, 2), (1, 2)))
    >>> compiled = compile_plan(plan, 2)
    >>> compiled.wanted, [(one.peer, one.parts, one.buffer) for one in compiled.receives]
    ((6, 2), [(0, ((slice(3, 6, None), slice(0, 2, None)),), None)])
    >>> compiled.finish.kind, compiled.finish.ranks
    (<CollectiveKind.ALL_GATHER: 'all-gather'>, (1, 2))
    """
    return _Compiler(plan, rank, itemsize_bytes, widths, memory_order).compile()


@dataclass(frozen=True, slots=True)
class _Compiler:
    """Reads one rank's part from a plan; the fields are the arguments of :func:`compile_plan`."""

    plan: BoundaryPlan
    rank: int
    itemsize_bytes: int | None
    widths: Widths | None
    memory_order: tuple[int, ...] | None

    def compile(self) -> CompiledPlan:
        plan, rank = self.plan, self.rank
        held, wanted = self._holding(plan.src, rank), self._holding(plan.dst, rank)
        return CompiledPlan(
            whole=plan.src.shape,
            held=None if held is None else local_shape(held, self.widths),
            start=None if held is None else self._start(held),
            sends=() if held is None else self._sends(),
            wanted=None if wanted is None else local_shape(wanted, self.widths),
            receives=() if wanted is None else self._receives(),
            finish=None if wanted is None else self._finish(wanted),
            kept=self._kept(held, wanted),
            memory_order=self.memory_order,
        )

    @staticmethod
    def _holding(sharding: Sharding, rank: int) -> LocalBoxes | None:
        return next((one for one in sharding.holdings if one.rank == rank and one.boxes), None)

    def _sends(self) -> tuple[CompiledMessage, ...]:
        holding = self.plan.sent_from(self.rank)
        shape = local_shape(holding, self.widths)
        return tuple(
            CompiledMessage(peer=one.dst, parts=_parts(self._slices(one.boxes, holding), shape))
            for one in self._messages(self.plan.sends_of(self.rank))
        )

    def _receives(self) -> tuple[CompiledMessage, ...]:
        holding = self.plan.lands_in(self.rank)
        shape = local_shape(holding, self.widths)
        found: list[CompiledMessage] = []
        for one in self._messages(self.plan.receives_of(self.rank)):
            parts = self._slices(one.boxes, holding)
            lying = [self._in_memory(part) for part in parts]
            if len(parts) == 1 and _is_block(lying[0], self._in_memory(shape)):
                found.append(CompiledMessage(peer=one.src, parts=_parts(parts, shape)))
                continue
            # Backends take dense memory only.
            sizes = [tuple(piece.stop - piece.start for piece in part) for part in lying]
            lengths = tuple(size[0] for size in sizes)
            buffer = sum(lengths), *sizes[0][1:]
            found.append(CompiledMessage(peer=one.src, parts=parts, buffer=buffer, lengths=lengths))
        return tuple(found)

    def _messages(self, transfers: Sequence[Transfer]) -> Sequence[Transfer]:
        """List the messages of some transfers of one rank, in their order.

        Left out are units of length 0, which both ends know of, and what a rank would send to itself.
        """
        found = [one for one in transfers if one.src != one.dst]
        if self.widths is not None:
            found = [one for one in found if any(self.widths[slice(*one.boxes[0][1])])]
        # Where ranks do not swap, portions would only cost messages.
        itemsize_bytes = self.itemsize_bytes if self.plan.finish.kind is CollectiveKind.ALL_GATHER else None
        if itemsize_bytes is None:
            return found
        return cut_into_portions(found, lambda one: self._num_elements(one) * itemsize_bytes)

    def _num_elements(self, transfer: Transfer) -> int:
        if self.widths is None:
            return transfer.num_elements
        depth = math.prod(stop - start for start, stop in transfer.boxes[0][2:])
        return num_rows(transfer.boxes) * sum(self.widths[slice(*transfer.boxes[0][1])]) * depth

    def _start(self, held: LocalBoxes) -> CompiledCollective | None:
        plan, ranks = self.plan, self.plan.start.group_of(self.rank)
        if ranks is None:
            return None
        kind = plan.start.kind
        if kind is CollectiveKind.GATHER:
            return self._with_root(kind, ranks, plan.src, plan.sent_from(self.rank))
        if not math.prod(local_shape(held, self.widths)):
            return None
        boxes = [[box for one in plan.sends_of(rank) for box in one.boxes] for rank in ranks]
        return CompiledCollective(kind=kind, ranks=ranks, parts=tuple(self._slices(each, held) for each in boxes))

    def _finish(self, wanted: LocalBoxes) -> CompiledCollective | None:
        plan, ranks = self.plan, self.plan.finish.group_of(self.rank)
        if ranks is None or not math.prod(local_shape(wanted, self.widths)):
            return None
        kind = plan.finish.kind
        if kind is CollectiveKind.SCATTER:
            return self._with_root(kind, ranks, plan.dst, plan.lands_in(self.rank))
        has_swaps = kind is CollectiveKind.ALL_GATHER and self.itemsize_bytes is not None
        return CompiledCollective(kind=kind, ranks=ranks, swaps=self._swaps(ranks) if has_swaps else None)

    def _with_root(
        self, kind: CollectiveKind, ranks: tuple[int, ...], sharding: Sharding, joint: LocalBoxes
    ) -> CompiledCollective:
        if self.rank != ranks[0]:
            return CompiledCollective(kind=kind, ranks=ranks)
        parts = tuple((local_slices(sharding.boxes_of(rank)[0], joint),) for rank in ranks)
        return CompiledCollective(kind=kind, ranks=ranks, joint=joint.local_shape, parts=parts)

    def _swaps(self, ranks: tuple[int, ...]) -> CompiledSwaps:
        sources = _others(ranks, self.rank, -1)
        known = {rank: self._swaps_of(rank) for rank in sources}
        return CompiledSwaps(
            passed_on=self._swaps_of(self.rank),
            receivers=_others(ranks, self.rank, 1),
            arriving=tuple(
                (rank, swap.start, swap.stop)
                for index in range(max(map(len, known.values())))
                for rank in sources
                for swap in known[rank][index : index + 1]
            ),
        )

    def _swaps_of(self, rank: int) -> tuple[Swap, ...]:
        """List what a rank passes on, and after which message; equal on all ranks of its group."""
        holding = LocalBoxes(rank=rank, boxes=self.plan.dst.boxes_of(rank))
        messages = self._messages(self.plan.receives_of(rank))
        return swaps(messages, lambda box: local_slices(box, holding)[0].start)

    def _kept(self, held: LocalBoxes | None, wanted: LocalBoxes | None) -> tuple[tuple[Slices, Slices], ...]:
        if held is None or wanted is None:
            return ()
        boxes = [box for one in self.plan.sends_of(self.rank) if one.dst == self.rank for box in one.boxes]
        return tuple(zip(self._slices(boxes, held), self._slices(boxes, wanted), strict=True))

    def _slices(self, boxes: Sequence[Box], holding: LocalBoxes) -> tuple[Slices, ...]:
        return tuple(local_slices(box, holding, self.widths) for box in boxes)

    def _in_memory(self, by_dim: tuple[_Each, ...]) -> tuple[_Each, ...]:
        """Reorder something that is given for every dimension as the memory has it."""
        return by_dim if self.memory_order is None else tuple(by_dim[dim] for dim in self.memory_order)


def _others(ranks: Sequence[int], own: int, step: int) -> tuple[int, ...]:
    """List the other ranks round the ring, starting beside this one, so that not all talk to one rank at once."""
    index = ranks.index(own)
    return tuple(ranks[(index + step * distance) % len(ranks)] for distance in range(1, len(ranks)))


def _parts(parts: tuple[Slices, ...], shape: Shape) -> tuple[Slices, ...]:
    """Leave out the slices of a message that is the whole tensor: an index costs more than the rest of its packing.

    >>> _parts(((slice(0, 6), slice(0, 4)),), (6, 4)), _parts(((slice(0, 3), slice(0, 4)),), (6, 4))
    ((), ((slice(0, 3, None), slice(0, 4, None)),))
    """
    return () if parts == (tuple(slice(0, length) for length in shape),) else parts


def _is_block(part: Slices, shape: Shape) -> bool:
    """Tell whether slices of a row-major tensor are one dense block of its memory.

    >>> _is_block((slice(1, 3), slice(0, 4)), (6, 4)), _is_block((slice(1, 3), slice(0, 2)), (6, 4))
    (True, False)
    """
    sizes = [piece.stop - piece.start for piece in part]
    dense = stride = 1
    for size, length in zip(reversed(sizes), reversed(shape), strict=True):
        if size > 1 and stride != dense:
            return 0 in sizes
        dense, stride = dense * size, stride * length
    return True
