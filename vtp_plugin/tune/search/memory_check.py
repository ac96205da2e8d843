"""What stages hold, and whether their cards have room for it."""

from __future__ import annotations

from collections.abc import Sequence

from vtp_plugin.plan.schedule.order.placement import Placement
from vtp_plugin.tune.search.problem import BatchSplit, StageType

Part = tuple[int, int]
"""The first layer of a virtual stage, and the first one behind it."""


def held_bytes_of(
    shape: BatchSplit,
    kinds: Sequence[StageType],
    placement: Placement,
    parts: Sequence[Part],
    peaks: Sequence[int],
) -> list[int]:
    """Say what the fullest rank of every stage holds.

    Args:
        shape: of the step.
        kinds: of the stages.
        placement: of the virtual stages.
        parts: layers of every virtual stage.
        peaks: microbatches of which each keeps activations.
    """
    held = [0] * len(kinds)
    ends: list[list[tuple[bool, bool]]] = [[] for _ in kinds]
    for vstage, (stage, part, peak) in enumerate(zip(placement.stages, parts, peaks, strict=True)):
        is_first, is_last = vstage == 0, vstage == placement.num_vstages - 1
        held[stage] += held_by(shape, kinds[stage], part, peak, is_first=is_first, is_last=is_last)
        ends[stage].append((is_first, is_last))
    return [num_bytes - held_twice(shape, kind, own) for num_bytes, kind, own in zip(held, kinds, ends, strict=True)]


def held_twice(shape: BatchSplit, kind: StageType, ends: Sequence[tuple[bool, bool]]) -> int:
    """Say what the virtual stages of a stage have in common, each with whether it has the embedding, and the head."""
    if shape.counted_twice is None or len(ends) == 1:
        return 0
    return shape.counted_twice(kind.tp, shape.num_replicas, tuple(ends))


def held_by(shape: BatchSplit, kind: StageType, part: Part, peak: int, *, is_first: bool, is_last: bool) -> int:
    """Say what a virtual stage adds to what its stage holds, with activations of so many microbatches.

    Args:
        shape: of the step.
        kind: of the stage.
        part: its layers.
        peak: microbatches.
        is_first: it has the embedding.
        is_last: it has the head.
    """
    if shape.held_bytes is None:
        return 0
    return shape.held_bytes(kind.tp, shape.num_replicas, *part, is_first, is_last, peak)
