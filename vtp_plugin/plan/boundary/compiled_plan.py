"""One rank's part of a plan, worked out once: carrying it out is nothing but indexing.

A plan says in global coordinates what all ranks do. :func:`compile_plan` reads from it what one rank does with a tensor
of one size: the shapes of its tensors, the slices of every message, which of them need a buffer, and its part in the
collectives inside its stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from vtp_plugin.plan.boundary.boundary_plan import BoundaryPlan, CollectiveKind, Transfer
from vtp_plugin.plan.boundary.endpoint import Shape
from vtp_plugin.plan.boundary.local_slices import Widths, local_shape, local_slices
from vtp_plugin.plan.boundary.portions import Swap, cut_into_portions, swaps
from vtp_plugin.plan.boundary.sharding import LocalBoxes, Sharding, num_rows
from vtp_plugin.util.index_boxes import Box

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

    >>> from vtp_plugin.plan.boundary.sharding import replicated
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
