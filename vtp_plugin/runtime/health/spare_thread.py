"""A thread that is there before it is needed: a process that is out of memory or threads cannot start one."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable


class Helper:
    """Does one thing after another, for callers that do not wait longer than they have time.

    Attributes:
        thread: to be started; it runs until :meth:`end`.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], threading.Lock] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="vtp-monitor-helper", daemon=True)

    def run(self, action: Callable[[], None], limit_s: float) -> None:
        """Have something done, and go on without it when that takes too long, as what was asked for before may."""
        done = threading.Lock()
        done.acquire()
        self._tasks.put((action, done))
        done.acquire(timeout=limit_s)

    def end(self) -> None:
        """Let the thread end after what it does just now."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            action, done = task
            with contextlib.suppress(Exception):  # whoever asked goes on without it
                action()
            done.release()
