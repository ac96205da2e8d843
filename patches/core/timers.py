"""H18: timers inside a planned step. U6b: the rank that reports prints the timers, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from vtp_plugin.patches.moment import Moment
from vtp_plugin.patching import Writes, Written, replaces
from vtp_plugin.session import Session

_TORCH = Written(
    id="H18",
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


@replaces(
    "megatron.core.timers:Timers.log",
    id="U6b",
    when=Moment.U_SHAPE,
    why="where no rank is named it prints on the world's last one, a cloud rank here; other lines of the log come "
    "from the edge",
    remove_when="with U1",
)
def _log_on_writer(
    session: Session,
    original: Callable[..., None],
    timers: Any,
    names: Sequence[str],
    rank: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Run `Timers.log` for the rank that writes the log, unless the caller names another one."""
    original(timers, names, session.planned.writer_rank if rank is None else rank, *args, **kwargs)
