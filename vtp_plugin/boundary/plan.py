"""What crosses a boundary between two stages: transfers between ranks, with a collective before and after.

A plan is data. It is made from the upstream and the downstream :class:`~vtp_plugin.boundary.spread.Spread` of one
tensor by a planner of :data:`STRATEGIES`, proved by :mod:`vtp_plugin.boundary.check` and carried out by the runtime,
which must not need to know which planner made it. Gradients are not sent by the plan turned round: their way is planned
anew by the same strategy, because after a broadcast every destination has the whole gradient, and one of them sends it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vtp_plugin.boundary.spread import Box, Holding, Spread, format_box, intersect, replicated, volume, whole_box
from vtp_plugin.errors import LayoutError, PlanError
from vtp_plugin.text_enum import TextEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One point-to-point message.

    Attributes:
        src: Global rank that sends; it has every box inside one of its own.
        dst: Global rank that receives.
        boxes: What is sent, one box behind the other in ascending order, in coordinates of the global tensor;
            :func:`local_slices` finds a box in a rank's memory.
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

    GATHER: the root gets what all members hold. BROADCAST: the members get what arrived at the root. SCATTER: each
    member gets its own boxes of what arrived at the root. ALL_GATHER: each member gets what arrived at all of them.
    """

    NONE = "none"
    GATHER = "gather"
    BROADCAST = "broadcast"
    SCATTER = "scatter"
    ALL_GATHER = "all-gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective inside one stage that prepares or completes an exchange.

    Attributes:
        kind: What it does.
        groups: Disjoint groups of ranks, each for itself; empty for NONE.
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
        """Return the group of a rank, or None for a rank that takes no part."""
        return next((group for group in self.groups if rank in group), None)

    def describe(self) -> str:
        """Write one line per group; nothing for NONE."""
        return "\n".join(f"{self.kind} in {group}" for group in self.groups)


NO_COLLECTIVE = Collective()


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryPlan:
    """How one tensor gets from the ranks of one stage to the ranks of the next.

    Attributes:
        src: Where the tensor is before.
        dst: Where it is after, the finish included.
        start: What ranks of `src` do together before: nothing, or GATHER.
        transfers: All messages of one exchange, at most one for each pair of ranks.
        finish: What ranks of `dst` do together afterwards.
        strategy: Name of the planner in :data:`STRATEGIES`, or `header`, which promises nothing about its links.
    """

    src: Spread
    dst: Spread
    start: Collective
    transfers: tuple[Transfer, ...]
    finish: Collective
    strategy: str

    @property
    def participants(self) -> tuple[int, ...]:
        """Ranks that send or receive a transfer, ascending; members of a collective alone are not among them."""
        return tuple(sorted({rank for transfer in self.transfers for rank in (transfer.src, transfer.dst)}))

    def sends_of(self, rank: int) -> tuple[Transfer, ...]:
        """Return what `rank` sends, in plan order; empty for a rank without a send."""
        return tuple(transfer for transfer in self.transfers if transfer.src == rank)

    def receives_of(self, rank: int) -> tuple[Transfer, ...]:
        """Return what `rank` receives by transfers, in plan order; empty for a rank without a receive."""
        return tuple(transfer for transfer in self.transfers if transfer.dst == rank)

    def sent_from(self, rank: int) -> Holding:
        """Return the memory that the transfers of a source rank read: its own part, or what it gathered."""
        if self.start.kind is CollectiveKind.GATHER and rank in {group[0] for group in self.start.groups}:
            return Holding(rank=rank, boxes=(_joint_box(self.src, self.start.group_of(rank) or ()),))
        return Holding(rank=rank, boxes=self.src.boxes_of(rank))

    def lands_in(self, rank: int) -> Holding:
        """Return the memory that the transfers to a destination rank fill: its own part, or what it will scatter."""
        if self.finish.kind is CollectiveKind.SCATTER and rank in {group[0] for group in self.finish.groups}:
            return Holding(rank=rank, boxes=(_joint_box(self.dst, self.finish.group_of(rank) or ()),))
        return Holding(rank=rank, boxes=self.dst.boxes_of(rank))

    def describe(self) -> str:
        """Write the start if there is one, one line per transfer in plan order, and the finish if there is one.

        >>> from vtp_plugin.boundary.spread import replicated
        >>> print(plan_rank0(replicated((4, 2), (0,)), replicated((4, 2), (1, 2))).describe())
        0 -> 1 [0:4, 0:2]
        broadcast in (1, 2)
        """
        parts = [self.start.describe(), *(str(transfer) for transfer in self.transfers), self.finish.describe()]
        return "\n".join(part for part in parts if part)


def _joint_box(spread: Spread, ranks: tuple[int, ...]) -> Box:
    """Return all rows of what ranks hold together; beyond the first dimension as far as their boxes reach."""
    boxes = [box for rank in ranks for box in spread.boxes_of(rank)]
    if not boxes:
        return whole_box(spread.shape)
    rest = (zip(*intervals, strict=True) for intervals in zip(*(box[1:] for box in boxes), strict=True))
    return ((0, spread.shape[0]), *((min(starts), max(stops)) for starts, stops in rest))


Planner = Callable[[Spread, Spread], BoundaryPlan]
"""Makes the plan from the upstream to the downstream spread; the same arguments always give the same plan."""


def plan_rank0(src: Spread, dst: Spread) -> BoundaryPlan:
    """Send the whole tensor from leader to leader; collectives inside the stages do the rest.

    Only one link is used, whatever the sizes of the stages. Each side is replicated, or sharded with one box for every
    rank: a sharded source is gathered at its leader first, a sharded destination is scattered from its leader. Where a
    side consists of replicas with different samples (:attr:`~vtp_plugin.boundary.spread.Spread.columns`), each of them
    has its leader, and there is a link between every two leaders that have samples in common.

    Raises:
        ConfigError: A rank holds none or several boxes, as under context parallelism.

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
        start=_inside(CollectiveKind.GATHER, src) if _is_in_slices(src) else NO_COLLECTIVE,
        transfers=tuple(transfers),
        finish=_inside(spreading, dst),
        strategy="rank0",
    )


def _is_for_leaders(spread: Spread) -> bool:
    """Whether each rank has one box, and those of a column are copies of all its rows, or slices of them."""
    has_one_box_each = all(len(holding.boxes) == 1 for holding in spread.holdings)
    num_boxes = len({holding.boxes for holding in spread.holdings})
    return has_one_box_each and num_boxes in (len(spread.columns), len(spread.ranks))


def _is_in_slices(spread: Spread) -> bool:
    leader = spread.ranks[0]
    return spread.boxes_of(leader) != (spread.column_box(leader),)


def _inside(kind: CollectiveKind, spread: Spread) -> Collective:
    """Give the collective inside the columns of a spread."""
    groups = tuple(ranks for ranks in spread.columns if len(ranks) > 1)
    return Collective(kind=kind, groups=groups) if groups else NO_COLLECTIVE


def plan_sliced(src: Spread, dst: Spread) -> BoundaryPlan:
    """Let every link carry its share: cut both sides evenly, and send each overlap of two pieces straight.

    What several ranks hold alike is cut in as many even pieces of rows, so a source rank sends at most
    ``ceil(rows / tp_src)`` rows and a destination rank receives at most ``ceil(rows / tp_dst)``, for any two sizes.
    Ranks that want copies complete them by an all-gather; sharded ranks have their part already. Where both sides hold
    the same boxes rank by rank, each rank sends all it has to its peer, as between stages of stock Megatron.

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
    if [holding.boxes for holding in src.holdings] == [holding.boxes for holding in dst.holdings]:
        pairs = zip(src.holdings, dst.ranks, strict=True)
        transfers = [Transfer(src=h.rank, dst=rank, boxes=tuple(sorted(h.boxes))) for h, rank in pairs if h.boxes]
        copies: tuple[tuple[int, ...], ...] = ()
    else:
        transfers = _overlaps(src.divided(), dst.divided())
        copies = tuple(group for group in dst.copies if len(group) > 1)
    return BoundaryPlan(
        src=src,
        dst=dst,
        start=NO_COLLECTIVE,
        transfers=tuple(transfers),
        finish=Collective(kind=CollectiveKind.ALL_GATHER, groups=copies) if copies else NO_COLLECTIVE,
        strategy="sliced",
    )


def _overlaps(src: Spread, dst: Spread) -> list[Transfer]:
    """Join each source with each destination that wants some of its elements; every element has one holder."""
    transfers = []
    for wanting in dst.holdings:
        for holding in src.holdings:
            common = [intersect(box, wanted) for box in holding.boxes for wanted in wanting.boxes]
            boxes = tuple(sorted(box for box in common if box is not None))
            if boxes:
                transfers.append(Transfer(src=holding.rank, dst=wanting.rank, boxes=boxes))
    return transfers


def plan_header(plan: BoundaryPlan, length: int) -> BoundaryPlan:
    """Plan how a small vector gets to every destination rank of `plan`, over links that `plan` uses.

    Where the plan broadcasts or scatters from leaders, the vector is broadcast as well; elsewhere every destination
    has it from the first rank that sends it anything, so `plan` must send something to each.

    >>> from vtp_plugin.boundary.spread import replicated
    >>> print(plan_header(plan_sliced(replicated((6,), (0, 1)), replicated((6,), (2, 3, 4))), 3).describe())
    0 -> 2 [0:3]
    0 -> 3 [0:3]
    1 -> 4 [0:3]
    """
    src, dst = (replicated((length,), spread.ranks) for spread in (plan.src, plan.dst))
    has_leaders = plan.strategy == "rank0"
    receivers = [ranks[0] for ranks in plan.dst.columns] if has_leaders else dst.ranks
    sources = [(plan.receives_of(rank)[0].src, rank) for rank in receivers]
    transfers = tuple(Transfer(src=source, dst=rank, boxes=(whole_box((length,)),)) for source, rank in sources)
    finish = _inside(CollectiveKind.BROADCAST, plan.dst) if has_leaders else NO_COLLECTIVE
    return BoundaryPlan(src=src, dst=dst, start=NO_COLLECTIVE, transfers=transfers, finish=finish, strategy="header")


STRATEGIES: Mapping[str, Planner] = MappingProxyType({"rank0": plan_rank0, "sliced": plan_sliced})
"""Planner for every strategy name; a plan carries the name of the planner that made it."""


def local_slices(box: Box, holding: Holding) -> tuple[slice, ...]:
    """Find a global box in the local tensor of a rank.

    Args:
        box: Global coordinates, inside one of the held boxes.
        holding: Of the rank whose memory is addressed; its boxes lie one behind the other along the first dimension.

    Returns:
        One slice per dimension that indexes the local tensor.

    >>> local_slices(((3, 4), (0, 2)), Holding(rank=1, boxes=(((2, 4), (0, 2)),)))
    (slice(1, 2, None), slice(0, 2, None))
    >>> local_slices(((7, 8),), Holding(rank=1, boxes=(((0, 2),), ((6, 8),))))
    (slice(3, 4, None),)
    """
    base = 0
    for held in holding.boxes:
        if intersect(box, held) == box:
            first, *rest = (
                slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, held, strict=True)
            )
            return (slice(first.start + base, first.stop + base), *rest)
        base += held[0][1] - held[0][0]
    raise PlanError(f"rank {holding.rank} holds {holding.boxes}, not {format_box(box)}")


def _require_same_shape(src: Spread, dst: Spread) -> None:
    """Refuse spreads of two different global tensors."""
    if src.shape != dst.shape:
        raise PlanError(f"the shape is {src.shape} upstream and {dst.shape} downstream")
