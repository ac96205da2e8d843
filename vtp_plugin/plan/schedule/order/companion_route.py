"""Where a companion crosses: with which activations a tensor of the batch travels from the stage that has read it."""

from __future__ import annotations

from collections.abc import Collection

from vtp_plugin.errors import PlanError
from vtp_plugin.plan.schedule.order.placement import Placement


def carriers(
    placement: Placement, src: int, dst: Collection[int] | None = None, chunks: Collection[int] | None = None
) -> frozenset[int]:
    """Return the virtual stages with whose output a companion crosses.

    It is read where stage `src` holds a virtual stage, and travels with every activation up to the last stage that
    wants it. Where the model comes back to `src`, that stage reads again, or the companion ends there.

    Args:
        placement: which stage holds which virtual stage; a chain.
        src: stage that reads the companion from its batch.
        dst: stages that want it; None for all others.
        chunks: chunks of stage `src` that read it, such as the one before the second of two rings; None for all.

    Raises:
        PlanError: the virtual stages are no chain, or a stage does not exist.

    >>> from vtp_plugin.plan.schedule.order.placement import interleaved_placement, plain_placement, u_placement
    >>> placements = plain_placement(4), u_placement(3), u_placement(2, num_rings=2)
    >>> [sorted(carriers(placement, 0)) for placement in placements]
    [[0, 1, 2], [0, 1], [0, 2]]
    >>> sorted(carriers(plain_placement(4), 1, {2})), sorted(carriers(interleaved_placement(3, 2), 1, {0}))
    ([1], [1, 2])
    >>> [sorted(carriers(u_placement(3, num_rings=2), 0, chunks={chunk})) for chunk in (0, 1)]
    [[0, 1], [3, 4]]
    """
    stages = placement.stages
    if not placement.is_chain or not {src, *(dst or ())} <= set(stages):
        raise PlanError(
            f"a companion from stage {src} to {dst} over {stages}: these stages are no chain that holds them"
        )
    carrying: set[int] = set()
    behind: list[int] = []
    for vstage, after in enumerate(stages[1:]):
        if stages[vstage] == src:
            behind = [vstage] if chunks is None or placement.chunk(vstage) in chunks else []
        elif behind:
            behind.append(vstage)
        if behind and after != src and (dst is None or after in dst):
            carrying.update(behind)
    return frozenset(carrying)
