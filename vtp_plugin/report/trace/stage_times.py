"""The time of a step, stage by stage: compute, exposed communication, bubble; and ranks that compute slowly."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from vtp_plugin.report.trace.causes import COMPUTES, Cause
from vtp_plugin.report.trace.explain import TimeShare, explain, totals

PARTS: Mapping[str, frozenset[Cause]] = MappingProxyType(
    {
        "compute": frozenset(COMPUTES),
        "exposed communication": frozenset({Cause.PACK, Cause.POST, Cause.SEND, Cause.MESSAGE, Cause.FINISH}),
        "bubble": frozenset({Cause.BUBBLE}),
    }
)
"""The parts of a step that are told, with their causes."""
# A rank is named if it computes longer than the other ranks of its stage by this factor.
_SLOW = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """The time of one stage in one step.

    Attributes:
        stage: number of the stage.
        mean_ms: for each part of the time, the mean of the stage's ranks in ms.
        slowest_ms: for each part of the time, the longest of a rank in ms.
        slowest_rank: for each part of the time, the rank with the longest.
        slow_ranks: factor by which a rank computes longer than the others of the stage, by rank as text; only where
            that is much.
    """

    stage: int
    mean_ms: Mapping[str, float]
    slowest_ms: Mapping[str, float]
    slowest_rank: Mapping[str, int]
    slow_ranks: Mapping[str, float]

    def __str__(self) -> str:
        """Write the times in one line.

        >>> ms, rank = dict.fromkeys(PARTS, 20.0), dict.fromkeys(PARTS, 3)
        >>> print(StageTimes(stage=1, mean_ms=ms, slowest_ms=ms, slowest_rank=rank, slow_ranks={}))
        stage 1: compute 20.0 ms (most: 20.0, rank 3), exposed communication 20.0 ms (most: 20.0, rank 3), \
bubble 20.0 ms (most: 20.0, rank 3)
        """
        parts = (
            f"{part} {self.mean_ms[part]:.1f} ms (most: {self.slowest_ms[part]:.1f}, rank {self.slowest_rank[part]})"
            for part in PARTS
        )
        return f"stage {self.stage}: {', '.join(parts)}"


def stage_times(shares: Sequence[TimeShare], stages: Mapping[int, int]) -> tuple[StageTimes, ...]:
    """Sum up a step by stages.

    Args:
        shares: time shares of all ranks, on one clock.
        stages: stage of each rank.
    """
    by_rank = {rank: totals(stretches) for rank, stretches in explain(shares).items()}
    own_ms = {
        part: {rank: 1e3 * sum(found.get(cause, 0.0) for cause in causes) for rank, found in by_rank.items()}
        for part, causes in PARTS.items()
    }
    return tuple(
        _sum_up(stage, [r for r in sorted(by_rank) if stages[r] == stage], own_ms)
        for stage in sorted({*stages.values()})
    )


def _sum_up(stage: int, ranks: Sequence[int], own_ms: Mapping[str, Mapping[int, float]]) -> StageTimes:
    slowest = {part: max(ranks, key=lambda rank, part=part: own_ms[part][rank]) for part in PARTS}
    return StageTimes(
        stage=stage,
        mean_ms={part: statistics.fmean(own_ms[part][rank] for rank in ranks) for part in PARTS},
        slowest_ms={part: own_ms[part][rank] for part, rank in slowest.items()},
        slowest_rank=slowest,
        slow_ranks={str(rank): factor for rank, factor in _slow({rank: own_ms["compute"][rank] for rank in ranks})},
    )


def _slow(compute_ms: Mapping[int, float]) -> Iterator[tuple[int, float]]:
    """Yield the ranks of a stage that compute much longer than the others, and by what factor.

    >>> list(_slow({3: 10.0, 4: 11.0, 5: 21.0})), list(_slow({3: 10.0}))
    ([(5, 2.0)], [])
    """
    for rank, own_ms in compute_ms.items():
        others_ms = [other_ms for other, other_ms in compute_ms.items() if other != rank]
        usual_ms = statistics.median(others_ms) if others_ms else own_ms
        if usual_ms and own_ms >= _SLOW * usual_ms:
            yield rank, own_ms / usual_ms
