"""`vision-layer-count`, `decoder-ends`: MindSpeed-MM's chunks in a U with two rings."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.mindspeed import known_mm
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.plan.layout.layer_lists import first_layer, read_rows
from vtp_plugin.session import Session
from vtp_plugin.util.undo import Name, UndoStack

_VLM = "mindspeed_mm.models.vlm_model"


@replaces(
    known_mm.LAYER_COUNT,
    id="vision-layer-count",
    when=Moment.MM_RINGS,
    why="of the rows before its own it counts only the stages before its own: none for the edge's second chunk, whose "
    "layers of full attention then see windows only",
    remove_when="MindSpeed-MM counts all layers of these rows; until then only its pinned version is corrected",
)
def _attend(session: Session, original: Callable[..., Any], block: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `Qwen2VLVisionTransformerBlock.forward`, its numbers of layers moved by what it counts too little."""
    config, ring = block.config, session.planned.first_ring
    if ring is None or not ring.is_counted or not getattr(config, "fullatt_block_indexes", None):
        return original(block, *args, **kwargs)
    rows, stage = read_rows(config.pipeline_num_layers), session.planned.own.stage
    chunk = parallel_state.get_virtual_pipeline_model_parallel_rank() or 0
    counted = sum(sum(row[:stage]) for row in rows[: chunk + 1])
    missing = first_layer(rows, stage=stage, chunk=chunk) - counted
    moved = [index - missing for index in config.fullatt_block_indexes]
    with UndoStack().during(Name(config, "fullatt_block_indexes"), moved):
        return original(block, *args, **kwargs)


@replaces(
    f"{_VLM}:VLMModel._build_text_decoder_model",
    id="decoder-ends",
    when=Moment.MM_RINGS,
    why="it builds nothing where the lists have no layer: the edge would have neither embedding nor head, and the "
    "cloud's first and last layers would bring them along",
    remove_when="it builds the edge's ends by their chunks, as MindSpeed-MM's own feature does",
)
def _build_decoder(original: Callable[..., Any], model: Any, config: Any) -> Any:
    """Run `VLMModel._build_text_decoder_model`, or build a part of a decoder one of whose ends has no layer."""
    rows = read_rows(config.pipeline_num_layers)
    *_, there, back = rows
    stage, chunk, last = model.pp_rank, model.vp_rank, len(rows) - 1
    is_first, is_last = (stage == 0 and chunk == end for end in (last - 1, last))
    layers = rows[chunk][stage]
    if (there[0] and back[0]) or not (layers or is_first or is_last):
        return original(model, config)
    home = importlib.import_module(_VLM)
    # Megatron divides it by the stages and their chunks.
    config.num_layers = layers * model.pp_size * model.vp_size
    return home.MMGPTModel(
        config=config,
        transformer_layer_spec=home.get_llm_layer_spec(config),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        parallel_output=config.parallel_output,
        position_embedding_type=config.position_embedding_type,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        rotary_base=getattr(config, "rope_theta", None) or config.rotary_base,
        pre_process=is_first,
        post_process=is_last,
        reward_process=model.reward_process,
    )
