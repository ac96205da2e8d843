"""Experts: what is logged, and where tensors go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import PlannedRun, Session


@replaces(
    targets={
        "<0.18": "megatron.core.transformer.moe.moe_utils:reduce_aux_losses_tracker_across_ranks",
        ">=0.18": "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker._sync_metrics",
    },
    id="router-loss-log",
    when=Moment.LIST,
)
def _sync(session: Session, host: MegatronHost, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Replace `MoEMetricsTracker._sync_metrics`: inside the stage first, then over the stages.

    Why: it sums over the pipeline group, which hangs where a rank is in several of them; on CPU, gloo has no averages.

    Remove when: Megatron sums these numbers inside each stage first, then over the model-parallel group.
    """
    if not session.is_active and session.planned.platform.name != "cpu":
        original(*args, **kwargs)
        return
    for metric in host.router_metrics(*args, **kwargs):
        if metric.sum_group is not None:
            dist.all_reduce(metric.values, group=metric.sum_group)
        if metric.mean_group is not None:
            _average(metric.values, metric.mean_group)
        # Older families log one replica. Stages with different numbers of replicas share none.
        if metric.is_averaged or (not metric.is_whole and len(set(session.planned.layout.dp_sizes)) > 1):
            _average(metric.values, parallel_state.get_data_parallel_group())
        _sum_stages(session.planned, metric.values)


def _average(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(values, group=group)
    values /= group.size()


def _sum_stages(planned: PlannedRun, values: torch.Tensor) -> None:
    """Add what the stages have; it is equal on all ranks of a stage.

    Megatron divides by the number of microbatches of the rank that logs. A stage with more replicas runs fewer, and has
    averaged over more.
    """
    dp_sizes, own = planned.layout.dp_sizes, planned.own
    is_equal = len(set(dp_sizes)) == 1
    if not is_equal:
        values *= dp_sizes[own.stage]
    if own.tp_rank != 0:
        values.zero_()
    dist.all_reduce(values, group=parallel_state.get_model_parallel_group())
    if not is_equal:
        values /= dp_sizes[own.stage]


@replaces(
    "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
    id="all-to-all-sizes",
    when=Moment.CPU,
    aliases=("megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",),
)
def _move(original: Callable[..., Any], tensor: Any, as_numpy: bool = False, *args: Any, **kwargs: Any) -> Any:
    """Run `maybe_move_tensor_to_cpu`; a tensor that is there already becomes an array, too.

    Why: it turns tensors of a device into arrays and leaves those of the CPU as they are, which torch's
    all_to_all_single does not take as sizes.

    Remove when: it gives arrays for tensors on the CPU too.
    """
    moved = original(tensor, as_numpy, *args, **kwargs)
    return moved.numpy() if as_numpy and torch.is_tensor(moved) and not moved.is_cuda else moved
