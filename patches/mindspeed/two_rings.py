"""MindSpeed-MM's two rings, and chunks of the vision tower.

MindSpeed-MM's layout of two rings: what of its model is not in the chunks' configurations, and what crosses first.

With vision layers in the cloud a microbatch goes round twice. In the first ring the vision tower's activations cross,
as wide as the tower and as long as a microbatch has patches; beside them go the sizes of its pictures.
"""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core import parallel_state

from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import replaces
from vtp_plugin.host.rules.checks.batch import most_tokens
from vtp_plugin.patches.mindspeed import known_mm
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.plan.boundary.message_kind import MessageKind
from vtp_plugin.plan.layout.layer_lists import FirstRing, first_layer, read_rows
from vtp_plugin.runtime.step.companion_tensors import Companion, CompanionError
from vtp_plugin.session import Session
from vtp_plugin.util.undo import Name, UndoStack

_VLM = "mindspeed_mm.models.vlm_model"


@replaces(known_mm.LAYER_COUNT, id="vision-layer-count", when=Moment.MM_RINGS)
def _attend(session: Session, original: Callable[..., Any], block: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `Qwen2VLVisionTransformerBlock.forward`, its numbers of layers moved by what it counts too little.

    Why: of the rows before its own it counts only the stages before its own: none for the edge's second chunk, whose
    layers of full attention then see windows only.

    Remove when: MindSpeed-MM counts all layers of these rows; until then only its pinned version is corrected.
    """
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


@replaces(f"{_VLM}:VLMModel._build_text_decoder_model", id="decoder-ends", when=Moment.MM_RINGS)
def _build_decoder(original: Callable[..., Any], model: Any, config: Any) -> Any:
    """Run `VLMModel._build_text_decoder_model`, or build a part of a decoder one of whose ends has no layer.

    Why: it builds nothing where the lists have no layer: the edge would have neither embedding nor head, and the
    cloud's first and last layers would bring them along.

    Remove when: it builds the edge's ends by their chunks, as MindSpeed-MM's own feature does.
    """
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


# So many patches beside each other become one token, in Qwen's encoders.
_MERGED = 2


def problems(args: argparse.Namespace) -> Iterator[str]:
    """Say which options do not go with vision layers in the cloud.

    Args:
        args: arguments of the run.
    """
    if args.sequence_parallel:
        yield (
            "--sequence-parallel with vision layers in the cloud; MindSpeed-MM would cut what a vision chunk of the "
            "cloud takes before it has come; leave it out, or keep the vision encoder on the edge"
        )
    if getattr(args, "encoder_dp_balance", False):
        yield (
            "--encoder-dp-balance with vision layers in the cloud; it changes which pictures a replica sees after "
            "their sizes were sent there; leave it out"
        )


def learn_first_ring(session: Session, vision: Any) -> None:
    """Note what the chunks do not say of the first ring: they have the language model's configuration.

    Args:
        session: the applied plugin.
        vision: what the JSON file says of the vision encoder.
    """
    is_counted = known_mm.counts_layers_wrong()
    # Where its JSON does not say it, MindSpeed-MM freezes the encoder, too.
    is_trained = not getattr(vision, "freeze", True)
    session.learn(first_ring=FirstRing(width=vision.hidden_size, is_trained=is_trained, is_counted=is_counted))
    full = getattr(vision, "fullatt_block_indexes", None)
    if is_counted and full and getattr(vision, "window_attn_size", None):
        before = first_layer(read_rows(vision.pipeline_num_layers), stage=0, chunk=1)
        session.learn(
            note=f"vision layers {','.join(map(str, full))} have full attention, as fullatt_block_indexes says; "
            f"MindSpeed-MM counts none of the {before} layers before the edge's second chunk, and would take others; "
            "that is corrected here"
        )


def grids(args: argparse.Namespace) -> Companion:
    """Say how the sizes of a microbatch's pictures cross, by which vision layers in the cloud know their neighbours.

    Args:
        args: arguments of the run.
    """
    most = args.seq_length * args.micro_batch_size  # a picture has a token at least
    tokens = known_mm.has_own_lengths(args) and most_tokens(args) or most
    merged = getattr(args.mm.model.image_encoder.vision_encoder, "spatial_merge_size", _MERGED)
    return Companion(
        kind=MessageKind.GRIDS,
        shape=(most, 1, 3),
        read=functools.partial(_read, most, tokens=tokens, merged=merged),
        give=functools.partial(_give, tokens=tokens, merged=merged),
        unit="batch",
        says="how large its pictures are",
        way_out="read one batch in every forward, as pretrain_vlm.py does",
        chunks=frozenset({0}),
    )


def sizes_of_pictures(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Return frames, rows and columns of each picture or video of a batch, in patches; None if it has none."""
    return batch.get("video_grid_thw" if "video_grid_thw" in batch else "image_grid_thw")


def _read(most: int, batch: Mapping[str, Any], *, tokens: int, merged: int) -> torch.Tensor:
    """Take the sizes of the pictures from the batch that only the edge has."""
    found = sizes_of_pictures(batch)
    number = 0 if found is None else len(found)
    if found is None or not 0 < number <= most:
        raise ConfigError(
            f"a batch of {number} pictures; with vision layers in the cloud every microbatch has one at least, and at "
            f"most as many as tokens ({most}); give a sample without one a white picture whose tokens are masked, as "
            "MindSpeed-MM's collator does"
        )
    if not _are_sizes(found, tokens, merged):
        raise ConfigError(
            f"a batch whose pictures have other sizes than its {tokens} tokens allow; {_rule(tokens, merged)}; make "
            "the pictures smaller, or raise --seq-length"
        )
    rows = torch.zeros(most, 1, 3, dtype=torch.int32)
    rows[:number, 0] = found
    return rows


def _are_sizes(sizes: torch.Tensor, tokens: int, merged: int) -> bool:
    """Tell whether a microbatch of so many tokens may have pictures of these sizes.

    >>> [_are_sizes(torch.tensor([size]), 6, 2) for size in ((1, 4, 6), (2, 4, 6), (1, 3, 8), (1, -4, -6))]
    [True, False, False, False]
    """
    # On the CPU, which all devices can wait for; products of large integers would overflow.
    sizes = sizes.cpu()
    patches = sizes.double().prod(1).sum()
    is_whole = ((sizes > 0).all(1) & (sizes[:, 1:] % merged == 0).all(1)).all()
    return bool(is_whole & (patches > 0) & (patches <= tokens * merged**2))


def _rule(tokens: int, merged: int) -> str:
    return (
        f"a token stands for {merged} by {merged} patches, so together they have {tokens * merged**2} at most, in rows "
        f"and columns of multiples of {merged}"
    )


def _give(rows: torch.Tensor, tokens: int | None = None, merged: int = _MERGED) -> dict[str, Any]:
    """Give what the script reads for a vision chunk of the cloud: sizes, and pixels of which only the number counts.

    Args:
        rows: what has come, `[S B, 1, 3]`.
        tokens: number of tokens that a microbatch has at most; None for one to each row.
        merged: so many rows and columns of patches become one of tokens.

    Raises:
        CompanionError: the tokens would not do for the pictures.
    """
    found = rows[:, 0].long()
    found = found[(found != 0).any(1)]
    tokens = tokens or len(rows)
    if not _are_sizes(found, tokens, merged):
        raise CompanionError("sizes of pictures that cannot be", _rule(tokens, merged))
    pixels = torch.zeros(int(found.prod(1).sum()), 1, device=rows.device)
    return {"input_ids": None, "pixel_values": pixels, "image_grid_thw": found}
