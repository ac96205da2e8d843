"""How long steps take, compared with how long they were planned to take."""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.cost.simulator import simulate
from vtp_plugin.plan.schedule.order.schedule import Schedule
from vtp_plugin.runtime.comm.recorder import Stopwatch
from vtp_plugin.runtime.step.measure import Report, read_shared

# A median over fewer steps says too little to act on.
_LEAST_STEPS = 3
# If the figures are still wrong after that, measuring again would only cost time.
MOST_REPLANS = 3


class StepTimes:
    """Times training steps and compares them with what the schedule promises.

    A step costs two marks in the rank's work. The ranks exchange figures only at the end of every interval.

    Args:
        watch: marks the steps.
        share_reports: combines all ranks' reports into one text and returns it on all; a collective call.
        interval: number of training steps from one comparison to the next.
        share: largest difference of real and predicted time, as a share of the predicted one, that counts as equal.
    """

    def __init__(
        self,
        watch: Stopwatch,
        share_reports: Callable[[Report, Callable[[Sequence[Report]], str]], str],
        *,
        interval: int,
        share: float,
    ) -> None:
        self._watch = watch
        self._share_reports = share_reports
        self._interval = interval
        self._share = share
        self._steps: deque[tuple[Any, Any]] = deque(maxlen=max(interval, _LEAST_STEPS))
        self._schedule: Schedule | None = None
        self._costs: Costs | None = None
        self._num_steps = 0

    def begin(self) -> Any:
        """Mark the start of a step, and return the mark for :meth:`end`."""
        return self._watch.mark()

    def end(self, start: Any, schedule: Schedule, costs: Costs | None) -> StepTime | None:
        """Count a training step; at the end of an interval, compare.

        Args:
            start: mark that :meth:`begin` has returned.
            schedule: schedule that the step ran.
            costs: costs that it was planned for, in ms; None if there are none yet: then nothing is compared.

        Returns:
            The comparison, the same on all ranks; None within an interval.
        """
        self._num_steps += 1
        if schedule is not self._schedule or costs is not self._costs:
            self._steps.clear()
            self._schedule, self._costs = schedule, costs
        # The first step of a run also loads, allocates and compiles.
        if self._num_steps > 1:
            self._steps.append((start, self._watch.mark()))
        if costs is None or self._num_steps % self._interval or not self._steps:
            return None
        own_ms = statistics.median(self._watch.between_ms(*marks) for marks in self._steps)

        def combine(reports: Sequence[Report]) -> str:
            slowest_ms = max(report["step_ms"]["0"] for report in reports)
            return json.dumps([simulate(schedule, costs).makespan, slowest_ms])

        predicted_ms, real_ms = read_shared(
            tuple[float, float], self._share_reports({"step_ms": {"0": own_ms}}, combine)
        )
        return StepTime(
            predicted_ms=predicted_ms,
            real_ms=real_ms,
            num_steps=len(self._steps),
            num_microbatches=schedule.num_microbatches,
            share=self._share,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Predicted and real duration of a step.

    Attributes:
        predicted_ms: duration by simulation of the plan with its costs.
        real_ms: median duration over several steps, of the slowest rank.
        num_steps: number of these steps.
        num_microbatches: microbatches of each step.
        share: largest difference that counts as equal, as a share of the predicted time.

    >>> print(StepTime(predicted_ms=40.0, real_ms=52.0, num_steps=3, num_microbatches=8, share=0.25))
    step of 8 microbatches: predicted 40.0 ms, real 52.0 ms (+30 %), median of 3 steps
    """

    predicted_ms: float
    real_ms: float
    num_steps: int
    num_microbatches: int
    share: float

    @property
    def differs(self) -> bool:
        """Whether the two durations are further apart than the share, over enough steps to tell.

        >>> StepTime(predicted_ms=40.0, real_ms=49.0, num_steps=3, num_microbatches=8, share=0.25).differs
        False
        >>> StepTime(predicted_ms=40.0, real_ms=29.0, num_steps=3, num_microbatches=8, share=0.25).differs
        True
        >>> StepTime(predicted_ms=40.0, real_ms=29.0, num_steps=1, num_microbatches=8, share=0.25).differs
        False
        """
        apart_ms = abs(self.real_ms - self.predicted_ms)
        return self.num_steps >= _LEAST_STEPS and apart_ms > self.share * self.predicted_ms

    def __str__(self) -> str:
        """Return the comparison as one line."""
        more = f" ({100 * (self.real_ms / self.predicted_ms - 1):+.0f} %)" if self.predicted_ms else ""
        steps = f"median of {self.num_steps} steps" if self.num_steps > 1 else "one step"
        return (
            f"step of {self.num_microbatches} microbatches: predicted {self.predicted_ms:.1f} ms, real "
            f"{self.real_ms:.1f} ms{more}, {steps}"
        )
