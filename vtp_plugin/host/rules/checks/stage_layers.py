"""Checks of layers: how many each stage has, in files and at the edge.

Whether the layers that Megatron's flags give the stages are those of the model.

Where they are not, Megatron trains a smaller or a larger model without a word, or ends with a traceback.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vtp_plugin.errors import ConfigError
from vtp_plugin.host.rules.rule import OptionContext
from vtp_plugin.plan.layout.layer_lists import LIST_NAME, LayerLists, num_layers, plain_chunks, show_rows
from vtp_plugin.util.typed_json import parse_json, read_json

_JSON = "change the JSON of the model"


def check_counts(lists: LayerLists, vision: int | None, text: int | None) -> Iterator[str]:
    """Say which lists hold other numbers of layers than the model has: the last layer would bring no head along.

    Args:
        lists: layers, chunk by chunk, stage by stage.
        vision: ``num_layers`` of the vision tower; None if there is none.
        text: ``num_layers`` of the language model, likewise.

    >>> print(*check_counts(LayerLists(((2, 0),), ((1, 2),)), 2, 4))
    pipeline_num_layers 1,2 of text_decoder has 3 layers; its num_layers is 4; change the JSON of the model
    """
    for name, rows, wanted in (("vision_encoder", lists.vision, vision), ("text_decoder", lists.text, text)):
        if wanted is not None and (found := num_layers(rows)) != wanted:
            yield f"{LIST_NAME} {show_rows(rows)} of {name} has {found} layers; its num_layers is {wanted}; {_JSON}"


def check_places(lists: LayerLists, *, is_u_shaped: bool) -> Iterator[str]:
    """Say which layers lie where MindSpeed-MM cannot have them.

    Args:
        lists: layers of both models: a row for every chunk of a stage, with a number for every stage.
        is_u_shaped: the first stage holds both ends; the others have one chunk.

    >>> next(check_places(LayerLists(((1, 1),), ((0, 4),)), is_u_shaped=False))[:70]
    'pipeline_num_layers 0,4 of text_decoder begins behind stage 0; what th'
    >>> print(*check_places(LayerLists(((1, 1),), ((2, 2),)), is_u_shaped=False))
    pipeline_num_layers 1,1 of vision_encoder: stage 1 has layers of it behind the first ones of text_decoder (2,2), \
which take its outputs; change the JSON of the model
    """
    vision, text = show_rows(lists.vision), show_rows(lists.text)
    chunks = [(chunk, stage) for chunk, row in enumerate(lists.text) for stage in range(len(row))]
    if is_u_shaped:
        if not (lists.text[0][0] and lists.text[1][0]):
            yield (
                f"{LIST_NAME} {text} of text_decoder in a U-shape; the edge has the embedding with the first layers "
                f"and the head with the last ones; give it one layer of each at least, such as 1,2 / 1,0; {_JSON}"
            )
        chunks = [(chunk, stage) for chunk, stage in chunks if chunk == 0 or stage == 0]
    else:
        if not lists.text[0][0]:
            yield (
                f"{LIST_NAME} {text} of text_decoder begins behind stage 0; what the vision encoder ({vision}) gives "
                "has other forms than what crosses between stages of unequal size; give stage 0 all of the vision "
                f"encoder and a layer of text_decoder; {_JSON}"
            )
        if not lists.text[-1][-1]:
            yield f"{LIST_NAME} {text} of text_decoder; the last stage has the head with the last layers; {_JSON}"
    begun = False
    for chunk, stage in chunks:
        if begun and lists.vision[chunk][stage]:
            yield (
                f"{LIST_NAME} {vision} of vision_encoder: stage {stage} has layers of it behind the first ones of "
                f"text_decoder ({text}), which take its outputs; {_JSON}"
            )
        begun = begun or lists.text[chunk][stage] > 0
        if not is_u_shaped and not lists.vision[chunk][stage] and not lists.text[chunk][stage]:
            yield f"{LIST_NAME} {vision} of vision_encoder and {text} of text_decoder: stage {stage} has none; {_JSON}"


def check_u_layers(
    num_layer_list: object, pipeline_layout: object, encoder_layer_list: object = None
) -> tuple[str, ...]:
    """Find out whether the layers of a U-shaped pipeline are given exactly once.

    Args:
        num_layer_list: The plugin's list of layers, or None.
        pipeline_layout: Megatron's ``--pipeline-model-parallel-layout``, or None.
        encoder_layer_list: The plugin's list of an encoder's layers, or None.

    Returns:
        One line if they are given twice or not at all.
    """
    if encoder_layer_list is not None and num_layer_list is None:
        return ("--vtp-encoder-layer-list needs --num-layer-list, the layers of the language model; give both",)
    if (num_layer_list is None) != (pipeline_layout is None):
        return ()
    return (
        "--layerwise-disaggregated-training needs --num-layer-list, such as 1,3,3,1, or "
        "--pipeline-model-parallel-layout, such as 'Et|ttt|ttt|tL'; give one of them",
    )


_OPTION = "--heterogeneous-layers-config-path"
# Megatron rounds a feed-forward size up to a multiple of it.
_STEP = 256
# Sizes that are named as a way out.
_LARGEST_NAMED = 64


def check_layer_file(args: object, context: OptionContext) -> tuple[str, ...]:
    """Find the layers of ``--heterogeneous-layers-config-path`` that a stage cannot cut by its tensor-parallel size.

    Any stage could hold any layer, so all layers are checked against all stages.

    Args:
        args: Megatron's arguments as parsed, before ``validate_args``.
        context: The run.

    Returns:
        One line for every layer and size that does not fit, ``value; rule; way out``; none without such a file, since
        Megatron then ignores a text of its own, and where all stages have one size, since Megatron then finds it on
        all ranks alike.

    >>> from types import SimpleNamespace
    >>> text = '{"hidden_size": 64, "num_attention_heads": 12, "block_configs": [{"ffn": {"ffn_mult": 1.5}}]}'
    >>> args = SimpleNamespace(
    ...     heterogeneous_layers_config_path="layers.json", heterogeneous_layers_config_encoded_json=text
    ... )
    >>> (line,) = check_layer_file(args, OptionContext(tp_sizes=(1, 3)))
    >>> line.split("; ")[0]
    '--heterogeneous-layers-config-path, layer 1: feed-forward size 256'
    """
    path = getattr(args, "heterogeneous_layers_config_path", None)
    text = getattr(args, "heterogeneous_layers_config_encoded_json", None)
    if context.is_uniform or path is None:
        return ()
    try:
        whole = read_json(Path(str(path))) if text is None else parse_json(text)
        return tuple(_check_layers(whole, sorted(set(context.tp_sizes))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return (f"{_OPTION} {path}: {error!r}; the layers' sizes cannot be read there; give Megatron's JSON file",)


def _check_layers(whole: Mapping[str, Any], tp_sizes: list[int]) -> Iterator[str]:
    for number, block in enumerate(whole["block_configs"], start=1):
        for name, size, is_shared in _sizes_of(block, whole):
            for tp in tp_sizes:
                if not _fits(size, tp, is_shared):
                    rule = "is neither a divisor nor a multiple of it" if is_shared else "does not divide it"
                    fitting = [one for one in range(1, _LARGEST_NAMED + 1) if _fits(size, one, is_shared)]
                    yield (
                        f"{_OPTION}, layer {number}: {name} {size}; a stage has TP {tp}, which {rule}; TP sizes that "
                        f"fit: {', '.join(map(str, fitting))}; or change the layer"
                    )


def _fits(size: int, tp: int, is_shared: bool) -> bool:
    return size % tp == 0 or (is_shared and tp % size == 0)


def _sizes_of(block: Mapping[str, Any], whole: Mapping[str, Any]) -> Iterator[tuple[str, int, bool]]:
    """Yield name and value of what a stage cuts in a layer, and whether ranks may share it."""
    attention, mlp = block.get("attention") or {}, block.get("ffn") or block.get("mlp") or {}
    if attention.get("replace_with_linear") or mlp.get("replace_with_linear"):
        yield "hidden size", int(whole["hidden_size"]), False
    groups = attention.get("num_query_groups")
    if groups is None and attention.get("n_heads_in_group"):
        groups = int(whole["num_attention_heads"]) // int(attention["n_heads_in_group"])
    if groups:
        yield "query groups", int(groups), True
    width = mlp.get("ffn_hidden_size")
    if width is None and mlp.get("ffn_mult"):
        width = -(-int(2 * mlp["ffn_mult"] * whole["hidden_size"] / 3) // _STEP) * _STEP
    if width:
        yield "feed-forward size", int(width), False


ELSEWHERE = (
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "is_hybrid_model",
    "mm",
    "noop_layers",
)
"""Arguments with which layers count otherwise, or only the model's code knows where they are."""
COUNTED_AS_LAYERS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""Switches with which the embedding or the loss counts as a layer when layers are shared out."""
_LAYOUT = "pipeline_model_parallel_layout"
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_CHUNKS, _CHUNK_LAYERS = "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"
# Of each row Megatron takes arguments of one tuple only.
_APART = (
    ((_LAYOUT,), _ENDS, COUNTED_AS_LAYERS),
    ((_LAYOUT,), (_CHUNKS,), (_CHUNK_LAYERS,)),
    (_ENDS, (_CHUNK_LAYERS,)),
)


def check_stage_layers(args: object, context: OptionContext) -> tuple[str, ...]:
    """Find out whether the flags give every layer of the model to one stage. A U has flags of its own.

    Args:
        args: Megatron's arguments as parsed, before ``validate_args``. Missing ones are not checked.
        context: The run.

    Returns:
        One line if they do not, ``value; rule; way out``.

    >>> from types import SimpleNamespace
    >>> args = SimpleNamespace(num_layers=4, decoder_last_pipeline_num_layers=1)
    >>> print(*check_stage_layers(args, OptionContext(tp_sizes=(2,))))
    --num-layers 4, --decoder-last-pipeline-num-layers 1; the only stage has all layers; leave the number of its \
layers out
    >>> args = SimpleNamespace(num_layers=4, pipeline_model_parallel_layout="Et|tL")
    >>> print(*check_stage_layers(args, OptionContext(tp_sizes=(1, 2))))
    --pipeline-model-parallel-layout Et|tL; it has 2 layers (t) and 0 that predict (m), --num-layers is 4 and \
--mtp-num-layers 0; make them equal
    """
    num_layers = getattr(args, "num_layers", None)
    if context.is_u_shaped or not num_layers or any(getattr(args, name, None) for name in ELSEWHERE):
        return ()
    for kinds in _APART:
        used = [given for names in kinds if (given := [name for name in names if _is_given(args, name)])]
        if len(used) > 1:
            flags = ", ".join(f"--{name.replace('_', '-')}" for (name, *_) in used)
            return (f"{flags}; they share out the layers in different ways; give one of them",)
    if isinstance(text := getattr(args, _LAYOUT, None), str):
        return tuple(_check_layout(text, num_layers, getattr(args, "mtp_num_layers", None) or 0, context.num_stages))
    num_counted = sum(_is_given(args, name) for name in COUNTED_AS_LAYERS)
    if num_counted and (num_layers + num_counted) % context.num_stages:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in COUNTED_AS_LAYERS if _is_given(args, name))
        return (
            f"--num-layers {num_layers} with {flags}; {context.num_stages} stages cannot share "
            f"{num_layers + num_counted} evenly; change the number, or leave the switches out",
        )
    first, last = (getattr(args, name, None) for name in _ENDS)
    try:
        num_chunks = count_chunks(args, context.num_stages)
        plain_chunks(num_layers + num_counted, context.num_stages, num_chunks, first=first, last=last)
    except ConfigError as error:
        return (str(error),)
    return ()


def count_chunks(args: object, num_stages: int) -> int:
    """Count the model chunks of a stage as Megatron does.

    Args:
        args: Megatron's arguments.
        num_stages: Number of pipeline stages.

    Raises:
        ConfigError: The numbers do not fit the stages.

    >>> from types import SimpleNamespace
    >>> count_chunks(SimpleNamespace(num_layers=8, num_layers_per_virtual_pipeline_stage=2), 2)
    2
    """
    num_layers = getattr(args, "num_layers", None)
    number, layers = getattr(args, _CHUNKS, None), getattr(args, _CHUNK_LAYERS, None)
    num_counted = sum(_is_given(args, name) for name in COUNTED_AS_LAYERS)
    if layers is not None:
        if number is not None or not num_layers or layers < 1 or (num_layers + num_counted) % (num_stages * layers):
            raise ConfigError(
                f"--num-layers-per-virtual-pipeline-stage {layers}; it needs --num-layers, a multiple of it times the "
                f"{num_stages} stages, and no --num-virtual-stages-per-pipeline-rank beside it; change it"
            )
        number = (num_layers + num_counted) // num_stages // layers
    if number is not None and (number < 1 or (number > 1 and num_stages == 1)):
        rule = "a stage has one chunk at least" if number < 1 else "the only stage has one chunk"
        raise ConfigError(f"{number} model chunks for each of {num_stages} stages; {rule}; leave the number out")
    return 1 if number is None else number


def _is_given(args: object, name: str) -> bool:
    """Tell whether an option has a value, or a switch is on."""
    return getattr(args, name, None) not in (None, False)


def _check_layout(text: str, num_layers: int, num_predicting: int, num_stages: int) -> Iterator[str]:
    """Say what Megatron would not take of a layout, first things first."""
    parts = _parts(text)
    letters, named = "".join(parts), f"--pipeline-model-parallel-layout {text}"
    t, m = letters.count("t"), letters.count("m")
    if len(parts) % num_stages:
        yield f"{named}; it has {len(parts)} parts for {num_stages} stages; give every stage as many parts"
    elif not re.fullmatch("Et*m*L", letters):
        yield f"{named}; it is not E, then layers t, those that predict m, then L; write it so, such as Ett|ttL"
    elif (t, m) != (num_layers, num_predicting):
        yield (
            f"{named}; it has {t} layers (t) and {m} that predict (m), --num-layers is {num_layers} and "
            f"--mtp-num-layers {num_predicting}; make them equal"
        )
    elif m and not any(part.count("m") == m for part in parts[-num_stages:]):
        yield f"{named}; layers that predict share the last part of one stage; put all m there"


def _parts(text: str) -> Sequence[str]:
    """Write out a layout, where ``(ab)*2`` stands for ``abab`` and ``t*2`` for ``tt``."""
    text = text.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
    return text.split("|")
