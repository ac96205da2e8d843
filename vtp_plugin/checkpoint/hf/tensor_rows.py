"""Which of their tensors make which of ours: rows, and the shares that follow from them.

Nothing is computed on the way: every element of theirs is one of ours, so one list of shares serves both directions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from vtp_plugin.checkpoint.hf.hf_model import HFModel
from vtp_plugin.util.boxes import Box, whole_box

_STATELESS = ("word_embeddings", "router")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """Tensors of theirs, and the one of ours that they make.

    Attributes:
        theirs: their names, with ``{layer}`` and ``{expert}``.
        shapes: their shapes, by the names that the sizes have in :class:`HFModel`.
        ours: the key in a checkpoint; a second one where Megatron's kinds of layers have different names for it.
        is_by_group: ours takes a part of each of theirs for every group of heads; else one lies behind the other.
        is_of_untied: it is there only where the output layer has weights of its own.
    """

    theirs: tuple[str, ...]
    shapes: tuple[str, ...]
    ours: tuple[str, ...]
    is_by_group: bool = False
    is_of_untied: bool = False

    @property
    def is_padded(self) -> bool:
        """Whether Megatron pads it: its rows are words."""
        return self.shapes[0].startswith("vocab")


# Transformer Engine's attention has no weights, but a state.
_ATTENTION = TensorRow(
    theirs=("{layer}",), shapes=("hidden",), ours=("decoder.layers.self_attention.core_attention.weight",)
)


@dataclass(frozen=True, slots=True)
class TensorShare:
    """Rows of one of their tensors.

    Attributes:
        name: of theirs.
        first: the first of its rows.
        box: of ours that the rows are.
        num_lead: dimensions of ours that theirs has not: layers, experts.
    """

    name: str
    first: int
    box: Box
    num_lead: int

    def their_box(self, inner: Box) -> Box:
        """Return the part of theirs that a part of ours is.

        >>> TensorShare("k", 2, ((0, 1), (6, 8), (0, 4)), 1).their_box(((0, 1), (7, 8), (1, 3)))
        ((3, 4), (1, 3))
        """
        (start, stop), *rest = inner[self.num_lead :]
        move = self.first - self.box[self.num_lead][0]
        return ((start + move, stop + move), *rest)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One of our tensors.

    Attributes:
        row: that it follows from.
        shape: of the whole, all layers and experts.
        shares: that it consists of.
    """

    row: TensorRow
    shape: tuple[int, ...]
    shares: tuple[TensorShare, ...]


def shape_of(text: str, model: HFModel) -> tuple[int, ...]:
    """Return a shape of a row in numbers."""
    return tuple(getattr(model, size) for size in text.split())


def their_shapes(rows: tuple[TensorRow, ...], model: HFModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all of their tensors, by name."""
    return {
        name.format(layer=layer, expert=expert): shape_of(shape, model)
        for row in rows
        for layer, expert in _leads(row, model)
        for name, shape in zip(row.theirs, row.shapes, strict=True)
    }


def our_tensors(rows: tuple[TensorRow, ...], model: HFModel) -> Iterator[Tensor]:
    """Yield our tensors with their shares.

    >>> model = HFModel(family="llama", num_layers=1, hidden=4, heads=4, groups=2, head_dim=1, ffn=8, vocab=16,
    ...     max_positions=64, epsilon=1e-5, rotary_base=10000)
    >>> row = TensorRow(theirs=("q.{layer}", "k.{layer}"), shapes=("queries hidden", "keys hidden"), ours=("qk",),
    ...     is_by_group=True)
    >>> (tensor,) = our_tensors((row,), model)
    >>> tensor.shape, [(share.name, share.first, share.box[1]) for share in tensor.shares]
    ((1, 6, 4), [('q.0', 0, (0, 2)), ('k.0', 0, (2, 3)), ('q.0', 2, (3, 5)), ('k.0', 1, (5, 6))])
    """
    for row in rows:
        shapes = [shape_of(shape, model) for shape in row.shapes]
        num_rows, rest = sum(shape[0] for shape in shapes), shapes[0][1:]
        has_layers, has_experts = "{layer}" in row.theirs[0], "{expert}" in row.theirs[0]
        counts = [model.num_layers] * has_layers + [model.num_experts] * has_experts
        shares: list[TensorShare] = []
        for layer, expert in _leads(row, model):
            lead = [(at, at + 1) for at in [layer] * has_layers + [expert] * has_experts]
            at = 0
            for i, part in product(range(model.groups if row.is_by_group else 1), range(len(shapes))):
                count = shapes[part][0] // (model.groups if row.is_by_group else 1)
                name = row.theirs[part].format(layer=layer, expert=expert)
                box = (*lead, (at, at + count), *whole_box(rest))
                shares.append(TensorShare(name, i * count, box, len(lead)))
                at += count
        yield Tensor(row, (*counts, num_rows, *rest), tuple(shares))


def empty_states(rows: tuple[TensorRow, ...], model: HFModel) -> Iterator[str]:
    """Yield the keys of what linear layers and norms store besides weights: nothing, where they compute without 8 bits.

    A run asks for those of its kind of layers and passes over the others.

    >>> model = HFModel(family="llama", num_layers=2, hidden=4, heads=4, groups=2, head_dim=1, ffn=8, vocab=16,
    ...     max_positions=64, epsilon=1e-5, rotary_base=10000)
    >>> row = TensorRow(theirs=("o.{layer}",), shapes=("hidden queries",), ours=("decoder.layers.x.weight",))
    >>> [*empty_states((row,), model)][:2]
    ['decoder.layers.x._extra_state/shard_0_2', 'decoder.layers.x._extra_state/shard_1_2']
    """
    for row in (*rows, _ATTENTION):
        has_experts = "{expert}" in row.theirs[0]
        counts = [model.num_layers] * ("{layer}" in row.theirs[0]) + [model.num_experts] * has_experts or [1]
        for key in row.ours:
            module, _, name = key.rpartition(".")
            if name == "weight" and not module.endswith(_STATELESS):
                for at in product(*map(range, counts)):
                    shard = ".".join(map(str, at)), ".".join(map(str, counts))
                    yield f"{module}._extra_state/shard_{'_'.join(shard)}"


def _leads(row: TensorRow, model: HFModel) -> Iterator[tuple[int, int]]:
    """Yield layer and expert of every tensor that a row names; 0 where it names none."""
    name = row.theirs[0]
    layers = range(model.num_layers if "{layer}" in name else 1)
    yield from product(layers, range(model.num_experts if "{expert}" in name else 1))
