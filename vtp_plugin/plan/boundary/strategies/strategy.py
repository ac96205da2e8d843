"""What a strategy is, as a row of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vtp_plugin.plan.boundary.boundary_plan import BoundaryPlan
from vtp_plugin.plan.boundary.sharding import Sharding

Planner = Callable[[Sharding, Sharding], BoundaryPlan]
"""Makes the plan from the upstream to the downstream sharding; equal arguments give equal plans on every rank."""

Promise = Callable[[BoundaryPlan], Iterator[str]]
"""Yields a line for everything in a plan that its links may not carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePair:
    """Two stages of one site and one context-parallel size: what decides which strategies a run tries between them.

    Attributes:
        src_tp: Tensor-parallel size upstream.
        dst_tp: Tensor-parallel size downstream.
        has_copies: Whether ranks of a stage hold copies.
    """

    src_tp: int
    dst_tp: int
    has_copies: bool


def never(_ends: StagePair) -> bool:
    """Tell that a run tries the strategy only where it is asked for."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to cross a boundary.

    Attributes:
        name: Name of the strategy, as a user writes it and as its plans carry it.
        plan: Makes a plan from two shardings.
        promise: Yields a line for all that the links of a plan may not carry;
            :mod:`vtp_plugin.plan.boundary.check_boundary` holds every plan to it.
        has_leaders: Whether only leaders talk. Headers then go the same way, and it cannot join stages of different
            context-parallel sizes.
        help: Text for the help of `--vtp-transport`; None if users are not offered the strategy.
        is_tried: Tells whether a run tries it at its start between two stages, if nothing else decides.
    """

    name: str
    plan: Planner
    promise: Promise
    has_leaders: bool = False
    help: str | None = None
    is_tried: Callable[[StagePair], bool] = never
