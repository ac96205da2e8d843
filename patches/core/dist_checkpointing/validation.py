"""`checkpoint-integrity`: a distributed checkpoint may hold tensors that stages cut differently, or another layout.

`safe-load`: nothing in it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import is_main_replica

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.core.dist_checkpointing.one_site import box_of_shard
from vtp_plugin.patches.core.dist_checkpointing.serialization import require_plain_checkpoint
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session
from vtp_plugin.util.index_boxes import overlaps, volume

_MODULE = "megatron.core.dist_checkpointing.validation"


@replaces(
    f"{_MODULE}:_validate_sharding_for_key",
    id="checkpoint-integrity",
    when=Moment.LIST,
    remove_when="the check works on element coverage",
)
def _validate_sharding(
    session: Session, original: Callable[[Any], list[Exception]], rank_sharding: Sequence[tuple[int, Any]]
) -> list[Exception]:
    """Replace `_validate_sharding_for_key` where shards differ in shape: every element must be stored exactly once.

    Why: it counts accesses on one regular grid of shards, but stages of unequal size have a grid each, and one site of
    several has a part of it.
    """
    shards = [shard for _, shard in rank_sharding]
    is_part = session.parts.is_seen
    if len({(shard.local_shape, shard.axis_fragmentations) for shard in shards}) == 1 and not is_part:
        return original(rank_sharding)
    first = shards[0]
    for shard in shards:
        if (shard.dtype, shard.global_shape) != (first.dtype, first.global_shape):
            found = f"{shard.dtype} {shard.global_shape} beside {first.dtype} {first.global_shape}"
            return [CheckpointingException(f"{first.key}: two tensors are stored under one name: {found}")]
    boxes = [box_of_shard(shard) for shard in shards if is_main_replica(shard.replica_id)]
    problems = ["shards overlap"] if next(overlaps(boxes), None) is not None else []
    # Where nothing overlaps, equal volumes mean that nothing is missing.
    missing = prod(first.global_shape) - sum(volume(box) for box in boxes)
    if missing > 0 and not is_part:
        problems.append(f"{missing} elements are not stored by any rank")
    return [CheckpointingException(f"{first.key}: {problem}") for problem in problems]


@replaces(
    f"{_MODULE}:_validate_objects_for_key",
    id="checkpoint-integrity/objects",
    when=Moment.LIST,
    remove_when="with `checkpoint-integrity`",
)
def _validate_objects(
    session: Session, original: Callable[[Any], list[Exception]], sharded_objects: Sequence[tuple[int, Any]]
) -> list[Exception]:
    """Replace `_validate_objects_for_key` where grids differ in width: no object may be stored twice.

    Why: random states are stored on a (stage, tp) grid, whose width differs between stages; a site has a part of it.
    """
    if len({obj.global_shape for _, obj in sharded_objects}) == 1 and not session.parts.is_seen:
        return original(sharded_objects)
    keys = Counter(obj.unique_key for _, obj in sharded_objects if is_main_replica(obj.replica_id))
    return [CheckpointingException(f"{key} is stored {count} times") for key, count in keys.items() if count > 1]


@replaces(
    id="safe-load",
    targets={
        "<0.17": f"{_MODULE}:verify_checkpoint_and_load_strategy",
        ">=0.17": f"{_MODULE}:verify_checkpoint",
    },
    when=Moment.LIST,
    remove_when="torch reads the index safely",
)
def _verify(session: Session, original: Callable[..., Any], folder: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `verify_checkpoint` of a checkpoint whose index, and what all ranks share, name nothing that may run.

    Why: all that reads a distributed checkpoint begins with it; then torch loads the index as a pickle, which may run
    anything.
    """
    if "://" not in str(folder):
        require_plain_checkpoint(session, Path(folder))
    return original(folder, *args, **kwargs)


@replaces(
    f"{_MODULE}:_determine_missing_and_unexpected_keys",
    id="checkpoint-integrity/keys",
    when=Moment.LIST,
    remove_when="with `bucket-map`, and when Megatron leaves out what it does not want of another layout",
)
def _compare_keys(
    session: Session, original: Callable[..., tuple[set[str], set[str]]], *args: Any
) -> tuple[set[str], set[str]]:
    """Run `_determine_missing_and_unexpected_keys`, and keep what a load of unequal stages really leaves out.

    Why: it takes for missing what `bucket-map/request` reads by itself, random states that no other layout can take,
    and the state of repeated steps, which is not asked for where no step was being repeated: --dist-ckpt-strictness
    raise_all ends.
    """
    missing, unexpected = original(*args)
    return session.loading.missing(missing), unexpected
