"""A thread that is there before it is needed: a process that is out of memory or threads cannot start one."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable


class Helper:
    """Runs actions one after another in a thread, for callers that wait for each only up to a limit.

    Attributes:
        thread: the thread, which the owner starts; it runs until :meth:`end`.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], threading.Lock] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="vtp-monitor-helper", daemon=True)

    def run(self, action: Callable[[], None], limit_s: float) -> None:
        """Run an action, and return after the limit even if it, or an earlier one, is still running."""
        done = threading.Lock()
        done.acquire()
        self._tasks.put((action, done))
        done.acquire(timeout=limit_s)

    def end(self) -> None:
        """Let the thread end after its current action."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            action, done = task
            with contextlib.suppress(Exception):  # whoever asked continues without it
                action()
            done.release()
