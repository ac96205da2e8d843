"""What Megatron's distributed optimizer says of itself, as a map: which part of which parameter lies where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from vtp_plugin.checkpoint.format.shard_map import Block, Bucket, BucketEntry, ShardSpec, block_at, row_major
from vtp_plugin.errors import PlanError


def cuts_of(model_state: Mapping[str, Any]) -> dict[torch.Tensor, ShardSpec]:
    """Say how this rank's parameters are cut, by what their model stores of them.

    Args:
        model_state: the model's sharded state, which holds the parameters themselves.

    Raises:
        PlanError: a part is no range of rows and columns.
    """
    cuts: dict[torch.Tensor, ShardSpec] = {}
    shards, _ = extract_sharded_tensors_and_factories(model_state)
    for shard in nested_values(shards):
        # A parameter may be stored twice, as a tied embedding is: the original counts, not its copy.
        if shard.data not in cuts or cuts[shard.data].is_copy:
            cuts[shard.data] = _cut(shard)
    return cuts


def _cut(shard: ShardedTensor | ShardedTensorFactory) -> ShardSpec:
    if isinstance(shard, ShardedTensor):
        parts, strides = [shard], row_major(tuple(shard.local_shape))
        blocks = (_block(shard, 0, strides),)
    else:
        # A factory cuts a parameter by views. Of a tensor without memory, their places can be read off.
        whole = torch.empty(shard.data.shape, dtype=shard.data.dtype, device="meta")
        parts = list(nested_values([replace(shard, data=whole).build()]))
        if any(part.data is not whole and part.data._base is not whole for part in parts):
            raise PlanError(f"{shard.key} is stored as copies of its parts")
        blocks = tuple(_block(part, part.data.storage_offset(), part.data.stride()) for part in parts)
    if len({(part.key, tuple(part.global_shape)) for part in parts}) != 1:
        raise PlanError(f"{shard.key} is stored under several names")
    # The last number of a replica is that of the data-parallel rank, of which the optimizer stores all.
    is_copy = any(shard.replica_id[:-1]) if isinstance(shard.replica_id, tuple) else bool(shard.replica_id)
    cut = ShardSpec(name=parts[0].key, shape=tuple(parts[0].global_shape), blocks=blocks, is_copy=is_copy)
    cut.require_orderly()
    return cut


def _block(part: ShardedTensor, offset: int, strides: tuple[int, ...]) -> Block:
    """Give a block in all dimensions of the whole parameter; before those of the tensor there may be others."""
    lengths = (1,) * part.prepend_axis_num + tuple(part.local_shape)
    box = tuple((start, start + length) for start, length in zip(part.global_offset, lengths, strict=True))
    return block_at(box, offset, (1,) * part.prepend_axis_num + tuple(strides))


def buckets_of(optimizer: Any, cuts: Mapping[torch.Tensor, ShardSpec], *, is_padded: bool = False) -> Iterator[Bucket]:
    """Yield the buckets of an optimizer, with keys as it stores them.

    Args:
        optimizer: Megatron's.
        cuts: how each of its parameters is cut.
        is_padded: whether it stores the end of a bucket that is there only so that the ranks can share it.

    Raises:
        KeyError: the model does not store a parameter.
    """
    group = f"optimizer.distributed.dp_group_idx_{optimizer.data_parallel_group_idx}"
    for number, (buffer, ranges) in enumerate(zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True)):
        (types,) = ranges
        for index, bucket in enumerate(buffer.buckets):
            parts = [
                BucketEntry(cuts[parameter], start - bucket.offset)
                for parameter, (start, _, of) in buffer.param_index_map.items()
                if of == index
            ]
            key = f"{group}.gbuf_idx_{number}.dtype_{types}.bucket_idx_{index}"
            numel = bucket.grad_data.numel() if is_padded else bucket.numel_unpadded
            yield Bucket(key, numel, tuple(sorted(parts, key=lambda part: part.offset)))
