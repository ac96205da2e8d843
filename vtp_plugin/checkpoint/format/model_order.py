"""Lists the parameters of a Megatron GPT model in the order in which a rank's model holds them, by stored name.

The order is that of ``vtp_plugin/plan/model/gpt_parameters.py``. Transformer Engine's was read in its source
(``LayerNormLinear`` holds its norm before its weight) and has not been run.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from vtp_plugin.checkpoint.format.index import StoredTensor
from vtp_plugin.checkpoint.format.shard_map import ShardSpec, block_at, row_major
from vtp_plugin.errors import PlanError
from vtp_plugin.plan.model.gpt_parameters import BEFORE_LAYERS, FINAL_NORM, LAYER, LAYERS, OUTPUT
from vtp_plugin.util.index_boxes import Box, box_shape, volume

_SECTIONS: Final = (*(row.module for row in BEFORE_LAYERS), LAYERS, FINAL_NORM[0].module, OUTPUT.module)
_EXPERTS: Final = "mlp.experts"
_MODULES: Final = tuple(dict.fromkeys(_EXPERTS if row.is_routed else row.module for row in LAYER))
_LEAVES: Final = ("layer_norm_weight", "layer_norm_bias", "weight", "bias", "gate_weight", "softmax_offset")
# Local layers keep their norms beside what they come before, and store them as part of it.
_STORED_AS: Final = {row.key.rpartition(".")[0]: row.module for row in LAYER if row.stored_as and not row.is_routed}
_BUFFERS: Final = re.compile(r".*\.router\.(expert_bias|local_tokens_per_expert|qb_beta)")
_LAYER: Final = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_EXPERT: Final = re.compile(r"mlp\.experts\.(?:experts\.)?(?:(\d+)\.)?(linear_fc[12])\.(weight|bias)")
Order = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParameter:
    """A parameter of one layer, with the shard of every rank.

    Attributes:
        order: sort key of its position in the model.
        shards: the shard of every tensor-parallel rank.
        dtype: type of its weight.
        expert: number of its expert; None if it belongs to none.
    """

    order: Order
    shards: tuple[ShardSpec, ...]
    dtype: str
    expert: int | None = None


def parameters_of(weights: Mapping[str, StoredTensor], arguments: Mapping[str, Any]) -> list[ModelParameter]:
    """List the parameters of a model in its order.

    Args:
        weights: the stored weights, by name.
        arguments: arguments of the run that stored them.

    Raises:
        PlanError: what a parameter is called, or how it is cut, is not known; the text says which.
    """
    found = [
        parameter
        for name, tensor in weights.items()
        if not _BUFFERS.fullmatch(name)
        for parameter in _parameters(name, tensor, arguments)
    ]
    return sorted(found, key=lambda parameter: parameter.order)


def expert_ranks(arguments: Mapping[str, Any]) -> int:
    """Return how many ranks share an expert.

    >>> expert_ranks({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": None})
    2
    """
    return int(arguments.get("expert_tensor_parallel_size") or arguments["tensor_model_parallel_size"])


def _parameters(name: str, tensor: StoredTensor, arguments: Mapping[str, Any]) -> Iterator[ModelParameter]:
    """Yield the parameters stored under one name, whose first dimensions are layers, and experts in them."""
    layer = _LAYER.fullmatch(name)
    section = next((i for i, start in enumerate(_SECTIONS) if name.startswith(f"{start}.")), None)
    if section is None:
        raise PlanError(f"{name} is no parameter of a GPT model")
    if layer is None:
        numbers: tuple[int | None, ...] = (0,)
        inner = name.removeprefix(_SECTIONS[section])
    else:
        numbers, inner = (None if layer.group(1) is None else int(layer.group(1)),), layer.group(2)
    expert = _EXPERT.fullmatch(inner)
    if expert is not None:
        numbers = (*numbers, None if expert.group(1) is None else int(expert.group(1)))
    num_prepended = numbers.count(None)
    size = expert_ranks(arguments) if expert else arguments["tensor_model_parallel_size"]
    by_numbers: defaultdict[tuple[int, ...], list[Box]] = defaultdict(list)
    for box, _ in tensor.extents:
        by_numbers[tuple(start for start, _ in box[:num_prepended])].append(box)
    for prepended, boxes in by_numbers.items():
        stored = iter(prepended)
        own = [next(stored) if number is None else number for number in numbers]
        is_gated = bool(arguments.get("swiglu")) and ".linear_fc1." in name and "layer_norm" not in name
        yield ModelParameter(
            order=(section, own[0], *_order_in_layer(name, inner, expert, own[-1], arguments)),
            shards=tuple(_shards(name, tensor.shape, boxes, size, num_prepended, is_gated=is_gated)),
            dtype=tensor.dtype,
            expert=own[1] if expert else None,
        )


def _order_in_layer(
    name: str, inner: str, expert: re.Match[str] | None, number: int, arguments: Mapping[str, Any]
) -> Order:
    module, _, leaf = inner.rpartition(".")
    if leaf not in _LEAVES:
        raise PlanError(f"{name} is no parameter of a GPT model")
    if not module:  # of no layer
        return (_LEAVES.index(leaf),)
    if expert is not None:
        layer, place = int(expert.group(2)[-1]), _LEAVES.index(leaf)
        # Experts one after another, or all in one module.
        is_grouped = bool(arguments.get("moe_grouped_gemm"))
        inside = (layer, place, number) if is_grouped else (number, layer, place)
        return (_MODULES.index(_EXPERTS), *inside)
    if arguments.get("transformer_impl") == "local" and leaf.startswith("layer_norm_"):
        module = _STORED_AS.get(module, module)
    if module not in _MODULES:
        raise PlanError(f"{name} is no parameter of a GPT model")
    return (_MODULES.index(module), _LEAVES.index(leaf))


def _shards(
    name: str, shape: tuple[int, ...], boxes: list[Box], size: int, num_prepended: int, *, is_gated: bool
) -> Iterator[ShardSpec]:
    """Yield the shard of every rank: one box each, two for a gated layer, or the whole tensor for all."""
    ordered = sorted(boxes)
    num_halves = 2 if is_gated else 1
    if len(ordered) not in (num_halves, num_halves * size):
        raise PlanError(f"{name} is cut into {len(ordered)} by {size} ranks")
    num_cuts = len(ordered) // num_halves
    for rank in range(size):
        own = [ordered[rank % num_cuts + half * num_cuts] for half in range(num_halves)]
        sizes = [volume(box) for box in own]
        blocks = tuple(
            block_at(box, sum(sizes[:index]), (*(1,) * num_prepended, *row_major(box_shape(box[num_prepended:]))))
            for index, box in enumerate(own)
        )
        yield ShardSpec(name=name, shape=shape, blocks=blocks, is_copy=rank >= num_cuts)
