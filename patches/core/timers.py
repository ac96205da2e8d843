"""`planned-step-timers`: timers inside a planned step.

`traced-timers`: what they time. `last-rank/timers`: the rank that reports prints the timers, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from vtp_plugin.host.patching import Writes, Written, replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.runtime.comm.work import Recorder
from vtp_plugin.session import Session
from vtp_plugin.trace.stretches import Cause

_TORCH = Written(
    id="planned-step-timers",
    target="megatron.core.timers:torch",
    when=Moment.LIST,
    why="timers of level 2 wait for the whole device, also for receives that a planned order has posted early, and "
    "their senders may wait for this rank; set only while a planned step runs: they wait for what it computes",
    remove_when="Megatron's timers wait for the current stream",
)


def waiting_for_computes(writes: Writes) -> AbstractContextManager[None]:
    """Let Megatron's timers wait for what was received, not for what is to be, while a planned step runs."""
    return writes[_TORCH].during(StreamTorch())


class StreamCuda:
    """``torch.cuda`` whose ``synchronize`` waits for the current stream alone, and so for what was received for it."""

    def synchronize(self) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream().synchronize()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class StreamTorch:
    """``torch`` with such a ``torch.cuda``.

    >>> StreamTorch().float32, StreamTorch().cuda.is_initialized()
    (torch.float32, False)
    """

    def __init__(self) -> None:
        self.cuda = StreamCuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_CAUSES = {
    "forward-compute": Cause.FORWARD,
    "backward-compute": Cause.BACKWARD,
    "batch-generator": Cause.BATCH,
    "save-checkpoint": Cause.SAVE,
    "save-checkpoint-non-persistent": Cause.SAVE,
    "evaluate": Cause.EVALUATE,
}


class TimedStretch:
    """A timer of Megatron that also tells the recorder what it times, whether Megatron itself does so or not.

    Args:
        timer: Megatron's timer.
        cause: what the timed stretch is, for the recorder.
        recorder: is told.
    """

    def __init__(self, timer: Any, cause: Cause, recorder: Recorder) -> None:
        self._timer, self._cause, self._recorder = timer, cause, recorder

    def start(self, *args: Any, **kwargs: Any) -> None:
        """Begin; a barrier before it counts, too."""
        self._recorder.begin(self._cause)
        self._timer.start(*args, **kwargs)

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """End."""
        self._timer.stop(*args, **kwargs)
        self._recorder.end(self._cause)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timer, name)


@replaces("megatron.core.timers:Timers.__call__", id="traced-timers", when=Moment.LIST)
def _tell(session: Session, original: Callable[..., Any], timers: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Run `Timers.__call__`; a timer of what a trace knows tells the recorder.

    Why: Megatron says by its timers when it computes, reads, saves and evaluates; while somebody listens, a trace is
    told, whatever --timing-log-level says.

    Remove when: Megatron can tell somebody else what its timers time.
    """
    timer = original(timers, name, *args, **kwargs)
    cause = _CAUSES.get(name)
    if cause is None or not session.recorder.is_on:
        return timer
    return TimedStretch(timer, cause, session.recorder)


@replaces("megatron.core.timers:Timers.log", id="last-rank/timers", when=Moment.U_SHAPE)
def _log_on_writer(
    session: Session,
    original: Callable[..., None],
    timers: Any,
    names: Sequence[str],
    rank: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Run `Timers.log` for the rank that writes the log, unless the caller names another one.

    Why: where no rank is named it prints on the world's last one, a cloud rank here; other lines of the log come from
    the edge.

    Remove when: with `last-stage`.
    """
    original(timers, names, session.planned.writer_rank if rank is None else rank, *args, **kwargs)
