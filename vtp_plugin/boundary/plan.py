"""What crosses a boundary between two stages: transfers between ranks, with a collective before and after.

A plan is data. A planner of :data:`STRATEGIES` makes it from the :class:`~vtp_plugin.boundary.spread.Spread` of one
tensor upstream and the spread downstream, :mod:`vtp_plugin.boundary.check` proves it, and the runtime carries it out
without knowing which planner made it. Gradients do not take the same plan in reverse: after a broadcast every
destination has the whole gradient and only one of them needs to send it, so the strategy plans each direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from vtp_plugin.boundary.spread import Box, Holding, Spread, format_box, intersect, volume, whole_box
from vtp_plugin.errors import LayoutError, PlanError
from vtp_plugin.ground.text_enum import TextEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One point-to-point message.

    Attributes:
        src: Global rank that sends; every box lies inside one box that it holds.
        dst: Global rank that receives.
        boxes: What is sent, box after box in ascending order, in coordinates of the global tensor;
            :func:`vtp_plugin.boundary.memory.local_slices` finds a box in a rank's memory.
    """

    src: int
    dst: int
    boxes: tuple[Box, ...]

    @property
    def num_elements(self) -> int:
        """Elements of the message."""
        return sum(volume(box) for box in self.boxes)

    def __str__(self) -> str:
        """Write source, destination and boxes: `0 -> 2 [0:4]`."""
        return f"{self.src} -> {self.dst} {' '.join(format_box(box) for box in self.boxes)}"


class CollectiveKind(TextEnum):
    """What ranks of one stage do together; the root of a group is its first rank.

    SUM: each member gets, of what it will send, the sum over what all members hold there. GATHER: the root gets what
    all members hold. BROADCAST: the members get what arrived at the root. SCATTER: each member gets its boxes of what
    arrived at the root. ALL_GATHER: each member gets what arrived at all of them.
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
        kind: What it does.
        groups: Disjoint groups of ranks; each runs the collective among its members. Empty for NONE.
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
        """All members."""
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
        src: Where the tensor is at first.
        dst: Where it is in the end, after the finish.
        start: What ranks of `src` do together before the transfers: nothing, GATHER, or SUM.
        transfers: All messages of one exchange, at most one for each pair of ranks.
        finish: What ranks of `dst` do together after the transfers.
        strategy: Name of the planner in :data:`STRATEGIES`, or `header`, which promises nothing about its links.
    """

    src: Spread
    dst: Spread
    start: Collective
    transfers: tuple[Transfer, ...]
    finish: Collective
    strategy: str

    # Cached: all channels of equal sizes ask one prototype.
    @cached_property
    def participants(self) -> tuple[int, ...]:
        """Ranks that send or receive a transfer, ascending; a part in a collective does not count."""
        return tuple(sorted({rank for transfer in self.transfers for rank in (transfer.src, transfer.dst)}))

    @cached_property
    def largest_transfer(self) -> int:
        """Elements of the largest transfer."""
        return max(transfer.num_elements for transfer in self.transfers)

    def sends_of(self, rank: int) -> tuple[Transfer, ...]:
        """Return what `rank` sends, in the order of the plan."""
        return tuple(transfer for transfer in self.transfers if transfer.src == rank)

    def receives_of(self, rank: int) -> tuple[Transfer, ...]:
        """Return what `rank` receives by transfers, in the order of the plan."""
        return tuple(transfer for transfer in self.transfers if transfer.dst == rank)

    def sent_from(self, rank: int) -> Holding:
        """Return the memory that the transfers of a source rank read: what it holds, or what it has gathered."""
        return _memory(self.src, self.start, CollectiveKind.GATHER, rank)

    def lands_in(self, rank: int) -> Holding:
        """Return the memory that the transfers to a destination rank fill: what it holds, or what it will scatter."""
        return _memory(self.dst, self.finish, CollectiveKind.SCATTER, rank)

    def describe(self) -> str:
        """Write the start, one line for each transfer, and the finish.

        >>> from vtp_plugin.boundary.spread import replicated
        >>> print(plan_rank0(replicated((4, 2), (0,)), replicated((4, 2), (1, 2))).describe())
        0 -> 1 [0:4, 0:2]
        broadcast in (1, 2)
        """
        parts = [self.start.describe(), *(str(transfer) for transfer in self.transfers), self.finish.describe()]
        return "\n".join(part for part in parts if part)


def _memory(spread: Spread, collective: Collective, kind: CollectiveKind, rank: int) -> Holding:
    """Return the joint box of a group for the root of a collective of this kind, else what the rank holds."""
    group = collective.group_of(rank) if collective.kind is kind else None
    boxes = (_joint_box(spread, group),) if group and group[0] == rank else spread.boxes_of(rank)
    return Holding(rank=rank, boxes=boxes)


def _joint_box(spread: Spread, ranks: tuple[int, ...]) -> Box:
    """Return a box that contains what ranks hold together: all rows, and as much of the other dimensions as needed."""
    boxes = [box for rank in ranks for box in spread.boxes_of(rank)]
    if not boxes:
        return whole_box(spread.shape)
    rest = (zip(*intervals, strict=True) for intervals in zip(*(box[1:] for box in boxes), strict=True))
    return ((0, spread.shape[0]), *((min(starts), max(stops)) for starts, stops in rest))


Planner = Callable[[Spread, Spread], BoundaryPlan]
"""Makes the plan from the upstream to the downstream spread; equal arguments give equal plans on every rank."""


def plan_rank0(src: Spread, dst: Spread) -> BoundaryPlan:
    """Send the whole tensor from leader to leader; collectives inside the stages do the rest.

    This uses one link, whatever the sizes of the stages. Each side is replicated, or sharded with one box on every
    rank: the leader gathers a sharded source first, and scatters to a sharded destination. If a side consists of
    replicas with different samples (:attr:`~vtp_plugin.boundary.spread.Spread.columns`), each replica has a leader, and
    every two leaders with samples in common have a link.

    Raises:
        ConfigError: A rank holds no box or several, as under context parallelism.

    >>> from vtp_plugin.boundary.spread import replicated, sharded
    >>> print(plan_rank0(sharded((4, 2), (0, 1), dim=0), replicated((4, 2), (2, 3, 4))).describe())
    gather in (0, 1)
    0 -> 2 [0:4, 0:2]
    broadcast in (2, 3, 4)
    """
    _require_same_shape(src, dst)
    for spread in (src, dst):
        if not _is_for_leaders(spread):
            raise LayoutError(
                f"boundary strategy rank0 needs one slice or a whole copy on each rank, but ranks {spread.ranks} hold "
                "several or none (unequal context parallelism): use --vtp-transport sliced there"
            )
    transfers = [
        Transfer(src=source[0], dst=wanting[0], boxes=(box,))
        for wanting in dst.columns
        for source in src.columns
        if (box := intersect(src.column_box(source[0]), dst.column_box(wanting[0])))
    ]
    spreading = CollectiveKind.SCATTER if _is_in_slices(dst) else CollectiveKind.BROADCAST
    return BoundaryPlan(
        src=src,
        dst=dst,
        start=inside(CollectiveKind.GATHER, src) if _is_in_slices(src) else NO_COLLECTIVE,
        transfers=tuple(transfers),
        finish=inside(spreading, dst),
        strategy="rank0",
    )


def _is_for_leaders(spread: Spread) -> bool:
    """Whether each rank has one box, and the boxes of a column are copies of all its rows, or slices of them."""
    has_one_box_each = all(len(holding.boxes) == 1 for holding in spread.holdings)
    num_boxes = len({holding.boxes for holding in spread.holdings})
    return has_one_box_each and num_boxes in (len(spread.columns), len(spread.ranks))


def _is_in_slices(spread: Spread) -> bool:
    """Whether ranks hold slices, not copies; the leader, which is never empty, shows it."""
    leader = spread.ranks[0]
    return spread.boxes_of(leader) != (spread.column_box(leader),)


def inside(kind: CollectiveKind, spread: Spread) -> Collective:
    """Return the collective inside every column of a spread that has several ranks."""
    groups = tuple(ranks for ranks in spread.columns if len(ranks) > 1)
    return Collective(kind=kind, groups=groups) if groups else NO_COLLECTIVE


def plan_sliced(src: Spread, dst: Spread) -> BoundaryPlan:
    """Let every link carry its share: cut both sides evenly, and send each overlap of two pieces directly.

    Ranks with equal boxes divide these into even pieces of rows, so a source rank sends at most ``ceil(rows / tp_src)``
    rows and a destination rank receives at most ``ceil(rows / tp_dst)``, for any two sizes. Ranks that need copies
    complete them by an all-gather; sharded ranks already have their part. If both sides hold the same boxes rank by
    rank, each rank sends all it has to its peer, as between stages of stock Megatron.

    Transfers are ordered by the positions of destination and source in their spreads.

    >>> from vtp_plugin.boundary.spread import replicated, sharded
    >>> print(plan_sliced(replicated((6,), (0, 1)), replicated((6,), (2, 3, 4))).describe())
    0 -> 2 [0:2]
    0 -> 3 [2:3]
    1 -> 3 [3:4]
    1 -> 4 [4:6]
    all-gather in (2, 3, 4)
    >>> print(plan_sliced(replicated((6,), (0, 1)), replicated((6,), (2, 3))).describe())
    0 -> 2 [0:6]
    1 -> 3 [0:6]
    """
    _require_same_shape(src, dst)
    if src.summands or [holding.boxes for holding in src.holdings] != [holding.boxes for holding in dst.holdings]:
        return replace(plan_divided(src, dst), strategy="sliced")
    pairs = zip(src.holdings, dst.ranks, strict=True)
    # A peer's copy is complete: cutting it and gathering the pieces again would only add a collective.
    return BoundaryPlan(
        src=src,
        dst=dst,
        start=NO_COLLECTIVE,
        transfers=tuple(Transfer(src=h.rank, dst=rank, boxes=tuple(sorted(h.boxes))) for h, rank in pairs if h.boxes),
        finish=NO_COLLECTIVE,
        strategy="sliced",
    )


def plan_divided(src: Spread, dst: Spread) -> BoundaryPlan:
    """Cut both sides evenly, and send each overlap once: no element crosses twice, also between equal sides.

    Ranks whose tensors must be added up (:attr:`~vtp_plugin.boundary.spread.Spread.summands`) add up what each of them
    sends.

    >>> from vtp_plugin.boundary.spread import replicated
    >>> print(plan_divided(replicated((6,), (0, 1)), replicated((6,), (2, 3))).describe())
    0 -> 2 [0:3]
    1 -> 3 [3:6]
    all-gather in (2, 3)
    """
    _require_same_shape(src, dst)
    copies = tuple(group for group in dst.copies if len(group) > 1 and dst.boxes_of(group[0]))
    return BoundaryPlan(
        src=src,
        dst=dst,
        start=Collective(kind=CollectiveKind.SUM, groups=src.summands) if src.summands else NO_COLLECTIVE,
        transfers=tuple(_overlaps(src.divided(), dst.divided())),
        finish=Collective(kind=CollectiveKind.ALL_GATHER, groups=copies) if copies else NO_COLLECTIVE,
        strategy="divided",
    )


def _overlaps(src: Spread, dst: Spread) -> list[Transfer]:
    """List a transfer from each source to each destination that needs some of its elements."""
    transfers = []
    # Destination first: every rank then has the same order of messages, which backends without tags rely on.
    for wanting in dst.holdings:
        for holding in src.holdings:
            common = [intersect(box, wanted) for box in holding.boxes for wanted in wanting.boxes]
            boxes = tuple(sorted(box for box in common if box is not None))
            if boxes:
                transfers.append(Transfer(src=holding.rank, dst=wanting.rank, boxes=boxes))
    return transfers


STRATEGIES: Mapping[str, Planner] = MappingProxyType(
    {"rank0": plan_rank0, "sliced": plan_sliced, "divided": plan_divided}
)
"""Planner of every strategy; a plan carries the name of the strategy that made it."""


def _require_same_shape(src: Spread, dst: Spread) -> None:
    """Refuse spreads of tensors of different shapes."""
    if src.shape != dst.shape:
        raise PlanError(f"the shape is {src.shape} upstream and {dst.shape} downstream")
