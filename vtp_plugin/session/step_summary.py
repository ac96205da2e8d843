"""How many training steps this process has run, and how long they took: for one line at the end of a run."""

from __future__ import annotations

import statistics
import time
from collections import deque

_NUM_KEPT = 1000


class StepSummary:
    """Counts the training steps of this process, and keeps the durations of the latest ones.

    >>> steps = StepSummary()
    >>> steps.begin(1.0), steps.end(3.0), steps.end(9.0), steps.describe()
    (None, None, None, '1 step, median 2.00 s')
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._begin_s: float | None = None
        self._durations_s: deque[float] = deque(maxlen=_NUM_KEPT)

    def begin(self, now_s: float | None = None) -> None:
        """Note that a step begins, or is run again; the time is for tests."""
        self._begin_s = time.monotonic() if now_s is None else now_s

    def end(self, now_s: float | None = None) -> None:
        """Note that the optimizer has made the step; do nothing if none has begun."""
        if self._begin_s is not None:
            self._num_steps += 1
            self._durations_s.append((time.monotonic() if now_s is None else now_s) - self._begin_s)
            self._begin_s = None

    def describe(self) -> str:
        """Return the number of steps and the median of the latest thousand; empty before the first."""
        if not self._durations_s:
            return ""
        median_s = statistics.median(self._durations_s)
        shown = f"{1e3 * median_s:.0f} ms" if median_s < 1.0 else f"{median_s:.2f} s"
        return f"{self._num_steps} step{'s'[: self._num_steps != 1]}, median {shown}"
