"""The table of strategies: what one does is said by its row, and by nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from vtp_plugin.plan.boundary.strategies.leaders import plan_rank0, promise_leaders
from vtp_plugin.plan.boundary.strategies.slices import plan_divided, plan_sliced, promise_divided, promise_sliced
from vtp_plugin.plan.boundary.strategies.strategy import Strategy

_ROWS = (
    Strategy(
        name="rank0",
        plan=plan_rank0,
        promise=promise_leaders,
        has_leaders=True,
        help="goes through one rank of each stage",
        is_tried=lambda ends: ends.src_tp != ends.dst_tp,
    ),
    Strategy(
        name="sliced",
        plan=plan_sliced,
        promise=promise_sliced,
        help="gives every link its share",
        is_tried=lambda ends: True,
    ),
    Strategy(
        name="divided",
        plan=plan_divided,
        promise=promise_divided,
        help="cuts also between stages of one size",
        # With one rank each, or with slices, there is nothing to cut.
        is_tried=lambda ends: ends.src_tp == ends.dst_tp and ends.has_copies,
    ),
)
STRATEGIES: Mapping[str, Strategy] = MappingProxyType({row.name: row for row in _ROWS})
"""By name, the simplest first: where a run tries several, each needs only ranks and groups that the last one has.

A plan carries the name of the strategy that made it.
"""
