"""Whether every stage can cut the layers that Megatron reads from a file, each of its own sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vtp_plugin.host.rules.context import OptionContext
from vtp_plugin.util.untrusted_files import parse_json, read_json

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
