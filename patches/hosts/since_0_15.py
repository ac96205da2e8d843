"""What the families from 0.15 on share: a communicator class, and process groups that are passed on."""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import load_content_metadata
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from vtp_plugin.checkpoint.format.resolver import (
    BY_BLOCK,
    BY_BUCKET,
    BY_BUCKET_OLDER,
    FORM,
    IN_MODEL_SPACE,
    TYPE,
    stored_optimizers,
)
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import replaces
from vtp_plugin.host.rules.rule import ULayers
from vtp_plugin.host.versions import is_in
from vtp_plugin.patches.core.pipeline_parallel.p2p_communication import communicate
from vtp_plugin.patches.hosts.megatron_host import MegatronHost
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.plan.layout.layer_lists import layout_of
from vtp_plugin.session import Session
from vtp_plugin.util.undo import Name, UndoStack


def edge_alone() -> AbstractContextManager[None]:
    """Let `get_batch_on_this_tp_rank` of `megatron.training`, which asks the arguments, see a pipeline of one stage."""
    from megatron.training.global_vars import get_args

    # The caller has asked whether its chunk is at an end of the model, so this is the edge.
    args: Any = get_args()
    return UndoStack().during(Name(args, "pipeline_model_parallel_size"), 1)


@replaces(
    "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
    id="p2p-communication",
    when=Moment.STAGES,
)
def _communicate(session: Session, original: Callable[..., Any], communicator: Any, **options: Any) -> Any:
    """Exchange over the session's channels.

    Why: all nine public methods go through it, so timers, list handling and return types stay Megatron's.

    Remove when: every entry point of Megatron takes a communicator.
    """
    return communicate(session, original, communicator, **options)


class GroupedHost(MegatronHost):
    """A family whose functions take a collection of process groups."""

    def is_whole_pipeline(
        self, pp_size: int | None = None, vp_size: int | None = None, schedule_pg_collection: Any = None
    ) -> bool:
        # Sizes, or groups of several modules, say that the caller means another pipeline.
        has_sizes = pp_size is not None or vp_size is not None
        return not has_sizes and isinstance(schedule_pg_collection, ProcessGroupCollection | None)

    def enter_chunk(self, chunk: int) -> None:
        """Do nothing: Megatron passes the number of a chunk on."""

    def asks_for_chunk(self, chunk: int, ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        return ignore_virtual or vp_stage == chunk

    def layers_of_layout(self, text: str) -> tuple[int, ...]:
        parts = PipelineParallelLayerLayout.parse_str_to_list(text)
        if LayerType.embedding not in parts[0] or LayerType.loss not in parts[-1]:
            raise ConfigError(
                f"--pipeline-model-parallel-layout {text!r}: the edge is stage 0 and holds the embedding and the loss; "
                "write E at the start of the first part and L at the end of the last one"
            )
        if any(LayerType.mtp in part for part in parts[:-1]):
            raise ConfigError(
                f"--pipeline-model-parallel-layout {text!r}: multi-token prediction reads the embedding, which never "
                "leaves the edge; write m before the L of the last part"
            )
        return tuple(part.count(LayerType.decoder) for part in parts)

    def written_layers(
        self, args: argparse.Namespace, layers: Sequence[int], num_rings: int = 1
    ) -> AbstractContextManager[None]:
        num_predicting = getattr(args, "mtp_num_layers", None) or 0
        args.pipeline_model_parallel_layout = layout_of(layers, num_predicting=num_predicting, num_rings=num_rings)
        return contextlib.nullcontext()

    def u_layers(self, layers: Sequence[int] | None, config: Any, num_rings: int = 1) -> ULayers:
        found = config.pipeline_model_parallel_layout
        if layers is None or found is None:
            return ULayers(layers=layers and tuple(layers), found=found)
        num_predicting = getattr(config, "mtp_num_layers", None) or 0
        text = layout_of(layers, num_predicting=num_predicting, num_rings=num_rings)
        wanted = PipelineParallelLayerLayout.from_str(text, len(layers) - 1).layout
        return ULayers(layers=tuple(layers), text=text, wanted=wanted, found=found.layout)

    def forward_step(
        self, *, chunk: int, num_chunks: int, is_last_stage: bool, is_first_microbatch: bool, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return schedules.forward_step(
            cp_group_size=parallel_state.get_context_parallel_world_size(),
            vp_stage=chunk if num_chunks > 1 else None,
            is_last_stage=is_last_stage,
            is_first_microbatch=is_first_microbatch,
            **options,
        )

    def backward_arguments(self, model: Any, config: Any) -> tuple[Any, ...]:
        return (config,)

    def default_groups(self) -> Any:
        return ProcessGroupCollection(
            tp=parallel_state.get_tensor_model_parallel_group(),
            cp=parallel_state.get_context_parallel_group(),
            pp=parallel_state.get_pipeline_model_parallel_group(),
            embd=parallel_state.get_embedding_group(check_initialized=False),
            pos_embd=parallel_state.get_position_embedding_group(check_initialized=False),
            dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )

    def seen_single_stage(self, options: dict[str, Any]) -> AbstractContextManager[None]:
        if options.get("is_pipeline_first_stage") and options.get("is_pipeline_last_stage"):
            options["pipeline_model_parallel_size"] = 1
        return contextlib.nullcontext()

    def tensor_shape(self, *, groups: Any, config: Any, model: Any, **sizes: Any) -> tuple[int, ...]:
        (shape,) = schedules.get_tensor_shapes(config=config, tp_group=groups.tp, cp_group=groups.cp, **sizes)
        return shape

    def is_reshardable(self, state: Mapping[str, Any]) -> bool:
        metadata = load_content_metadata(preloaded_state_dict=state) or {}
        # Old checkpoints do not say; Megatron decides what to do with them.
        form = metadata.get(FORM)
        return form is None or form in DistributedOptimizer.checkpoint_fully_reshardable_formats

    def lost_form(self, state: Mapping[str, Any]) -> str | None:
        # Checkpoints of 0.12 say it of each optimizer, later ones of all of them.
        forms = {(load_content_metadata(preloaded_state_dict=state) or {}).get(FORM)}
        forms |= {each[TYPE] for each in stored_optimizers(state)}
        lost = {BY_BUCKET_OLDER} | ({BY_BLOCK} if is_in(self.version, ">=0.16") else set())
        return next(iter(forms & lost), None)

    def is_by_bucket(self, state: Mapping[str, Any]) -> bool:
        return (load_content_metadata(preloaded_state_dict=state) or {}).get(FORM) == BY_BUCKET

    def take_for_reshardable(self, state: Mapping[str, Any]) -> None:
        content = load_content_metadata(preloaded_state_dict=state)
        assert content is not None
        content[FORM] = IN_MODEL_SPACE

    def mtp_stages(self, config: Any, num_stages: int) -> Sequence[int]:
        if not getattr(config, "mtp_num_layers", None) or config.pipeline_model_parallel_layout is None:
            return super().mtp_stages(config, num_stages)
        chunks = enumerate(config.pipeline_model_parallel_layout.layout)
        return [stage for stage, parts in chunks if any(LayerType.mtp in part for part in parts)]

    def token_group(self) -> dist.ProcessGroup:
        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    def finalize_options(self, groups: Any, force_all_reduce: bool | None) -> dict[str, Any]:
        # Megatron 0.15 knows no force_all_reduce, so none of its callers asks for one.
        return {"pg_collection": groups} | ({"force_all_reduce": True} if force_all_reduce else {})

    def without_ends(
        self, pg_collection: ProcessGroupCollection | None = None, force_all_reduce: bool | None = False
    ) -> dict[str, Any]:
        groups = copy.copy(pg_collection or ProcessGroupCollection.use_mpu_process_groups())
        groups.embd = groups.pos_embd = None
        return self.finalize_options(groups, force_all_reduce)
