"""Handles of messages under way, and the timed wait for other ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from vtp_plugin.errors import PeerError
from vtp_plugin.platform.interface import Platform
from vtp_plugin.report.trace.causes import Cause
from vtp_plugin.runtime.comm.recorder import Recorder
from vtp_plugin.runtime.health.monitor import Monitor
from vtp_plugin.runtime.health.redaction import first_line


class Finish(Protocol):
    """The finish of a plan under way: what the ranks of a stage do together with what they have received."""

    def advance(self, num_arrived: int) -> None:
        """Note that `num_arrived` messages of this rank have come."""
        ...

    def complete(self) -> None:
        """Return when the tensor is complete."""
        ...


WaitFor = Callable[[Sequence[dist.Work]], None]


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

    def run(
        self, wait_for_others: Callable[[], object], position: str, peer: str, what: str, cause: Cause = Cause.WAIT
    ) -> None:
        """Call what waits for other ranks, and keep its time.

        Args:
            wait_for_others: what waits.
            position: boundary, direction and microbatch.
            peer: name of the ranks that are waited for.
            what: name of what is broken if the backend fails.
            cause: what this rank's time goes to, for the recorder.

        Raises:
            PeerError: the backend failed.
        """
        wait = self.monitor.position.begin(position, peer) if self.monitor is not None else None
        try:
            with self.recorder.span(cause, position):
                wait_for_others()
        except RuntimeError as error:
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

    def wait_for(self, works: Sequence[dist.Work], position: str, peer: str) -> None:
        """Wait for the backend's handles; arguments and error are those of :meth:`run`."""

        def wait() -> None:
            for work in works:
                work.wait()

        self.run(wait, position, peer, f"connection to {peer}")


class SendWork:
    """A send under way: keeps the tensor and the backend's handles until it is waited for.

    ``wait`` is idempotent: a second wait on gloo's own handle would block until the timeout.
    """

    def __init__(self, works: Sequence[dist.Work], tensors: Sequence[torch.Tensor], wait_for: WaitFor) -> None:
        self._works = list(works)
        self._tensors = list(tensors)
        self._wait_for = wait_for

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
        return SendWork(self._works + later._works, self._tensors + later._tensors, self._wait_for)

    def wait(self) -> None:
        """Return when the tensor may be reused: at once for the host on device backends.

        Raises:
            PeerError: the connection to the receiver broke.
        """
        works, self._works = self._works, []
        if works:
            self._wait_for(works)
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
        wait_for: waits for the handles and keeps the time.
    """

    tensor: torch.Tensor
    works: Sequence[dist.Work]
    copies: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]
    finish: Finish | None
    wait_for: WaitFor

    def wait(self) -> torch.Tensor:
        """Return the tensor when it holds the local part of what was sent; called once.

        Raises:
            PeerError: the connection to the sender, or to a member of this rank's stage, broke.
        """
        if len(self.works) == len(self.copies):
            for number, work in enumerate(self.works):
                self._await((work,), number, number + 1)
        else:
            self._await(self.works, 0, len(self.copies))
        if self.finish is not None:
            self.finish.complete()
        return self.tensor

    def _await(self, works: Sequence[dist.Work], first: int, stop: int) -> None:
        """Wait for the messages `first:stop`, and put them where they belong."""
        self.wait_for(works)
        for copies in self.copies[first:stop]:
            for target, piece in copies:
                target.copy_(piece)
        if self.finish is not None:
            self.finish.advance(stop)


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as text for a message.

    >>> ranks_text({3}), ranks_text((1, 0))
    ('rank 3', 'ranks 0, 1')
    """
    numbers = sorted(ranks)
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
