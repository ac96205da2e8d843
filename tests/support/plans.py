"""Plans and spreads, seen as only tests need to see them."""

from __future__ import annotations

from vtp_plugin.plan.boundary.boundary_plan import BoundaryPlan
from vtp_plugin.plan.boundary.endpoint import Sharding
from vtp_plugin.plan.boundary.strategies.known_strategies import STRATEGIES
from vtp_plugin.plan.layout.pipeline_layout import ChannelId, Direction
from vtp_plugin.plan.schedule.order.placement import Placement
from vtp_plugin.util.index_boxes import whole_box


def reversed_plan(plan: BoundaryPlan) -> BoundaryPlan:
    """Plan the gradient's way from ``plan.dst`` to ``plan.src``, by the same strategy."""
    return STRATEGIES[plan.strategy].plan(plan.dst, plan.src)


def is_replicated(sharding: Sharding) -> bool:
    """Whether every rank holds the whole tensor in one box; true for any spread over a single rank."""
    return all(holding.boxes == (whole_box(sharding.shape),) for holding in sharding.holdings)


def link_bytes(plan: BoundaryPlan, itemsize_bytes: int) -> dict[tuple[int, int], int]:
    """Return the bytes that each link (src, dst) carries, in the order of the plan, without start and finish."""
    total_bytes: dict[tuple[int, int], int] = {}
    for transfer in plan.transfers:
        link = transfer.src, transfer.dst
        total_bytes[link] = total_bytes.get(link, 0) + transfer.num_elements * itemsize_bytes
    return total_bytes


def worker_boundaries(placement: Placement) -> list[tuple[int, int]]:
    """List the pairs of workers, upstream and downstream, between which activations cross, boundary by boundary."""
    # One number of replicas divides the other, so after the larger number of microbatches the pairs repeat.
    num, workers = placement.num_replicas, range(placement.num_workers)
    own = [[one for one in workers if placement.stage_and_replica(one)[0] == stage] for stage in range(len(num))]
    return [
        (own[upstream][h % num[upstream]], own[downstream][h % num[downstream]])
        for upstream, downstream in placement.boundaries
        for h in range(max(num[upstream], num[downstream]))
    ]


def channels(placement: Placement) -> tuple[ChannelId, ...]:
    """List all channels: for each pair of workers the forward one, then the backward one."""
    return tuple(
        ChannelId.between(upstream, downstream, direction)
        for upstream, downstream in worker_boundaries(placement)
        for direction in Direction
    )
