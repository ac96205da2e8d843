"""Send and receive functions for training steps written by hand, with the interface of the Ascend implementation.

Names, arguments and returns follow ``layerwise_disaggregated_training/p2p_communication.py`` of MindSpeed-LLM: code
written for it only changes its import. Below run the same channels as in every other step, so any transport, any sizes,
sequence parallelism and variable lengths work.

All tensor-parallel ranks of a stage must call the same function at the same program point, and must wait for the
receives of a channel in the order of their calls. A call that has nothing to send or receive, by the rules below, does
not communicate. ``group`` only chooses the replica of the pipeline, since every direction of every boundary has its
channel. It is one of :func:`pipeline_groups`, and may be left out if there is only one.

With variable lengths every receive waits for the sender's header, even if it does not wait for the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, overload

import torch
import torch.distributed as dist

from vtp_plugin.api import open_session
from vtp_plugin.errors import ConfigError
from vtp_plugin.patches.core.pipeline_parallel.p2p_communication import tensor_format
from vtp_plugin.runtime.channel import RecvWork, TensorFormat
from vtp_plugin.runtime.communicator import PipelineCommunicator, Work
from vtp_plugin.runtime.work import SendWork
from vtp_plugin.session import Session

# The handles under the names that users of the Ascend implementation know.
_VTPRecvWork = RecvWork
_VTPSendWork = SendWork

__all__ = [
    "_VTPRecvWork",
    "_VTPSendWork",
    "pipeline_groups",
    "recv_backward_with_reqs",
    "recv_forward_with_reqs",
    "send_backward",
    "send_forward",
    "vtp_recv_backward",
    "vtp_recv_forward",
    "vtp_send_backward",
    "vtp_send_forward",
]

Group = dist.ProcessGroup | Sequence[dist.ProcessGroup] | None
Requests = dict[str, Work]
_Neighbour = Literal["prev", "next"]


def pipeline_groups() -> list[dist.ProcessGroup]:
    """Return this rank's pipeline group in every replica of the pipeline that this rank works in.

    That is one group, but more on a stage that has fewer replicas than another: two on stage 0 of
    ``--vtp-dp-list 1,2``.
    """
    return list(open_session().running.pipeline_groups)


def vtp_send_forward(tensor: torch.Tensor, config: Any = None, *, group: Group = None) -> list[Work] | None:
    """Send this rank's part of an activation ``[S, B, H]`` to the next stage; from the last stage of a U to the edge.

    Args:
        tensor: keeps its memory until the work is waited for or the step ends.
        config: Megatron's model-parallel configuration. Default: that of an earlier call; in the very first call the
            tensor's type and width, not sharded.
        group: one group, or a list of groups to send to several replicas.

    Returns:
        The sends under way, one per replica; None on ranks that send nothing: with rank0 all but the leaders.
    """
    return _send("next", tensor, config, group)


def vtp_send_backward(tensor: torch.Tensor, config: Any = None, *, group: Group = None) -> list[Work] | None:
    """Send the gradient of an activation to the stage that sent the activation; as :func:`vtp_send_forward`."""
    return _send("prev", tensor, config, group)


@overload
def vtp_recv_forward(
    tensor_shape: Sequence[int], config: Any, async_op: Literal[False] = False, *, group: Group = None
) -> torch.Tensor: ...
@overload
def vtp_recv_forward(
    tensor_shape: Sequence[int], config: Any, async_op: Literal[True], *, group: Group = None
) -> tuple[torch.Tensor, Requests]: ...
def vtp_recv_forward(
    tensor_shape: Sequence[int], config: Any, async_op: bool = False, *, group: Group = None
) -> torch.Tensor | tuple[torch.Tensor, Requests]:
    """Receive an activation from the previous stage; on the edge of a U from the last stage.

    Args:
        tensor_shape: local shape; with variable lengths the sender's header has it.
        config: Megatron's model-parallel configuration.
        async_op: do not wait.
        group: of one replica, also as a list of one.

    Returns:
        The tensor, a fresh leaf; with ``async_op`` also ``{"recv_prev": work}``, for which all ranks must wait.
    """
    tensor, requests = _receive("prev", tensor_shape, config, group, wait=not async_op)
    return tensor if requests is None else (tensor, requests)


@overload
def vtp_recv_backward(
    tensor_shape: Sequence[int], config: Any, async_op: Literal[False] = False, *, group: Group = None
) -> torch.Tensor: ...
@overload
def vtp_recv_backward(
    tensor_shape: Sequence[int], config: Any, async_op: Literal[True], *, group: Group = None
) -> tuple[torch.Tensor, Requests]: ...
def vtp_recv_backward(
    tensor_shape: Sequence[int], config: Any, async_op: bool = False, *, group: Group = None
) -> torch.Tensor | tuple[torch.Tensor, Requests]:
    """Receive the gradient of an activation from the next stage; as :func:`vtp_recv_forward`, with ``"recv_next"``."""
    tensor, requests = _receive("next", tensor_shape, config, group, wait=not async_op)
    return tensor if requests is None else (tensor, requests)


def recv_forward_with_reqs(
    tensor_shape: Sequence[int],
    config: Any,
    is_end_stage: bool = False,
    *,
    group: Group = None,
    wait_on_reqs: bool = True,
) -> tuple[torch.Tensor | None, Requests | None]:
    """Receive an activation unless this rank's part of the model is the first one.

    Args:
        tensor_shape: local shape.
        config: Megatron's model-parallel configuration.
        is_end_stage: on the edge of a U: receive for the last part of the model, not for the first.
        group: as for :func:`vtp_recv_forward`.
        wait_on_reqs: wait for the tensor.

    Returns:
        The tensor, and ``{"recv_prev": work}`` if it was not waited for; None in place of what does not exist.
    """
    if open_session().planned.own.stage == 0 and not is_end_stage:
        return None, None
    with _timed(config, "forward-recv"):
        return _receive("prev", tensor_shape, config, group, wait=wait_on_reqs)


def recv_backward_with_reqs(
    tensor_shape: Sequence[int],
    config: Any,
    is_end_stage: bool = False,
    *,
    group: Group = None,
    wait_on_reqs: bool = True,
) -> tuple[torch.Tensor | None, Requests | None]:
    """Receive a gradient unless this rank's part of the model is the last one; as :func:`recv_forward_with_reqs`."""
    if _ends_the_model(open_session(), is_end_stage):
        return None, None
    with _timed(config, "backward-recv"):
        return _receive("next", tensor_shape, config, group, wait=wait_on_reqs)


def send_forward(
    output_tensor: torch.Tensor,
    config: Any,
    is_end_stage: bool = False,
    *,
    group: Group = None,
    wait_on_reqs: bool = True,
) -> None:
    """Send an activation to the next stage unless this rank's part of the model is the last one.

    Args:
        output_tensor: this rank's part.
        config: Megatron's model-parallel configuration.
        is_end_stage: as for :func:`recv_forward_with_reqs`.
        group: as for :func:`vtp_send_forward`.
        wait_on_reqs: ignored: the runtime keeps the tensor, and waits for the send at the end of the step at latest.
    """
    if not _ends_the_model(open_session(), is_end_stage):
        with _timed(config, "forward-send"):
            _send("next", output_tensor, config, group)


def send_backward(
    input_tensor_grad: torch.Tensor,
    config: Any,
    is_end_stage: bool = False,
    *,
    group: Group = None,
    wait_on_reqs: bool = True,
) -> None:
    """Send a gradient to the previous stage unless this rank's part of the model is the first; as `send_forward`."""
    if open_session().planned.own.stage > 0 or is_end_stage:
        with _timed(config, "backward-send"):
            _send("prev", input_tensor_grad, config, group)


def _ends_the_model(session: Session, is_end_stage: bool) -> bool:
    """Tell whether this rank's part of the model is the last one; on the edge of a U that is its second part."""
    is_on_loss_stage = session.planned.own.stage == session.planned.loss_stage
    return is_on_loss_stage and (is_end_stage or not session.config.layerwise_disaggregated)


def _send(neighbour: _Neighbour, tensor: torch.Tensor, config: Any, group: Group) -> list[Work] | None:
    session = open_session()
    form = _format(session, config, tensor)
    works: list[Work] = []
    for communicator in _communicators(session, group):
        _require(communicator.reaches(f"send_{neighbour}"), session, f"send to the {neighbour}")
        tensors: dict[str, Any] = {f"send_{neighbour}": tensor}
        works += communicator.exchange(form, wait=False, **tensors).works.values()
    # A rank that only takes part in collectives of its stage has nothing under way.
    return [work for work in works if not work.is_done] or None


def _receive(
    neighbour: _Neighbour, shape: Sequence[int], config: Any, group: Group, *, wait: bool
) -> tuple[torch.Tensor, Requests | None]:
    session = open_session()
    form = _format(session, config, None)
    if not wait and form.is_batched:
        raise ConfigError("batch_p2p_comm cannot receive without waiting; wait, or give overlap_p2p_comm")
    communicators = _communicators(session, group)
    if len(communicators) > 1:
        raise ConfigError(f"a receive from {len(communicators)} replicas at once; give the group of one")
    (communicator,) = communicators
    _require(communicator.reaches(f"recv_{neighbour}"), session, f"receive from the {neighbour}")
    wanted: dict[str, Any] = {f"recv_{neighbour}": True}
    done = communicator.exchange(form, shape=shape, wait=wait, **wanted)
    tensor = done.from_prev if neighbour == "prev" else done.from_next
    assert tensor is not None
    return tensor, None if wait else done.works


def _format(session: Session, config: Any, tensor: torch.Tensor | None) -> TensorFormat:
    """Return the format of the tensors that cross; all ranks compare it in their first call."""
    if config is not None:
        return tensor_format(session, config)
    assert tensor is not None
    form = session.tensor_format or TensorFormat(dtype=tensor.dtype, width=tensor.shape[-1])
    return session.agree_on_formats(lambda: (form,))[0]


def _communicators(session: Session, group: Group) -> list[PipelineCommunicator]:
    """Return the communicator of each replica that the groups choose, in their order."""
    groups = list(group) if isinstance(group, Sequence) else [group]
    indexes = [_index_of(session, one) for one in groups]
    if not indexes or len(set(indexes)) < len(indexes):
        raise ConfigError(f"the groups name the replicas {indexes}; name each that is meant once")
    return [session.running.communicators[index] for index in indexes]


def _index_of(session: Session, group: dist.ProcessGroup | None) -> int:
    if group is None and len(session.running.communicators) == 1:
        return 0
    ranks = None if group is None else dist.get_process_group_ranks(group)
    own = [dist.get_process_group_ranks(one) for one in session.running.pipeline_groups]
    if ranks not in own:
        given = "no group was given" if ranks is None else f"the ranks {ranks} are not such a group"
        raise ConfigError(f"{given}: this rank's pipeline groups are those of the ranks {own}; use pipeline_groups()")
    return own.index(ranks)


def _require(is_there: bool, session: Session, what: str) -> None:
    if not is_there:
        raise ConfigError(
            f"stage {session.planned.own.stage} cannot {what} stage: there is none; only "
            "--layerwise-disaggregated-training joins the last stage and the first"
        )


@contextmanager
def _timed(config: Any, name: str) -> Iterator[None]:
    """Measure a call by Megatron's timers, as its schedules do."""
    if config.timers is not None:
        config.timers(name, log_level=2).start()
    yield
    if config.timers is not None:
        config.timers(name).stop()
