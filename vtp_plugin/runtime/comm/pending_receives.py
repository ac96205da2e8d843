"""Receives of a channel: each is wanted, then posted, then done, and none overtakes another."""

from __future__ import annotations

from collections import deque
from enum import IntEnum

import torch

from vtp_plugin.errors import PlanError
from vtp_plugin.plan.boundary.header import Whole
from vtp_plugin.runtime.comm.dispatch import Dispatch
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.comm.work import PendingRecv


class State(IntEnum):
    """How far a receive is."""

    WANTED = 0  # its header has not come
    POSTED = 1  # its memory waits for the tensor
    DONE = 2


class RecvWork:
    """A receive under way.

    Every tensor-parallel rank of the receiving stage has one, even a rank that receives nothing itself, and waits for
    it at the same program point.

    Args:
        queue: receives of the same channel.
        form: of the tensor.
        whole: describes the whole tensor; None before its header was read.
        position: boundary, direction and number, for error messages.
    """

    def __init__(self, queue: Receives, form: TensorFormat, whole: Whole | None, position: str) -> None:
        self.form = form
        self.whole = whole
        self.position = position
        self.state = State.WANTED
        self._queue = queue
        self._landing: PendingRecv | None = None
        self._tensor: torch.Tensor | None = None

    @property
    def is_done(self) -> bool:
        """Whether it was waited for."""
        return self.state is State.DONE

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor, to be read before :meth:`wait` fills it; with variable shapes this waits for its header."""
        self._queue.bring(self, State.POSTED)
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
        self._queue.bring(self, State.DONE)
        # Megatron keeps handles longer than tensors: the memory must be free as soon as nobody else needs it.
        self._tensor = None

    def take(self) -> torch.Tensor:
        """Wait, and return the tensor: a fresh leaf. May be called once, and not after :meth:`wait`."""
        tensor = self.tensor
        self.wait()
        return tensor

    def land(self, landing: PendingRecv) -> None:
        """Note the memory that the tensor lands in; for the queue."""
        self._landing = landing
        self._tensor = landing.tensor.requires_grad_(self.form.requires_grad)
        self.state = State.POSTED

    def finish(self) -> None:
        """Wait for the tensor itself; for the queue."""
        landing, self._landing, self.state = self._landing, None, State.DONE
        if landing is None:
            raise PlanError(f"{self.position}: nothing is posted")
        landing.wait()


class Receives:
    """The receives of one channel, the oldest first.

    With variable shapes one header is under way at a time: when it has come, its tensor is posted, and right behind it
    the next header, so that both sides use the channel in one order. Finishes inside the stage keep the order of
    posting.

    Args:
        dispatch: posts the messages of the channel.
    """

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._queue: deque[RecvWork] = deque()
        self._header: PendingRecv | None = None

    def add(self, whole: Whole | None, form: TensorFormat, position: str) -> RecvWork:
        """Post a receive, or its header if none is under way; arguments as of :class:`RecvWork`."""
        receive = RecvWork(self, form, whole, position)
        self._queue.append(receive)
        if whole is not None:
            receive.land(self._dispatch.post(whole, form, position))
        elif self._header is None:
            self._header = self._dispatch.post_header(position)
        return receive

    def bring(self, receive: RecvWork, state: State) -> None:
        """Take steps until a receive is in a state: the oldest header is read, or the oldest tensor waited for."""
        while receive.state < state:
            if state is State.POSTED or self._queue[0].state is State.WANTED:
                self._take_header()
            else:
                self._queue.popleft().finish()

    def _take_header(self) -> None:
        """Wait for the header under way, then post its tensor and the next header."""
        receive, *later = (receive for receive in self._queue if receive.state is State.WANTED)
        if self._header is None:
            raise PlanError(f"{receive.position}: no header is under way")
        receive.whole = self._dispatch.read_header(self._header.wait(), receive.form, receive.position)
        receive.land(self._dispatch.post(receive.whole, receive.form, receive.position))
        self._header = self._dispatch.post_header(later[0].position) if later else None
