"""Plans and spreads, seen as only tests need to see them."""

from __future__ import annotations

from vtp_plugin.plan.boundary.boundary_plan import BoundaryPlan
from vtp_plugin.plan.boundary.endpoint import Sharding
from vtp_plugin.plan.boundary.strategies.known_strategies import STRATEGIES
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
