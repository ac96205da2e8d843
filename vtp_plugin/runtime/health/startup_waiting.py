"""Waiting for other ranks at start-up: polling with a limit, and lines that say for whom and how long."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import torch.distributed as dist

from vtp_plugin.errors import PeerError
from vtp_plugin.runtime.health.redaction import first_line, write_error_file
from vtp_plugin.util import log

EXIT_CODE = 1
WAITED = "start-up: waited"
POLL_S = 0.02
_FIRST_POLL_S = 0.001
JUDGE_SHARE = 0.9
"""Of the time that ranks wait for each other: rank 0 judges first, so that the others read in time what it found."""
UNKNOWN_PEER = (
    "it did not start, ended, or runs without vtp_plugin (every rank needs apply() or 'python -m vtp_plugin run')"
)
_NEXT_LINE_S = 60.0
_MOST_STEP_S = 5.0
_FAREWELL_S, _FAREWELL_SHARE = 20.0, 0.15
STORE_KEEPER = "rank 0 or the launcher, which keeps the store"
# Tests shorten it.
_FIRST_LINE_VARIABLE = "VTP_FIRST_WAITING_LINE_S"


class AwakeClock:
    """Counts seconds from its creation; asked often, since a longer time without a question counts as a short one.

    So time in which this process stands still, as one that is suspended, accuses nobody.
    """

    def __init__(self) -> None:
        self._seen_s, self._spent_s = time.monotonic(), 0.0

    def seconds(self) -> float:
        """Return the seconds so far; since the last question at most :data:`_MOST_STEP_S`."""
        now_s = time.monotonic()
        self._spent_s += min(now_s - self._seen_s, _MOST_STEP_S)
        self._seen_s = now_s
        return self._spent_s


class WaitingLines:
    """Says for whom this rank waits: after ten seconds, then every minute. Only the first rank of a machine speaks.

    Args:
        limit_s: how long the wait may take.
        describe: names the ranks that are missing; called when a line is due.
        environment: variables of this process.
    """

    def __init__(
        self, limit_s: float, describe: Callable[[], str], environment: Mapping[str, str] = os.environ
    ) -> None:
        self._begin_s = time.monotonic()
        self._limit_s = limit_s
        self._describe = describe
        self._is_speaker = environment.get("LOCAL_RANK", "0") == "0"
        self._address = (
            f"{environment.get('MASTER_ADDR', '(no address)')}:{environment.get('MASTER_PORT', '(no port)')}"
        )
        self._due_s = self._begin_s + float(environment.get(_FIRST_LINE_VARIABLE, "10"))

    @property
    def pause_s(self) -> float:
        """Seconds until the next line is due."""
        return max(0.0, self._due_s - time.monotonic()) if self._is_speaker else float("inf")

    def say(self) -> None:
        """Write a line if one is due."""
        now_s = time.monotonic()
        if not self._is_speaker or now_s < self._due_s:
            return
        self._due_s = now_s + _NEXT_LINE_S
        waited_s = now_s - self._begin_s
        left_s = max(0.0, self._limit_s - waited_s)
        log.warning(
            f"start-up: waiting for {self._describe()}; they meet at {self._address}; waited {waited_s:.0f} s, "
            f"{left_s:.0f} s left"
        )


def poll(
    is_true: Callable[[], bool], limit_s: float, *, pause_s: float = POLL_S, lines: WaitingLines | None = None
) -> bool:
    """Call ``is_true`` until it returns True or the time is up, at least once; return what it returned last.

    It is called often at first, since most waits are short, and then every ``pause_s``.
    """
    clock, next_s = AwakeClock(), _FIRST_POLL_S
    while not is_true():
        if clock.seconds() > limit_s:
            return False
        if lines is not None:
            lines.say()
        time.sleep(min(next_s, pause_s))
        next_s *= 2
    return True


def report(rank: int, text: str, *, is_consequence: bool = False) -> None:
    """Write why a rank ends, as one line and in one call, and tell torchrun.

    This does not use ``logging``, whose locks a stuck thread may hold. ``is_consequence``: another rank failed first.
    """
    write_error_file(text, is_consequence=is_consequence)
    log.write_at_once(2, log.format_record(logging.ERROR, text, rank=rank))


@contextlib.contextmanager
def until_store_ends(whom: str, where: str = "start-up") -> Iterator[None]:
    """Turn torch's error about the connection to the run's store into one line; also a decorator.

    Args:
        whom: who keeps the store, as far as it is known.
        where: what this rank does meanwhile.

    Raises:
        PeerError: the store is gone, or does not answer.
    """
    begin_s = time.monotonic()
    try:
        yield
    except dist.DistError as broken:
        text = f"{WAITED} {time.monotonic() - begin_s:.1f} s for {whom}, at {where}: the connection broke"
        raise PeerError(f"{text} ({first_line(str(broken))}); it ended", shared=f"{text}; it ended") from None


def tell_read(part: dist.Store, key: str) -> None:
    """Tell the rank that keeps the store, which leaves last, that this one has read what was there for it.

    Called when all is read: the store may be gone at once, which matters no longer.
    """
    with contextlib.suppress(dist.DistError):
        part.add(key, 1)


def await_readers(part: dist.Store, key: str, number: int, timeout_s: float) -> None:
    """Wait until so many ranks have told that they have read; one that has died does not tell.

    Args:
        part: part of the store with the posts.
        key: key under which the ranks count.
        number: number of ranks that are there.
        timeout_s: timeout of the run, of which this is a small share.
    """
    poll(lambda: part.add(key, 0) >= number, min(_FAREWELL_S, _FAREWELL_SHARE * timeout_s))


@contextlib.contextmanager
def time_limit(rank: int, timeout_s: float, what: str) -> Iterator[None]:
    """End the process if the block takes clearly longer than its own timeout.

    A call on a store never returns while the store's server is stopped (suspended, not dead).
    """
    limit_s, is_over = 1.1 * timeout_s + 1.0, threading.Event()

    def watch() -> None:
        clock = AwakeClock()
        while clock.seconds() <= limit_s:
            if is_over.wait(min(1.0, limit_s / 4)):
                return
        report(rank, f"{WAITED} {limit_s:.1f} s {what}; the process that keeps the store is stopped")
        os._exit(EXIT_CODE)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def some_ranks(ranks: list[int]) -> str:
    """Return ranks as text: at most eight, and how many more there are.

    >>> some_ranks([*range(10)])
    '0, 1, 2, 3, 4, 5, 6, 7 and 2 more'
    """
    shown = ", ".join(str(r) for r in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
