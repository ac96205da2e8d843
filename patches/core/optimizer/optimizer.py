"""Megatron's optimizer: marks of what is sharded, and the map of its parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from vtp_plugin.checkpoint.format.shard_map import Block, Bucket, BucketEntry, ShardSpec, block_at, row_major
from vtp_plugin.errors import PlanError, refuse
from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.core.models.common.language_module.language_module import tied_embedding
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Pipeline, Session
from vtp_plugin.util import log


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


_UNMARKED: Final = ("softmax_offset",)
"""Ends of the names of weights that Megatron cuts along their first axis, by heads, and does not mark."""


@replaces(
    "megatron.core.optimizer:get_megatron_optimizer",
    id="sharding-marks",
    when=Moment.STAGES,
    aliases=("megatron.training.training:get_megatron_optimizer",),
)
def _get_optimizer(
    session: Session,
    host: MegatronHost,
    original: Callable[..., Any],
    config: Any,
    model_chunks: Sequence[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run `get_megatron_optimizer`; on unequal stages all ranks look at the marks of their weights first.

    Why: norms, clipping and numbers of zeros count a weight on every rank of a stage if it is marked as cut, on the
    first one if not, whatever it is; sinks are cut by heads and not marked.

    Remove when: Megatron marks what `sharded_state_dict` cuts.

    Raises:
        ConfigError: a mark is wrong, or more is trained than adapters; on all ranks.
    """
    if session.config.lora is not None:
        # Not at the top: a run without adapters does not load them.
        from vtp_plugin.patches.lora_layers import trained_besides

        refuse(trained_besides(model_chunks))
    groups = kwargs.get("pg_collection")
    pipeline = session.pipelines.of(getattr(groups, "pp", None))
    if pipeline is not None and not pipeline.plan.layout.is_uniform:
        check = functools.partial(_check, pipeline, host, model_chunks, groups)
        if dist.get_backend() == "fake":
            check()
        else:
            members = pipeline.plan.members if pipeline.plan.ends.are_bridged else None
            session.ranks.agreement("the check of the weights' marks", members)(check)
    return original(config, model_chunks, *args, **kwargs)


def _check(pipeline: Pipeline, host: MegatronHost, chunks: Sequence[Any], groups: Any) -> dict[str, object]:
    """Mark what Megatron leaves out, and refuse all other wrong marks.

    Raises:
        ConfigError: there are some.
    """
    stage = pipeline.plan.layout.coord(dist.get_rank()).stage
    sizes = pipeline.plan.layout.tp_sizes[stage], pipeline.plan.layout.experts[stage].tp
    replicas = getattr(groups, "dp_cp", None) or parallel_state.get_data_parallel_group(with_context_parallel=True)
    problems: list[str] = []
    for number, chunk in enumerate(chunks):
        host.enter_chunk(number)
        model = _bare(chunk)
        for name, parameter in model.named_parameters():
            if name.endswith(_UNMARKED):
                # megatron.training has said of all weights without a mark that they are whole.
                vars(parameter).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)
        problems += problems_of_marks(model, tp=sizes[0], etp=sizes[1], metadata={"dp_cp_group": replicas})
    refuse(problems)
    # Who trains its copy of a tied embedding would wait for the gradients of all others.
    copies = [weight for chunk in chunks if (weight := tied_embedding(_bare(chunk))) is not None]
    name = "requires_grad of the tied word embedding (freeze output_layer.weight of the last stage, too)"
    return {name: copies[0].requires_grad} if copies else {}


def _bare(chunk: Any) -> Any:
    """Return the model inside DDP and mixed precision."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def problems_of_marks(model: torch.nn.Module, *, tp: int, etp: int, metadata: Mapping[str, Any]) -> Iterator[str]:
    """Say which weights of a chunk are marked as cut and stored whole, or stored in parts and not marked.

    Args:
        model: the chunk.
        tp: tensor-parallel size of its stage.
        etp: tensor-parallel size of the experts there, where they have groups of their own.
        metadata: argument of the same name of `sharded_state_dict`.
    """
    stored = _Stored(metadata)
    for path, owner in model.named_modules():
        for leaf, parameter in owner.named_parameters(recurse=False):
            size = tp if getattr(parameter, "allreduce", True) else etp
            is_cut = stored.is_cut(parameter, _keepers(model, path)) if size > 1 else None
            is_marked = bool(getattr(parameter, "tensor_model_parallel", False))
            if is_cut is None or is_cut == is_marked:
                continue
            name = f"{path}.{leaf}".removeprefix(".")
            has, does = ("no", "cuts it") if is_cut else ("a", "stores it whole")
            count = "one rank only" if is_cut else "each rank of a stage"
            yield (
                f"{name} has {has} tensor_model_parallel mark and sharded_state_dict {does}; norms and clipping would "
                f"count it on {count}, so they would depend on the sizes of the stages; "
                + (
                    "call set_tensor_model_parallel_attributes where it is made"
                    if is_cut
                    else "set its tensor_model_parallel to False, or let sharded_state_dict say how it is cut"
                )
            )


def _keepers(model: torch.nn.Module, path: str) -> list[torch.nn.Module]:
    """List those who can say how the weights of a module are stored: itself, or who holds it, the nearest first."""
    words = path.split(".") if path else []
    line = [model.get_submodule(".".join(words[:end])) for end in range(len(words), -1, -1)]
    return [module for module in line if hasattr(module, "sharded_state_dict")]


@dataclass(slots=True)
class _Stored:
    """Asks modules how they store their weights, each once."""

    metadata: Mapping[str, Any]
    _cuts: dict[int, dict[int, bool]] = field(default_factory=dict[int, dict[int, bool]])

    def is_cut(self, parameter: torch.Tensor, keepers: Sequence[Any]) -> bool | None:
        """Tell whether the ranks of a stage store parts of a weight; None if nobody says how it is stored."""
        for keeper in keepers[:1]:
            if id(keeper) not in self._cuts:
                self._cuts[id(keeper)] = self._ask(keeper)
            return self._cuts[id(keeper)].get(id(parameter))
        return None

    def _ask(self, keeper: Any) -> dict[int, bool]:
        try:
            state = keeper.sharded_state_dict(metadata=dict(self.metadata))
        except Exception as error:
            name = type(keeper).__name__
            log.warning(
                f"whether the weights of {name} are marked as they are cut is not known: it stores none ({error})"
            )
            return {}
        found = (item for item in nested_values(state) if isinstance(item, (ShardedTensor, ShardedTensorFactory)))
        return {id(item.data): _covers_less(item) for item in found}


def _covers_less(item: ShardedTensor | ShardedTensorFactory) -> bool:
    """Tell whether what this rank stores is less than the whole; layers and experts lie along axes of their own."""
    parts = [item] if isinstance(item, ShardedTensor) else list(nested_values([item.build()]))
    covered: dict[tuple[Any, ...], int] = {}
    whole: dict[tuple[Any, ...], int] = {}
    for part in parts:
        first = part.prepend_axis_num
        place = part.key, tuple(part.global_offset[:first])
        covered[place] = covered.get(place, 0) + prod(part.local_shape)
        whole[place] = prod(part.global_shape[first:])
    return any(covered[place] < whole[place] for place in whole)


@replaces("megatron.core.optimizer.optimizer:ChainedOptimizer.prepare_grads", id="shared-loss-scale", when=Moment.LIST)
def _prepare(session: Session, original: Callable[[Any], bool], chain: Any) -> bool:
    """Run `ChainedOptimizer.prepare_grads`; on unequal stages all scales are the first's, and follow all overflows.

    Why: experts with groups of their own have an optimizer, and a loss scale, of their own, which follows their
    overflows alone; but the loss has the first optimizer's, so their gradients would be divided by another number than
    on a stage that has them in the first one.

    Remove when: the optimizers of a rank share a loss scale.
    """
    members = (getattr(optimizer, "grad_scaler", None) for optimizer in chain.chained_optimizers)
    scalers = [scaler for scaler in members if scaler is not None]
    if len(scalers) < 2 or not session.pipelines.are_unequal():
        return original(chain)
    before = scalers[0].state_dict()
    for scaler in scalers[1:]:
        # Stored by a run that let them part.
        scaler.load_state_dict(before)
    is_infinite = original(chain)
    for scaler in scalers:
        # Each has been told what its own gradients are like.
        scaler.load_state_dict(before)
        scaler.update(is_infinite)
    return is_infinite
