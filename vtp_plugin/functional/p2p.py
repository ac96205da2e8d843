"""The Ascend implementation's exchange functions, over the plugin's channels; see :mod:`vtp_plugin.functional`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, cast, overload

import torch

from vtp_plugin.api import (
    current_session,
    get_vtp_my_stage_idx,
    get_vtp_size_list,
    get_vtp_stage_ranks,
    is_vtp_stage_rank0,
    open_session,
)
from vtp_plugin.errors import ConfigError, MissingError
from vtp_plugin.functional.handles import RecvHandle, Requests, post, timed
from vtp_plugin.functional.replicas import Group, Ranks, choose_communicators
from vtp_plugin.patches.core.pipeline_parallel.p2p_communication import read_format
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.comm.work import SendWork
from vtp_plugin.session import Session

# The handles under the names that users of the Ascend implementation know.
_VTPRecvWork = RecvHandle
_VTPSendWork = SendWork

__all__ = [
    "_VTPRecvWork",
    "_VTPSendWork",
    "_communicate_impl",
    "get_vtp_my_stage_idx",
    "get_vtp_size_list",
    "get_vtp_stage_ranks",
    "is_vtp_stage_rank0",
    "recv_backward_with_reqs",
    "recv_forward_with_reqs",
    "send_backward",
    "send_forward",
    "vtp_recv_backward",
    "vtp_recv_forward",
    "vtp_send_backward",
    "vtp_send_forward",
]

_Neighbour = Literal["prev", "next"]


class _Receive(Protocol):
    """A receive, which gives a handle only where it is asked not to wait."""

    @overload
    def __call__(
        self, tensor_shape: Sequence[int], config: Any, async_op: Literal[False] = False, **replicas: Group | Ranks
    ) -> torch.Tensor: ...
    @overload
    def __call__(
        self, tensor_shape: Sequence[int], config: Any, async_op: Literal[True], **replicas: Group | Ranks
    ) -> tuple[torch.Tensor, Requests]: ...


def _by_async_op(receive: Callable[..., Any]) -> _Receive:
    return cast(_Receive, receive)


def vtp_send_forward(
    tensor: torch.Tensor,
    config: Any = None,
    *,
    group: Group = None,
    next_rank: Ranks = None,
    prev_rank: Ranks = None,
) -> list[SendWork] | None:
    """Send this rank's part of an activation ``[S, B, H]`` to the next stage; from the last stage of a U to the edge.

    Args:
        tensor: keeps its memory until the work is waited for or the step ends.
        config: Megatron's model-parallel configuration. Default: that of an earlier call; in the very first call the
            tensor's type and width, not sharded.
        group: one group, or a list of groups to send to several replicas.
        next_rank: leader of the next stage, or a list of leaders; chooses replicas as well.
        prev_rank: leader of the previous stage, or a list of leaders; chooses replicas as well.

    Returns:
        The sends under way, one per replica; None on ranks that send nothing: with rank0 all but the leaders.

    Raises:
        ConfigError: there is no such neighbour, or the keywords do not name replicas; see :mod:`vtp_plugin.functional`.
    """
    return _send("next", tensor, config, group=group, next_rank=next_rank, prev_rank=prev_rank)


def vtp_send_backward(
    tensor: torch.Tensor,
    config: Any = None,
    *,
    group: Group = None,
    next_rank: Ranks = None,
    prev_rank: Ranks = None,
) -> list[SendWork] | None:
    """Send the gradient of an activation to the stage that sent the activation; as :func:`vtp_send_forward`."""
    return _send("prev", tensor, config, group=group, next_rank=next_rank, prev_rank=prev_rank)


@_by_async_op
def vtp_recv_forward(
    tensor_shape: Sequence[int],
    config: Any,
    async_op: bool = False,
    *,
    group: Group = None,
    next_rank: Ranks = None,
    prev_rank: Ranks = None,
) -> torch.Tensor | tuple[torch.Tensor, Requests]:
    """Receive an activation from the previous stage; on the edge of a U from the last stage.

    Args:
        tensor_shape: local shape; with variable lengths the sender's header has it.
        config: Megatron's model-parallel configuration; its ``batch_p2p_comm`` does not matter.
        async_op: whether to return without waiting.
        group: group of one replica, or a list of groups for the mean of several replicas.
        next_rank: leader of the next stage, or a list of leaders; chooses replicas as well.
        prev_rank: leader of the previous stage, or a list of leaders; chooses replicas as well.

    Returns:
        The tensor, a fresh leaf; with ``async_op`` also ``{"recv_prev": work}``, for which all ranks must wait.

    Raises:
        ConfigError: as :func:`vtp_send_forward`.
    """
    return _receive("prev", tensor_shape, config, async_op, group=group, next_rank=next_rank, prev_rank=prev_rank)


@_by_async_op
def vtp_recv_backward(
    tensor_shape: Sequence[int],
    config: Any,
    async_op: bool = False,
    *,
    group: Group = None,
    next_rank: Ranks = None,
    prev_rank: Ranks = None,
) -> torch.Tensor | tuple[torch.Tensor, Requests]:
    """Receive the gradient of an activation from the next stage; as :func:`vtp_recv_forward`, with ``"recv_next"``."""
    return _receive("next", tensor_shape, config, async_op, group=group, next_rank=next_rank, prev_rank=prev_rank)


def recv_forward_with_reqs(
    tensor_shape: Sequence[int], config: Any, is_end_stage: bool = False, **options: Any
) -> tuple[torch.Tensor | None, Requests | None]:
    """Receive an activation unless this rank's part of the model is the first one.

    Args:
        tensor_shape: local shape.
        config: Megatron's model-parallel configuration.
        is_end_stage: whether to receive for the last part of the model, not for the first, on the edge of a U.
        options: ``wait_on_reqs``, ``group``, ``next_rank`` and ``prev_rank`` of :func:`_communicate_impl`.

    Returns:
        The tensor, and ``{"recv_prev": work}`` if it was not waited for; None in place of what does not exist.

    Raises:
        ConfigError, MissingError: as :func:`_communicate_impl`.
    """
    if open_session().planned.own.stage == 0 and not is_end_stage:
        return None, None
    with timed(config, "forward-recv"):
        tensor, _, requests = _communicate_impl(recv_prev=True, tensor_shape=tensor_shape, config=config, **options)
    return tensor, requests


def recv_backward_with_reqs(
    tensor_shape: Sequence[int], config: Any, is_end_stage: bool = False, **options: Any
) -> tuple[torch.Tensor | None, Requests | None]:
    """Receive a gradient unless this rank's part of the model is the last one; as :func:`recv_forward_with_reqs`."""
    if _ends_the_model(open_session(), is_end_stage):
        return None, None
    with timed(config, "backward-recv"):
        _, tensor, requests = _communicate_impl(recv_next=True, tensor_shape=tensor_shape, config=config, **options)
    return tensor, requests


def send_forward(output_tensor: torch.Tensor, config: Any, is_end_stage: bool = False, **options: Any) -> None:
    """Send an activation to the next stage unless this rank's part of the model is the last one.

    Args:
        output_tensor: this rank's part.
        config: Megatron's model-parallel configuration.
        is_end_stage: whether to send from the last part of the model, not from the first, on the edge of a U.
        options: options of :func:`recv_forward_with_reqs`. Sends are not waited for in any case: the runtime keeps the
            tensor, and waits at the end of the step at latest.

    Raises:
        ConfigError, MissingError: as :func:`_communicate_impl`.
    """
    if not _ends_the_model(open_session(), is_end_stage):
        with timed(config, "forward-send"):
            _communicate_impl(tensor_send_next=output_tensor, config=config, **options)


def send_backward(input_tensor_grad: torch.Tensor, config: Any, is_end_stage: bool = False, **options: Any) -> None:
    """Send a gradient to the previous stage unless this rank's part of the model is the first; as `send_forward`."""
    if open_session().planned.own.stage > 0 or is_end_stage:
        with timed(config, "backward-send"):
            _communicate_impl(tensor_send_prev=input_tensor_grad, config=config, **options)


def _communicate_impl(
    *,
    config: Any,
    tensor_send_next: torch.Tensor | None = None,
    tensor_send_prev: torch.Tensor | None = None,
    recv_prev: bool = False,
    recv_next: bool = False,
    tensor_shape: Sequence[int] | None = None,
    wait_on_reqs: bool = True,
    group: Group = None,
    next_rank: Ranks = None,
    prev_rank: Ranks = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, Requests | None]:
    """Exchange with both neighbours at once.

    Args:
        config: Megatron's model-parallel configuration.
        tensor_send_next: activation for the next stage.
        tensor_send_prev: gradient for the previous stage.
        recv_prev: whether to receive an activation from the previous stage.
        recv_next: whether to receive a gradient from the next stage.
        tensor_shape: local shape of the tensors to receive.
        wait_on_reqs: whether to wait for the receives; otherwise the caller waits for the handles, in their order.
        group: group of one replica, or a list of groups for several.
        next_rank: leader of the next stage, or a list of leaders; chooses replicas as well.
        prev_rank: leader of the previous stage, or a list of leaders; chooses replicas as well.

    Returns:
        The tensor from the previous stage, that from the next one, and, without waiting, the handles by Megatron's
        names: ``recv_prev``, ``recv_next``, ``send_next``, ``send_prev``.

    Raises:
        MissingError: a receive without ``config.pipeline_dtype`` or a shape; a RuntimeError.
        ConfigError: not waiting with ``config.batch_p2p_comm``, or as :func:`vtp_send_forward`; a ValueError.
    """
    session = open_session()
    for name in ("recv_prev",) * recv_prev + ("recv_next",) * recv_next:
        if config.pipeline_dtype is None or tensor_shape is None:
            given = f"pipeline_dtype={config.pipeline_dtype}, tensor_shape={tensor_shape}"
            raise MissingError(f"{name} with {given}; a receive needs both: set config.pipeline_dtype, give the shape")
    if config.batch_p2p_comm and not wait_on_reqs:
        raise ConfigError("batch_p2p_comm cannot receive without waiting; wait, or give overlap_p2p_comm")
    operations = {
        "send_next": tensor_send_next,
        "send_prev": tensor_send_prev,
        "recv_prev": recv_prev or None,
        "recv_next": recv_next or None,
    }
    wanted = {name: value for name, value in operations.items() if value is not None}
    chosen = choose_communicators(session, [*wanted], group=group, next_rank=next_rank, prev_rank=prev_rank)
    done = post(chosen, _format(session, config), shape=tensor_shape, **wanted)
    if wait_on_reqs:
        for name, work in done.works.items():
            if name.startswith("recv"):
                work.wait()
    return done.from_prev, done.from_next, None if wait_on_reqs else done.works


def _ends_the_model(session: Session, is_end_stage: bool) -> bool:
    """Tell whether this rank's part of the model is the last one; on the edge of a U that is its second part."""
    is_on_loss_stage = session.planned.own.stage == session.planned.loss_stage
    return is_on_loss_stage and (is_end_stage or not session.config.layerwise_disaggregated)


def _send(neighbour: _Neighbour, tensor: torch.Tensor, config: Any, **replicas: Any) -> list[SendWork] | None:
    # Without a run every rank is a leader, unless a test of somebody's step has replaced the query.
    if current_session() is None and not is_vtp_stage_rank0():
        return None
    session, name = open_session(), f"send_{neighbour}"
    form = _format(session, config, tensor)
    operation: dict[str, Any] = {name: tensor}
    works = [
        communicator.exchange(form, wait=False, **operation).works[name]
        for communicator in choose_communicators(session, [name], **replicas)
    ]
    # A rank that only takes part in collectives of its stage has nothing under way.
    return [work for work in works if isinstance(work, SendWork) and not work.is_done] or None


def _receive(
    neighbour: _Neighbour, shape: Sequence[int], config: Any, async_op: bool, **replicas: Any
) -> torch.Tensor | tuple[torch.Tensor, Requests]:
    session, name = open_session(), f"recv_{neighbour}"
    chosen = choose_communicators(session, [name], **replicas)
    done = post(chosen, _format(session, config), shape=shape, **{name: True})
    tensor = done.from_prev if neighbour == "prev" else done.from_next
    assert tensor is not None
    # The receive itself fills the whole stage, so nothing is left to broadcast.
    own = session.planned.own
    leader = session.planned.layout.leader(own.stage, own.dp_rank, own.cp_rank)
    work = _VTPRecvWork(done.works[name], tensor, leader, session.running.stage_group, 1)
    if async_op:
        return tensor, {name: work}
    work.wait()
    return tensor


def _format(session: Session, config: Any, tensor: torch.Tensor | None = None) -> TensorFormat:
    """Return the format of the tensors that cross, never coalesced; all ranks compare it in their first call."""
    pipeline = session.running

    def read() -> tuple[TensorFormat, ...]:
        if config is not None:
            form = read_format(session, pipeline, config)
        else:
            assert tensor is not None
            form = pipeline.form or TensorFormat(dtype=tensor.dtype, width=tensor.shape[-1])
        # A first send has no configuration that could say so, and both ends must do the same.
        return (dataclasses.replace(form, is_batched=False),)

    return pipeline.agree_on_formats(read)[0]
