"""MindSpeed-MM: its JSON files say what the model is, and in a U the cloud needs where the tokens of pictures stand.

Nothing of it is replaced here. What it reads from its files only while it checks the arguments is read before, by its
own function, since the plugin's checks come first.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from vtp_plugin.checkpoint.format.resolver import asked_at_start
from vtp_plugin.errors import ConfigError, LayoutError, refuse
from vtp_plugin.host.rules.checks.batch import most_tokens, packing_flag
from vtp_plugin.host.rules.checks.stage_layers import check_counts, check_places
from vtp_plugin.patches.mindspeed import known_mm, two_rings
from vtp_plugin.patches.mindspeed.known_mm import problems_of_converted
from vtp_plugin.plan.boundary.message_kind import MessageKind
from vtp_plugin.plan.layout.layer_lists import (
    LIST_NAME,
    LayerLists,
    Rows,
    encoder_layers,
    read_rows,
    ring_layers,
    rows_of_u,
)
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.runtime.step.companion_tensors import Companion, CompanionError
from vtp_plugin.session import Session
from vtp_plugin.util import log

_SIZES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "max_position_embeddings",
    "ffn_hidden_size",
)
_SWITCH = "layerwise_disaggregated_training"
_POSITIONS = "mindspeed_mm.models.vision.vlm_attentionmask_for_llm"
# Its collator pads a batch to a multiple of it.
_MULTIPLE = 8
_MOST_PLACE = 1 << 24
_PLACES = f"they count from 0 to {_MOST_PLACE} at most, as far as fp32 does, and a mask has zeros and ones"


def is_multimodal(args: object) -> bool:
    """Tell whether arguments are those of MindSpeed-MM, with a model whose layers lie on stages by lists."""
    return bool(getattr(args, "mm_model", "")) and hasattr(args, "mm_data")


def read_model(args: argparse.Namespace, *, is_u_shaped: bool) -> None:
    """Add to the arguments what the JSON of the model says, and take over its switch of a U.

    Args:
        args: parsed arguments.
        is_u_shaped: ``apply()`` was asked for a U.

    Raises:
        ConfigError: the lists of layers are not of a U, or the model is another one.
    """
    importlib.import_module("mindspeed_mm.configs.config").merge_mm_args(args)
    text = getattr(args.mm.model, "text_decoder", None)
    if is_u_shaped or getattr(args, _SWITCH, False) or has_switch(args.mm.model):
        refuse(known_mm.problems_of_model(args.mm.model))
    if text is None:
        return
    for name in _SIZES:
        setattr(args, name, getattr(text, name, getattr(args, name)))
    if has_switch(args.mm.model):
        # Its own patches stay out: what it switches on is ours.
        setattr(args.mm.model.patch, _SWITCH, False)
        setattr(args, _SWITCH, True)
    if is_u_shaped or getattr(args, _SWITCH, False):
        given = _lists(args)
        _require_rows(given, args.virtual_pipeline_model_parallel_size)
        lists = rows_of_u(given)
        args.mm.model.image_encoder.vision_encoder.pipeline_num_layers = [list(row) for row in lists.vision]
        text.pipeline_num_layers = [list(row) for row in lists.text]
        args.num_layer_list, encoder = _written(ring_layers(lists)), encoder_layers(lists)
        args.vtp_encoder_layer_list = None if encoder is None else _written(encoder)
        args.virtual_pipeline_model_parallel_size = None  # it follows from the U


def _written(layers: Iterable[int]) -> str:
    return ",".join(map(str, layers))


def has_switch(model: Any) -> bool:
    """Tell whether the JSON of a model asks for MindSpeed-MM's own layerwise-disaggregated training."""
    return bool(getattr(getattr(model, "patch", None), _SWITCH, False))


def _require_rows(lists: LayerLists, num_chunks: int | None) -> None:
    """Refuse a U whose number of chunks is not that of its lists.

    Raises:
        LayoutError: it is given, and another.
    """
    if num_chunks is not None and num_chunks != len(lists.text):
        raise LayoutError(
            f"--virtual-pipeline-model-parallel-size {num_chunks} in a U-shape, with {len(lists.text)} rows in "
            f"{LIST_NAME} of text_decoder; a row is a chunk of every stage; leave the flag out"
        )


def check(session: Session, args: argparse.Namespace) -> None:
    """Check what MindSpeed-MM's files say against the stages; on one rank, name what of its code is another.

    Raises:
        LayoutError: its lists do not fit the stages.
        ConfigError: the model is not known, or what a rank reads is missing.
    """
    layout, is_u_shaped = session.planned.layout, session.config.layerwise_disaggregated
    refuse(known_mm.problems_of_model(args.mm.model))
    is_split = session.planned.replicas.is_split
    refuse(problems(args, layout, is_u_shaped=is_u_shaped, is_split=is_split), LayoutError)
    if not is_u_shaped or layout.stage_of(args.rank) == 0:
        refuse(known_mm.problems_of_files(args))
    session.learn(
        check_batch=functools.partial(known_mm.require_batch, args)
        if layout.num_stages > 1
        else known_mm.require_one_kind
    )
    if is_u_shaped and session.config.num_rings > 1:
        two_rings.learn_first_ring(session, args.mm.model.image_encoder.vision_encoder)
    if args.rank == 0 and (changed := tuple(known_mm.changes_of_versions())):
        log.warning(f"{'; '.join(changed)}; compare your first steps with a run of one size")


def problems_of_rows(args: argparse.Namespace, num_stages: int) -> Iterator[str]:
    """Say which rows of a U have not a number for every stage.

    Args:
        args: after :func:`read_model`.
        num_stages: pipeline stages.
    """
    lists = _lists(args)
    yield from lists.problems(num_stages, num_rows=len(lists.text))


def problems(
    args: argparse.Namespace, layout: PipelineLayout, *, is_u_shaped: bool, is_split: bool = False
) -> Iterator[str]:
    """Say what of the JSON of the model does not fit the stages.

    Args:
        args: after :func:`read_model`.
        layout: who is where.
        is_u_shaped: the run is.
        is_split: replicas of a wide stage share the samples of a narrow one's microbatch.
    """
    text = getattr(args.mm.model, "text_decoder", None)
    if text is None or layout.num_stages == 1:
        return
    lists, chunks = _lists(args), args.virtual_pipeline_model_parallel_size or 1
    found = asked_at_start(args).resolve()
    yield from problems_of_converted(None if found is None else str(found.folder), layout, is_u_shaped=is_u_shaped)
    wrong = tuple(lists.problems(layout.num_stages, num_rows=len(lists.text) if is_u_shaped else chunks))
    yield from wrong or _problems_of_layers(args, lists, layout, is_u_shaped=is_u_shaped)
    yield from _problems_of_sequences(args, layout)
    if is_u_shaped:
        yield from _problems_of_a_u(args)
    if is_split and len(set(layout.dp_sizes)) > 1:
        yield (
            "--vtp-dp-mode split with MindSpeed-MM; the pictures of a microbatch lie in one tensor, which cannot be "
            "cut by samples; leave it out, then every microbatch goes to one replica"
        )
    if is_u_shaped and encoder_layers(lists) is not None:
        yield from two_rings.problems(args)


def _problems_of_layers(
    args: argparse.Namespace, lists: LayerLists, layout: PipelineLayout, *, is_u_shaped: bool
) -> Iterator[str]:
    """Say what lists that have the right form do not fit."""
    text = args.mm.model.text_decoder
    vision = getattr(getattr(args.mm.model, "image_encoder", None), "vision_encoder", None)
    counts = (None if part is None else getattr(part, "num_layers", None) for part in (vision, text))
    yield from check_counts(lists, *counts)
    if not is_u_shaped or encoder_layers(lists) is None:  # of two rings `rows_of_u` has looked
        yield from check_places(lists, is_u_shaped=is_u_shaped)
    if vision is not None:
        yield from lists.problems_of_heads(layout.tp_sizes, vision.num_attention_heads)


def _problems_of_sequences(args: argparse.Namespace, layout: PipelineLayout) -> Iterator[str]:
    """Say which stage's ranks cannot share the sequences of a batch."""
    if not getattr(args, "sequence_parallel", False):
        return
    if (size := layout.tp_sizes[0]) > 1:
        yield (
            f"--sequence-parallel with stage 0 of {size} ranks; where pictures are put into the text, MindSpeed-MM "
            "adds up the embedding's gradient once for each of them, also without the plugin; leave out "
            "--sequence-parallel, or give stage 0 one rank"
        )
    for stage, size in enumerate(layout.tp_sizes if known_mm.has_own_lengths(args) else ()):
        if _MULTIPLE % size:
            yield (
                f"--variable-seq-lengths and --sequence-parallel with stage {stage} of {size} ranks, which share a "
                f"sequence; MindSpeed-MM pads a batch to a multiple of {_MULTIPLE}, and {size} does not divide it; "
                "leave out --sequence-parallel, or take another size"
            )


def _problems_of_a_u(args: argparse.Namespace) -> Iterator[str]:
    if flag := packing_flag(args):
        yield (
            f"{flag} in a U-shape with MindSpeed-MM; of a microbatch either positions or the lengths of packed samples "
            "cross; leave it out"
        )


def stated_model(args: argparse.Namespace) -> str:
    """Write what the JSON of the model says; all ranks must say the same. Data are the edge's own in a U."""
    return json.dumps(args.mm.model.to_dict(), sort_keys=True, default=str)


def write_chunks(args: argparse.Namespace) -> None:
    """Say how many chunks every stage of a U has: one for each row. MindSpeed-MM checks that, and builds them."""
    args.virtual_pipeline_model_parallel_size = len(args.mm.model.text_decoder.pipeline_num_layers)


def companions(args: argparse.Namespace) -> Iterator[Companion]:
    """Say what crosses beside activations: of two rings something else in each.

    Args:
        args: after :func:`read_model`.
    """
    if encoder_layers(_lists(args)) is None:
        yield positions(args)
        return
    yield two_rings.grids(args)
    yield dataclasses.replace(positions(args), chunks=frozenset({1}))


def positions(args: argparse.Namespace) -> Companion:
    """Say how the positions of a microbatch's tokens cross, and which of them are padding.

    Args:
        args: arguments of the run.
    """
    return Companion(
        kind=MessageKind.POSITIONS,
        shape=(None, None, 4) if known_mm.has_own_lengths(args) else (args.seq_length, args.micro_batch_size, 4),
        most_tokens=most_tokens(args),
        read=functools.partial(_read, args),
        give=_batch,
        unit="batch",
        says="where its tokens stand",
        way_out="read one batch in every forward, as pretrain_vlm.py does",
    )


def _read(args: argparse.Namespace, batch: Mapping[str, Any]) -> torch.Tensor:
    """Compute the positions by MindSpeed-MM's own function, of the batch that only the edge has."""
    known_mm.require_batch(args, batch)
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    _, places = importlib.import_module(_POSITIONS).prepare_positionsids_mask_for_llm(
        config=args,
        input_ids=ids,
        attention_mask=mask,
        position_ids=batch.get("position_ids"),
        image_grid_thw=two_rings.sizes_of_pictures(batch),
        **{name: value for name, value in batch.items() if name == "second_per_grid_ts"},
    )
    is_token = torch.ones_like(ids) if mask is None else mask
    rows = torch.cat([places.long(), is_token.long().unsqueeze(0)]).permute(2, 1, 0)
    if not _are_places(rows):
        raise ConfigError(
            f"a batch with positions or a mask of other numbers; {_PLACES}; correct what the data loader gives as "
            "position_ids and attention_mask"
        )
    return rows.int().contiguous()


def _are_places(rows: torch.Tensor) -> bool:
    """Tell whether numbers are places of tokens and a mask; attention sums up the mask, and reads memory there."""
    return bool((rows >= 0).all() & (rows[..., :3] <= _MOST_PLACE).all() & (rows[..., 3] <= 1).all())


def _batch(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Give what the script reads in the cloud: positions, a mask, and ids of which only the form counts.

    Raises:
        CompanionError: these have other numbers.
    """
    if not _are_places(rows):
        raise CompanionError("positions of tokens, or a mask, that cannot be", _PLACES)
    by_row = rows.long().permute(2, 1, 0)
    mask = by_row[3].contiguous()
    return {"input_ids": torch.zeros_like(mask), "attention_mask": mask, "position_ids": by_row[:3].contiguous()}


def _lists(args: argparse.Namespace) -> LayerLists:
    model = args.mm.model
    vision = getattr(getattr(model, "image_encoder", None), "vision_encoder", None)
    text = _rows(model.text_decoder, "text_decoder")
    if vision is None:
        return LayerLists(tuple((0,) * len(row) for row in text), text)
    return LayerLists(_rows(vision, "vision_encoder"), text)


def _rows(part: Any, name: str) -> Rows:
    given = getattr(part, LIST_NAME, None)
    if given is None:
        raise LayoutError(f"no {LIST_NAME} of {name}; it says how many layers every stage has; add it to the JSON")
    return read_rows(given)
