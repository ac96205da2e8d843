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
        self._receives = receives
        self._tensor: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor, to be read before :meth:`wait` fills it; with variable shapes this waits for its header."""
        self._receives.read_headers(self)
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
        self._receives.finish(self)
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

    With variable shapes one header is under way at a time: when it has come, its tensor is posted, and right behind it
    the next header, so that both endpoints use the channel in one order. Finishes inside the stage run in the order
    of posting.

    Args:
        transfers: posts the messages of the channel.
        transmission: gives how a whole tensor crosses.
        headers: the headers of the channel.
    """

    def __init__(
        self, transfers: Transfers, transmission: Callable[[Whole, TensorFormat], Transmission], headers: Headers
    ) -> None:
        self._transfers = transfers
        self._transmission = transmission
        self._headers = headers
        self._queue: deque[RecvWork] = deque()
        self._header: PendingRecv | None = None

    def add(self, form: TensorFormat, transmission: Transmission | None, position: str) -> RecvWork:
        """Post a receive, or its header if none is under way; the arguments are those of :class:`RecvWork`."""
        receive = RecvWork(self, form, transmission, position)
        self._queue.append(receive)
        if transmission is not None:
            self._post(receive, transmission)
        elif self._header is None:
            self._header = self._headers.post(position)
        return receive

    def read_headers(self, receive: RecvWork) -> None:
        """Read headers until a receive is posted."""
        while receive.pending is None and not receive.is_done:
            self._take_header()

    def finish(self, receive: RecvWork) -> None:
        """Wait for tensors, the oldest first, until a receive is done."""
        while not receive.is_done:
            oldest = self._queue[0]
            self.read_headers(oldest)
            self._queue.popleft()
            pending, oldest.pending, oldest.is_done = oldest.pending, None, True
            assert pending is not None
            pending.wait()

    def _take_header(self) -> None:
        """Wait for the header under way, then post its tensor and the next header."""
        receive, *later = (receive for receive in self._queue if receive.pending is None)
        if self._header is None:
            raise PlanError(f"{receive.position}: no header is under way")
        whole = self._headers.read(self._header.wait(), receive.form, receive.position)
        receive.transmission = self._transmission(whole, receive.form)
        self._post(receive, receive.transmission)
        self._header = self._headers.post(later[0].position) if later else None

    def _post(self, receive: RecvWork, transmission: Transmission) -> None:
        receive.note_posted(self._transfers.receive(transmission, receive.position))
