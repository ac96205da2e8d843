"""The strategy rank0: only the leaders of the stages talk."""

from __future__ import annotations

from collections.abc import Iterator

from vtp_plugin.errors import LayoutError
from vtp_plugin.plan.boundary.boundary_plan import (
    NO_COLLECTIVE,
    BoundaryPlan,
    CollectiveKind,
    Transfer,
    inside,
    require_same_shape,
)
from vtp_plugin.plan.boundary.endpoint import Sharding
from vtp_plugin.util.index_boxes import intersect


def plan_rank0(src: Sharding, dst: Sharding) -> BoundaryPlan:
    """Send the whole tensor from leader to leader; collectives inside the stages gather and distribute it.

    This uses one link, whatever the sizes of the stages. Each endpoint is replicated, or sharded with one box on
    every rank: the leader gathers a sharded source first, and scatters to a sharded destination. If an endpoint has
    replicas with different samples (:attr:`~vtp_plugin.plan.boundary.endpoint.Sharding.columns`), each replica has a
    leader, and every two leaders with samples in common have a link.

    Raises:
        ConfigError: A rank holds no box or several, as under context parallelism.

    >>> from vtp_plugin.plan.boundary.endpoint import replicated, sharded
    >>> print(plan_rank0(sharded((4, 2), (0, 1), dim=0), replicated((4, 2), (2, 3, 4))).describe())
    gather in (0, 1)
    0 -> 2 [0:4, 0:2]
    broadcast in (2, 3, 4)
    """
    require_same_shape(src, dst)
    for sharding in (src, dst):
        if not _is_for_leaders(sharding):
            raise LayoutError(
                f"boundary strategy rank0 needs one slice or a whole copy on each rank, but ranks {sharding.ranks} "
                "hold several or none (unequal context parallelism): use --vtp-transport sliced there"
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


def _is_for_leaders(sharding: Sharding) -> bool:
    """Whether each rank has one box, and the boxes of a column are copies of all its rows, or slices of them."""
    has_one_box_each = all(len(holding.boxes) == 1 for holding in sharding.holdings)
    num_boxes = len({holding.boxes for holding in sharding.holdings})
    return has_one_box_each and num_boxes in (len(sharding.columns), len(sharding.ranks))


def _is_in_slices(sharding: Sharding) -> bool:
    """Whether ranks hold slices, not copies; the leader, which is never empty, shows it."""
    leader = sharding.ranks[0]
    return sharding.boxes_of(leader) != (sharding.column_box(leader),)


def promise_leaders(plan: BoundaryPlan) -> Iterator[str]:
    """Yield a line if a plan has other links than those from leader to leader."""
    leaders = [
        (source[0], wanting[0])
        for wanting in plan.dst.columns
        for source in plan.src.columns
        if intersect(plan.src.column_box(source[0]), plan.dst.column_box(wanting[0]))
    ]
    links = [(transfer.src, transfer.dst) for transfer in plan.transfers]
    if links != leaders:
        yield f"strategy {plan.strategy} has transfers on the links {links}, not on {leaders}"
