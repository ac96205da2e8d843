"""What crosses a boundary between two stages: transfers between ranks, then a finish inside the receiving stage.

A plan is data. It is made from the upstream and the downstream :class:`~vtp_plugin.boundary.spread.Spread` of one
tensor by a planner of :data:`STRATEGIES`, proved by :mod:`vtp_plugin.boundary.check` and carried out by the runtime,
which must not need to know which planner made it. Gradients travel by :func:`reversed_plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from vtp_plugin.boundary.spread import Box, Holding, Spread, format_box, intersect, whole_box
from vtp_plugin.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One point-to-point message.

    Attributes:
        src: Global rank that sends; it holds the whole box inside one of its boxes.
        dst: Global rank that receives.
        box: What is sent, in coordinates of the global tensor; :func:`local_slices` finds it in a rank's memory.
    """

    src: int
    dst: int
    box: Box


class FinishKind(StrEnum):
    """What the receiving stage does after the transfers have arrived."""

    NONE = "none"
    BROADCAST = "broadcast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The collective inside the receiving stage that completes an exchange.

    Attributes:
        kind: NONE, or BROADCAST: what `root` received goes to all of `ranks`.
        ranks: Members of the collective, `root` included; empty for NONE.
        root: Rank that has the data; None for NONE.
    """

    kind: FinishKind
    ranks: tuple[int, ...]
    root: int | None

    def __post_init__(self) -> None:
        if self.kind is FinishKind.NONE:
            assert not self.ranks and self.root is None, "no finish has no members"
        else:
            assert self.root in self.ranks, f"root {self.root} is not one of {self.ranks}"
            assert len(set(self.ranks)) == len(self.ranks), f"rank listed twice in {self.ranks}"


NO_FINISH = Finish(kind=FinishKind.NONE, ranks=(), root=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryPlan:
    """How one tensor gets from the ranks of one stage to the ranks of the next.

    Attributes:
        src: Where the tensor is before.
        dst: Where it is after, the finish included.
        transfers: All messages of one exchange. Both ends post them in this order: messages carry no tags, so several
            of one (src, dst) pair are matched by their order alone.
        finish: What the ranks of `dst` do together afterwards.
        strategy: Name of the planner in :data:`STRATEGIES`.
    """

    src: Spread
    dst: Spread
    transfers: tuple[Transfer, ...]
    finish: Finish
    strategy: str

    @property
    def participants(self) -> tuple[int, ...]:
        """Ranks that send or receive a transfer, ascending; members of the finish alone are not among them."""
        return tuple(sorted({rank for transfer in self.transfers for rank in (transfer.src, transfer.dst)}))

    def sends_of(self, rank: int) -> tuple[Transfer, ...]:
        """Return what `rank` sends, in plan order; empty for a rank without a send."""
        return tuple(transfer for transfer in self.transfers if transfer.src == rank)

    def receives_of(self, rank: int) -> tuple[Transfer, ...]:
        """Return what `rank` receives by transfers, in plan order; empty for a rank without a receive."""
        return tuple(transfer for transfer in self.transfers if transfer.dst == rank)

    def describe(self) -> str:
        """Write one line per transfer in plan order, and a last one for the finish if there is one.

        >>> from vtp_plugin.boundary.spread import replicated
        >>> print(plan_rank0(replicated((4, 2), (0,)), replicated((4, 2), (1, 2))).describe())
        0 -> 1 [0:4, 0:2]
        broadcast from 1 to (1, 2)
        """
        lines = [f"{transfer.src} -> {transfer.dst} {format_box(transfer.box)}" for transfer in self.transfers]
        if self.finish.kind is not FinishKind.NONE:
            lines.append(f"{self.finish.kind} from {self.finish.root} to {self.finish.ranks}")
        return "\n".join(lines)


type Planner = Callable[[Spread, Spread], BoundaryPlan]
"""Makes the plan from the upstream to the downstream spread; the same arguments always give the same plan."""


def plan_rank0(src: Spread, dst: Spread) -> BoundaryPlan:
    """Send the whole tensor from leader to leader, then broadcast it inside the receiving stage.

    Only one link is used, whatever the sizes of the stages. Both sides must be replicated.

    Raises:
        ConfigError: One side is sharded, so that its leader does not hold the whole tensor.

    >>> from vtp_plugin.boundary.spread import replicated
    >>> plan = plan_rank0(replicated((4, 2), (0, 1)), replicated((4, 2), (2, 3, 4)))
    >>> [(t.src, t.dst) for t in plan.transfers], plan.finish.root
    ([(0, 2)], 2)
    """
    _assert_same_shape(src, dst)
    for side, spread in (("upstream", src), ("downstream", dst)):
        if not spread.is_replicated:
            raise ConfigError(
                f"boundary strategy rank0 sends the leader's tensor as the whole one, but on the {side} ranks "
                f"{spread.ranks} it is sharded: sequence-parallel boundaries need another strategy"
            )
    leader = dst.ranks[0]
    finish = Finish(kind=FinishKind.BROADCAST, ranks=dst.ranks, root=leader) if len(dst.ranks) > 1 else NO_FINISH
    transfer = Transfer(src=src.ranks[0], dst=leader, box=whole_box(src.shape))
    return BoundaryPlan(src=src, dst=dst, transfers=(transfer,), finish=finish, strategy="rank0")


def plan_overlap(src: Spread, dst: Spread) -> BoundaryPlan:
    """Send every overlap of a source box with a destination box straight to the rank that needs it.

    Each element that a destination needs comes from exactly one holder. Where m ranks hold the same boxes, the
    destinations that need any of them take turns in their order: the i-th takes from holder ``i % m``. With equal
    spreads on both sides rank i sends to rank i alone, which is the pattern between stages of the same size. There is
    no finish. A pair of ranks has one transfer for each pair of their boxes that overlap.

    Transfers are ordered by the positions of destination and source in their spreads, then by box.

    >>> from vtp_plugin.boundary.spread import replicated, sharded
    >>> print(plan_overlap(replicated((4,), (0, 1)), replicated((4,), (2, 3))).describe())
    0 -> 2 [0:4]
    1 -> 3 [0:4]
    >>> print(plan_overlap(sharded((6,), (0, 1), dim=0), sharded((6,), (2, 3, 4), dim=0)).describe())
    0 -> 2 [0:2]
    0 -> 3 [2:3]
    1 -> 3 [3:4]
    1 -> 4 [4:6]
    """
    _assert_same_shape(src, dst)
    transfers: list[Transfer] = []
    for holders, boxes in src.replicas().items():
        num_takers = 0
        for holding in dst.holdings:
            common = [intersect(box, needed) for box in boxes for needed in holding.boxes]
            parts = [box for box in common if box is not None]
            holder = holders[num_takers % len(holders)]
            transfers += [Transfer(src=holder, dst=holding.rank, box=box) for box in parts]
            num_takers += bool(parts)
    src_position = {rank: position for position, rank in enumerate(src.ranks)}
    dst_position = {rank: position for position, rank in enumerate(dst.ranks)}
    transfers.sort(key=lambda t: (dst_position[t.dst], src_position[t.src], t.box))
    return BoundaryPlan(src=src, dst=dst, transfers=tuple(transfers), finish=NO_FINISH, strategy="direct")


STRATEGIES: Mapping[str, Planner] = MappingProxyType({"rank0": plan_rank0, "direct": plan_overlap})
"""Planner for every strategy name; a plan carries the name of the planner that made it."""


def reversed_plan(plan: BoundaryPlan) -> BoundaryPlan:
    """Plan the way back: the tensor's gradient, spread like the tensor, from `plan.dst` to `plan.src`.

    The way back is planned anew by the same strategy, not by turning the arrows round: after a broadcast, or where one
    source fed several destinations, every destination has the complete gradient and only one of them must send it.
    For a plan of one of :data:`STRATEGIES`, ``reversed_plan(reversed_plan(plan)) == plan``.

    >>> from vtp_plugin.boundary.spread import replicated
    >>> print(reversed_plan(plan_rank0(replicated((4,), (0,)), replicated((4,), (1, 2)))).describe())
    1 -> 0 [0:4]
    """
    return STRATEGIES[plan.strategy](plan.dst, plan.src)


def local_slices(box: Box, holding: Holding) -> tuple[slice, ...]:
    """Find a global box in the local tensor of a rank that holds one box.

    Args:
        box: Global coordinates, inside the held box.
        holding: Of the rank whose memory is addressed; exactly one box, whose shape is the local tensor's.

    Returns:
        One slice per dimension that indexes the local tensor.

    >>> local_slices(((3, 4), (0, 2)), Holding(rank=1, boxes=(((2, 4), (0, 2)),)))
    (slice(1, 2, None), slice(0, 2, None))
    """
    assert len(holding.boxes) == 1, f"rank {holding.rank} holds {len(holding.boxes)} boxes, not one"
    (held,) = holding.boxes
    assert intersect(box, held) == box, f"rank {holding.rank} holds {format_box(held)}, not {format_box(box)}"
    return tuple(slice(start - base, stop - base) for (start, stop), (base, _) in zip(box, held, strict=True))


def _assert_same_shape(src: Spread, dst: Spread) -> None:
    """Assert that both spreads are of the same global tensor."""
    assert src.shape == dst.shape, f"the shape is {src.shape} upstream and {dst.shape} downstream"
