"""A thread that is there before it is needed: a process that is out of memory or threads cannot start one."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable


class Helper:
    """Does one thing after another, for callers that do not wait longer than they have time."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], threading.Lock]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="vtp-monitor-helper", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def run(self, action: Callable[[], None], limit_s: float) -> None:
        """Have something done, and go on without it when that takes too long, as what was asked for before may."""
        done = threading.Lock()
        done.acquire()
        self._tasks.put((action, done))
        done.acquire(timeout=limit_s)

    def _work(self) -> None:
        while True:
            action, done = self._tasks.get()
            with contextlib.suppress(Exception):  # whoever asked goes on without it
                action()
            done.release()
