"""What the functions and queries of the Ascend implementation do on real ranks, as facts by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig

from tests.multiproc.cases.core_cases import Case
from tests.multiproc.jobs.core_job import applied, model_parallel
from tests.support.pool import init_gloo
from vtp_plugin import functional as p2p
from vtp_plugin.runtime.comm.transfers import Transfers

SHAPE = (4, 1, 6)
Facts = dict[str, Any]


def facts(sizes: tuple[int, ...]) -> Facts:
    """Send an activation and its gradient over one boundary, twice, and ask every query.

    Megatron's default configuration coalesces messages (``batch_p2p_comm``).

    Args:
        sizes: of a plain pipeline of two stages.
    """
    init_gloo()
    case = Case.of(sizes=sizes, transport="rank0")
    with applied(case, force=False):
        before = _queries()
        with model_parallel(case):
            config = ModelParallelConfig(
                tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
                pipeline_model_parallel_size=2,
                pipeline_dtype=torch.float32,
            )
            assert config.batch_p2p_comm
            config.hidden_size = SHAPE[-1]  # pyright: ignore[reportAttributeAccessIssue]
            is_first = parallel_state.get_pipeline_model_parallel_rank() == 0
            crossed = _first_stage(config) if is_first else _last_stage(config)
            return {"before": before, **_queries(), **crossed, "made by hand": _made_by_hand()}


def _queries() -> Facts:
    names = ("is_vtp_enabled", "get_vtp_size_list", "get_vtp_stage_ranks", "get_vtp_my_stage_idx", "is_vtp_stage_rank0")
    found: Facts = {name: getattr(p2p, name)() for name in names}
    group = p2p.get_vtp_intra_stage_group()
    found["get_vtp_intra_stage_group"] = None if group is None else dist.get_process_group_ranks(group)
    return found


def _first_stage(config: ModelParallelConfig) -> Facts:
    """Send twice, then receive what comes back, at once and later."""
    with _messages() as sent:
        works = [p2p.vtp_send_forward(_activation(number)) for number in range(2)]
        waited = [work.wait() for one in works for work in one or ()]
    with _messages() as received:
        gradient = p2p.vtp_recv_backward(SHAPE, config)
    later, reqs = p2p.vtp_recv_backward(SHAPE, config, async_op=True)
    assert isinstance(reqs["recv_next"], p2p._VTPRecvWork)
    reqs["recv_next"].wait()
    reqs["recv_next"].wait()
    equal = [gradient.detach().equal(_activation(0) * 2), later.detach().equal(_activation(1) * 2)]
    return {
        "sends": [None if one is None else len(one) for one in works],
        "waited": waited,
        "sent": sent,
        "received": received,
        "equal": equal,
        "leaf": later.is_leaf and later.requires_grad,
        "reqs": list(reqs),
    }


def _last_stage(config: ModelParallelConfig) -> Facts:
    with _messages() as received:
        activation = p2p.vtp_recv_forward(SHAPE, config, async_op=False)
    later, reqs = p2p.vtp_recv_forward(SHAPE, config, async_op=True)
    reqs["recv_prev"].wait()
    with _messages() as sent:
        works = [p2p.vtp_send_backward(tensor.detach() * 2) for tensor in (activation, later)]
        waited = [work.wait() for one in works for work in one or ()]
    return {
        "sends": [None if one is None else len(one) for one in works],
        "waited": waited,
        "sent": sent,
        "received": received,
        "equal": [tensor.detach().equal(_activation(number)) for number, tensor in enumerate((activation, later))],
        "leaf": later.is_leaf and later.requires_grad,
        "reqs": list(reqs),
    }


def _activation(number: int) -> torch.Tensor:
    return torch.arange(24.0).view(SHAPE) + 100 * number


def _made_by_hand() -> bool:
    """Wait for a receive that the test has posted itself: from the stage's last rank to its first, then to all."""
    group: Any = p2p.get_vtp_intra_stage_group()
    ranks = dist.get_process_group_ranks(group)
    tensor = torch.zeros(3)
    work = None
    if len(ranks) > 1 and dist.get_rank() == ranks[0]:
        work = dist.irecv(tensor, src=ranks[-1], group=group)
    elif len(ranks) > 1 and dist.get_rank() == ranks[-1]:
        dist.send(torch.ones(3), dst=ranks[0], group=group)
    received = p2p._VTPRecvWork([work], tensor, broadcast_src=ranks[0], intra_group=group, dst_size=len(ranks))
    received.wait()
    received.wait()
    return tensor.equal(torch.ones(3) if len(ranks) > 1 else torch.zeros(3))


@contextmanager
def _messages() -> Iterator[list[tuple[str, int]]]:
    """Note the messages between stages, as ``(operation, peer)``, that this rank posts meanwhile."""
    noted: list[tuple[str, int]] = []
    post = Transfers.post

    def noting(self: Transfers, messages: Any, kind: Any, **options: Any) -> Any:
        noted.extend((operation.__name__, peer) for operation, _, peer in messages)
        return post(self, messages, kind, **options)

    with mock.patch.object(Transfers, "post", noting):
        yield noted
