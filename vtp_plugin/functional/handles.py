"""Handles of transfers under way, questions to them, and what stands in for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vtp_plugin.api import (
    current_session,
    get_vtp_intra_stage_group,
    get_vtp_my_stage_idx,
    get_vtp_size_list,
    get_vtp_stage_ranks,
    is_vtp_enabled,
    is_vtp_stage_rank0,
    open_session,
)
from vtp_plugin.errors import ConfigError
from vtp_plugin.functional.replicas import replicas_of
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.step.communicator import PipelineCommunicator

__all__ = [
    "get_edge_tp_size",
    "get_layerwise_disaggregated_training",
    "get_pipeline_model_parallel_group_alternate",
    "get_pipeline_model_parallel_group_first_to_last",
    "get_pipeline_model_parallel_group_last_to_first",
    "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank",
    "get_vdp_size",
    "get_vtp_intra_stage_group",
    "get_vtp_my_stage_idx",
    "get_vtp_size_list",
    "get_vtp_stage_ranks",
    "is_vdp_enabled",
    "is_vtp_enabled",
    "is_vtp_stage_rank0",
    "pipeline_groups",
]


def pipeline_groups() -> list[dist.ProcessGroup]:
    """Return this rank's pipeline group in every replica of the pipeline that this rank works in.

    That is one group, but more on a stage that has fewer replicas than another: two on stage 0 of
    ``--vtp-dp-list 1,2``.

    Raises:
        MissingError: the channels are not open.
    """
    return list(open_session().running.pipeline_groups)


def get_pipeline_model_parallel_next_rank() -> int | list[int]:
    """Return the leader of the next stage, after the last stage that of the first; a list if there are several.

    Raises:
        MissingError: the channels are not open.
    """
    return _one_or_all([one.next_ranks[0] for one in replicas_of(open_session())])


def get_pipeline_model_parallel_prev_rank() -> int | list[int]:
    """Return the leader of the previous stage, before the first that of the last; as the query of the next one."""
    return _one_or_all([one.prev_ranks[0] for one in replicas_of(open_session())])


def get_pipeline_model_parallel_group_alternate() -> dist.ProcessGroup | list[dist.ProcessGroup]:
    """Return what chooses a replica: the pipeline group, or all; no second group is needed to keep directions apart.

    Raises:
        MissingError: the channels are not open.
    """
    groups = pipeline_groups()
    return groups[0] if len(groups) == 1 else groups


get_pipeline_model_parallel_group_first_to_last = get_pipeline_model_parallel_group_alternate
get_pipeline_model_parallel_group_last_to_first = get_pipeline_model_parallel_group_alternate


def get_edge_tp_size() -> int:
    """Return the tensor-parallel size of the first stage; 1 before it is known."""
    sizes = get_vtp_size_list()
    return sizes[0] if sizes else 1


def get_layerwise_disaggregated_training() -> bool:
    """Tell whether the pipeline is U-shaped."""
    session = current_session()
    return session is not None and session.config.layerwise_disaggregated


def get_vdp_size() -> int:
    """Return the largest data-parallel size of a stage, that of the cloud; 1 before it is known."""
    session = current_session()
    return max(session.planned.layout.dp_sizes) if session is not None and session.is_planned else 1


def is_vdp_enabled() -> bool:
    """Tell whether stages differ in their data-parallel sizes."""
    session = current_session()
    return session is not None and session.is_planned and not session.planned.replicas.is_equal


def _one_or_all(ranks: list[int]) -> int | list[int]:
    return ranks[0] if len(ranks) == 1 else ranks


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
