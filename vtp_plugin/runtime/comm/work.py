"""What is under way on this rank: waits for it, their records, and the counters of the sockets below.

What the kernel counts of TCP in this process's network namespace; on Linux only.

Gloo's connections cannot be asked one by one: torch gives out no sockets. The counters are those of all connections of
the namespace, other programs' included.

What this rank does and when: the one place where its time is measured.

Whatever computes, sends or waits notes it here (:meth:`Recorder.span`). Nothing is measured or kept unless somebody
listens: the first steps of a run that measures its costs, ``--vtp-trace`` and ``--vtp-timing``.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vtp_plugin.errors import PeerError
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.health.monitor import Monitor
from vtp_plugin.runtime.health.redaction import first_line
from vtp_plugin.trace.stretches import Cause

_COUNTERS = Path("/proc/self/net/snmp")
_NAMESPACE, _BOOT = Path("/proc/self/ns/net"), Path("/proc/sys/kernel/random/boot_id")


def read_counters(text: str) -> Mapping[str, int]:
    r"""Read the counters of TCP from the text of ``/proc/net/snmp``: a line of names, then one of values.

    >>> read_counters("Ip: Forwarding\nIp: 2\nTcp: OutSegs RetransSegs\nTcp: 700 3\n")
    {'OutSegs': 700, 'RetransSegs': 3}
    """
    rows = [line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:")]
    return {} if len(rows) != 2 else dict(zip(rows[0], map(int, rows[1]), strict=True))


def num_resent() -> int | None:
    """Count the TCP segments that the namespace has sent again since it exists; None where the system does not tell."""
    try:
        return read_counters(_COUNTERS.read_text(encoding="ascii")).get("RetransSegs")
    except (OSError, ValueError):
        return None


def name_network() -> str:
    """Return a digest that is equal for processes of one network namespace and differs between others; else empty."""
    try:
        name = f"{_BOOT.read_text(encoding='ascii').strip()} {_NAMESPACE.stat().st_ino}"
    except OSError:
        return ""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Marks points in this rank's work; on a device it marks the stream, and the host does not wait.

    Attributes:
        platform: says whether the host computes itself.
    """

    platform: Platform

    def mark(self) -> Any:
        """Mark the end of all work issued so far: a time, or an event of the device."""
        if self.platform.host_blocking_wait:
            return time.perf_counter()
        event = self.platform.module().Event(enable_timing=True)
        event.record()
        return event

    def between_ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds between two marks; waits until the work has reached the second."""
        if self.platform.host_blocking_wait:
            return 1e3 * (end - start)
        end.synchronize()
        return start.elapsed_time(end)


@dataclass(frozen=True, slots=True)
class Noted:
    """One span of this rank's time.

    Attributes:
        cause: what the time went to.
        name: which tensor or compute it was; its text is made only where somebody reads it.
        start: mark of the span's start.
        end: mark of its end.
        num_bytes: bytes of the messages that were handed to the backend in it, as far as they are counted.
    """

    cause: Cause
    name: object
    start: Any
    end: Any
    num_bytes: int = 0


class Recorder:
    """Notes what the main thread of this rank does, for those who listen.

    Args:
        platform: where this rank computes.

    Attributes:
        watch: makes the marks.
        counts_traffic: whether those who listen want to know bytes, too: in a run that is traced, or that has several
            sites.
        counts_resent: whether they want to know what was sent again, too: in a run that has several sites.
    """

    def __init__(self, platform: Platform) -> None:
        self.watch = Stopwatch(platform)
        self.counts_traffic = False
        self.counts_resent = False
        self._listeners: list[list[Noted]] = []
        self._open: list[_Open] = []
        self._thread = threading.get_ident()

    @property
    def is_on(self) -> bool:
        """Whether somebody listens."""
        return bool(self._listeners)

    def start_listening(self) -> list[Noted]:
        """Return a list to which every span that ends is added, until the list is given to :meth:`stop_listening`."""
        noted: list[Noted] = []
        self._listeners.append(noted)
        return noted

    def stop_listening(self, noted: list[Noted]) -> None:
        """Add nothing more to a list of :meth:`start_listening`."""
        self._listeners = [one for one in self._listeners if one is not noted]
        if not self._listeners:
            # A span that an error left open must not hide later ones.
            self._open.clear()

    @contextlib.contextmanager
    def listening(self) -> Iterator[list[Noted]]:
        """Give a list of the spans that end inside a ``with`` block."""
        noted = self.start_listening()
        try:
            yield noted
        finally:
            self.stop_listening(noted)

    @contextlib.contextmanager
    def _noting(self, cause: Cause, name: object) -> Iterator[None]:
        self.begin(cause, name)
        try:
            yield
        finally:
            self.end(cause)

    def span(self, cause: Cause, name: object = "") -> AbstractContextManager[object]:
        """Note the time of a ``with`` block; of nested spans of one cause only the outer one counts."""
        if not self._listeners or not self._is_heard or any(one.cause is cause for one in self._open[-1:]):
            return _NOTHING
        return self._noting(cause, name)

    def begin(self, cause: Cause, name: object = "") -> None:
        """Begin a span that :meth:`end` ends; inside a span of the same cause it counts as a part of that."""
        if not self._is_heard:
            return
        if self._open and self._open[-1].cause is cause:
            self._open[-1].num_inside += 1
            return
        self._open.append(_Open(cause, name, self.watch.mark()))

    def end(self, cause: Cause) -> None:
        """End the newest open span of a cause, and all that are open inside it; do nothing if there is none."""
        if not self._is_heard or all(one.cause is not cause for one in self._open):
            return
        while self._open[-1].cause is not cause:
            self._open.pop()
        one = self._open[-1]
        if one.num_inside:
            one.num_inside -= 1
            return
        self._open.pop()
        noted = Noted(cause, one.name, one.start, self.watch.mark(), one.num_bytes)
        for listener in self._listeners:
            listener.append(noted)

    def add_bytes(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count messages that are handed to the backend in the innermost open span."""
        if self.counts_traffic and self._is_heard and self._open:
            self._open[-1].num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def _is_heard(self) -> bool:
        return bool(self._listeners) and threading.get_ident() == self._thread


@dataclass(slots=True)
class _Open:
    """A span that has begun.

    Attributes:
        cause: what the time goes to.
        name: which tensor or compute it is.
        start: mark of its start.
        num_inside: number of open spans of the same cause inside it.
        num_bytes: bytes of the messages that were handed to the backend in it so far.
    """

    cause: Cause
    name: object
    start: Any
    num_inside: int = 0
    num_bytes: int = 0


_NOTHING = contextlib.nullcontext()


Timed = Callable[[], AbstractContextManager[None]]
"""Makes a ``with`` block whose time is kept."""


class Finish(Protocol):
    """The finish of a plan under way: what the ranks of a stage do together with what they have received."""

    def advance(self, num_arrived: int) -> None:
        """Note that `num_arrived` messages of this rank have come."""
        ...

    def complete(self) -> None:
        """Return when the tensor is complete."""
        ...


@dataclass(frozen=True, slots=True)
class TimedWaits:
    """Waits for other ranks: the monitor keeps the time, and a broken connection becomes an error of one line.

    Attributes:
        platform: says whether a wait blocks the host or the device's stream.
        monitor: keeps the time; None in single-process use.
        recorder: notes how long each wait took.
    """

    platform: Platform
    monitor: Monitor | None
    recorder: Recorder

    @contextlib.contextmanager
    def timed(self, position: str, peer: str, what: str = "", cause: Cause = Cause.WAIT) -> Iterator[None]:
        """Keep the time of a ``with`` block that waits for other ranks.

        Args:
            position: boundary, direction and microbatch.
            peer: name of the ranks that are waited for.
            what: name of what is broken if the backend fails; by default the connection to the peer.
            cause: what this rank's time goes to, for the recorder.

        Raises:
            PeerError: the backend failed.
        """
        wait = self.monitor.position.begin(position, peer) if self.monitor is not None else None
        try:
            with self.recorder.span(cause, position):
                yield
        except RuntimeError as error:
            what = what or f"connection to {peer}"
            raise PeerError(
                f"{position}: {what} broke ({first_line(str(error))})", shared=f"{position}: {what} broke"
            ) from error
        if wait is None:
            return
        if self.platform.host_blocking_wait:
            wait.ended = True
        else:
            # The host has only queued the wait: it is over when the device's stream has passed this point.
            wait.event = event = self.platform.module().Event()
            event.record()


class SendWork:
    """A send under way: keeps the tensor and the backend's handles until it is waited for.

    ``wait`` is idempotent: a second wait on gloo's own handle would block until the timeout.

    Args:
        works: the backend's handles.
        tensors: what is being sent.
        timed: keeps the time of a wait for the receiver.
    """

    def __init__(self, works: Sequence[dist.Work], tensors: Sequence[torch.Tensor], timed: Timed) -> None:
        self._works = list(works)
        self._tensors = list(tensors)
        self._timed = timed

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to wait for: the send was waited for, or this rank sends nothing."""
        return not self._works

    def reap(self) -> bool:
        """Free the tensor if all of it is sent, and return whether it is. Never blocks.

        A gloo handle does not know that its message is sent until someone waits for it: there, only an earlier wait
        counts.
        """
        if self._works and all(work.is_completed() for work in self._works):
            self.wait()
        return not self._works

    def joined_with(self, later: SendWork) -> SendWork:
        """Return one handle for this send and a later one."""
        return SendWork(self._works + later._works, self._tensors + later._tensors, self._timed)

    def wait(self) -> None:
        """Return when the tensor may be reused: at once for the host on device backends.

        Raises:
            PeerError: the connection to the receiver broke.
        """
        works, self._works = self._works, []
        if works:
            with self._timed():
                for work in works:
                    work.wait()
        self._tensors = []


class OpenSends:
    """Sends that nobody has waited for yet, oldest first."""

    # More than a schedule has under way between two stages, so waiting for the oldest of so many cannot deadlock.
    # The limit keeps a rank that only sends, as in evaluation, from running far ahead.
    _MAX_OPEN = 256

    def __init__(self) -> None:
        self._works: deque[SendWork] = deque()

    def add(self, work: SendWork) -> SendWork:
        """Keep a send, and drop the oldest ones, as far as they are done."""
        while self._works and self._works[0].reap():
            self._works.popleft()
        self._works.append(work)
        if len(self._works) > self._MAX_OPEN:
            self._works[0].wait()
        return work

    def wait(self) -> None:
        """Wait for all of them.

        Raises:
            PeerError: the connection to a receiver broke.
        """
        works, self._works = self._works, deque()
        for work in works:
            work.wait()


@dataclass(slots=True, kw_only=True, eq=False)
class PendingRecv:
    """A posted receive: the memory that messages fill, then the deferred finish inside the stage.

    Every tensor-parallel rank of the receiving stage has one, even a rank that receives nothing itself, and waits for
    it at the same program point: the finish is a collective.

    Attributes:
        tensor: this rank's part, complete after :meth:`wait`.
        works: the backend's handles of this rank's receives: one for each message, or one for all that were coalesced.
        copies: pairs of a part of the tensor and the dense buffer that it is copied from, a list for each message.
        finish: the collective inside the stage; None if there is none.
        timed: keeps the time of a wait for the sender.
    """

    tensor: torch.Tensor
    works: Sequence[dist.Work]
    copies: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]
    finish: Finish | None
    timed: Timed

    def wait(self) -> torch.Tensor:
        """Return the tensor when it holds the local part of what was sent; called once.

        Raises:
            PeerError: the connection to the sender, or to a member of this rank's stage, broke.
        """
        is_each = len(self.works) == len(self.copies)
        for number, works in enumerate([(work,) for work in self.works] if is_each else [self.works]):
            with self.timed():
                for work in works:
                    work.wait()
            num_arrived = number + 1 if is_each else len(self.copies)
            for copies in self.copies[number:num_arrived]:
                for target, piece in copies:
                    target.copy_(piece)
            if self.finish is not None:
                self.finish.advance(num_arrived)
        if self.finish is not None:
            self.finish.complete()
        return self.tensor


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as text for a message.

    >>> ranks_text({3}), ranks_text((1, 0))
    ('rank 3', 'ranks 0, 1')
    """
    numbers = sorted(ranks)
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
