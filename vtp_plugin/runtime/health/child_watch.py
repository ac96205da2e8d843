"""Child processes that write for this one: if one dies, whoever waits for it must not wait forever."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

from vtp_plugin.errors import PeerError
from vtp_plugin.util import log

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
