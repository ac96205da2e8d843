"""Liveness of the run: no rank hangs silently (design section 5, contract 7).

``wait()`` on NCCL and HCCL does not block the host, a stopped process closes no connection, and a rank that is blocked
in a collective of Megatron's own never comes back to our code. So two small threads keep the time on every rank. They
issue no communication on a device; they talk to the store over a connection of their own.

* The *poller* shows a sign of life, looks for that of the next rank (a ring: linear cost in the world size), and looks
  for a failure that some rank posted.
* The *timer* ends the process when the poller found a failure, when the store itself does not answer, or when this rank
  has waited too long at a boundary.

Ending means: one line that names the boundary, direction, microbatch and waiting time, and a non-zero exit.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist

from vtp_plugin.runtime.startup import describe_error

EXIT_CODE = 1
_DONE = b"done"


class DeviceEvent(Protocol):
    """What the monitor needs of ``torch.cuda.Event`` and its kin: has the stream come this far?"""

    def query(self) -> bool:
        """Return whether all work before the event has finished; does not block."""
        ...


@dataclass(slots=True)
class Wait:
    """A wait of this rank for a peer. On device backends it ends when the stream has passed, not when the host has."""

    place: str
    peer: str
    begin_s: float = field(default_factory=time.monotonic)
    event: DeviceEvent | None = None
    ended: bool = False

    def is_over(self) -> bool:
        """Tell whether the wait has ended, on the host or on the device's stream."""
        return self.ended or (self.event is not None and self.event.query())


class Monitor:
    """Keeps the time of one rank. Create after all ranks agreed to start; ``stop`` before a normal end.

    Args:
        store: the run's store; the monitor opens its own connection to the same server.
        rank: global rank.
        world_size: number of ranks.
        timeout_s: every other rank ends within this time after a rank died, stopped or hangs, in seconds.
        exit_process: ends the process; replaced in tests.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        """Open the connection; the threads run after :meth:`start`."""
        self._store = dist.PrefixStore("monitor", store.clone())
        self._rank = rank
        self._world_size = world_size
        self.timeout_s = timeout_s
        # A death is noticed after dead_s, told after one more interval: together less than the timeout.
        self._dead_s = 0.5 * timeout_s
        self._interval_s = min(15.0, timeout_s / 20)
        self._exit_process = exit_process
        self._stopping = threading.Event()
        self._failure: str | None = None
        self._last_contact_s = time.monotonic()
        self._waits: list[Wait] = []
        self._last_wait: Wait | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the two threads."""
        for target in (self._poll, self._keep_time):
            thread = threading.Thread(target=target, name=f"vtp-monitor-{target.__name__.strip('_')}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Say goodbye to the others and end the threads.

        Rank 0, which may own the store's server, leaves last: it waits, still watching, until all others are done.
        """
        if self._stopping.is_set():
            return
        with contextlib.suppress(RuntimeError):
            self._store.add("done", 1)
            while self._rank == 0 and self._store.add("done", 0) < self._world_size:
                time.sleep(0.02)
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout=2 * self._interval_s + 1.0)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"life/{self._rank}", _DONE)

    @contextlib.contextmanager
    def waiting(self, place: str, peer: str) -> Iterator[Wait]:
        """Time a blocking wait of the main thread. ``place`` names boundary, direction and microbatch."""
        wait = self.begin(place, peer)
        try:
            yield wait
        finally:
            wait.ended = wait.event is None

    def begin(self, place: str, peer: str) -> Wait:
        """Start the clock of a wait; set ``ended`` or an ``event`` on the result when the host has passed."""
        wait = Wait(place, peer)
        self._waits = [w for w in self._waits if not w.is_over()]
        self._waits.append(wait)
        self._last_wait = wait
        return wait

    def post_failure(self, error: BaseException) -> None:
        """Tell the others that this rank fails, so that they need not wait for its silence."""
        with contextlib.suppress(RuntimeError):
            self._store.compare_set("failed", "", f"rank {self._rank} failed: {describe_error(error)}")

    @property
    def failure(self) -> str | None:
        """What another rank reported, once known."""
        return self._failure

    def describe_position(self) -> str:
        """Say where this rank stands: the wait that it is in, or the boundary that it used last."""
        now_s = time.monotonic()
        open_waits = [w for w in self._waits if not w.is_over()]
        if open_waits:
            wait = open_waits[0]
            return f"this rank waited {now_s - wait.begin_s:.1f} s at {wait.place} for {wait.peer}"
        if self._last_wait is not None:
            ago_s = now_s - self._last_wait.begin_s
            return f"this rank was not waiting at a boundary (last: {self._last_wait.place}, {ago_s:.1f} s ago)"
        return "this rank had not used any boundary yet"

    def _poll(self) -> None:
        neighbour = (self._rank + 1) % self._world_size
        seen, seen_s, beat = b"", time.monotonic(), 0
        while not self._stopping.is_set():
            try:
                beat += 1
                self._store.set(f"life/{self._rank}", str(beat))
                key = f"life/{neighbour}"
                life = self._store.get(key) if self._store.check([key]) else b""
                now_s = time.monotonic()
                if life != seen or life == _DONE or neighbour == self._rank:
                    seen, seen_s = life, now_s
                elif now_s - seen_s > self._dead_s:
                    reason = f"rank {neighbour} does not answer: no sign of life for {now_s - seen_s:.1f} s"
                    self._store.compare_set("failed", "", reason)
                if self._store.check(["failed"]):
                    self._failure = self._store.get("failed").decode()
                self._last_contact_s = now_s
            except RuntimeError:
                pass  # The timer ends the process when contact stays lost.
            self._stopping.wait(self._interval_s)

    def _keep_time(self) -> None:
        while not self._stopping.wait(self._interval_s / 4):
            now_s = time.monotonic()
            if self._failure is not None:
                self._end(f"{self._failure}; {self.describe_position()}")
            elif now_s - self._last_contact_s > self._dead_s + self._interval_s:
                lost_s = now_s - self._last_contact_s
                self._end(
                    f"no contact for {lost_s:.1f} s with the store that the launcher or rank 0 keeps: it ended or "
                    f"stopped; {self.describe_position()}"
                )
            else:
                self._check_own_waits(now_s)

    def _check_own_waits(self, now_s: float) -> None:
        for wait in list(self._waits):
            if not wait.is_over() and now_s - wait.begin_s > 0.8 * self.timeout_s:
                reason = f"waited {now_s - wait.begin_s:.1f} s at {wait.place} for {wait.peer}: no answer"
                with contextlib.suppress(RuntimeError):
                    self._store.compare_set("failed", "", f"rank {self._rank} {reason}")
                self._end(f"{reason}; look for a rank that ended, stopped or runs another schedule")

    def _end(self, reason: str) -> None:
        print(f"[vtp rank {self._rank}] error: {reason}", file=sys.stderr, flush=True)
        # Helpers of a checkpoint save would outlive this process and keep its output open.
        for child in multiprocessing.active_children():
            child.kill()
        self._exit_process(EXIT_CODE)
        self._stopping.set()
