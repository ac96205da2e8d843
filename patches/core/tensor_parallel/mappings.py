"""`gloo-uneven-gather`, CPU only: gathers and scattered sums of pieces of different sizes, which gloo does not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment

_MODULE = "megatron.core.tensor_parallel.mappings"


def _given(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group that is meant; callers in Megatron 0.12 leave out the tensor-parallel one."""
    return parallel_state.get_tensor_model_parallel_group() if group is None else group


@replaces(f"{_MODULE}:_gather_along_first_dim", id="gloo-uneven-gather", when=Moment.CPU)
def _gather(
    original: Callable[..., torch.Tensor],
    input_: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    output_split_sizes: Sequence[int] | None = None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Run `_gather_along_first_dim`; pieces of different sizes travel in boxes of the largest one.

    Why: gloo gathers only tensors of one size, and ranks of a stage send experts different numbers of tokens.

    Remove when: gloo gathers tensors of different sizes.
    """
    group = _given(group)
    if output_split_sizes is None or group.size() == 1:
        return original(input_, group, output_split_sizes, *args, **kwargs)
    sizes = [int(size) for size in output_split_sizes]
    box = input_.new_zeros((max(sizes), *input_.shape[1:]))
    box[: len(input_)] = input_
    boxes = [torch.empty_like(box) for _ in sizes]
    dist.all_gather(boxes, box, group=group)
    return torch.cat([box[:size] for box, size in zip(boxes, sizes, strict=True)])


@replaces(f"{_MODULE}:_reduce_scatter_along_first_dim", id="gloo-uneven-reduce-scatter", when=Moment.CPU)
def _reduce_scatter(
    original: Callable[..., torch.Tensor],
    input_: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Run `_reduce_scatter_along_first_dim`; of pieces of different sizes each rank sums all and keeps its own.

    Why: as `gloo-uneven-gather`, on the way back.

    Remove when: gloo scatters sums of different sizes.
    """
    group = _given(group)
    if input_split_sizes is None or group.size() == 1:
        return original(input_, group, input_split_sizes, *args, **kwargs)
    whole = input_.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=group)
    return whole.split([int(size) for size in input_split_sizes])[group.rank()].clone()
