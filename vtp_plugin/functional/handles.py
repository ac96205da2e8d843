"""Handles of sends and receives under way with one or several replicas of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vtp_plugin.errors import ConfigError
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.step.communicator import PipelineCommunicator


class Waitable(Protocol):
    """Something under way."""

    def wait(self) -> Any:
        """Return when it is done."""
        ...


Requests = dict[str, Waitable]


class RecvHandle:
    """A receive of the stage's leader, and the broadcast to its stage that follows; may be made by hand.

    Args:
        irecv_work: a handle, or a list of them; None on ranks that receive nothing.
        tensor: tensor that is received.
        broadcast_src: global rank of the leader.
        intra_group: process group of the stage; None for no broadcast.
        dst_size: number of ranks of the stage; with 1 there is no broadcast. Receives of this package fill the whole
            stage themselves, and have 1.
    """

    def __init__(
        self, irecv_work: Any, tensor: torch.Tensor, broadcast_src: int, intra_group: Any, dst_size: int
    ) -> None:
        self._irecv_work = irecv_work
        self._tensor: torch.Tensor | None = tensor
        self._broadcast_src = broadcast_src
        self._intra_group = intra_group
        self._dst_size = dst_size

    def wait(self) -> None:
        """Return when the tensor is there; waiting again does nothing. All ranks of the stage must wait."""
        tensor, self._tensor = self._tensor, None
        if tensor is None:
            return
        works, self._irecv_work = self._irecv_work, None
        for work in works if isinstance(works, list) else [works]:
            if work is not None:
                work.wait()
        if self._dst_size > 1 and self._intra_group is not None:
            torch.distributed.broadcast(tensor, src=self._broadcast_src, group=self._intra_group)


class _Joint:
    """Several handles as one: waits for each, then does something once."""

    def __init__(self, works: Sequence[Waitable], then: Callable[[], None] | None = None) -> None:
        self._works = list(works)
        self._then = then

    def wait(self) -> None:
        """Return when all is done; waiting again does nothing."""
        works, self._works = self._works, []
        for work in works:
            work.wait()
        then, self._then = self._then, None
        if then is not None:
            then()


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """An exchange under way.

    Attributes:
        from_prev: activation from the previous stage; None if not asked for.
        from_next: gradient from the next stage; None if not asked for.
        works: handles by Megatron's names, in the order in which they must be waited for.
    """

    from_prev: torch.Tensor | None
    from_next: torch.Tensor | None
    works: Requests


def post(communicators: Sequence[PipelineCommunicator], form: TensorFormat, **exchange: Any) -> Posted:
    """Exchange with one or several replicas; what several send becomes its mean in fp32 when it is waited for.

    Args:
        communicators: communicators of the replicas.
        form: type and layout of all tensors.
        exchange: arguments of :meth:`~vtp_plugin.runtime.step.communicator.PipelineCommunicator.exchange`.

    Raises:
        ConfigError: replicas send tensors of different shapes, or as that method.
    """
    each = [communicator.exchange(form, wait=False, **exchange) for communicator in communicators]
    if len(each) == 1:
        return Posted(from_prev=each[0].from_prev, from_next=each[0].from_next, works={**each[0].works})
    works: Requests = {name: _Joint([one.works[name] for one in each]) for name in each[0].works}
    means: dict[str, torch.Tensor] = {}
    for name in ("recv_prev", "recv_next"):
        parts = [one.from_prev if name == "recv_prev" else one.from_next for one in each]
        if name in works:
            means[name], fill = _mean_of([part for part in parts if part is not None])
            works[name] = _Joint([works[name]], fill)
    return Posted(from_prev=means.get("recv_prev"), from_next=means.get("recv_next"), works=works)


def _mean_of(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
    """Make a fresh leaf for the mean of tensors that are still to come, and what fills it when they are there."""
    if len(shapes := {tuple(part.shape) for part in parts}) > 1:
        raise ConfigError(f"a mean of tensors of the shapes {sorted(shapes)}; receive from one replica at a time")
    mean = torch.empty_like(parts[0], requires_grad=parts[0].requires_grad)

    def fill() -> None:
        with torch.no_grad():
            mean.copy_(torch.stack(list(parts)).mean(dim=0, dtype=torch.float32))

    return mean, fill


@contextmanager
def timed(config: Any, name: str) -> Iterator[None]:
    """Measure a call by Megatron's timers, as its schedules do."""
    if config.timers is not None:
        config.timers(name, log_level=2).start()
    yield
    if config.timers is not None:
        config.timers(name).stop()
