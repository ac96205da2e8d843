"""Plans and spreads, seen as only tests need to see them."""

from __future__ import annotations

from vtp_plugin.boundary.plan import STRATEGIES, BoundaryPlan
from vtp_plugin.boundary.spread import Spread, whole_box


def reversed_plan(plan: BoundaryPlan) -> BoundaryPlan:
    """Plan the gradient's way from ``plan.dst`` to ``plan.src``, by the same strategy."""
    return STRATEGIES[plan.strategy](plan.dst, plan.src)


def is_replicated(spread: Spread) -> bool:
    """Whether every rank holds the whole tensor in one box; true for any spread over a single rank."""
    return all(holding.boxes == (whole_box(spread.shape),) for holding in spread.holdings)
