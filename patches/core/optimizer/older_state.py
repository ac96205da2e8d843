"""`bucket-map` on Megatron 0.12: unequal stages store the distributed optimizer by bucket, with the same map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties

from vtp_plugin.checkpoint.format.optimizer_formats import BY_BLOCK, BY_BUCKET_OLDER
from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.core.optimizer.moved_state import request_state
from vtp_plugin.patches.core.optimizer.optimizer_map import cuts_of
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session

_CLASS = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


@replaces(
    f"{_CLASS}.sharded_state_dict",
    id="bucket-map/older-request",
    when=Moment.LIST,
    why="it stores each parameter's state on one regular grid of blocks, which stages of unequal size have not, or "
    "without saying where it lies; by bucket, with a map, any layout can load it",
    remove_when="Megatron 0.12 is no longer supported",
    unneeded={">=0.15": "bucket-map/request"},
)
def _older_state(
    session: Session,
    original: Callable[..., dict[Any, Any]],
    optimizer: Any,
    model_state: Any,
    is_loading: bool = False,
    sharding_type: str = BY_BLOCK,
) -> dict[Any, Any]:
    """Run `sharded_state_dict`, by bucket where stages differ; what a checkpoint holds by bucket is noted as wanted."""
    if is_loading and session.loading.stored_optimizer is not None:
        return request_state(optimizer, session.loading.stored_optimizer, cuts_of(model_state), session.loading.rates)
    if not is_loading and len(set(session.planned.layout.tp_sizes)) > 1:
        sharding_type = BY_BUCKET_OLDER
    return original(optimizer, model_state, is_loading, sharding_type)


@replaces(
    f"{_CLASS}.get_parameter_state_fs_bucket_space",
    id="bucket-map/older-state",
    when=Moment.LIST,
    why="its caller takes the step of torch's Adam for a tensor of the bucket, and leaves out padding before a rank's "
    "first parameter, so that Megatron's own check of what is stored fails",
    remove_when="Megatron 0.12 is no longer supported",
    unneeded={">=0.15": "the caller does both"},
)
def _bucket_state(original: Callable[[Any], dict[Any, Any]], optimizer: Any) -> dict[Any, Any]:
    """Run `get_parameter_state_fs_bucket_space`; take the steps out, and put padding in."""
    state = original(optimizer)
    for number in range(len(optimizer.gbuf_ranges)):
        for parameters in (each for buckets in state[number].values() for each in buckets):
            for parameter in parameters:
                parameter.pop("step", None)
            if parameters and (start := parameters[0]["gbuf_local_start"]) > 0:
                tensors = {name: value for name, value in parameters[0].items() if isinstance(value, torch.Tensor)}
                padding = {name: torch.empty(start, dtype=value.dtype) for name, value in tensors.items()}
                parameters.insert(0, {**padding, "gbuf_local_start": 0, "gbuf_local_end": start, "padding": True})
    return state


@replaces(
    "megatron.core.dist_checkpointing.strategies.torch:sharded_tensor_to_torch_sharded_tensor",
    id="bucket-map/older-pieces",
    when=Moment.LIST,
    why="it fails where a rank stores more than one piece of a bucket, since it takes the place of the first for that "
    "of all",
    remove_when="Megatron 0.12 is no longer supported",
    unneeded={">=0.15": "it takes pieces of any bucket"},
)
def _torch_tensor(original: Callable[..., Any], pieces: list[Any], rank: int | None = None, *args: Any) -> Any:
    """Run `sharded_tensor_to_torch_sharded_tensor`; in a bucket each piece is a shard, and each gap is another rank's.

    The shards that a rank lists for others only have to cover the tensor: torch keeps what each rank lists of its own.
    """
    if ".bucket_idx_" not in pieces[0].key or any(piece.flattened_range is None for piece in pieces):
        return original(pieces, rank, *args)
    rank = dist.get_rank() if rank is None else rank
    pieces = sorted(pieces, key=_begin)
    shards = [Shard.from_tensor_and_offsets(piece.data.contiguous(), [_begin(piece)], rank) for piece in pieces]
    (numel,) = pieces[0].global_shape
    other = f"rank:{(rank + 1) % dist.get_world_size()}/{pieces[0].data.device}"
    ends = [0, *(_begin(piece) + piece.data.numel() for piece in pieces)]
    gaps = zip(ends, [*map(_begin, pieces), numel], strict=True)
    others = [ShardMetadata([start], [stop - start], other) for start, stop in gaps if stop > start]
    properties = TensorProperties(dtype=pieces[0].data.dtype, requires_grad=False)
    metadata = ShardedTensorMetadata([*(shard.metadata for shard in shards), *others], torch.Size([numel]), properties)
    made: Any = ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata)
    made.mcore_sh_ten, made.mcore_metadata = pieces[0].without_data(), {}
    return made


def _begin(piece: Any) -> int:
    return piece.global_offset[0] + piece.flattened_range.start
