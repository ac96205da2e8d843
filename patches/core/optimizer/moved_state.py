"""States of optimizers that were moved, or written by older versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties

from vtp_plugin.checkpoint.format.resolver import BY_BLOCK, BY_BUCKET, BY_BUCKET_OLDER, FORM
from vtp_plugin.checkpoint.format.shard_map import MAP, Bucket, ShardSpec
from vtp_plugin.checkpoint.load.stored_optimizer import (
    Group,
    Rates,
    Request,
    StoredOptimizer,
    Wanted,
    are_found,
    counterparts,
)
from vtp_plugin.errors import PlanError
from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.core.optimizer.distrib_optimizer import require_rates
from vtp_plugin.patches.core.optimizer.optimizer import buckets_of, cuts_of
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session
from vtp_plugin.util.log import warning

_OLDER_CLASS = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


@replaces(
    f"{_OLDER_CLASS}.sharded_state_dict",
    id="bucket-map/older-request",
    when=Moment.LIST,
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
    """Run `sharded_state_dict`, by bucket where stages differ; what a checkpoint holds by bucket is noted as wanted.

    Why: it stores each parameter's state on one regular grid of blocks, which stages of unequal size have not, or
    without saying where it lies; by bucket, with a map, any layout can load it.

    Remove when: Megatron 0.12 is no longer supported.
    """
    if is_loading and session.loading.stored_optimizer is not None:
        return request_state(optimizer, session.loading.stored_optimizer, cuts_of(model_state), session.loading.rates)
    if not is_loading and len(set(session.planned.layout.tp_sizes)) > 1:
        sharding_type = BY_BUCKET_OLDER
    return original(optimizer, model_state, is_loading, sharding_type)


@replaces(
    f"{_OLDER_CLASS}.get_parameter_state_fs_bucket_space",
    id="bucket-map/older-state",
    when=Moment.LIST,
    unneeded={">=0.15": "the caller does both"},
)
def _bucket_state(original: Callable[[Any], dict[Any, Any]], optimizer: Any) -> dict[Any, Any]:
    """Run `get_parameter_state_fs_bucket_space`; take the steps out, and put padding in.

    Why: its caller takes the step of torch's Adam for a tensor of the bucket, and leaves out padding before a rank's
    first parameter, so that Megatron's own check of what is stored fails.

    Remove when: Megatron 0.12 is no longer supported.
    """
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
    unneeded={">=0.15": "it takes pieces of any bucket"},
)
def _torch_tensor(original: Callable[..., Any], pieces: list[Any], rank: int | None = None, *args: Any) -> Any:
    """Run `sharded_tensor_to_torch_sharded_tensor`; in a bucket each piece is a shard, and each gap is another rank's.

    Why: it fails where a rank stores more than one piece of a bucket, since it takes the place of the first for that of
    all.

    Remove when: Megatron 0.12 is no longer supported.

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


_CLASS = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
# Of the form that Megatron 0.12 has by bucket.
_OLDER: Final = "fs_bucket_space"


class MapPart:
    """This rank's part of a map, in the state that it saves.

    Args:
        buckets: buckets of one optimizer; None if they are not known.
        beside: an object that is stored with them; in a chain, Megatron puts the optimizer's number before its key.
    """

    def __init__(self, buckets: tuple[Bucket, ...] | None, beside: Any) -> None:
        self._buckets, self._beside, self._key = buckets, beside, beside.key

    def buckets(self) -> tuple[Bucket, ...] | None:
        """Return the buckets with the keys under which they are stored."""
        if self._buckets is None:
            return None
        prefix = self._beside.key.removesuffix(self._key)
        return tuple(Bucket(prefix + bucket.key, bucket.numel, bucket.parts) for bucket in self._buckets)


@replaces(
    targets={
        "<0.15": f"{_CLASS}.sharded_param_state_{_OLDER}",
        ">=0.15": f"{_CLASS}.sharded_param_state_dp_reshardable",
    },
    id="bucket-map",
    when=Moment.LIST,
)
def _with_map(
    host: MegatronHost,
    original: Callable[..., dict[Any, Any]],
    optimizer: Any,
    model_state: Any,
    is_loading: bool = False,
    *args: Any,
) -> dict[Any, Any]:
    """Run what stores an optimizer by bucket; the first rank of a group adds its part of the map to what it saves.

    Why: what it stores does not say which parameter lies where in a bucket, so that only the same layout can load it.

    Remove when: Megatron stores a map of its buckets.
    """
    state = original(optimizer, model_state, is_loading, *args)
    is_first = optimizer.data_parallel_group.rank() == 0 and optimizer.distributed_optimizer_instance_id == 0
    if is_first and not is_loading:
        own = _own_buckets(optimizer, model_state, is_padded=host.stores_padding)
        state["vtp_map"] = LocalNonpersistentObject(MapPart(own, state["per_bucket_numel"]))
    return state


def _own_buckets(optimizer: Any, model_state: Any, *, is_padded: bool) -> tuple[Bucket, ...] | None:
    """Return this optimizer's buckets; None if a part of a parameter cannot be said by ranges, and log which."""
    try:
        return tuple(buckets_of(optimizer, cuts_of(model_state), is_padded=is_padded))
    except PlanError as error:
        warning(f"no {MAP} is written, so only this layout can load the optimizer: {error}")
        return None


@replaces(
    f"{_CLASS}.sharded_state_dict",
    id="bucket-map/request",
    when=Moment.LIST,
    unneeded={"<0.15": "bucket-map/older-request"},
)
def _wanted_state(
    session: Session,
    original: Callable[..., dict[Any, Any]],
    optimizer: Any,
    model_state: Any = None,
    is_loading: bool = False,
    sharding_type: str | None = None,
    metadata: dict[str, Any] | None = None,
) -> dict[Any, Any]:
    """Run `sharded_state_dict`; where a checkpoint has other buckets, ask for nothing and note what is wanted of it.

    Why: it asks for the buckets of this layout, which a checkpoint of another one does not have.

    Remove when: with `bucket-map`.
    """
    stored = session.loading.stored_optimizer
    if stored is None or not is_loading:
        return original(optimizer, model_state, is_loading, sharding_type, metadata)
    own = tuple(buckets_of(optimizer, cuts := cuts_of(model_state)))
    prefix = stored.prefix_of(own)
    if prefix is not None:
        state = original(optimizer, model_state, is_loading, sharding_type, {**(metadata or {}), FORM: BY_BUCKET})
        add_prefix_for_sharding(state, prefix)
        return state
    return request_state(optimizer, stored, cuts, session.loading.rates)


def request_state(
    optimizer: Any, stored: StoredOptimizer, cuts: Mapping[torch.Tensor, ShardSpec], rates: Rates
) -> dict[Any, Any]:
    """Ask Megatron for nothing, and note what an optimizer wants of a stored one.

    Args:
        optimizer: Megatron's.
        stored: what a checkpoint holds.
        cuts: how each of the optimizer's parameters is cut.
        rates: whose rates count.
    """
    # As the original: the optimizer makes its tensors before they are filled.
    optimizer.load_state_dict(optimizer.state_dict())
    rest = optimizer.state_dict()
    wanted = [
        Wanted(cuts[parameter], ranges["param"].start, ranges["param"].end, tuple(_tensors(optimizer, parameter)))
        for parameter, ranges in _held(optimizer)
    ]
    request = Request(stored, wanted, lambda: _take_rest(stored, rest, rates))
    kept = {name: LocalNonpersistentObject(value) for name, value in rest.items()}
    return {**kept, "param_state": LocalNonpersistentObject(request)}


def _held(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, Mapping[str, Any]]]:
    """Yield the parameters of which this rank holds state, in Megatron's order, and which range of them."""
    for by_type in optimizer.gbuf_ranges:
        for buckets in by_type.values():
            for bucket in buckets:
                yield from bucket["param_map"].items()


def _tensors(optimizer: Any, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Return the tensors of a parameter's state, by the names under which they are stored."""
    found = optimizer._get_main_param_and_optimizer_states(parameter)
    return {name: tensor.detach() for name, tensor in found.items() if name != "step"}


def _take_rest(stored: StoredOptimizer, rest: dict[str, Any], rates: Rates) -> None:
    """Take what is stored besides tensors: groups of parameters, with their steps, and the scaler of the loss.

    Raises:
        ConfigError: no stage of the run that was saved had such a group, or it had other rates.
    """
    own, groups = rest["optimizer"]["param_groups"], list[Group]()
    # Stages may have different groups, so one object may not have all.
    for saved in stored.objects("optimizer"):
        groups += saved["param_groups"]
        if are_found(own, groups, rates):
            break
    found = counterparts(str(stored.folder), own, groups, rates)
    require_rates(str(stored.folder), own, found, rates)
    rest["optimizer"]["param_groups"] = found
    if "grad_scaler" in rest:
        rest["grad_scaler"].update(next(stored.objects("grad_scaler"), {}))


@replaces(
    targets={
        "<0.15": f"{_CLASS}.load_parameter_state_from_{_OLDER}",
        ">=0.15": f"{_CLASS}.load_parameter_state_from_dp_reshardable",
    },
    id="bucket-map/load",
    when=Moment.LIST,
)
def _fill(original: Callable[[Any, Any], None], optimizer: Any, state: Any) -> None:
    """Run what loads an optimizer by bucket, or read what was noted by `bucket-map/request`.

    Why: it takes tensors of the buckets of this layout; those of another one are cut and copied to their places.

    Remove when: with `bucket-map`.
    """
    if isinstance(state, Request):
        state.fill(_tensors(optimizer, parameter) for parameter, _ in _held(optimizer))
    else:
        original(optimizer, state)
