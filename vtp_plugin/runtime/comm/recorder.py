"""What this rank does and when: the one place where its time is measured.

Whatever computes, sends or waits notes it here (:meth:`Recorder.span`). Nothing is measured or kept unless somebody
listens: the first steps of a run that measures its costs, ``--vtp-trace`` and ``--vtp-timing``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from vtp_plugin.platform.interface import Platform
from vtp_plugin.report.trace.causes import Cause


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Marks points in this rank's work; on a device it marks the stream, and the host does not wait.

    Attributes:
        platform: says whether the host computes itself.
    """

    platform: Platform

    def mark(self) -> Any:
        """Mark the end of all work issued so far: a time, or an event of the device."""
        if self.platform.host_blocking_wait:
            return time.perf_counter()
        event = self.platform.module().Event(enable_timing=True)
        event.record()
        return event

    def between_ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds between two marks; waits until the work has reached the second."""
        if self.platform.host_blocking_wait:
            return 1e3 * (end - start)
        end.synchronize()
        return start.elapsed_time(end)


@dataclass(frozen=True, slots=True)
class Noted:
    """One span of this rank's time.

    Attributes:
        cause: what the time went to.
        name: which tensor or compute it was; its text is made only where somebody reads it.
        start: mark of the span's start.
        end: mark of its end.
        num_bytes: bytes of the messages that were handed to the backend in it, as far as they are counted.
    """

    cause: Cause
    name: object
    start: Any
    end: Any
    num_bytes: int = 0


class Recorder:
    """Notes what the main thread of this rank does, for those who listen.

    Args:
        platform: where this rank computes.

    Attributes:
        watch: makes the marks.
        counts_traffic: whether those who listen want to know bytes and retransmissions, too: in a run of several sites.
    """

    def __init__(self, platform: Platform) -> None:
        self.watch = Stopwatch(platform)
        self.counts_traffic = False
        self._listeners: list[list[Noted]] = []
        self._open: list[_Open] = []
        self._thread = threading.get_ident()

    @property
    def is_on(self) -> bool:
        """Whether somebody listens."""
        return bool(self._listeners)

    def start_listening(self) -> list[Noted]:
        """Return a list to which every span that ends is added, until the list is given to :meth:`stop_listening`."""
        noted: list[Noted] = []
        self._listeners.append(noted)
        return noted

    def stop_listening(self, noted: list[Noted]) -> None:
        """Add nothing more to a list of :meth:`start_listening`."""
        self._listeners = [one for one in self._listeners if one is not noted]
        if not self._listeners:
            # A span that an error left open must not hide later ones.
            self._open.clear()

    @contextlib.contextmanager
    def listening(self) -> Iterator[list[Noted]]:
        """Give a list of the spans that end inside a ``with`` block."""
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
        """Note the time of a ``with`` block; of nested spans of one cause only the outer one counts."""
        if not self._is_heard or any(one.cause is cause for one in self._open[-1:]):
            return _NOTHING
        return self._noting(cause, name)

    def begin(self, cause: Cause, name: object = "") -> None:
        """Begin a span that :meth:`end` ends; inside a span of the same cause it counts as a part of that."""
        if not self._is_heard:
            return
        if self._open and self._open[-1].cause is cause:
            self._open[-1].num_inside += 1
            return
        self._open.append(_Open(cause, name, self.watch.mark()))

    def end(self, cause: Cause) -> None:
        """End the newest open span of a cause, and all that are open inside it; do nothing if there is none."""
        if not self._is_heard or all(one.cause is not cause for one in self._open):
            return
        while self._open[-1].cause is not cause:
            self._open.pop()
        one = self._open[-1]
        if one.num_inside:
            one.num_inside -= 1
            return
        self._open.pop()
        noted = Noted(cause, one.name, one.start, self.watch.mark(), one.num_bytes)
        for listener in self._listeners:
            listener.append(noted)

    def add_bytes(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count messages that are handed to the backend in the innermost open span."""
        if self.counts_traffic and self._is_heard and self._open:
            self._open[-1].num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def _is_heard(self) -> bool:
        return bool(self._listeners) and threading.get_ident() == self._thread


@dataclass(slots=True)
class _Open:
    """A span that has begun.

    Attributes:
        cause: what the time goes to.
        name: which tensor or compute it is.
        start: mark of its start.
        num_inside: number of open spans of the same cause inside it.
        num_bytes: bytes of the messages that were handed to the backend in it so far.
    """

    cause: Cause
    name: object
    start: Any
    num_inside: int = 0
    num_bytes: int = 0


_NOTHING = contextlib.nullcontext()
