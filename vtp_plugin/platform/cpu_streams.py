"""Streams and events of a device that runs everything on the host, immediately and in program order."""

from __future__ import annotations

import time
from types import TracebackType

import torch


class CpuEvent:
    """Stands for ``torch.cuda.Event``: it is complete as soon as it is recorded, with the time of the host."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self._recorded_at_s: float | None = None

    def record(self, stream: object = None) -> None:
        """Note the time."""
        self._recorded_at_s = time.perf_counter()

    def wait(self, stream: object = None) -> None:
        """Return at once: what precedes the event has run."""

    def synchronize(self) -> None:
        """Return at once: what precedes the event has run."""

    def query(self) -> bool:
        """Return True: what precedes the event has run."""
        return True

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Return the milliseconds from this event to ``end_event``.

        Raises:
            RuntimeError: One of the two was never recorded.
        """
        if self._recorded_at_s is None or end_event._recorded_at_s is None:
            raise RuntimeError("both events must be recorded before their elapsed time is taken")
        return (end_event._recorded_at_s - self._recorded_at_s) * 1e3


class CpuStream:
    """Stands for ``torch.cuda.Stream``: its work is done when the call returns."""

    def __init__(self, device: object = None, priority: int = 0, **_kwargs: object) -> None:
        self.device = torch.device("cpu")
        self.device_index = 0
        self.priority = priority
        self.cuda_stream = 0
        self.stream_id = 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and the highest priority: there is one."""
        return (0, 0)

    def wait_event(self, event: object) -> None:
        """Return at once: the event has been reached."""

    def wait_stream(self, stream: object) -> None:
        """Return at once: the other stream is idle."""

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Record ``event``, or a new one, and return it."""
        event = event if event is not None else CpuEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Return at once: the stream is idle."""

    def query(self) -> bool:
        """Return True: the stream is idle."""
        return True


class StreamState:
    """Keeps the current stream: ``current_stream()`` returns what ``set_stream()`` was given."""

    def __init__(self) -> None:
        self._default = CpuStream()
        self._current = self._default

    def current_stream(self, device: object = None) -> CpuStream:
        """Return the current stream."""
        return self._current

    def default_stream(self, device: object = None) -> CpuStream:
        """Return the default stream."""
        return self._default

    def set_stream(self, stream: CpuStream | None) -> None:
        """Make ``stream`` the current one; None changes nothing."""
        if stream is not None:
            self._current = stream

    def stream(self, stream: CpuStream | None) -> StreamContext:
        """Return a context in which ``stream`` is the current one."""
        return StreamContext(self, stream)


class StreamContext:
    """Stands for ``torch.cuda.stream(...)``: a context manager that may be entered several times."""

    def __init__(self, state: StreamState, stream: CpuStream | None) -> None:
        self._state = state
        self._stream = stream
        self._outer: list[CpuStream] = []

    def __enter__(self) -> None:
        self._outer.append(self._state.current_stream())
        self._state.set_stream(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state.set_stream(self._outer.pop())
