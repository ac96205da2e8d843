"""U13: the edge of a U-shaped pipeline saves a tied embedding once, though both of its chunks hold it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.utils import _sharded_tensor_shard_id

from vtp_plugin.patches.moment import Moment
from vtp_plugin.patching import replaces


@replaces(
    "megatron.core.dist_checkpointing.strategies.fully_parallel:distribute_main_replicas_with_precomputed_distribution",
    id="U13",
    when=Moment.U_SHAPE,
    why="it shares out what replicas save by the names of tensors, and a rank saves all that it holds under a name; "
    "the edge holds a tied embedding twice, and saving a tensor twice is refused",
    remove_when="it chooses one tensor, not one rank",
)
def _distribute(original: Callable[..., None], sharded_state_dict: Any, *args: Any, **kwargs: Any) -> None:
    """Run `distribute_main_replicas_with_precomputed_distribution`, then let this rank save nothing twice."""
    original(sharded_state_dict, *args, **kwargs)
    saved: set[object] = set()
    for shard in nested_values(sharded_state_dict):
        if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id):
            shard_id = _sharded_tensor_shard_id(shard)
            if shard_id in saved:
                shard.replica_id = 1
            saved.add(shard_id)
