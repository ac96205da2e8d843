"""`bucket-map`: the distributed optimizer's state is stored with a map, and loads into another layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

from vtp_plugin.checkpoint.format.map_file import MAP
from vtp_plugin.checkpoint.format.optimizer_formats import BY_BUCKET, FORM
from vtp_plugin.checkpoint.format.shard_map import Bucket, ShardSpec
from vtp_plugin.checkpoint.load.pair_groups import Group, Rates, are_found, counterparts
from vtp_plugin.checkpoint.load.stored_optimizer import Request, StoredOptimizer, Wanted
from vtp_plugin.errors import PlanError
from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.core.optimizer.optimizer_map import buckets_of, cuts_of
from vtp_plugin.patches.core.optimizer.param_groups import require_rates
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session
from vtp_plugin.util.log import warning

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
    why="what it stores does not say which parameter lies where in a bucket, so that only the same layout can load it",
    remove_when="Megatron stores a map of its buckets",
)
def _with_map(
    host: MegatronHost,
    original: Callable[..., dict[Any, Any]],
    optimizer: Any,
    model_state: Any,
    is_loading: bool = False,
    *args: Any,
) -> dict[Any, Any]:
    """Run what stores an optimizer by bucket; the first rank of a group adds its part of the map to what it saves."""
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
    why="it asks for the buckets of this layout, which a checkpoint of another one does not have",
    remove_when="with `bucket-map`",
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
    """Run `sharded_state_dict`; where a checkpoint has other buckets, ask for nothing and note what is wanted of it."""
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
    why="it takes tensors of the buckets of this layout; those of another one are cut and copied to their places",
    remove_when="with `bucket-map`",
)
def _fill(original: Callable[[Any, Any], None], optimizer: Any, state: Any) -> None:
    """Run what loads an optimizer by bucket, or read what was noted by `bucket-map/request`."""
    if isinstance(state, Request):
        state.fill(_tensors(optimizer, parameter) for parameter, _ in _held(optimizer))
    else:
        original(optimizer, state)
