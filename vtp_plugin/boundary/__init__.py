"""What crosses from one pipeline stage to the next: spreads, plans and their proof. Pure: no torch, no processes."""

from __future__ import annotations

from vtp_plugin.boundary.check import check, egress_bytes, ingress_bytes, link_bytes, require_valid
from vtp_plugin.boundary.plan import (
    NO_FINISH,
    STRATEGIES,
    BoundaryPlan,
    Finish,
    FinishKind,
    Planner,
    Transfer,
    local_slices,
    plan_overlap,
    plan_rank0,
    reversed_plan,
)
from vtp_plugin.boundary.spread import (
    Box,
    Holding,
    Spread,
    even_cuts,
    format_box,
    intersect,
    replicated,
    sharded,
    subtract,
    volume,
    whole_box,
)

__all__ = [
    "NO_FINISH",
    "STRATEGIES",
    "BoundaryPlan",
    "Box",
    "Finish",
    "FinishKind",
    "Holding",
    "Planner",
    "Spread",
    "Transfer",
    "check",
    "egress_bytes",
    "even_cuts",
    "format_box",
    "ingress_bytes",
    "intersect",
    "link_bytes",
    "local_slices",
    "plan_overlap",
    "plan_rank0",
    "replicated",
    "require_valid",
    "reversed_plan",
    "sharded",
    "subtract",
    "volume",
    "whole_box",
]
