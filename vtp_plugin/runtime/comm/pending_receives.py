"""The receives of a channel: each is wanted, then posted, then done, in the order in which they were asked for."""

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
    """State of a receive."""

    WANTED = 0  # its header has not come
    POSTED = 1  # its memory waits for the tensor
    DONE = 2


class RecvWork:
    """A receive under way, whether its header has come or not.

    Every tensor-parallel rank of the receiving stage has one, even a rank that receives nothing itself, and waits for
    it at the same program point.

    Args:
        queue: all receives of the same channel.
        form: type and layout of the tensor.
        whole: description of the whole tensor; None until its header is read.
        position: boundary, direction and number, for error messages.
    """

    def __init__(self, queue: Receives, form: TensorFormat, whole: Whole | None, position: str) -> None:
        self.form = form
        self.whole = whole
        self.position = position
        self.state = State.WANTED
        self._queue = queue
        self._pending: PendingRecv | None = None
        self._tensor: torch.Tensor | None = None

    @property
    def is_done(self) -> bool:
        """Whether the tensor was waited for."""
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
        # Megatron keeps handles longer than tensors: the memory must become free as soon as nobody else needs it.
        self._tensor = None

    def take(self) -> torch.Tensor:
        """Wait, and return the tensor: a fresh leaf. May be called once, and not after :meth:`wait`."""
        tensor = self.tensor
        self.wait()
        return tensor

    def note_posted(self, pending: PendingRecv) -> None:
        """Note the posted receive, with the memory that it fills; called by the queue."""
        self._pending = pending
        self._tensor = pending.tensor.requires_grad_(self.form.requires_grad)
        self.state = State.POSTED

    def finish(self) -> None:
        """Wait for the tensor itself; called by the queue."""
        pending, self._pending, self.state = self._pending, None, State.DONE
        if pending is None:
            raise PlanError(f"{self.position}: nothing is posted")
        pending.wait()


class Receives:
    """The receives of one channel, the oldest first.

    With variable shapes one header is under way at a time: when it has come, its tensor is posted, and right behind it
    the next header, so that both endpoints use the channel in one order. Finishes inside the stage run in the order
    of posting.

    Args:
        dispatch: posts the messages of the channel.
    """

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._queue: deque[RecvWork] = deque()
        self._header: PendingRecv | None = None

    def add(self, whole: Whole | None, form: TensorFormat, position: str) -> RecvWork:
        """Post a receive, or its header if none is under way; the arguments are those of :class:`RecvWork`."""
        receive = RecvWork(self, form, whole, position)
        self._queue.append(receive)
        if whole is not None:
            receive.note_posted(self._dispatch.post(whole, form, position))
        elif self._header is None:
            self._header = self._dispatch.post_header(position)
        return receive

    def bring(self, receive: RecvWork, state: State) -> None:
        """Read headers and wait for tensors, the oldest first, until a receive has reached a state."""
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
        receive.note_posted(self._dispatch.post(receive.whole, receive.form, receive.position))
        self._header = self._dispatch.post_header(later[0].position) if later else None
