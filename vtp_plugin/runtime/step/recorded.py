"""One recorded step of this rank, first as marks, then as times of the host's clock."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from vtp_plugin.report.trace.causes import Cause, Stretch
from vtp_plugin.report.trace.trace_files import RankStep
from vtp_plugin.runtime.comm.recorder import Noted, Recorder, Stopwatch
from vtp_plugin.runtime.comm.tcp_counters import num_resent


class HostTimes:
    """Reads marks as times of the host's clock; on a device the host waits for the stream once, at the start."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._mark = watch.mark()
        watch.between_ms(self._mark, self._mark)
        self._at_s: float = self._mark if watch.platform.host_blocking_wait else time.perf_counter()

    def read(self, mark: Any) -> float:
        """Return the time of a mark, in seconds; waits until the work has reached it."""
        return self._at_s + 1e-3 * self._watch.between_ms(self._mark, mark)

    def count_from(self, mark: Any) -> None:
        """Measure from a later mark on: a device's differences lose digits as they grow."""
        self._at_s, self._mark = self.read(mark), mark


@dataclass(kw_only=True)
class RecordedStep:
    """A step that is being recorded, or waits to be read.

    Attributes:
        number: number of the step, from 1 on.
        start: mark of the step's start.
        noted: spans that were noted in the step.
        plan: digest of the step's plan.
        end: mark of the step's end; None before it ends.
        resent_before: TCP segments that were sent again up to the step's start; None where nobody counts.
        num_resent: those that were sent again in the step; None before it ends, and where nobody counts.
    """

    number: int
    start: Any
    noted: list[Noted]
    plan: str = ""
    end: Any = None
    resent_before: int | None = None
    num_resent: int | None = None

    def finish(self, recorder: Recorder) -> None:
        """Mark the end of the step."""
        # This span begins after the gradients, and ends with a line of the log, which not every step has.
        recorder.end(Cause.OPTIMIZER)
        self.end = recorder.watch.mark()
        recorder.stop_listening(self.noted)
        if self.resent_before is not None and (resent := num_resent()) is not None:
            self.num_resent = resent - self.resent_before

    def read(self, times: HostTimes) -> RankStep:
        """Return the step with times in seconds; waits until the work has reached its end."""
        times.count_from(self.start)
        return RankStep(
            number=self.number,
            plan=self.plan,
            start_s=times.read(self.start),
            end_s=times.read(self.end),
            stretches=tuple(
                Stretch(
                    cause=one.cause,
                    name=str(one.name),
                    start_s=times.read(one.start),
                    end_s=times.read(one.end),
                    num_bytes=one.num_bytes,
                )
                for one in self.noted
            ),
            num_resent=self.num_resent,
        )


def begin_step(number: int, recorder: Recorder, *, start: Any = None) -> RecordedStep:
    """Begin to record a step.

    Args:
        number: number of the step.
        recorder: notes what this rank does.
        start: mark of the step's start, the end of the previous step; None marks it now.
    """
    noted = recorder.start_listening()
    return RecordedStep(
        number=number,
        start=recorder.watch.mark() if start is None else start,
        noted=noted,
        resent_before=num_resent() if recorder.counts_traffic else None,
    )
