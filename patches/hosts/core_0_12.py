"""Megatron 0.12: functions and global groups, where later families have a communicator and collections of groups."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_type

from vtp_plugin.checkpoint.format.resolver import BY_BLOCK, BY_BUCKET_OLDER, TYPE, stored_optimizers
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.host.patching import replaces, subclasses
from vtp_plugin.host.rules.rule import LAYER_RULES, ULayers
from vtp_plugin.patches.core.dist_checkpointing.strategies.torch import checking
from vtp_plugin.patches.core.pipeline_parallel.p2p_communication import exchange, tensor_format
from vtp_plugin.patches.hosts.before_0_17 import OlderHost
from vtp_plugin.patches.hosts.shared import load_in_passes
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.plan.layout.layer_lists import first_layer, layers_of_chunk, num_layers, read_rows
from vtp_plugin.runtime.comm.collectives import ModelGroup
from vtp_plugin.runtime.comm.plain_data import ObjectError
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.session import Session
from vtp_plugin.util.undo import Name, UndoStack


class Megatron012(OlderHost):
    """Megatron 0.12."""

    name = "0.12"
    averages_replicas = False
    sums_whole_experts = True
    stores_padding = True
    for_any_list = "without --no-ckpt-fully-parallel-save"

    def _noted(self) -> Mapping[str, Any]:
        return parallel_state.get_moe_layer_wise_logging_tracker()

    def is_whole_pipeline(self) -> bool:
        return True

    def enter_chunk(self, chunk: int) -> None:
        if parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None:
            # The model and its loss function ask there which chunk runs.
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)

    def asks_for_chunk(self, chunk: int, ignore_virtual: bool = False) -> bool:
        return ignore_virtual or parallel_state.get_virtual_pipeline_model_parallel_rank() == chunk

    def layers_of_layout(self, text: str) -> tuple[int, ...]:
        raise ConfigError(
            f"--pipeline-model-parallel-layout {text!r}: Megatron 0.12 has no such layouts; use --num-layer-list"
        )

    def written_layers(
        self, args: argparse.Namespace, layers: Sequence[int], num_rings: int = 1
    ) -> AbstractContextManager[None]:
        # For the checks only: the chunks' layers come from the records `layers-of-chunk`, which know the list.
        return UndoStack().during(Name(args, "num_virtual_stages_per_pipeline_rank"), 2)

    def u_layers(self, layers: Sequence[int] | None, config: Any, num_rings: int = 1) -> ULayers:
        # Where lists say what all chunks hold, MindSpeed-MM counts those of one chunk as if all were like it.
        told = None if layers is None else tuple(layers)
        return ULayers(layers=told, num_layers=sum(told) if told and _lists_layers(config) else config.num_layers)

    def seen_single_stage(self, options: dict[str, Any]) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def forward_step(
        self, *, chunk: int, num_chunks: int, is_last_stage: bool, is_first_microbatch: bool, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return schedules.forward_step(is_first_microbatch=is_first_microbatch, **options)

    def default_groups(self) -> Any:
        return None

    def tensor_shape(self, *, groups: Any, config: Any, model: Any, **sizes: Any) -> tuple[int, ...]:
        get_shapes: Callable[..., Any] = schedules.get_tensor_shapes
        (shape,) = get_shapes(
            rank=parallel_state.get_pipeline_model_parallel_rank(),
            model_type=get_model_type(model),
            config=config,
            encoder_decoder_xattn=False,
            **sizes,
        )
        return shape

    def finalize_options(self, groups: Any, force_all_reduce: bool | None) -> dict[str, Any]:
        return {}

    def without_ends(self) -> dict[str, Any]:
        return {}  # without embedding ranks, which `parallel-state` forgets, it leaves the ends alone

    def is_reshardable(self, state: Mapping[str, Any]) -> bool:
        return all(part[TYPE] == BY_BLOCK for part in stored_optimizers(state))

    def is_by_bucket(self, state: Mapping[str, Any]) -> bool:
        return any(part[TYPE] == BY_BUCKET_OLDER for part in stored_optimizers(state))

    def take_for_reshardable(self, state: Mapping[str, Any]) -> None:
        for part in stored_optimizers(state):
            part[TYPE] = BY_BLOCK
        state["args"].ckpt_fully_parallel_save = True  # by which Megatron knows this form

    def token_group(self) -> dist.ProcessGroup:
        # A loss function of this family gives the number of tokens of all context-parallel ranks.
        return parallel_state.get_data_parallel_group()

    def note_of_prediction(self, tp_size: int) -> str:
        if tp_size == 1:
            return ""
        return (
            f"multi-token prediction on a stage of tp {tp_size}: Megatron 0.12 itself multiplies the gradients that "
            f"pass through it by {tp_size} (all_gather_last_dim_from_tensor_parallel_region adds up copies), so this "
            f"equals the uniform run of tp {tp_size}, not that of another size; newer Megatrons do not multiply"
        )


HOST = Megatron012


@replaces("megatron.core.fp8_utils:quantize_param_shard", id="fp8-step-without-te", when=Moment.PLATFORM)
def _quantize(original: Callable[..., None], model_params: Sequence[Any], *args: Any, **kwargs: Any) -> None:
    """Run `quantize_param_shard` where there is an FP8 parameter.

    Why: without Transformer Engine it fails in every step of the distributed optimizer, also where no parameter is FP8;
    with it, it returns at once then.

    Remove when: Megatron 0.12 is no longer supported.
    """
    if model_params:
        original(model_params, *args, **kwargs)


def _own_layers(session: Session, host: Megatron012, config: Any) -> range:
    """List the layers of the chunk that Megatron asks for: it keeps its number in a global."""
    layers = session.config.num_layer_list
    refuse(host.refusals(LAYER_RULES, host.u_layers(layers, config)))
    assert layers is not None
    return layers_of_chunk(layers, stage=session.planned.own.stage, chunk=_own_chunk())


def _own_chunk() -> int:
    return parallel_state.get_virtual_pipeline_model_parallel_rank() or 0


def _lists_layers(config: Any) -> bool:
    """Tell whether a configuration is one of MindSpeed-MM, which has the layers of all chunks in lists.

    It reads them with several stages only.
    """
    return hasattr(config, "pipeline_num_layers") and config.pipeline_model_parallel_size > 1


@replaces(
    "megatron.core.transformer.transformer_block:get_num_layers_to_build", id="layers-of-chunk", when=Moment.U_SHAPE
)
def _num_layers(session: Session, host: Megatron012, original: Callable[[Any], int], config: Any) -> int:
    """Replace `get_num_layers_to_build`; MindSpeed-MM writes into a chunk's configuration how many it holds.

    Why: Megatron knows no chunks of different size on one stage; it asks here for every chunk.

    Remove when: Megatron 0.12 is no longer supported.
    """
    if _lists_layers(config):
        return original(config)
    return len(_own_layers(session, host, config))


@replaces(
    "megatron.core.transformer.transformer_layer:get_transformer_layer_offset",
    id="layers-of-chunk/offset",
    when=Moment.LIST,
)
def _layer_offset(session: Session, host: Megatron012, original: Callable[[Any], int], config: Any) -> int:
    """Replace `get_transformer_layer_offset` in a U-shape, and where lists say what all chunks hold.

    Why: Megatron knows no chunks of different size on one stage; it asks here for every chunk; and it takes all stages
    for alike, but MindSpeed-MM's layer lists give them different numbers.

    Remove when: Megatron 0.12 is no longer supported.
    """
    if _lists_layers(config):
        rows = read_rows(config.pipeline_num_layers)
        return first_layer(rows, stage=session.planned.own.stage, chunk=_own_chunk())
    if session.config.layerwise_disaggregated:
        return _own_layers(session, host, config).start
    return original(config)


@replaces(
    "megatron.core.transformer.transformer_block:TransformerBlock.sharded_state_dict",
    id="layers-of-chunk/stored",
    when=Moment.LIST,
)
def _sharded_layers(original: Callable[..., dict[str, Any]], block: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Run `TransformerBlock.sharded_state_dict` with the number of layers of the whole model, where lists say it.

    Why: MindSpeed-MM writes into a chunk's configuration how many layers there were if all chunks were like it, and
    every layer is stored as one part of that many.

    Remove when: Megatron 0.12 is no longer supported.
    """
    config = block.config
    if not _lists_layers(config):
        return original(block, *args, **kwargs)
    with UndoStack().during(Name(config, "num_layers"), num_layers(read_rows(config.pipeline_num_layers))):
        return original(block, *args, **kwargs)


@replaces(
    "megatron.core.dist_checkpointing.strategies.torch:TorchDistLoadShardedStrategy.load",
    id="tied-embedding-load",
    when=Moment.U_SHAPE,
)
def _load(original: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Run `TorchDistLoadShardedStrategy.load`, a second time for what this rank loads twice.

    Why: the edge holds a tied embedding twice, and Megatron makes one tensor of all that a rank loads under one name,
    of which no part may be there twice.

    Remove when: Megatron 0.12 is no longer supported.
    """
    return load_in_passes(original, *args)


@subclasses(
    "megatron.core.dist_checkpointing.strategies.torch:CachedMetadataFileSystemReader",
    id="hashed-reads/reader-class",
    when=Moment.LIST,
)
def _make_reader(session: Session, original: type[Any]) -> type[Any]:
    """Make a reader that checks what it reads.

    Why: it is what `hashed-reads` replaces in later families: torch reads a piece without looking whether a byte has
    changed.

    Remove when: Megatron 0.12 is no longer supported.
    """
    return checking(original, session)


@replaces(
    "megatron.training.checkpointing:fix_fp8_params_lose_precision_when_loading_dist_ckpt",
    id="fp8-load-without-te",
    when=Moment.PLATFORM,
)
def _mend_fp8(original: Callable[[Any], None], state: Any) -> None:
    """Run `fix_fp8_params_lose_precision_when_loading_dist_ckpt` where there is a Transformer Engine.

    Why: without Transformer Engine, whose version it asks for, it fails at every load of a distributed checkpoint;
    there are no FP8 parameters then.

    Remove when: Megatron 0.12 is no longer supported.
    """
    if importlib.util.find_spec("transformer_engine") is not None:
        original(state)


@replaces(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.get_grad_stats_parallel_group",
    id="grad-stats-group",
    when=Moment.LIST,
)
def _group_of_shares(original: Callable[[Any], dist.ProcessGroup | None], optimizer: Any) -> dist.ProcessGroup | None:
    """Run `DistributedOptimizer.get_grad_stats_parallel_group`, or give our group that sums over all ranks.

    Why: it is the world, whose sums cross between sites on many links; `parallel-state/optimizer-group` is this group
    in later families.

    Remove when: Megatron 0.12 is no longer supported.
    """
    group = parallel_state.get_model_parallel_group()
    return group.shares if isinstance(group, ModelGroup) else original(optimizer)


@replaces(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_model_param_gbuf_map",
    id="tied-bucket-start",
    when=Moment.LIST,
)
def _places_in_buckets(original: Callable[..., dict[Any, Any]], *args: Any) -> dict[Any, Any]:
    """Run `DistributedOptimizer._build_model_param_gbuf_map`, and name the cause where it fails.

    Why: it ends at an assertion that says nothing of its cause: a tied embedding has a bucket of its own, which begins
    at a multiple of 128 elements, and itself begins at one of 64.

    Remove when: Megatron 0.12 is no longer supported.
    """
    try:
        return original(*args)
    except AssertionError as error:
        raise ConfigError(
            "--use-distributed-optimizer with a tied embedding; Megatron 0.12 can place one only where the weights "
            "before it end at a multiple of 128 elements, and here they do not; add "
            "--untie-embeddings-and-output-weights, leave --use-distributed-optimizer out, or change --hidden-size"
        ) from error


@replaces("megatron.core.optimizer:_get_param_groups", id="empty-expert-optimizer", when=Moment.LIST)
def _same_groups(original: Callable[..., list[dict[str, Any]]], *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    """Run `_get_param_groups`; experts' groups of other ranks are added without parameters. A collective call.

    Why: on a stage without experts nobody would have the optimizer of the experts, and take part in its sums over the
    stages; later families make the groups of all ranks alike.

    Remove when: Megatron 0.12 is no longer supported.
    """
    groups = original(*args, **kwargs)
    own = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    gathered: list[list[dict[str, Any]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    try:
        for group in (group for found in gathered for group in found):
            if group["is_expert_parallel"] and group not in own:
                own.append(group)
                groups.append({"params": [], **group})
    except Exception as error:  # of whatever kind: another site may have sent anything
        raise ObjectError(f"describes no groups of parameters ({type(error).__name__})") from error
    return groups


@replaces("megatron.core.pipeline_parallel.p2p_communication:_communicate", id="p2p-communication", when=Moment.STAGES)
def _communicate(
    session: Session,
    original: Callable[..., Any],
    *,
    config: Any,
    **options: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, Any] | None]:
    """Replace `_communicate`: exchange with both neighbours over channels, where there are any.

    Why: all functions that exchange tensors between stages go through it.

    Remove when: Megatron 0.12 is no longer supported.
    """
    pipeline = session.pipelines.own
    if pipeline is None or pipeline.communicator is None:
        return original(config=config, **options)

    def begin() -> TensorFormat:
        # `planned-schedule` has begun the step, unless a script goes past Megatron's get_forward_backward_func().
        return pipeline.form or tensor_format(session, pipeline, config)

    return exchange(pipeline, config, begin, **options)
