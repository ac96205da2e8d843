"""Where this rank stands: its waits for other ranks, on the monitor's clock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from vtp_plugin.runtime.health.waiting import some_ranks
from vtp_plugin.runtime.health.who_waits import Standing, find_collective, ranks_in


class DeviceEvent(Protocol):
    """Interface of ``torch.cuda.Event`` and its like: whether the stream has come this far."""

    def query(self) -> bool:
        """Return whether all work before the event has finished; does not block."""
        ...


@dataclass(slots=True)
class Wait:
    """A wait of this rank for a peer. On a device it ends when the stream has passed it, not when the host has.

    Attributes:
        position: boundary, direction and microbatch, or a collective and the compute that it is inside.
        peer: name of the ranks that are waited for.
        begin_s: start of the wait, on the monitor's clock.
        event: recorded behind the wait on the device's stream; None until the host has come that far.
        ended: whether the host knows that the wait is over.
    """

    position: str
    peer: str
    begin_s: float
    event: DeviceEvent | None = None
    ended: bool = False

    def is_over(self) -> bool:
        """Tell whether the wait has ended, on the host or on the device's stream."""
        try:
            return self.ended or (self.event is not None and self.event.query())
        except RuntimeError:
            # The device failed: its stream will never pass the wait.
            return False


class Position:
    """Where this rank is: its waits at boundaries and in collectives.

    Args:
        rank: this rank.
        clock_s: reads the monitor's clock.
    """

    def __init__(self, rank: int, clock_s: Callable[[], float]) -> None:
        self._rank = rank
        self._clock_s = clock_s
        self._waits: list[Wait] = []
        self._last_wait: Wait | None = None
        # The collective inside a compute that holds up this rank.
        self._inside: Wait | None = None
        self._name_compute: Callable[[], str] | None = None

    def begin(self, position: str, peer: str) -> Wait:
        """Start the clock of a wait; set ``ended`` or an ``event`` on the result when the host has passed.

        Args:
            position: boundary, direction and microbatch.
            peer: name of the ranks that are waited for.
        """
        wait = Wait(position, peer, self._clock_s())
        self._waits = [*self._open, wait]
        self._last_wait = wait
        return wait

    @contextlib.contextmanager
    def computing(self, name_compute: Callable[[], str]) -> Iterator[None]:
        """Watch collectives inside computes in a ``with`` block: their waits count as those at boundaries do.

        Args:
            name_compute: names the compute that is running; empty between two of them.
        """
        self._name_compute = name_compute
        try:
            yield
        finally:
            self._name_compute = self._inside = None

    def look(self) -> None:
        """Note whether a compute waits in a collective, and since when; called often, by the thread with the clock."""
        compute = self._compute
        collective = find_collective() if compute else None
        if collective is None:
            self._inside = None
            return
        position = f"{collective.name} inside {compute}"
        if self._inside is None or self._inside.position != position:
            others = [rank for rank in collective.ranks if rank != self._rank]
            self._inside = Wait(position, f"rank {some_ranks(others)}" if others else "other ranks", self._clock_s())

    def longer_than(self, limit_s: float) -> Wait | None:
        """Return a wait that has taken longer than a limit; None if there is none."""
        known = [*self._waits, *([self._inside] if self._inside is not None else [])]
        waits = (wait for wait in known if self._clock_s() - wait.begin_s > limit_s and not wait.is_over())
        return next(waits, None)

    def stand(self) -> Standing:
        """Return where this rank is, for others: at a boundary, in a collective, or elsewhere."""
        for wait in self._open:
            return Standing(text=f"waits at {wait.position} for {wait.peer}", peers=ranks_in(wait.peer))
        if (collective := self._collective()) is not None:
            return collective
        if compute := self._compute:
            return Standing(text=f"computes {compute}")
        last = "" if self._last_wait is None else f" (last at {self._last_wait.position})"
        return Standing(text=f"was not waiting at a boundary{last}")

    def describe(self) -> str:
        """Describe where this rank is, for its own line: its current wait, or the boundary that it used last.

        Returns:
            The text; empty where there is nothing to say, before the first boundary.
        """
        now_s = self._clock_s()
        for wait in self._open:
            return f"this rank waited {now_s - wait.begin_s:.1f} s at {wait.position} for {wait.peer}"
        if (collective := self._collective()) is not None:
            return f"this rank {collective.text}"
        if (last := self._last_wait) is not None:
            ago_s = now_s - last.begin_s
            return f"this rank was not waiting at a boundary (last: {last.position}, {ago_s:.1f} s ago)"
        return ""

    @property
    def _open(self) -> list[Wait]:
        return [wait for wait in self._waits if not wait.is_over()]

    @property
    def _compute(self) -> str:
        name_compute = self._name_compute
        return "" if name_compute is None else name_compute()

    def _collective(self) -> Standing | None:
        collective = find_collective()
        if collective is None:
            return None
        of = f" of ranks {some_ranks([*collective.ranks])}" if collective.ranks else ""
        inside = f", inside {self._compute}" if self._compute else ""
        return Standing(
            text=f"stands in {collective.name}{of}{inside}",
            peers=tuple(rank for rank in collective.ranks if rank != self._rank),
            group=collective.ranks,
        )
