"""Adapters (LoRA) in PEFT's directory: read onto a base, and written so that PEFT loads them on the published model.

Follows ``peft.utils.save_and_load`` and ``peft.tuners.lora.config.LoraConfig`` of PEFT 0.21: ``adapter_config.json``,
and ``adapter_model.safetensors`` with ``base_model.model.model.layers.{layer}.{block}.{matrix}.lora_{A,B}.weight``.
Those of experts are of ``target_parameters`` (``peft.tuners.lora.layer.ParamWrapper``), which transformers 5 needs: one
A ``[E * r, in]`` and one B ``[out, r * E]`` for all experts of a layer, in B the expert changing fastest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch

from vtp_plugin.checkpoint.format.checkpoint_files import itemsize
from vtp_plugin.checkpoint.format.contents import Contents
from vtp_plugin.checkpoint.hf.hf_model import HFModel
from vtp_plugin.checkpoint.hf.read_config import CONFIG, read_config, read_model, read_object
from vtp_plugin.checkpoint.hf.tensor_rows import TensorShare
from vtp_plugin.checkpoint.load.stored_optimizer import Elements
from vtp_plugin.checkpoint.save.atomic_dir import InParts
from vtp_plugin.checkpoint.tools.import_hf import Import, begin_import
from vtp_plugin.checkpoint.tools.writer import (
    NewPiece,
    NewTensor,
    Shards,
    bytes_of,
    cut_pieces,
    read_box,
    require_new,
    write_header,
    written_beside,
)
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.plan.model.gpt_model import LAYERS, GPTModel
from vtp_plugin.plan.model.lora import EXPERTS, GATE_UP, Lora, LoraTarget, is_adapter, lora_of, published_matrices
from vtp_plugin.util.index_boxes import Box, whole_box

PEFT_CONFIG: Final = "adapter_config.json"
PEFT_WEIGHTS: Final = "adapter_model.safetensors"
_NAME: Final = re.compile(r"base_model\.model\.model\.layers\.(\d{1,6})\.(\w+)\.(\w+)\.lora_([AB])\.weight")
_EXPERTS_NAME: Final = re.compile(
    r"base_model\.model\.model\.layers\.(\d{1,6})\.mlp\.experts\.(?:base_layer\.)?lora_[AB]\.weight"
)
_FIRST: Final = "linear_in"
# Fields of LoraConfig that change what is computed, with the values with which nothing but the product is added.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "modules_to_save": ((), None),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "megatron_config": (None,),
}
_MAX_NAMED: Final = 3


def _matrices(model: GPTModel) -> tuple[LoraTarget, ...]:
    """List the published matrices of a layer of a published model."""
    return published_matrices(model.matrices(has_experts=model.experts is not None))


def _factors(lora: Lora, model: GPTModel) -> list[tuple[LoraTarget, str, tuple[int, ...]]]:
    """List the factors of a layer: the matrix that each is beside, its module and its shape, experts first.

    Args:
        lora: the adapters.
        model: sizes of the model.
    """
    found: list[tuple[LoraTarget, str, tuple[int, ...]]] = []
    kinds = model.matrices(has_experts=model.experts is not None)
    ffn = model.ffn if model.experts is None else model.experts.ffn
    wide = {"o_proj": model.queries, "down_proj": ffn, "experts.down_proj": ffn}
    rows = {"q_proj": model.queries, "k_proj": model.keys, "v_proj": model.keys}
    rows |= dict.fromkeys(("gate_proj", "up_proj", GATE_UP), ffn)
    for target in lora.pairs(kinds):
        lead = (model.num_experts,) if target.block == EXPERTS else ()
        found.append((target, _FIRST, (*lead, lora.rank, wide.get(target.published, model.hidden))))
        shape = (*lead, rows.get(target.published, model.hidden), lora.rank)
        found += [(target, second, shape) for second in target.seconds(kinds)]
    return found


def plan_import_peft(folder: Path, like: Path, target: Path) -> Import:
    """Plan a checkpoint of adapters alone: check all of PEFT's directory but its elements.

    Args:
        folder: PEFT's directory.
        like: folder of the published model that the adapters are for, with its config.
        target: folder for the new checkpoint.

    Raises:
        ConfigError: it holds what the plugin does not compute, or belongs to another model; or the target holds
            something.
    """
    model, passed = begin_import(like, target)
    shards = Shards(folder, single=PEFT_WEIGHTS)
    lora = _read_lora(folder, shards, model)
    layers, factors = lora.layer_numbers(model.num_layers), _factors(lora, model)
    refuse(_take_apart(shards, lora, model))
    expected = {_name(layer, each, factor): shape for layer, (each, factor, shape) in product(layers, factors)}
    problems = [f"{name} is missing; every layer with adapters has those of all matrices" for name in expected]
    problems = [line for line in problems if line.partition(" ")[0] not in shards.names]
    problems += [
        f"{name} has the shape {shards.shape(name)}, and {shape} is expected"
        for name, shape in expected.items()
        if name in shards.names and shards.shape(name) != shape
    ]
    refuse(
        f"{folder}: {problem}; {like / CONFIG} says what the base is; give the folder of its base with --like"
        for problem in problems[:_MAX_NAMED]
    )
    pieces = [
        NewPiece(_key(each, factor), dtype, shape, box, parts=(TensorShare(name, 0, whole, 1),))
        for each, factor, own in factors
        for shape in ((len(layers), *own),)
        for place, layer in enumerate(layers)
        for name in (_name(layer, each, factor),)
        for dtype in (shards.dtype_of(name),)
        for whole in (((place, place + 1), *whole_box(shape[1:])),)
        for box in cut_pieces(whole, itemsize(dtype))
    ]
    return Import(like, model, shards, (folder / PEFT_WEIGHTS,), tuple(pieces), tuple(passed), lora)


def _take_apart(shards: Shards, lora: Lora, model: GPTModel) -> Iterator[str]:
    """Give the shards a tensor for each factor of experts in the place of PEFT's; yield a line where that cannot be."""
    targets, factors = {each.published: each for each in _matrices(model)}, _factors(lora, model)
    for layer, (target, name) in product(lora.layer_numbers(model.num_layers), _names_of_experts(lora).items()):
        names = [_name_in_experts(layer, name, factor) for factor in "AB"]
        if missing := [each for each in names if each not in shards.names]:
            yield f"{shards.folder}: {missing[0]} is missing; every layer with adapters has those of all matrices"
            continue
        shapes = {factor: shape for each, factor, shape in factors if each.published == target}
        (number, rank, columns), seconds = shapes.pop(_FIRST), shapes
        rows = sum(shape[1] for shape in seconds.values())
        for each, wanted in zip(names, ((number * rank, columns), (rows, rank * number)), strict=True):
            if shards.shape(each) != wanted:
                yield f"{shards.folder}: {each} has the shape {shards.shape(each)}, and {wanted} is expected"
                return
        one, two = (shards.whole(each) for each in names)
        shards.put(_name(layer, targets[target], _FIRST), one.view(number, rank, columns), instead_of=names[0])
        parts = two.view(rows, rank, number).permute(2, 0, 1).chunk(len(seconds), dim=1)
        for factor, part in zip(seconds, parts, strict=True):
            shards.put(_name(layer, targets[target], factor), part, instead_of=names[1])
        shards.drop(names)


def _put_together(one: torch.Tensor, two: torch.Tensor) -> dict[str, torch.Tensor]:
    """Give A and B of all experts of a layer as PEFT has them, from those of the experts."""
    return {"A": one.flatten(0, 1), "B": two.permute(1, 2, 0).reshape(two.shape[1], -1)}


def _names_of_experts(lora: Lora) -> dict[str, str]:
    """Say where PEFT keeps the factors of experts: the wrapper of one parameter lies inside that of the next one."""
    found = [name for name in (GATE_UP, "experts.down_proj") if name in lora.targets]
    return dict(zip(found, ("base_layer.", "") if len(found) > 1 else ("",), strict=True)) if found else {}


def _name_in_experts(layer: int, inside: str, factor: str) -> str:
    return f"base_model.model.model.layers.{layer}.mlp.experts.{inside}lora_{factor}.weight"


def _read_lora(folder: Path, shards: Shards, model: HFModel) -> Lora:
    """Read what the adapters are, from their config and from the names of their tensors."""
    config = _read_config(folder)
    refuse(_variants(folder, config, shards, model))
    found = [match for name in shards.names if (match := _NAME.fullmatch(name)) is not None]
    of_experts = [match for name in shards.names if (match := _EXPERTS_NAME.fullmatch(name)) is not None]
    layers = sorted({int(match[1]) for match in [*found, *of_experts]})
    named = {match[3] for match in found}
    named |= {f"experts.{each.rpartition('.')[2]}" for each in config.get("target_parameters") or ()}
    ends = [layer for layer in layers if layer + 1 not in layers]
    begins = [layer for layer in layers if layer - 1 not in layers]
    is_all = layers == list(range(model.num_layers))
    return Lora(
        rank=config["r"],
        alpha=config["lora_alpha"],
        targets=tuple(each.published for each in _matrices(model) if each.published in named),
        layers=() if is_all else tuple((begin, end + 1) for begin, end in zip(begins, ends, strict=True)),
        dropout=config.get("lora_dropout", 0.0),
    )


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / PEFT_CONFIG
    config = read_object(file, "the adapters are", "give PEFT's directory", "save them again with PEFT")
    sizes = [config.get(name) for name in ("r", "lora_alpha")]
    if not all(isinstance(size, int | float) and size > 0 for size in sizes) or not isinstance(sizes[0], int):
        raise ConfigError(
            f"{file}: r {sizes[0]!r} and lora_alpha {sizes[1]!r}; both are positive; save the adapters again with PEFT"
        )
    share = config.get("lora_dropout", 0.0)
    if not isinstance(share, int | float) or not 0 <= share < 1:
        raise ConfigError(f"{file}: lora_dropout {share!r}; it is a share below 1; save the adapters again with PEFT")
    return config


def _variants(folder: Path, config: Mapping[str, Any], shards: Shards, model: GPTModel) -> Iterator[str]:
    """Say what of the adapters the plugin does not compute."""
    way_out = "train adapters without it, or merge them with PEFT"
    for field, neutral in _NEUTRAL.items():
        value = config.get(field, neutral[0])
        if (tuple(value) if isinstance(value, list) else value) not in neutral:
            yield f"{folder / PEFT_CONFIG}: {field} is {value!r}; the plugin's adapters add a product alone; {way_out}"
    start = config.get("init_lora_weights", True)
    if not isinstance(start, bool) and start != "gaussian":
        yield (
            f"{folder / PEFT_CONFIG}: init_lora_weights is {start!r}; some such starts change the base; convert the "
            "adapters with PEFT's path_initial_model_for_weight_conversion, which writes true"
        )
    known = {(each.block, each.published) for each in _matrices(model)}
    parameters = config.get("target_parameters") or []
    for name in parameters if isinstance(parameters, list) else (parameters,):
        if not isinstance(name, str) or (EXPERTS, ".".join(name.split(".")[-2:])) not in known:
            yield (
                f"{folder / PEFT_CONFIG}: target_parameters has {name!r}; the plugin's adapters are for "
                f"experts.gate_up_proj and experts.down_proj of models with experts; {way_out}"
            )
    others = [
        name
        for name in shards.names
        if not (parameters and _EXPERTS_NAME.fullmatch(name))
        and ((match := _NAME.fullmatch(name)) is None or match.group(2, 3) not in known)
    ]
    for name in others[:_MAX_NAMED]:
        yield f"{folder}: {name} is beside no matrix that the plugin's adapters are for; {way_out}"
    if not shards.names:
        yield f"{folder}: there is no tensor; adapters have two for each matrix; save them again with PEFT"


def _name(layer: int, target: LoraTarget, factor: str) -> str:
    """Name a factor as PEFT does; one of experts as it would be, were it not in one tensor with others."""
    block = target.block if target.block != EXPERTS else "mlp"
    name = factor if target.block == EXPERTS else f"lora_{'A' if factor == _FIRST else 'B'}"
    return f"base_model.model.model.layers.{layer}.{block}.{target.published}.{name}.weight"


def _key(target: LoraTarget, factor: str) -> str:
    return f"{LAYERS}.{target.place.replace(EXPERTS, 'mlp.experts.experts')}.{factor}.weight"


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a checkpoint.

    Attributes:
        lora: which they are.
        factors: whole factors, under their names in PEFT's file.
        of_experts: those of experts, by layer and module of Megatron's, ``[E, rows, columns]``, A before B.
    """

    lora: Lora
    factors: Mapping[str, torch.Tensor]
    of_experts: Mapping[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all factors."""
        return sum(factor.numel() * factor.element_size() for factor in self.factors.values())

    def scaled_factors(self, weight: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return both factors beside a published weight in fp32, the second one scaled; None if it has none."""
        names = [f"base_model.model.{weight.removesuffix('.weight')}.lora_{factor}.weight" for factor in "AB"]
        if names[0] not in self.factors:
            return None
        one, two = (self.factors[name].float() for name in names)
        return one, two * self.lora.scale

    def scaled_of_expert(self, layer: int, linear: str, expert: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the same for an expert's layer of Megatron's, such as ``linear_fc1``, whose rows they are for."""
        if (layer, linear) not in self.of_experts:
            return None
        one, two = (factor[expert].float() for factor in self.of_experts[layer, linear])
        return one, two * self.lora.scale


def merge_into_base(base: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor], box: Box) -> torch.Tensor:
    """Add the product of an adapter's factors to a part of the base weight beside them, in fp32.

    Args:
        base: the part, in any shape with its elements in order.
        factors: both factors of the whole weight, see :meth:`Adapters.scaled_factors`.
        box: rows and columns of the whole weight that the part holds.

    Returns:
        The sum, in the type and the shape of the part.

    >>> factors = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0], [10.0]])
    >>> merge_into_base(torch.ones(1, 2), factors, ((1, 2), (0, 2)))
    tensor([[11., 21.]])
    """
    (one, two), (rows, columns) = factors, box
    more = two[slice(*rows)] @ one[:, slice(*columns)]
    return (base.float() + more.reshape(base.shape)).to(base.dtype)


def read_adapters(contents: Contents, like: Path) -> Adapters:
    """Read the adapters of a checkpoint, whatever layout saved it.

    Args:
        contents: the checkpoint.
        like: folder with the config of the published model.

    Raises:
        ConfigError: it holds none, or those of another model.
    """
    lora, weights = lora_of(contents.arguments), contents.weights()
    if lora is None or not any(map(is_adapter, weights)):
        raise ConfigError(
            f"{contents.folder} holds no adapters; only a run with --vtp-lora-rank, or an import of PEFT's, writes "
            "some; give the folder of such a checkpoint"
        )
    model, elements = read_model(read_config(like), like / CONFIG), Elements(contents.folder)
    layers, factors, problems = lora.layer_numbers(model.num_layers), dict[str, torch.Tensor](), list[str]()
    known = _factors(lora, model)
    for (each, factor, shape), (place, layer) in product(known, enumerate(layers)):
        key = _key(each, factor)
        lead: tuple[int, ...] = (place,)
        whole = (len(layers), *shape)
        if key not in weights:  # Megatron stores each layer on its own where kinds of layers differ
            key, lead, whole = key.replace(LAYERS, f"{LAYERS}.{layer}", 1), (), shape
        if key not in weights or weights[key].shape != whole:
            problems.append(f"{key} is missing, or has another shape than {whole}")
            continue
        box = (*((at, at + 1) for at in lead), *whole_box(shape))
        read = read_box(elements, weights[key].parts(), box, contents.index.tensors[key].dtype)
        factors[_name(layer, each, factor)] = read.reshape(shape)
    refuse(
        f"{contents.folder}: {problem}; {like / CONFIG} says what the base is; give its own with --like"
        for problem in problems[:_MAX_NAMED]
    )
    of_experts, inside = dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]](), _names_of_experts(lora)
    for layer, each in product(layers, (each for each in _matrices(model) if each.published in inside)):
        one, *seconds = (factors.pop(_name(layer, each, factor)) for other, factor, _ in known if other == each)
        of_experts[layer, each.linear] = pair = one, torch.cat(seconds, dim=1)
        for factor, made in _put_together(*pair).items():
            factors[_name_in_experts(layer, inside[each.published], factor)] = made
    return Adapters(lora, factors, of_experts)


def write_peft(adapters: Adapters, like: Path, target: Path, on_written: Callable[[int], None]) -> None:
    """Write PEFT's directory. It appears as a whole.

    Args:
        adapters: what is written.
        like: folder of the published model, which the config names.
        target: the directory; it must be new.
        on_written: called with the bytes of each factor.

    Raises:
        ConfigError: the folder holds something, or cannot be written.
    """
    require_new(target)
    lora = adapters.lora
    layers, experts = sorted({int(name.split(".")[4]) for name in adapters.factors}), _names_of_experts(lora)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(like),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": [name for name in lora.targets if name not in experts],
        "target_parameters": [
            f"{place}mlp.{name}"
            for name in experts
            for place in ([f"layers.{n}." for n in layers] if lora.layers else [""])
        ]
        or None,
        "layers_to_transform": layers if lora.layers else None,
        "layers_pattern": "layers" if lora.layers else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    tensors = [
        NewTensor(name, str(factor.dtype).removeprefix("torch."), tuple(factor.shape))
        for name, factor in sorted(adapters.factors.items())
    ]
    with written_beside(target) as part:
        with (part / PEFT_WEIGHTS).open("wb") as file:
            write_header(file, tensors)
            for tensor in tensors:
                data = bytes_of(adapters.factors[tensor.name].contiguous())
                InParts(file).write(data)
                on_written(len(data))
        (part / PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
