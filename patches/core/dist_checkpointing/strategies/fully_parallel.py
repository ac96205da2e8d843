"""`fully-parallel-save`: stages with one replica save and load beside stages with several, which share the work.

`tied-embedding-save`: the edge of a U-shaped pipeline saves a tied embedding once, though both of its chunks hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.exchange_utils import ShardDistribution, exchange_loaded_objects_gather_object
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.utils import _sharded_tensor_shard_id

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session

_MODULE = "megatron.core.dist_checkpointing.strategies.fully_parallel"


@replaces(
    f"{_MODULE}:FullyParallelSaveStrategyWrapper.apply_saving_parallelization",
    id="fully-parallel-save",
    when=Moment.LIST,
    remove_when="it keeps that it was called",
)
def _share_saving(session: Session, original: Callable[..., None], wrapper: Any, state: Any) -> None:
    """Run `apply_saving_parallelization`; a rank that shares nothing then keeps that, as others keep their share.

    Why: with --ckpt-assume-constant-structure a rank whose weights have one copy keeps nothing of the first save, takes
    the second for the first, and gathers over the world; ranks whose weights have several copies do not come.
    """
    original(wrapper, state)
    if wrapper.do_cache_distribution and wrapper.cached_distribution is None and _differ(session):
        wrapper.cached_distribution = ShardDistribution({}, set(), {}, {})


@replaces(
    f"{_MODULE}:FullyParallelLoadStrategyWrapper.load",
    id="fully-parallel-load",
    when=Moment.LIST,
    remove_when="it gathers over the ranks that share the work",
)
def _load(session: Session, original: Callable[..., Any], wrapper: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `load`; beside ranks that share the work, a rank without others to share it takes the same steps.

    Why: a rank whose weights have one copy loads all at once and leaves; the others load objects first, then tensors,
    and gather the objects of all ranks of the world.
    """
    if dist.get_world_size(wrapper.parallelization_group) > 1 or not _differ(session):
        return original(wrapper, state, *args, **kwargs)
    load = wrapper.base_strategy.load
    objects, tensors, own, others = wrapper._defer_loading_sharded_objects(state)
    loaded_objects = load(own, *args, **kwargs)
    loaded = load(tensors, *args, **kwargs)
    found = exchange_loaded_objects_gather_object(loaded_objects)
    if missing := others.keys() - found.keys():
        raise CheckpointingException(f"no rank has loaded the objects {missing}")
    wrapper.fill_in_deferred_sharded_objects(objects, found)
    merge(loaded, objects)
    # What was read is compared with what is saved next, in a collective of all ranks that have it.
    wrapper.cached_global_metadata = wrapper.base_strategy.cached_global_metadata
    return loaded


def _differ(session: Session) -> bool:
    """Tell whether a rank without copies of its weights may stand beside one with copies."""
    layout = session.planned.layout if session.is_planned else None
    return layout is not None and not (layout.has_equal_replicas and layout.has_equal_experts)


@replaces(
    f"{_MODULE}:distribute_main_replicas_with_precomputed_distribution",
    id="tied-embedding-save",
    when=Moment.U_SHAPE,
    remove_when="it chooses one tensor, not one rank",
)
def _distribute(original: Callable[..., None], sharded_state_dict: Any, *args: Any, **kwargs: Any) -> None:
    """Run `distribute_main_replicas_with_precomputed_distribution`, then let this rank save nothing twice.

    Why: it shares out what replicas save by the names of tensors, and a rank saves all that it holds under a name; the
    edge holds a tied embedding twice, and the plugin lets no tensor be saved twice.
    """
    original(sharded_state_dict, *args, **kwargs)
    saved: set[object] = set()
    for shard in nested_values(sharded_state_dict):
        if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id):
            shard_id = _sharded_tensor_shard_id(shard)
            if shard_id in saved:
                shard.replica_id = 1
            saved.add(shard_id)
