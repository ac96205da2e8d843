"""The receives of a channel: each is wanted, then posted, then done, in the order in which they were asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from vtp_plugin.errors import PlanError
from vtp_plugin.plan.boundary.header import Whole
from vtp_plugin.runtime.comm.headers import Headers
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.comm.transfers import Transfers, Transmission
from vtp_plugin.runtime.comm.work import PendingRecv


class RecvWork:
    """A receive under way, whether its header has come or not.

    Every tensor-parallel rank of the receiving stage has one, even a rank that receives nothing itself, and waits for
    it at the same program point.

    Args:
        receives: all receives of the same channel.
        form: type and layout of the tensor.
        transmission: how the tensor crosses; None until its header is read.
        position: boundary, direction and number, for error messages.

    Attributes:
        receives: all receives of the same channel.
        pending: what is posted; None before that, and once it was waited for.
        is_done: whether the tensor was waited for.
    """

    def __init__(
        self, receives: Receives, form: TensorFormat, transmission: Transmission | None, position: str
    ) -> None:
        self.form = form
        self.transmission = transmission
        self.position = position
        self.pending: PendingRecv | None = None
        self.is_done = False
        self.receives = receives
        self._tensor: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor, to be read before :meth:`wait` fills it; with variable shapes this waits for its header."""
        self.receives.read_headers(self)
        if self._tensor is None:
            raise PlanError(f"{self.position}: the tensor was handed out already; read it before wait(), or use take()")
        return self._tensor

    def wait(self) -> None:
        """Return when the tensor holds the local part of what was sent; idempotent.

        What was sent before it on the same channel is waited for first.

        Raises:
            PeerError: the connection to the sender, or to a member of this rank's stage, broke.
            ConfigError: a header does not fit what this rank expects.
        """
        self.receives.finish(self)
        # Megatron keeps handles longer than tensors: the memory must become free as soon as nobody else needs it.
        self._tensor = None

    def take(self) -> torch.Tensor:
        """Wait, and return the tensor: a fresh leaf. May be called once, and not after :meth:`wait`."""
        tensor = self.tensor
        self.wait()
        return tensor

    def note_posted(self, pending: PendingRecv) -> None:
        """Keep what is posted, with the memory that it fills; called once, where it is posted."""
        self.pending = pending
        self._tensor = pending.tensor.requires_grad_(self.form.requires_grad)


class Receives:
    """The receives of one channel, the oldest first.

    Channels over the same groups stand in one line (`beside`): what comes over one connection is posted in the order in
    which it was sent. With variable shapes one header is under way at a time: when it has come, its tensor is posted,
    and right behind it what follows, so that both endpoints use the connection in one order. Finishes inside the stage
    run in the order of posting.

    Args:
        transfers: posts the messages of the channel.
        transmission: gives how a whole tensor crosses.
        headers: the headers of the channel.
        beside: receives of another channel over the same groups; None starts a line.
    """

    def __init__(
        self,
        transfers: Transfers,
        transmission: Callable[[Whole, TensorFormat], Transmission],
        headers: Headers,
        beside: Receives | None = None,
    ) -> None:
        self._transfers = transfers
        self._transmission = transmission
        self._headers = headers
        self._line = _Line() if beside is None else beside._line

    def add(self, form: TensorFormat, transmission: Transmission | None, position: str) -> RecvWork:
        """Post a receive, or its header if none is under way; the arguments are those of :class:`RecvWork`."""
        receive = RecvWork(self, form, transmission, position)
        self._line.waiting.append(receive)
        self._line.unposted.append(receive)
        self._line.advance()
        return receive

    def read_headers(self, receive: RecvWork) -> None:
        """Read headers until a receive is posted."""
        while receive.pending is None and not receive.is_done:
            self._line.take_header(receive.position)

    def finish(self, receive: RecvWork) -> None:
        """Wait for tensors, the oldest first, until a receive is done."""
        waiting = self._line.waiting
        while not receive.is_done:
            oldest = waiting[0]
            self.read_headers(oldest)
            waiting.popleft()
            pending, oldest.pending, oldest.is_done = oldest.pending, None, True
            assert pending is not None
            pending.wait()

    def post_header(self, receive: RecvWork) -> PendingRecv:
        """Post the receive of a header."""
        return self._headers.post(receive.position)

    def read_header(self, receive: RecvWork, header: PendingRecv) -> Transmission:
        """Wait for a header, and return how the tensor crosses that it announces.

        Raises:
            ConfigError: this rank expects another tensor.
        """
        whole = self._headers.read(header.wait(), receive.form, receive.position)
        return self._transmission(whole, receive.form)

    def post(self, receive: RecvWork, transmission: Transmission) -> None:
        """Post the receive of a tensor whose shape is known."""
        receive.note_posted(self._transfers.receive(transmission, receive.position))


class _Line:
    """Receives over the same groups, the oldest first; of these, those that are not posted yet."""

    def __init__(self) -> None:
        self.waiting: deque[RecvWork] = deque()
        self.unposted: deque[RecvWork] = deque()
        self._header: PendingRecv | None = None

    def advance(self) -> None:
        """Post what is not posted, up to the first tensor whose shape is not known: of that one the header."""
        while self.unposted:
            receive = self.unposted[0]
            if receive.transmission is None:
                if self._header is None:
                    self._header = receive.receives.post_header(receive)
                return
            self.unposted.popleft()
            receive.receives.post(receive, receive.transmission)

    def take_header(self, position: str) -> None:
        """Wait for the header under way, then post its tensor and what follows.

        Args:
            position: what is waited for, for the error if there is none.
        """
        header, self._header = self._header, None
        if header is None:
            raise PlanError(f"{position}: no header is under way")
        receive = self.unposted[0]
        receive.transmission = receive.receives.read_header(receive, header)
        self.advance()
