"""Maps Hugging Face tensors to Megatron tensors: rows, and the shares that follow from them.

Nothing is computed on the way: every element of one side is an element of the other, so one list of shares serves both
directions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from vtp_plugin.checkpoint.hf.hf_model import HFModel
from vtp_plugin.util.index_boxes import Box, whole_box

_STATELESS = ("word_embeddings", "router")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """Hugging Face tensors, and the Megatron tensor that they make.

    Attributes:
        hf_names: names of the Hugging Face tensors, with ``{layer}`` and ``{expert}``.
        shapes: shapes of the Hugging Face tensors, by the names that the sizes have in :class:`HFModel`.
        megatron_keys: key of the Megatron tensor in a checkpoint; a second one where Megatron's kinds of layers differ
            in it.
        is_by_group: whether each query group has rows of every Hugging Face tensor in turn; else one tensor lies behind
            the other.
        is_of_untied: whether the row exists only where the output layer has weights of its own.
    """

    hf_names: tuple[str, ...]
    shapes: tuple[str, ...]
    megatron_keys: tuple[str, ...]
    is_by_group: bool = False
    is_of_untied: bool = False

    @property
    def is_padded(self) -> bool:
        """Whether Megatron pads it: its rows are words."""
        return self.shapes[0].startswith("vocab")


# Transformer Engine's attention has no weights, but a state.
_ATTENTION = TensorRow(
    hf_names=("{layer}",), shapes=("hidden",), megatron_keys=("decoder.layers.self_attention.core_attention.weight",)
)


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


def shape_of(text: str, model: HFModel) -> tuple[int, ...]:
    """Return a shape of a row in numbers."""
    return tuple(getattr(model, size) for size in text.split())


def hf_shapes(rows: tuple[TensorRow, ...], model: HFModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all Hugging Face tensors, by name."""
    return {
        name.format(layer=layer, expert=expert): shape_of(shape, model)
        for row in rows
        for layer, expert in _leads(row, model)
        for name, shape in zip(row.hf_names, row.shapes, strict=True)
    }


def megatron_tensors(rows: tuple[TensorRow, ...], model: HFModel) -> Iterator[Tensor]:
    """Yield the Megatron tensors with their shares.

    >>> model = HFModel(family="llama", num_layers=1, hidden=4, heads=4, groups=2, head_dim=1, ffn=8, vocab=16,
    ...     max_positions=64, epsilon=1e-5, rotary_base=10000)
    >>> row = TensorRow(hf_names=("q.{layer}", "k.{layer}"), shapes=("queries hidden", "keys hidden"),
    ...     megatron_keys=("qk",), is_by_group=True)
    >>> (tensor,) = megatron_tensors((row,), model)
    >>> tensor.shape, [(share.name, share.first, share.box[1]) for share in tensor.shares]
    ((1, 6, 4), [('q.0', 0, (0, 2)), ('k.0', 0, (2, 3)), ('q.0', 2, (3, 5)), ('k.0', 1, (5, 6))])
    """
    for row in rows:
        shapes = [shape_of(shape, model) for shape in row.shapes]
        num_rows, rest = sum(shape[0] for shape in shapes), shapes[0][1:]
        has_layers, has_experts = "{layer}" in row.hf_names[0], "{expert}" in row.hf_names[0]
        counts = [model.num_layers] * has_layers + [model.num_experts] * has_experts
        shares: list[TensorShare] = []
        for layer, expert in _leads(row, model):
            lead = [(at, at + 1) for at in [layer] * has_layers + [expert] * has_experts]
            at = 0
            for i, part in product(range(model.groups if row.is_by_group else 1), range(len(shapes))):
                count = shapes[part][0] // (model.groups if row.is_by_group else 1)
                name = row.hf_names[part].format(layer=layer, expert=expert)
                box = (*lead, (at, at + count), *whole_box(rest))
                shares.append(TensorShare(name, i * count, box, len(lead)))
                at += count
        yield Tensor(row, (*counts, num_rows, *rest), tuple(shares))


def empty_states(rows: tuple[TensorRow, ...], model: HFModel) -> Iterator[str]:
    """Yield the keys of what linear layers and norms store besides weights: nothing, where they compute without 8 bits.

    A run asks for those of its kind of layers and passes over the others.

    >>> model = HFModel(family="llama", num_layers=2, hidden=4, heads=4, groups=2, head_dim=1, ffn=8, vocab=16,
    ...     max_positions=64, epsilon=1e-5, rotary_base=10000)
    >>> row = TensorRow(hf_names=("o.{layer}",), shapes=("hidden queries",), megatron_keys=("decoder.layers.x.weight",))
    >>> [*empty_states((row,), model)][:2]
    ['decoder.layers.x._extra_state/shard_0_2', 'decoder.layers.x._extra_state/shard_1_2']
    """
    for row in (*rows, _ATTENTION):
        has_experts = "{expert}" in row.hf_names[0]
        counts = [model.num_layers] * ("{layer}" in row.hf_names[0]) + [model.num_experts] * has_experts or [1]
        for key in row.megatron_keys:
            module, _, name = key.rpartition(".")
            if name == "weight" and not module.endswith(_STATELESS):
                for at in product(*map(range, counts)):
                    shard = ".".join(map(str, at)), ".".join(map(str, counts))
                    yield f"{module}._extra_state/shard_{'_'.join(shard)}"


def _leads(row: TensorRow, model: HFModel) -> Iterator[tuple[int, int]]:
    """Yield layer and expert of every tensor that a row names; 0 where it names none."""
    name = row.hf_names[0]
    layers = range(model.num_layers if "{layer}" in name else 1)
    yield from product(layers, range(model.num_experts if "{expert}" in name else 1))
