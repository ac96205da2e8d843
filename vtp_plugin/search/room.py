"""What stages hold, and whether their cards have room for it."""

from __future__ import annotations

from collections.abc import Sequence

from vtp_plugin.schedule.order.placement import Placement
from vtp_plugin.search.question import Kind, Question, Shape

Part = tuple[int, int]
"""The first layer of a virtual stage, and the first one behind it."""


def held_bytes_of(
    question: Question,
    shape: Shape,
    kinds: Sequence[Kind],
    placement: Placement,
    parts: Sequence[Part],
    peaks: Sequence[int],
) -> list[int]:
    """Say what the fullest rank of every stage holds.

    Args:
        question: what is asked.
        shape: of the step.
        kinds: of the stages.
        placement: of the virtual stages.
        parts: layers of every virtual stage.
        peaks: microbatches of which each keeps activations.
    """
    held = [0] * len(kinds)
    for vstage, (stage, part, peak) in enumerate(zip(placement.stages, parts, peaks, strict=True)):
        is_last = vstage == placement.num_vstages - 1
        held[stage] += held_by(question, shape, kinds[stage], part, peak, is_first=vstage == 0, is_last=is_last)
    return held


def held_by(
    question: Question, shape: Shape, kind: Kind, part: Part, peak: int, *, is_first: bool, is_last: bool
) -> int:
    """Say what a virtual stage adds to what its stage holds, with activations of so many microbatches.

    Args:
        question: what is asked.
        shape: of the step.
        kind: of the stage.
        part: its layers.
        peak: microbatches.
        is_first: it has the embedding.
        is_last: it has the head.
    """
    if question.held_bytes is None:
        return 0
    return question.held_bytes(kind.tp, shape.num_replicas, *part, is_first, is_last, peak)
