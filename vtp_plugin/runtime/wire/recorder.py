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

from vtp_plugin.platform.base import Platform
from vtp_plugin.trace.causes import Cause


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
        self._open: list[Cause] = []
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

    def span(self, cause: Cause, name: object = "") -> AbstractContextManager[object]:
        """Note what a ``with`` block takes; of two blocks of one cause inside each other only the outer counts."""
        if not self._listeners or self._open[-1:] == [cause] or threading.get_ident() != self._thread:
            return _NOTHING
        return _Span(self, cause, name)

    def enter(self, cause: Cause) -> tuple[int, Any]:
        """Begin something; returns what :meth:`leave` takes."""
        self._open.append(cause)
        return len(self._open), self.watch.mark()

    def leave(self, cause: Cause, name: object, begun: tuple[int, Any]) -> None:
        """End something, and all inside it that was left open."""
        depth, start = begun
        del self._open[depth - 1 :]
        noted = Noted(cause, name, start, self.watch.mark())
        for listener in self._listeners:
            listener.append(noted)


class _Span:
    __slots__ = ("_begun", "_cause", "_name", "_recorder")

    def __init__(self, recorder: Recorder, cause: Cause, name: object) -> None:
        self._recorder, self._cause, self._name = recorder, cause, name

    def __enter__(self) -> None:
        self._begun = self._recorder.enter(self._cause)

    def __exit__(self, *error: object) -> None:
        self._recorder.leave(self._cause, self._name, self._begun)


_NOTHING = contextlib.nullcontext()
