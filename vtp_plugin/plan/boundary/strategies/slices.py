"""The strategies sliced and divided: every link carries its share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vtp_plugin.plan.boundary.boundary_plan import (
    NO_COLLECTIVE,
    BoundaryPlan,
    Collective,
    CollectiveKind,
    Transfer,
    egress_bytes,
    ingress_bytes,
    require_same_shape,
)
from vtp_plugin.plan.boundary.endpoint import Sharding
from vtp_plugin.util.index_boxes import intersect, volume


def plan_sliced(src: Sharding, dst: Sharding) -> BoundaryPlan:
    """Cut both endpoints evenly, and send each overlap of two pieces directly: every link carries its share.

    Ranks with equal boxes divide these into even pieces of rows, so a source rank sends at most ``ceil(rows / tp_src)``
    rows and a destination rank receives at most ``ceil(rows / tp_dst)``, for any two sizes. Ranks that need copies
    complete them by an all-gather; sharded ranks already have their part. If both endpoints hold the same boxes, rank
    by rank, each rank sends all it has to its peer, as between stages of stock Megatron.

    Transfers are ordered by the positions of destination and source in their shardings.

    >>> from vtp_plugin.plan.boundary.endpoint import replicated, sharded
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
    if src.summands or not _are_paired(src, dst):
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


def plan_divided(src: Sharding, dst: Sharding) -> BoundaryPlan:
    """Cut both endpoints evenly, and send each overlap once: no element crosses twice, even between equal ones.

    Ranks whose tensors must be added up (:attr:`~vtp_plugin.plan.boundary.endpoint.Sharding.summands`) add up what each
    of them sends.

    >>> from vtp_plugin.plan.boundary.endpoint import replicated
    >>> print(plan_divided(replicated((6,), (0, 1)), replicated((6,), (2, 3))).describe())
    0 -> 2 [0:3]
    1 -> 3 [3:6]
    all-gather in (2, 3)
    """
    require_same_shape(src, dst)
    copies = tuple(group for group in dst.copies if len(group) > 1 and dst.boxes_of(group[0]))
    return BoundaryPlan(
        src=src,
        dst=dst,
        start=Collective(kind=CollectiveKind.SUM, groups=src.summands) if src.summands else NO_COLLECTIVE,
        transfers=tuple(_overlaps(src.divided(), dst.divided())),
        finish=Collective(kind=CollectiveKind.ALL_GATHER, groups=copies) if copies else NO_COLLECTIVE,
        strategy="divided",
    )


def _overlaps(src: Sharding, dst: Sharding) -> list[Transfer]:
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


def _are_paired(src: Sharding, dst: Sharding) -> bool:
    """Whether both endpoints hold the same boxes, rank by rank."""
    return [holding.boxes for holding in src.holdings] == [holding.boxes for holding in dst.holdings]


def promise_sliced(plan: BoundaryPlan) -> Iterator[str]:
    """Yield where a plan moves more than an even share; between equal endpoints a rank may send its peer all it has."""
    yield from _excess(plan, (plan.src, plan.dst)) if _are_paired(plan.src, plan.dst) else promise_divided(plan)


def promise_divided(plan: BoundaryPlan) -> Iterator[str]:
    """Yield where a plan moves more than an even share of an endpoint's tensor."""
    yield from _excess(plan, (plan.src.divided(), plan.dst.divided()))


def _excess(plan: BoundaryPlan, shares: tuple[Sharding, Sharding]) -> Iterator[str]:
    carried = (egress_bytes(plan, itemsize_bytes=1), ingress_bytes(plan, itemsize_bytes=1))
    for side, share, elements in zip(("source", "destination"), shares, carried, strict=True):
        for rank, number in elements.items():
            fair = sum(volume(box) for box in share.boxes_of(rank))
            if number > fair:
                yield f"strategy {plan.strategy} moves {number} elements at {side} rank {rank}, more than its {fair}"
