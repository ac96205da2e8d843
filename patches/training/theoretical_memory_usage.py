"""`argument-checks/logged-memory`: the memory that Megatron logs, with the world as a rank of this stage sees it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session


@replaces(
    "megatron.training.theoretical_memory_usage:compute_weight_and_optimizer_memory",
    id="argument-checks/logged-memory",
    when=Moment.LIST,
)
def _compute(session: Session, original: Callable[..., float], args: Any, *rest: Any, **kwargs: Any) -> float:
    """Run `compute_weight_and_optimizer_memory` on the world that there would be if all stages were like this one.

    Why: it divides the world by this stage's tensor-parallel size times the number of stages: on a wide stage beside
    narrow ones that gives 0 replicas, and rank 0 divided by 0 after the first steps.

    Remove when: with `argument-checks`.
    """
    # A copy: everything else must keep seeing the real world.
    seen = copy.copy(args)
    seen.world_size = session.planned.layout.uniform_world_size(args.rank)
    return original(seen, *rest, **kwargs)
