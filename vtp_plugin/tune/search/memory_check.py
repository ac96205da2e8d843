"""What stages hold in memory."""

from __future__ import annotations

from collections.abc import Sequence

from vtp_plugin.plan.layout.chunks import Kept
from vtp_plugin.plan.schedule.order.placement import Placement
from vtp_plugin.tune.cluster.stage_memory import HeldPart
from vtp_plugin.tune.search.problem import BatchSplit, StageType

Part = tuple[int, int]
"""The first layer of a virtual stage, and the first one behind it."""


def held_bytes_of(
    split: BatchSplit,
    stage_types: Sequence[StageType],
    placement: Placement,
    parts: Sequence[Part],
    peaks: Sequence[Sequence[Kept]],
) -> list[int]:
    """Give the bytes that the fullest rank of every stage holds.

    Args:
        split: how the samples of the step are shared out.
        stage_types: the type of every stage.
        placement: which stage holds which virtual stage.
        parts: the layers of every virtual stage.
        peaks: what a rank of every stage keeps at its fullest moments.
    """
    found, last = [], placement.num_vstages - 1
    for stage, (stage_type, moments) in enumerate(zip(stage_types, peaks, strict=True)):
        own = [(parts[vstage], vstage == 0, vstage == last) for vstage in placement.vstages(stage)]
        held = max(
            sum(
                held_by(split, stage_type, part, *pair, is_first=is_first, is_last=is_last)
                for (part, is_first, is_last), pair in zip(own, kept, strict=True)
            )
            for kept in moments
        )
        found.append(held - held_twice(split, stage_type, [(is_first, is_last) for _, is_first, is_last in own]))
    return found


def held_twice(split: BatchSplit, stage_type: StageType, ends: Sequence[tuple[bool, bool]]) -> int:
    """Give the bytes that are counted twice; ``ends``: whether each virtual stage has the embedding, and the head."""
    if split.counted_twice is None or len(ends) == 1:
        return 0
    return split.counted_twice(stage_type.tp, split.num_replicas, tuple(ends))


def held_by(
    split: BatchSplit,
    stage_type: StageType,
    part: Part,
    in_flight: int,
    waiting: int = 0,
    *,
    is_first: bool,
    is_last: bool,
) -> int:
    """Give the bytes that a virtual stage adds to what its stage holds.

    Args:
        split: how the samples of the step are shared out.
        stage_type: the type of the stage.
        part: the layers of the virtual stage.
        in_flight: number of microbatches whose activations it keeps.
        waiting: number of microbatches that keep only what the gradients of their weights need.
        is_first: whether it has the embedding.
        is_last: whether it has the head.
    """
    if split.held_bytes is None:
        return 0
    return split.held_bytes(
        HeldPart(
            tp=stage_type.tp,
            num_replicas=split.num_replicas,
            start=part[0],
            end=part[1],
            is_first=is_first,
            is_last=is_last,
            in_flight=in_flight,
            waiting=waiting,
        )
    )
