"""The parameters of a model chunk on one rank, in the order of its model: what is listed of them, with their sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.layout.chunks import Chunk
from vtp_plugin.plan.layout.grids import ExpertGrid, StageGrid
from vtp_plugin.plan.model.gpt_model import GPTModel
from vtp_plugin.plan.model.gpt_parameters import (
    DENSE_LAYER,
    EXPERT_LAYER,
    FINAL_NORM,
    LAYERS,
    OUTPUT,
    POSITION_EMBEDDING,
    PREDICTION,
    PREDICTION_NORM,
    WORD_EMBEDDING,
    ParameterRow,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of one rank.

    Attributes:
        name: name in ``named_parameters()``.
        numel: number of elements on this rank.
        is_expert: whether it belongs to a routed expert.
        is_shared: whether other stages have a copy, so that Megatron gives it a bucket of its own.
    """

    name: str
    numel: int
    is_expert: bool = False
    is_shared: bool = False


def chunk_parameters(model: GPTModel, chunk: Chunk, grid: StageGrid, experts: ExpertGrid) -> tuple[Parameter, ...]:
    """List the parameters of a chunk on each rank of its stage.

    Args:
        model: the whole model.
        chunk: which layers of it.
        grid: sizes of the stage.
        experts: how the stage shares its experts.

    Raises:
        ConfigError: a size does not divide what it cuts.

    >>> model = GPTModel(num_layers=2, num_predicting=0, hidden=8, heads=2, groups=2, kv_channels=4, ffn=12, vocab=10,
    ...     num_positions=0, is_gated=True, has_bias=False, has_qkv_bias=False, has_norm_bias=False,
    ...     has_query_norm=False, is_tied=False)
    >>> chunk = Chunk(layers=(0,), is_first=True, is_last=False, is_whole=False)
    >>> [(p.name.split(".")[-2], p.numel) for p in chunk_parameters(model, chunk, StageGrid(2), ExpertGrid(2, 1, 1))]
    ... # doctest: +NORMALIZE_WHITESPACE
    [('word_embeddings', 40), ('input_layernorm', 8), ('linear_proj', 32), ('linear_qkv', 96), ('pre_mlp_layernorm', 8),
     ('linear_fc1', 96), ('linear_fc2', 48)]
    """
    return tuple(_chunk(_Rank(model, grid.tp, experts), chunk))


def _chunk(rank: _Rank, chunk: Chunk) -> Iterator[Parameter]:
    model = rank.model
    predicts = chunk.is_last and model.num_predicting > 0
    # Every other place of the word embedding is a copy that is kept equal to it.
    is_copied = not chunk.is_whole and (model.is_tied or model.num_predicting > 0)
    if chunk.is_first or predicts:
        yield from rank.held((WORD_EMBEDDING,), is_shared=is_copied)
        yield from rank.held((POSITION_EMBEDDING,))
    for layer in chunk.layers:
        yield from rank.layer(f"{LAYERS}.{layer}.", layer)
    if chunk.is_last:
        yield from rank.held(FINAL_NORM)
    for number in range(model.num_predicting if predicts else 0):
        yield from rank.prediction(f"mtp.layers.{number}.")
    if chunk.is_last and not (chunk.is_first and model.is_tied):
        yield from rank.held((OUTPUT,), is_shared=is_copied and model.is_tied and not predicts)


class _Rank:
    """Says what one rank holds of the parameters of a model.

    Args:
        model: the model.
        tp: tensor-parallel size of the rank's stage.
        experts: how the stage shares its experts.
    """

    def __init__(self, model: GPTModel, tp: int, experts: ExpertGrid) -> None:
        self.model = model
        self._tp, self._experts = tp, experts
        self._layers: dict[bool, tuple[tuple[str, int, bool], ...]] = {}

    def layer(self, prefix: str, layer: int) -> Iterator[Parameter]:
        """Yield the parameters of a layer; all with experts are alike, and all without."""
        experts = self.model.experts
        has_experts = experts is not None and experts.layers[layer]
        if has_experts not in self._layers:
            self._layers[has_experts] = tuple(self._sizes(EXPERT_LAYER if has_experts else DENSE_LAYER, prefix))
        for name, numel, is_routed in self._layers[has_experts]:
            yield Parameter(name=prefix + name, numel=numel, is_expert=is_routed)

    def prediction(self, prefix: str) -> Iterator[Parameter]:
        """Yield the parameters of a layer of multi-token prediction."""
        yield from self.held(PREDICTION, prefix)
        yield from self.layer(f"{prefix}mtp_model_layer.", self.model.num_layers - 1)
        yield from self.held(PREDICTION_NORM, prefix)

    def held(self, rows: Iterable[ParameterRow], prefix: str = "", *, is_shared: bool = False) -> Iterator[Parameter]:
        """Yield the parameters of some rows."""
        for name, numel, _ in self._sizes(rows, prefix):
            yield Parameter(name=prefix + name, numel=numel, is_shared=is_shared)

    def _sizes(self, rows: Iterable[ParameterRow], prefix: str) -> Iterator[tuple[str, int, bool]]:
        """Yield name and elements of every row, and whether it is of a routed expert; these one after another."""
        own = (row for row in rows if row.needs(self.model))
        for is_routed, group in groupby(own, lambda row: row.is_routed):
            numbers = range(self._num_experts() if is_routed else 1)
            alike = [(row.name, self._numel(row, prefix)) for row in group]
            for number in numbers:
                yield from ((name.format(expert=number), numel, is_routed) for name, numel in alike)

    def _num_experts(self) -> int:
        assert self.model.experts is not None
        return _cut("--num-experts", self.model.experts.number, self._experts.ep)

    def _numel(self, row: ParameterRow, prefix: str) -> int:
        size = self._experts.tp if row.is_routed else self._tp
        what = row.cut_name or prefix + row.module
        lengths, width = row.rows(self.model), math.prod(row.rest(self.model))
        if row.cut == "rows":
            whole = (sum(lengths),) if row.is_by_group else lengths
            lengths = tuple(_cut(what, length, size) for length in whole)
        return sum(lengths) * (_cut(what, width, size) if row.cut == "columns" else width)


def _cut(what: str, size: int, parts: int) -> int:
    if size % parts:
        raise ConfigError(f"{what} {size}; a stage cuts it into {parts} parts, which must divide it; use a multiple")
    return size // parts
