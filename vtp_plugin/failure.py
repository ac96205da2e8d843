"""What this process does when an error ends it: one line, a word to the other ranks, and an end without waiting."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from vtp_plugin import log
from vtp_plugin.errors import VtpError


class Watch(Protocol):
    """What knows where the run stands, and reaches the other ranks."""

    @property
    def failure(self) -> str | None:
        """What is known to have failed before."""
        ...

    def describe_position(self) -> str:
        """Say where this rank is."""
        ...

    def post_failure(self, error: BaseException) -> None:
        """Tell the other ranks."""
        ...


class FailureHook:
    """The plugin's link in the chain of exception hooks.

    Errors of the plugin are one line; all others go to the hook that was there before, and a line of ours follows.

    Args:
        is_applied: tells whether the plugin is applied.
        get_watch: returns what reaches the other ranks, as soon as something does.
        note: also gets the error that our line was about, the line's end, and whether another rank failed before.
    """

    def __init__(
        self,
        is_applied: Callable[[], bool],
        get_watch: Callable[[], Watch | None],
        note: Callable[[BaseException, str, bool], None] = lambda error, position, is_consequence: None,
    ) -> None:
        self._is_applied = is_applied
        self._get_watch = get_watch
        self._note = note
        self._before: Callable[..., object] | None = None
        self._is_active = False
        self._has_failed = False

    def install(self) -> None:
        """Become the process's exception hook; idempotent."""
        if self._before is None:
            self._before = sys.excepthook
            sys.excepthook = self
        self._is_active = True

    def remove(self) -> None:
        """Put the hook back that was there before; under a hook that was set meanwhile, pass everything on to it."""
        self._is_active = self._has_failed = False
        if sys.excepthook is self and self._before is not None:
            sys.excepthook, self._before = self._before, None

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report an error that ends the process; contract of ``sys.excepthook``."""
        before = self._before or sys.__excepthook__
        if not self._is_active:
            before(kind, error, trace)
            return
        monitor = self._get_watch()
        self._has_failed = self._is_applied()
        position = ""
        if monitor is not None:
            position = f"; {monitor.describe_position()}"
            # Before printing: torch may complain about a broken store, and our line shall be the last.
            monitor.post_failure(error)
            if monitor.failure is not None:
                position += f"; before that, {monitor.failure}"
        text = str(error)
        if not isinstance(error, VtpError):
            before(kind, error, trace)
            text = "this rank failed with the error above"
        if monitor is not None or isinstance(error, VtpError):
            log.error(f"{text}{position}")
            self._note(error, position, monitor is not None and monitor.failure is not None)

    def leave(self) -> None:
        """End here, after the other exit handlers: destructors of process groups may wait for peers that are gone."""
        if not self._has_failed:
            return
        for child in multiprocessing.active_children():
            child.kill()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)
