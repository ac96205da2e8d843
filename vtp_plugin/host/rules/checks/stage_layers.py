"""Whether the layers that Megatron's flags give the stages are those of the model.

Where they are not, Megatron trains a smaller or a larger model without a word, or ends with a traceback.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from vtp_plugin.errors import ConfigError
from vtp_plugin.host.rules.context import OptionContext
from vtp_plugin.plan.layout.chunks import plain_chunks

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
