"""How a process ends: its error by the hook, the launcher's file of errors, and its children."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from vtp_plugin.errors import PeerError, VtpError
from vtp_plugin.runtime.health.redaction import describe_error, say_once, write_error_file
from vtp_plugin.util import log
from vtp_plugin.util.text import one_line

if TYPE_CHECKING:
    from vtp_plugin.runtime.health.monitor import Monitor


# Processes are not looked at before: forking them while a thread runs through Python's own list is asking for trouble.
_POLL_S: Final = 1.0


@contextlib.contextmanager
def ending_with_writers(rank_process: int) -> Iterator[None]:
    """Run a block that starts processes and waits for them without checking that they live; end if one of them dies.

    Args:
        rank_process: id of the rank's own process, which tells the other ranks; a process that writes for it just ends.
    """
    before, is_over = _children(), threading.Event()
    watcher = threading.Thread(target=_watch, args=(before, is_over, rank_process), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def _children() -> set[int]:
    """Return the child processes that nobody has waited for; ``active_children()`` would wait for them."""
    known: Any = multiprocessing.process
    return {child.pid for child in tuple(known._children)}


def _watch(before: set[int], is_over: threading.Event, rank_process: int) -> None:
    while not is_over.wait(_POLL_S):
        for code in map(_exit_code, _children() - before):
            if code:
                _end(code, is_rank=os.getpid() == rank_process)


def _exit_code(process: int) -> int | None:
    """Return the exit code of a process without reaping it; None while it lives."""
    try:
        found = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # somebody was faster
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def ended_early(writer: str, code: int | None) -> PeerError:
    """Make the error for a process that has ended before it had written everything.

    Args:
        writer: description of the process.
        code: its exit code; negative for a signal.
    """
    return PeerError(
        f"{writer} has ended with {code}, before it had written all; the checkpoint before that one stays; find out "
        "what ended it, such as a lack of memory, and start again"
    )


def _end(code: int, *, is_rank: bool) -> None:
    error = ended_early("a process that was writing a checkpoint", code)
    if is_rank:
        sys.excepthook(type(error), error, None)
    else:  # the rank finds that this process is gone
        log.error(str(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


_NUM_COMPARED = 200
_PATIENCE_S = 10.0


class FailureHook:
    """The plugin's link in the chain of exception hooks.

    An error of the plugin is printed as one line; one that all ranks of a machine know, by one of them. So is a
    connection that broke because another rank has failed. Any other error goes to the hook that was there before; then
    one line of the plugin follows if the run was being watched. The launcher gets a line of every error.

    Args:
        is_applied: tells whether the plugin is applied.
        get_monitor: returns what reaches the other ranks; None while nothing does.
        note: is called with the error, and whether another rank failed before.
    """

    def __init__(
        self,
        is_applied: Callable[[], bool],
        get_monitor: Callable[[], Monitor | None],
        note: Callable[[BaseException, bool], None] = lambda error, is_consequence: None,
    ) -> None:
        self._is_applied = is_applied
        self._get_monitor = get_monitor
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
        """Put the earlier hook back. If another hook was set meanwhile, stay below it and pass every error on."""
        self._is_active = self._has_failed = False
        if sys.excepthook is self and self._before is not None:
            sys.excepthook, self._before = self._before, None

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report an error that ends the process; called as ``sys.excepthook``."""
        before = self._before or sys.__excepthook__
        if not self._is_active:
            before(kind, error, trace)
            return
        monitor = self._get_monitor()
        self._has_failed = self._is_applied()
        cause = position = ""
        has_lost = False
        if monitor is not None:
            position = monitor.describe_position(error)
            # Before printing: torch may complain about a broken store, and the plugin's line must be the last.
            has_lost = monitor.post_failure(error)
            if monitor.failure is not None and not _says(monitor.failure, error):
                if has_lost or isinstance(error, PeerError):
                    cause = f"{monitor.failure}; then, "  # says more than where this rank waited for it
                else:
                    position += f"; before that, {monitor.failure}"
        is_consequence = monitor is not None and monitor.failure is not None
        if isinstance(error, VtpError) and error.is_known_to_node:
            say_once(describe_error(error), log.error, limit_s=_PATIENCE_S)
        else:
            text = str(error)
            if has_lost and not isinstance(error, VtpError):
                text = "this rank lost a connection"
            elif not isinstance(error, VtpError):
                before(kind, error, trace)
                text = f"this rank failed with the error above, {describe_error(error)[:_NUM_COMPARED]}"
            if monitor is not None or isinstance(error, VtpError):
                log.error(f"{cause}{text}{position}")
            write_error_file(f"{cause}{describe_error(error)}{position}", is_consequence=is_consequence)
        self._note(error, is_consequence)

    def announce(self, error: BaseException) -> bool:
        """Tell the other ranks of an end that reaches no exception hook, such as ``sys.exit(1)``.

        Returns:
            Whether another rank failed before.
        """
        monitor = self._get_monitor()
        if not self._is_active or monitor is None:
            return False
        monitor.post_failure(error)
        return monitor.failure is not None

    def leave(self) -> None:
        """Exit at once after an error: destructors of process groups could wait for peers that are gone."""
        if not self._has_failed:
            return
        # os._exit() skips multiprocessing's exit handler: children such as data loaders would go on.
        for child in multiprocessing.active_children():
            child.kill()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)


def _says(failure: str, error: BaseException) -> bool:
    """Tell whether a failure of another rank is this rank's own error.

    >>> _says("rank 2 failed: no such list", VtpError("no such list")), _says("rank 2 failed: x", ValueError("y"))
    (True, False)
    """
    own = one_line(f"failed: {describe_error(error)}")[:_NUM_COMPARED]  # what was posted may be cut
    return isinstance(error, VtpError) and own in failure
