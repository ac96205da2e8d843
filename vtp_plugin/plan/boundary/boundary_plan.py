"""What crosses a boundary between two stages: transfers between ranks, with a collective before and after.

A plan is data. A planner of :mod:`vtp_plugin.plan.boundary.strategies` makes it from the
:class:`~vtp_plugin.plan.boundary.sharding.Sharding` of one tensor upstream and the one downstream,
:mod:`vtp_plugin.plan.boundary.check_boundary` proves it, and the runtime carries it out without knowing which planner
made it. Gradients do not take the same plan in reverse: after a broadcast every destination has the whole gradient and
only one of them needs to send it, so the strategy plans each direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from vtp_plugin.errors import PlanError
from vtp_plugin.plan.boundary.sharding import LocalBoxes, Sharding
from vtp_plugin.util.index_boxes import Box, format_box, volume, whole_box
from vtp_plugin.util.text_enum import TextEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One point-to-point message.

    Attributes:
        src: Global rank that sends; every box lies inside one box that it holds.
        dst: Global rank that receives.
        boxes: What is sent, box after box in ascending order, in coordinates of the global tensor;
            :func:`vtp_plugin.plan.boundary.local_slices.local_slices` finds a box in a rank's local tensor.
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

        >>> from vtp_plugin.plan.boundary.sharding import replicated
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
    >>> from vtp_plugin.plan.boundary.sharding import replicated
    >>> egress_bytes(plan_rank0(replicated((4, 2), (0, 1)), replicated((4, 2), (2,))), itemsize_bytes=2)
    {0: 16, 1: 0}
    """
    return {rank: itemsize_bytes * sum(t.num_elements for t in plan.sends_of(rank)) for rank in plan.src.ranks}


def ingress_bytes(plan: BoundaryPlan, itemsize_bytes: int) -> dict[int, int]:
    """Return the bytes that each destination rank receives in transfers.

    >>> from vtp_plugin.plan.boundary.strategies.leaders import plan_rank0
    >>> from vtp_plugin.plan.boundary.sharding import replicated
    >>> ingress_bytes(plan_rank0(replicated((4, 2), (0,)), replicated((4, 2), (1, 2))), itemsize_bytes=2)
    {1: 16, 2: 0}
    """
    return {rank: itemsize_bytes * sum(t.num_elements for t in plan.receives_of(rank)) for rank in plan.dst.ranks}
