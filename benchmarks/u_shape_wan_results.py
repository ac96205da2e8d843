"""What ``benchmarks/u_shape_wan.py`` measures: one row for each order over each line."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

OURS, REFERENCE = "ours", "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One order over one line.

    Attributes:
        order: OURS or REFERENCE.
        num_stages: P, the number of stages.
        num_microbatches: m, the number of microbatches.
        latency: L, in t_f.
        in_flight: Most microbatches in flight, by stage.
        lookahead: number of computes ahead for which receives are posted.
        simulated_s: simulated seconds of a step.
        steps_s: measured seconds of the steps.
        planned_kept: Most activations kept at a time, by virtual stage, as planned.
        measured_kept: the same as counted in the run.
    """

    order: str
    num_stages: int
    num_microbatches: int
    latency: float
    in_flight: tuple[int, ...]
    lookahead: int
    simulated_s: float
    steps_s: tuple[float, ...]
    planned_kept: tuple[int, ...]
    measured_kept: tuple[int, ...]

    @property
    def median_s(self) -> float:
        """The measured time that counts."""
        return statistics.median(self.steps_s)
