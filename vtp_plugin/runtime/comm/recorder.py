"""What this rank does and when: the one place where its time is measured.

Whatever computes, sends or waits notes it here (:meth:`Recorder.span`). Nothing is measured or kept unless somebody
listens: the first steps of a run that measures its costs, ``--vtp-trace`` and ``--vtp-timing``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from vtp_plugin.platform.interface import Platform
from vtp_plugin.report.trace.causes import Cause


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Marks points in this rank's work; on a device it marks the stream and does not hold up the host.

    Attributes:
        platform: says whether the host computes itself.
    """

    platform: Platform

    def mark(self) -> Any:
        """Mark the end of what was issued so far: a time, or an event of the device."""
        if self.platform.host_blocking_wait:
            return time.perf_counter()
        event = self.platform.module().Event(enable_timing=True)
        event.record()
        return event

    def between_ms(self, start: Any, end: Any) -> float:
        """Return the time between two marks; waits until the work has reached the second."""
        if self.platform.host_blocking_wait:
            return 1e3 * (end - start)
        end.synchronize()
        return start.elapsed_time(end)


@dataclass(frozen=True, slots=True)
class Noted:
    """Something that this rank did.

    Attributes:
        cause: what its time went to.
        name: what exactly; its text is made only where somebody reads it.
        start: mark of its start.
        end: mark of its end.
    """

    cause: Cause
    name: object
    start: Any
    end: Any


class Recorder:
    """Notes what the main thread of this rank does, for those who listen.

    Args:
        platform: where this rank computes.

    Attributes:
        watch: makes the marks.
    """

    def __init__(self, platform: Platform) -> None:
        self.watch = Stopwatch(platform)
        self._listeners: list[list[Noted]] = []
        self._open: list[_Open] = []
        self._thread = threading.get_ident()

    @property
    def is_on(self) -> bool:
        """Whether somebody listens."""
        return bool(self._listeners)

    def start_listening(self) -> list[Noted]:
        """Return a list that gets all that ends from now on, until it is given to :meth:`stop_listening`."""
        noted: list[Noted] = []
        self._listeners.append(noted)
        return noted

    def stop_listening(self, noted: list[Noted]) -> None:
        """Note nothing more in a list of :meth:`start_listening`."""
        self._listeners = [one for one in self._listeners if one is not noted]
        if not self._listeners:
            # What an error left open must not hide what comes later.
            self._open.clear()

    @contextlib.contextmanager
    def listening(self) -> Iterator[list[Noted]]:
        """Give a list of what ends inside a ``with`` block."""
        noted = self.start_listening()
        try:
            yield noted
        finally:
            self.stop_listening(noted)

    @contextlib.contextmanager
    def _noting(self, cause: Cause, name: object) -> Iterator[None]:
        self.begin(cause, name)
        try:
            yield
        finally:
            self.end(cause)

    def span(self, cause: Cause, name: object = "") -> AbstractContextManager[object]:
        """Note what a ``with`` block takes; of two of one cause inside each other only the outer one counts."""
        if not self._is_heard or any(one.cause is cause for one in self._open[-1:]):
            return _NOTHING
        return self._noting(cause, name)

    def begin(self, cause: Cause, name: object = "") -> None:
        """Begin something that :meth:`end` ends; inside something of the same cause it counts as a part of that."""
        if not self._is_heard:
            return
        if self._open and self._open[-1].cause is cause:
            self._open[-1].num_inside += 1
            return
        self._open.append(_Open(cause, name, self.watch.mark()))

    def end(self, cause: Cause) -> None:
        """End what was begun last of a cause, and all inside it that was left open; nothing if none was begun."""
        if not self._is_heard or all(one.cause is not cause for one in self._open):
            return
        while self._open[-1].cause is not cause:
            self._open.pop()
        one = self._open[-1]
        if one.num_inside:
            one.num_inside -= 1
            return
        self._open.pop()
        noted = Noted(cause, one.name, one.start, self.watch.mark())
        for listener in self._listeners:
            listener.append(noted)

    @property
    def _is_heard(self) -> bool:
        return bool(self._listeners) and threading.get_ident() == self._thread


@dataclass(slots=True)
class _Open:
    """Something that has begun.

    Attributes:
        cause: what it is.
        name: what exactly.
        start: mark of its start.
        num_inside: how many of the same cause have begun inside it, and not ended.
    """

    cause: Cause
    name: object
    start: Any
    num_inside: int = 0


_NOTHING = contextlib.nullcontext()
