"""Job of test_model_group: reductions over the model-parallel group on this rank, with what they issue."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.distributed_c10d import _pg_group_ranks, _pg_map

import vtp_plugin
from tests.ordering.recorder import Recorder
from tests.ordering.trace import Kind
from tests.support.pool import TIMEOUT_S, init_gloo
from vtp_plugin.platform.detect import detect
from vtp_plugin.runtime.comm.collectives import ModelGroup


@dataclass(slots=True, kw_only=True)
class Reduced:
    """What one rank saw.

    Attributes:
        place: rank and size of the group.
        total: of ``10 ** place``, equal on the replicas of a stage.
        spoiled: largest value, where the last rank of the stage has a 1, for every stage.
        agreed: smallest value, where the last rank of the stage has a 0, for every stage.
        shares: number of shares that the group of the distributed optimizer summed, one of each rank.
        groups: ranks of the groups that each of the two sums used, in order.
        members: ranks that torch names, of this rank's replica.
        asked: this rank's place and their number, as torch says, and their first rank, as Megatron says.
        error: of a sum that failed, as torch reports it.
        written: names of Megatron and torch that are written, while the groups exist.
        is_undone: whether all are as they were, after ``destroy_model_parallel()`` and before ``revert()``.
    """

    place: tuple[int, int]
    total: int
    shares: int
    spoiled: list[float]
    agreed: list[float]
    groups: list[tuple[int, ...]]
    members: list[int]
    asked: tuple[int, int, int]
    error: str = ""
    written: tuple[str, ...] = ()
    is_undone: bool = False


def reduce(tp_sizes: tuple[int, ...], cp_sizes: tuple[int, ...], dp_sizes: tuple[int, ...]) -> Reduced:
    """Make the groups and reduce."""
    init_gloo()
    vtp_plugin.apply(
        vtp_size_list=tp_sizes, vtp_cp_list=cp_sizes, vtp_dp_list=dp_sizes, device="cpu", timeout_s=TIMEOUT_S
    )
    registry = dict(_pg_map), dict(_pg_group_ranks)
    try:
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=len(tp_sizes))
        result = _reduce(len(tp_sizes))
        result.written = _written()
        parallel_state.destroy_model_parallel()
        groups = {group for known in (_pg_map, _pg_group_ranks) for group in known if isinstance(group, ModelGroup)}
        is_kept = all(
            then.items() <= now.items() for then, now in zip(registry, (_pg_map, _pg_group_ranks), strict=True)
        )
        result.is_undone = not groups and not _written() and is_kept
        return result
    finally:
        parallel_state.destroy_model_parallel()
        vtp_plugin.revert()


def _written() -> tuple[str, ...]:
    return tuple(status.target.partition(":")[2] for status in vtp_plugin.status() if status.state == "written")


def _reduce(num_stages: int) -> Reduced:
    group = parallel_state.get_model_parallel_group()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    whole_stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    is_last = dist.get_rank() == dist.get_process_group_ranks(whole_stage)[-1]
    total = torch.tensor([10 ** group.rank()])
    with Recorder(detect("cpu")) as recorder:
        dist.all_reduce(total, group=group)
    groups = _groups_of(recorder)
    shares = torch.tensor([1])
    with Recorder(detect("cpu")) as recorder:
        dist.all_reduce(shares, group=_group_of_shares())
    assert _groups_of(recorder) == groups
    spoiled, agreed = [], []
    for where in range(num_stages):
        is_marked = is_last and stage == where
        worst, best = torch.tensor([float(is_marked)]), torch.tensor([float(not is_marked)])
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
        work = dist.all_reduce(best, op=dist.ReduceOp.MIN, group=group, async_op=True)
        assert work is not None
        work.wait()
        spoiled.append(worst.item())
        agreed.append(best.item())
    try:
        dist.all_reduce(torch.zeros(1, dtype=torch.quint8), group=group)
        error = ""
    except Exception as raised:
        error = str(raised)
    return Reduced(
        place=(group.rank(), group.size()),
        total=int(total.item()),
        shares=int(shares.item()),
        spoiled=spoiled,
        agreed=agreed,
        groups=groups,
        members=dist.get_process_group_ranks(group),
        asked=(dist.get_rank(group), dist.get_world_size(group), parallel_state.get_model_parallel_src_rank()),
        error=error,
    )


def _group_of_shares() -> dist.ProcessGroup | None:
    """Give the group over which the distributed optimizer sums what its shards count."""
    if hasattr(parallel_state, "get_intra_distributed_optimizer_instance_group"):
        return parallel_state.get_intra_distributed_optimizer_instance_group()
    # Megatron 0.12 asks its optimizer, whose answer depends on nothing in it.
    return DistributedOptimizer.get_grad_stats_parallel_group(None)  # pyright: ignore[reportArgumentType]


def _groups_of(recorder: Recorder) -> list[tuple[int, ...]]:
    """Give the ranks of every collective's group, in the order of issue."""
    issued = [event for event in recorder.trace().events if event.kind is Kind.COLLECTIVE]
    return [event.group.ranks for event in issued if event.group is not None]
