"""Maps Hugging Face tensors to Megatron tensors: rows, and the shares that follow from them.

Nothing is computed on the way: every element of one side is an element of the other, so one list of shares serves both
directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final

from vtp_plugin.checkpoint.hf.hf_model import HFModel
from vtp_plugin.plan.model.gpt_model import GPTModel
from vtp_plugin.plan.model.gpt_parameters import LAYERS, ParameterRow
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

    >>> from vtp_plugin.plan.model.gpt_parameters import parameter
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

    >>> from vtp_plugin.plan.model.gpt_parameters import parameter
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
