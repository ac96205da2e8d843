"""``--vtp-trace``: what this rank does in some steps, written to a file."""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Callable

from vtp_plugin.report.trace.causes import Cause
from vtp_plugin.report.trace.trace_files import Owner, Plan, clock_line, owner_line, plan_line, step_line
from vtp_plugin.runtime.comm.recorder import Recorder
from vtp_plugin.runtime.health.clock import ClockOffset
from vtp_plugin.runtime.health.line_file import LineFile
from vtp_plugin.runtime.step.recorded import HostTimes, RecordedStep, begin_step


class Tracing:
    """Writes what this rank does in some consecutive training steps; before and after them nothing is recorded.

    A step is kept in memory until the one after it has ended, since a device may still work on it, and is then written.
    So the memory that this takes does not grow with the number of steps, and the file holds those steps only.

    Args:
        file: trace file of this rank.
        owner: this rank, as the file names it.
        recorder: notes what this rank does.
        steps: numbers of the first and the last step to trace, from 1 on.
        compare_clocks: measures how far this rank's clock is behind that of rank 0; a collective call.
    """

    def __init__(
        self,
        file: LineFile,
        owner: Owner,
        recorder: Recorder,
        *,
        steps: tuple[int, int],
        compare_clocks: Callable[[], ClockOffset],
    ) -> None:
        self._file = file
        self._owner = owner
        self._recorder = recorder
        self._first, self._last = steps
        self._compare_clocks = compare_clocks
        self._num_steps = 0
        self._current: RecordedStep | None = None
        self._ended: list[RecordedStep] = []
        self._times: HostTimes | None = None
        self._plans: set[str] = set()
        self._reason: object = None
        self._plan = ""
        atexit.register(self.close)

    def begin_step(self) -> None:
        """Note that a training step begins, and so that the one before ends; all ranks call this for each step."""
        self._num_steps += 1
        if self._num_steps == self._first:
            # Before the step, so that the step itself does not wait for the clocks of all ranks.
            self._file.write(owner_line(self._owner))
            self._note_clock()
            self._times = HostTimes(self._recorder.watch)
        self._end_step()
        if self._first <= self._num_steps <= self._last:
            start = self._ended[-1].end if self._ended else None
            self._current = begin_step(self._num_steps, self._recorder, start=start)
            with self._recorder.span(Cause.TRACE):
                self._write(keep=1)
        elif self._num_steps == self._last + 1:
            self._write(keep=0)
            self._note_clock()
            self._file.close()

    def note_plan(self, reason: object, make: Callable[[], Plan]) -> None:
        """Note what the step that has begun is to do.

        Args:
            reason: what the plan follows from: an equal reason means the plan of the step before.
            make: makes the plan; called only if the step is traced and its plan is a new one.
        """
        if self._current is None:
            return
        with self._recorder.span(Cause.TRACE):
            if reason != self._reason:
                self._plan, self._reason = self._digest(make()), reason
            self._current.plan = self._plan

    def _digest(self, plan: Plan) -> str:
        digest = hashlib.sha256(f"{plan.schedule.digest} {plan.costs}".encode()).hexdigest()[:16]
        if self._owner.rank == 0 and digest not in self._plans:
            self._file.write(plan_line(digest, plan))
        # A run replans a few times at most.
        self._plans.add(digest)
        return digest

    def close(self) -> None:
        """Write what has been recorded, and end; idempotent."""
        atexit.unregister(self.close)
        self._end_step()
        if not self._file.is_closed:
            self._write(keep=0)
            self._file.close()

    def _end_step(self) -> None:
        if self._current is not None:
            self._current.finish(self._recorder)
            self._ended.append(self._current)
            self._current = None

    def _note_clock(self) -> None:
        offset = self._compare_clocks()
        self._file.write(clock_line(offset.at_s, offset.offset_s, offset.error_s))

    def _write(self, *, keep: int) -> None:
        """Write the steps that have ended, except for the last `keep`."""
        while len(self._ended) > keep and self._times is not None:
            self._file.write(step_line(self._ended.pop(0).read(self._times)))
