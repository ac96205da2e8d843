"""H2b: the estimate of memory that Megatron logs, with the world as a rank of this stage sees it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from vtp_plugin.patching import PatchRecord
from vtp_plugin.session import Session


def records(session: Session) -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="H2b",
            target="megatron.training.theoretical_memory_usage:compute_weight_and_optimizer_memory",
            build=functools.partial(_compute, session),
            why="it divides the world by one tensor-parallel size times the stages, which gives 0 replicas on a "
            "wide stage beside narrow ones, and divides by that: rank 0 ended after the first steps",
            versions=">=0.19,<0.20",
            remove_when="with H2",
        ),
    )


def _compute(session: Session, original: Callable[..., float]) -> Callable[..., float]:
    @functools.wraps(original)
    def compute_weight_and_optimizer_memory(args: Any, *rest: Any, **kwargs: Any) -> float:
        seen = copy.copy(args)
        seen.world_size = session.planned.layout.uniform_world_size(args.rank)
        return original(seen, *rest, **kwargs)

    return compute_weight_and_optimizer_memory
