"""Tensors of a published model: names, rows, and the files beside them.

Maps Hugging Face tensors to Megatron tensors: rows, and the shares that follow from them.

Nothing is computed on the way: every element of one side is an element of the other, so one list of shares serves both
directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

from vtp_plugin.checkpoint.hf.hf_model import HFModel, frequencies
from vtp_plugin.plan.model.gpt_model import (
    FINAL_NORM,
    LAYERS,
    OUTPUT,
    WORD_EMBEDDING,
    GPTModel,
    ParameterRow,
    parameter,
)
from vtp_plugin.util.index_boxes import Box, whole_box

_STATELESS = ("word_embeddings", "router")
# Transformer Engine's attention has no weights, but a state.
_ATTENTION = "self_attention.core_attention"


@dataclass(frozen=True, slots=True)
class Place:
    """A module of a model that has layers of its own, or no layers.

    Attributes:
        module: its name with a full stop; empty for the whole model.
        layers: name of its layers in it.
        sizes: gives its sizes in a model.
    """

    module: str
    layers: str
    sizes: Callable[[HFModel], GPTModel]

    def key_of_layer(self, key: str, layer: int) -> str:
        """Return the key of a single layer's tensor for that of all layers."""
        return key.replace(f"{self.module}{self.layers}.", f"{self.module}{self.layers}.{layer}.", 1)


WHOLE: Final = Place("", LAYERS, lambda model: model)
"""A GPT that is all of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """Hugging Face tensors, and the parameter of Megatron's that they make.

    Attributes:
        hf_names: names of the Hugging Face tensors, with ``{layer}`` and ``{expert}``: one for each part of the
            parameter's rows, or one for all of them, one behind another.
        parameter: the parameter; it says the shapes, and how the parts lie in it.
        place: the module that has the parameter.
        has_own_name: whether it is stored under the name that it has in the model, too, since Megatron's kinds of
            layers differ in that.
    """

    hf_names: tuple[str, ...]
    parameter: ParameterRow
    place: Place = WHOLE
    has_own_name: bool = False

    @property
    def megatron_keys(self) -> tuple[str, ...]:
        """Key of the Megatron tensor in a checkpoint, and a second one where kinds of layers differ in it."""
        names = (self.parameter.key, *([self.parameter.name] if self.has_own_name else []))
        module = self.place.module + (f"{self.place.layers}." if self.is_of_layers else "")
        return tuple(module + name for name in names)

    @property
    def is_of_layers(self) -> bool:
        """Whether every layer has it."""
        return "{layer}" in self.hf_names[0]

    @property
    def is_of_experts(self) -> bool:
        """Whether every expert has Hugging Face tensors of its own."""
        return "{expert}" in self.hf_names[0]

    def leads(self, model: HFModel) -> list[int]:
        """Return the lengths of the dimensions that only the Megatron tensor has."""
        sizes = self.place.sizes(model)
        return [sizes.num_layers] * self.is_of_layers + [sizes.num_experts] * self.is_of_experts

    def shapes(self, model: HFModel) -> list[tuple[int, ...]]:
        """Return the shapes of the Hugging Face tensors, each of one layer, and one expert if it has its own."""
        sizes = self.place.sizes(model)
        lengths = self.parameter.rows(sizes)
        parts = lengths if len(self.hf_names) > 1 else (sum(lengths),)
        holds_all_experts = self.parameter.is_routed and not self.is_of_experts
        lead = (sizes.num_experts,) if holds_all_experts else ()
        return [(*lead, part, *self.parameter.rest(sizes)) for part in parts]

    def parts(self, model: HFModel) -> list[tuple[int, int, int]]:
        """Return the parts of the parameter's rows: which tensor has one, at which of its rows it begins, and how many.

        Rows that lie one behind another on both sides are one part.
        """
        shapes = self.shapes(model)
        if len(shapes) > 1 or not self.parameter.is_by_group:
            return [(index, 0, shape[0]) for index, shape in enumerate(shapes)]
        lengths = self.parameter.rows(self.place.sizes(model))
        return [(0, sum(lengths[:index]), length) for index, length in enumerate(lengths)]


@dataclass(frozen=True, slots=True)
class TensorShare:
    """Rows of a Hugging Face tensor.

    Attributes:
        name: name of the Hugging Face tensor.
        first: number of the first of its rows.
        box: the box of the Megatron tensor that the rows are.
        num_lead: number of dimensions that only the Megatron tensor has: layers, experts.
    """

    name: str
    first: int
    box: Box
    num_lead: int

    def hf_box(self, inner: Box) -> Box:
        """Return the part of theirs that a part of ours is.

        >>> TensorShare("k", 2, ((0, 1), (6, 8), (0, 4)), 1).hf_box(((0, 1), (7, 8), (1, 3)))
        ((3, 4), (1, 3))
        """
        (start, stop), *rest = inner[self.num_lead :]
        move = self.first - self.box[self.num_lead][0]
        return ((start + move, stop + move), *rest)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A Megatron tensor.

    Attributes:
        row: the row that it follows from.
        shape: shape of the whole tensor, with all layers and experts.
        shares: the shares that it consists of.
    """

    row: TensorRow
    shape: tuple[int, ...]
    shares: tuple[TensorShare, ...]


def hf_shapes(rows: tuple[TensorRow, ...], model: HFModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all Hugging Face tensors, by name."""
    return {
        name.format(layer=layer, expert=expert): shape
        for row in rows
        for shapes in (row.shapes(model),)
        for layer, expert in _leads(row, model)
        for name, shape in zip(row.hf_names, shapes, strict=True)
    }


def megatron_tensors(rows: tuple[TensorRow, ...], model: HFModel) -> Iterator[Tensor]:
    """Yield the Megatron tensors with their shares.

    >>> from vtp_plugin.plan.model.gpt_model import parameter
    >>> model = HFModel(family="llama", num_layers=1, hidden=4, heads=4, groups=2, kv_channels=1, ffn=8, vocab=16,
    ...     max_positions=64, epsilon=1e-5, rotary_base=10000)
    >>> qkv = TensorRow(hf_names=("q.{layer}", "k.{layer}", "v.{layer}"),
    ...     parameter=parameter("self_attention.linear_qkv.weight"))
    >>> (tensor,) = megatron_tensors((qkv,), model)
    >>> tensor.shape, [(share.name, share.first, share.box[1]) for share in tensor.shares[:4]]
    ((1, 8, 4), [('q.0', 0, (0, 2)), ('k.0', 0, (2, 3)), ('v.0', 0, (3, 4)), ('q.0', 2, (4, 6))])
    """
    for row in rows:
        shapes = row.shapes(model)
        num_rows, rest = sum(shape[0] for shape in shapes), shapes[0][1:]
        num_groups = row.place.sizes(model).groups if row.parameter.is_by_group else 1
        shares: list[TensorShare] = []
        for layer, expert in _leads(row, model):
            lead = [(at, at + 1) for at in [layer] * row.is_of_layers + [expert] * row.is_of_experts]
            at = 0
            for i, (index, first, length) in product(range(num_groups), row.parts(model)):
                count = length // num_groups
                name = row.hf_names[index].format(layer=layer, expert=expert)
                box = (*lead, (at, at + count), *whole_box(rest))
                shares.append(TensorShare(name, first + i * count, box, len(lead)))
                at += count
        yield Tensor(row, (*row.leads(model), num_rows, *rest), tuple(shares))


def empty_states(rows: tuple[TensorRow, ...], model: HFModel) -> Iterator[str]:
    """Yield the keys of what linear layers and norms store besides weights: nothing, where they compute without 8 bits.

    A run asks for those of its kind of layers and passes over the others.

    >>> from vtp_plugin.plan.model.gpt_model import parameter
    >>> model = HFModel(family="llama", num_layers=2, hidden=4, heads=4, groups=2, kv_channels=1, ffn=8, vocab=16,
    ...     max_positions=64, epsilon=1e-5, rotary_base=10000)
    >>> row = TensorRow(hf_names=("o.{layer}",), parameter=parameter("self_attention.linear_proj.weight"))
    >>> [*empty_states((row,), model)][:2]  # doctest: +NORMALIZE_WHITESPACE
    ['decoder.layers.self_attention.linear_proj._extra_state/shard_0_2',
     'decoder.layers.self_attention.linear_proj._extra_state/shard_1_2']
    """
    keys = [(key, row.leads(model) or [1]) for row in rows for key in row.megatron_keys]
    places = dict.fromkeys(row.place for row in rows if row.is_of_layers)
    attention = [(f"{each.module}{each.layers}.{_ATTENTION}.weight", [each.sizes(model).num_layers]) for each in places]
    for key, counts in (*keys, *attention):
        module, _, name = key.rpartition(".")
        if name == "weight" and not module.endswith(_STATELESS):
            for at in product(*map(range, counts)):
                shard = ".".join(map(str, at)), ".".join(map(str, counts))
                yield f"{module}._extra_state/shard_{'_'.join(shard)}"


def _leads(row: TensorRow, model: HFModel) -> Iterator[tuple[int, int]]:
    """Yield layer and expert of every tensor that a row names; 0 where it names none."""
    sizes = row.place.sizes(model)
    layers = range(sizes.num_layers if row.is_of_layers else 1)
    yield from product(layers, range(sizes.num_experts if row.is_of_experts else 1))


_LAYER: Final = "model.layers.{layer}."
_EXPERTS: Final = "mlp.experts.local_experts.{expert}"


def layer_row(hf_names: tuple[str, ...], name: str, *, has_own_name: bool = False) -> TensorRow:
    """Make a row of every layer, from names inside the layer: theirs, and that of Megatron's parameter."""
    names = tuple(_LAYER + each for each in hf_names)
    return TensorRow(hf_names=names, parameter=parameter(name), has_own_name=has_own_name)


ENDS: Final = (
    TensorRow(hf_names=("model.embed_tokens.weight",), parameter=WORD_EMBEDDING),
    TensorRow(hf_names=("model.norm.weight",), parameter=FINAL_NORM[0]),
    TensorRow(hf_names=("lm_head.weight",), parameter=OUTPUT),
)
ATTENTION: Final = (
    layer_row(("input_layernorm.weight",), "input_layernorm.weight"),
    layer_row(
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "self_attention.linear_qkv.weight",
    ),
    layer_row(("self_attn.o_proj.weight",), "self_attention.linear_proj.weight"),
)
QKV_BIAS: Final = layer_row(
    ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"), "self_attention.linear_qkv.bias"
)
QUERY_NORMS: Final = (
    layer_row(("self_attn.q_norm.weight",), "self_attention.q_layernorm.weight"),
    layer_row(("self_attn.k_norm.weight",), "self_attention.k_layernorm.weight"),
)
DENSE: Final = (
    layer_row(("post_attention_layernorm.weight",), "pre_mlp_layernorm.weight"),
    layer_row(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "mlp.linear_fc1.weight"),
    layer_row(("mlp.down_proj.weight",), "mlp.linear_fc2.weight"),
)


def experts(folder: str, gate: str, up: str, down: str) -> tuple[TensorRow, ...]:
    """Return the rows of a layer of experts.

    Args:
        folder: name of the layer's feed-forward part, in Hugging Face's names.
        gate: name of an expert's gate projection.
        up: name of the projection that the gate is multiplied with.
        down: name of the projection back.

    >>> [row.megatron_keys[-1] for row in experts("mlp", "gate_proj", "up_proj", "down_proj")][:2]
    ['decoder.layers.pre_mlp_layernorm.weight', 'decoder.layers.mlp.router.weight']
    """
    one = folder + ".experts.{expert}."
    return (
        # Local layers store the norm before experts as that of a dense layer; Transformer Engine's keep its name.
        layer_row(("post_attention_layernorm.weight",), "pre_mlp_layernorm.weight", has_own_name=True),
        layer_row((f"{folder}.gate.weight",), "mlp.router.weight"),
        layer_row((f"{one}{gate}.weight", f"{one}{up}.weight"), f"{_EXPERTS}.linear_fc1.weight"),
        layer_row((f"{one}{down}.weight",), f"{_EXPERTS}.linear_fc2.weight"),
    )


# As transformers 5 has them while it computes, also those of Mixtral. A file holds them so where its writer did not let
# transformers take them apart.
FUSED: Final = (
    layer_row(("mlp.gate.weight",), "mlp.router.weight"),
    layer_row(("mlp.experts.gate_up_proj",), f"{_EXPERTS}.linear_fc1.weight"),
    layer_row(("mlp.experts.down_proj",), f"{_EXPERTS}.linear_fc2.weight"),
)

# Harmless fields that several families have, with the reason.
UNUSED_WINDOW: Final = {
    "sliding_window": "not used, since use_sliding_window is false",
}
ROUTER_LOSS: Final = {
    "output_router_logits": "what transformers returns while it trains",
    "router_aux_loss_coef": "a loss of training: --moe-aux-loss-coeff",
}


EMBEDDING: Final = "model.embed_tokens.weight"
"""The tensor with the words."""
HEAD: Final = "lm_head.weight"
"""The tensor of the output layer."""
_BASE: Final = "model."
_OF_BASE: Final = ("embed_tokens.", "layers.", "norm.", "rotary_emb.")
# As transformers calls the parts of a model that sees pictures, and as it writes them.
_NESTED: Final = {"model.language_model.": _BASE, "model.visual.": "visual."}
_FREQUENCIES: Final = "rotary_emb.inv_freq"
# Relative and absolute, of half precision: enough to tell bases apart.
_TOLERANCE: Final = (1e-2, 1e-7)


def respelt(names: Collection[str], model: HFModel) -> dict[str, str]:
    """Return the names of a model's class for those that a file has, as transformers finds them.

    A file of the class without output layer has no ``model.`` before its names. Where the output layer is the
    embedding, the file may hold it under either name. The language model beside a vision tower may be named as such.

    >>> model = HFModel(family="llama", num_layers=1, hidden=4, heads=4, groups=2, kv_channels=1, ffn=8, vocab=16,
    ...     max_positions=64, epsilon=1e-5, rotary_base=10000, is_tied=True)
    >>> respelt(["lm_head.weight", "norm.weight"], model)
    {'model.norm.weight': 'norm.weight', 'model.embed_tokens.weight': 'lm_head.weight'}
    """
    has_base = any(name.startswith(_BASE) for name in names)
    found = {_BASE + name if name.startswith(_OF_BASE) and not has_base else name: name for name in names}
    if model.vision is not None:
        found = {_unnested(name): stored for name, stored in found.items()}
    if model.is_tied and HEAD in found and EMBEDDING not in found:
        found[EMBEDDING] = found.pop(HEAD)
    return found


def _unnested(name: str) -> str:
    """Return the name that a tensor has in files for the one that it has in transformers' class."""
    return next((short + name[len(long) :] for long, short in _NESTED.items() if name.startswith(long)), name)


def is_frequencies(name: str) -> bool:
    """Tell whether a tensor has the frequencies of positions, which transformers recomputes from the config."""
    return name.endswith(_FREQUENCIES)


def are_frequencies(values: Sequence[float], model: HFModel) -> bool:
    """Tell whether frequencies are those that follow from a model's config."""
    relative, absolute = _TOLERANCE
    expected = frequencies(model.kv_channels, model.rotary_base, model.rope_factor or 1.0)
    return len(values) == len(expected) and all(
        math.isclose(found, wanted, rel_tol=relative, abs_tol=absolute)
        for found, wanted in zip(values, expected, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFields:
    """Where a family's config says how many experts there are.

    Attributes:
        number: names of the field with the experts of a layer, the newest first.
        ffn: name of the field with the inner size of an expert.
        normalised: name of the field that says whether a token's weights add up to 1; None where they always do.
    """

    number: tuple[str, ...]
    ffn: str
    normalised: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """All of them, with that of the experts of a token."""
        return frozenset({*self.number, self.ffn, "num_experts_per_tok"} | ({self.normalised} - {None}))  # type: ignore[operator]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFields:
    """What the fields of a family's ``vision_config`` mean.

    Attributes:
        defaults: what transformers takes for a field that a config leaves out.
        read: fields that are carried over, and what becomes of them.
        fixed: fields that change what is computed, with the values that MindSpeed-MM computes.
        harmless: fields of it alone that change nothing, with the reason.
        beside: fields beside it that are of pictures, and what becomes of them.
        defaults_beside: what transformers takes for these.
    """

    defaults: Mapping[str, Any]
    read: Mapping[str, str]
    fixed: Mapping[str, tuple[Any, ...]]
    harmless: Mapping[str, str]
    beside: Mapping[str, str]
    defaults_beside: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models that one class of transformers computes.

    Attributes:
        model_type: ``model_type`` in the config of its models.
        architecture: name of the class.
        rows: which Hugging Face tensors make which Megatron tensors.
        defaults: what transformers takes for a field that a config leaves out.
        fixed: fields of this family alone that change what is computed, with the values that Megatron computes; of a
            list, of each entry.
        harmless: fields of this family alone that change nothing, with the reason.
        has_qkv_bias: queries, keys and values have biases.
        has_query_norm: queries and keys have norms of their own.
        experts: where the config speaks of experts; None of a dense family.
        vision: where the config speaks of pictures; None of a family that sees none.
        fused: rows that replace those with the same Megatron keys, where all experts of a layer lie in one tensor.
    """

    model_type: str
    architecture: str
    rows: tuple[TensorRow, ...]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    harmless: Mapping[str, str] = field(default_factory=dict)
    has_qkv_bias: bool = False
    has_query_norm: bool = False
    experts: ExpertFields | None = None
    vision: VisionFields | None = None
    fused: tuple[TensorRow, ...] = ()
