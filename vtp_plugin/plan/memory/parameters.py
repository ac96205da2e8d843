"""The parameters of a model chunk on one rank, in the order in which Megatron's local layers register them.

Read in megatron/core of 0.19: ``models/gpt/gpt_model.py``, ``transformer/attention.py``,
``transformer/multi_latent_attention.py``, ``transformer/mlp.py``, ``transformer/moe`` and
``transformer/multi_token_prediction.py``. Transformer Engine's layers have as many parameters, in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.layout.chunks import Chunk
from vtp_plugin.plan.layout.grids import ExpertGrid, StageGrid
from vtp_plugin.plan.memory.gpt_model import GPTModel, Latent


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
    return tuple(_chunk(_Writer(model=model, tp=grid.tp, etp=experts.tp, ep=experts.ep), chunk))


def _chunk(write: _Writer, chunk: Chunk) -> Iterator[Parameter]:
    model = write.model
    predicts = chunk.is_last and model.num_predicting > 0
    # Every other place of the word embedding is a copy that is kept equal to it.
    is_copied = not chunk.is_whole and (model.is_tied or model.num_predicting > 0)
    if chunk.is_first or predicts:
        yield Parameter(name="embedding.word_embeddings.weight", numel=write.vocab, is_shared=is_copied)
        if model.num_positions:
            positions = model.num_positions * model.hidden
            yield Parameter(name="embedding.position_embeddings.weight", numel=positions)
    for layer in chunk.layers:
        yield from write.layer(f"decoder.layers.{layer}", has_experts=write.has_experts(layer))
    if chunk.is_last:
        yield from write.norm("decoder.final_layernorm", model.hidden)
    for number in range(model.num_predicting if predicts else 0):
        yield from write.prediction(f"mtp.layers.{number}")
    if chunk.is_last and not (chunk.is_first and model.is_tied):
        is_copy = is_copied and model.is_tied and not predicts
        yield Parameter(name="output_layer.weight", numel=write.vocab, is_shared=is_copy)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writer:
    """Lists the parameters of a layer for one rank."""

    model: GPTModel
    tp: int
    etp: int
    ep: int

    @property
    def vocab(self) -> int:
        return _cut("the padded vocabulary", self.model.vocab, self.tp) * self.model.hidden

    def has_experts(self, layer: int) -> bool:
        return self.model.experts is not None and self.model.experts.layers[layer]

    def norm(self, name: str, width: int) -> Iterator[Parameter]:
        yield Parameter(name=f"{name}.weight", numel=width)
        if self.model.has_norm_bias:
            yield Parameter(name=f"{name}.bias", numel=width)

    def layer(self, name: str, *, has_experts: bool) -> Iterator[Parameter]:
        yield from self.norm(f"{name}.input_layernorm", self.model.hidden)
        if self.model.latent is None:
            yield from self._attention(f"{name}.self_attention")
        else:
            yield from self._latent_attention(f"{name}.self_attention", self.model.latent)
        yield from self.norm(f"{name}.pre_mlp_layernorm", self.model.hidden)
        if has_experts:
            yield from self._experts(f"{name}.mlp")
        else:
            yield from self._feed_forward(f"{name}.mlp", self.model.ffn, self.tp)

    def prediction(self, name: str) -> Iterator[Parameter]:
        model = self.model
        yield from self.norm(f"{name}.enorm", model.hidden)
        yield from self.norm(f"{name}.hnorm", model.hidden)
        yield from self._column(f"{name}.eh_proj", 2 * model.hidden, model.hidden, has_bias=False)
        yield from self.layer(f"{name}.mtp_model_layer", has_experts=self.has_experts(model.num_layers - 1))
        yield from self.norm(f"{name}.final_layernorm", model.hidden)

    def _attention(self, name: str) -> Iterator[Parameter]:
        model = self.model
        queries, keys = model.heads * model.kv_channels, model.groups * model.kv_channels
        yield from self._row(f"{name}.linear_proj", queries, model.hidden)
        has_bias = model.has_bias or model.has_qkv_bias
        yield from self._column(f"{name}.linear_qkv", model.hidden, queries + 2 * keys, has_bias=has_bias)
        if model.has_query_norm:
            yield from self.norm(f"{name}.q_layernorm", model.kv_channels)
            yield from self.norm(f"{name}.k_layernorm", model.kv_channels)

    def _latent_attention(self, name: str, sizes: Latent) -> Iterator[Parameter]:
        model, keys = self.model, sizes.qk_head_dim + sizes.qk_pos_emb_head_dim
        yield from self._row(f"{name}.linear_proj", model.heads * sizes.v_head_dim, model.hidden)
        columns = [("linear_q_proj", model.hidden, model.heads * keys)]
        if sizes.q_lora_rank:
            columns = [("linear_q_down_proj", model.hidden, sizes.q_lora_rank)]
            columns += [("linear_q_up_proj", sizes.q_lora_rank, model.heads * keys)]
        columns += [("linear_kv_down_proj", model.hidden, sizes.kv_lora_rank + sizes.qk_pos_emb_head_dim)]
        columns += [("linear_kv_up_proj", sizes.kv_lora_rank, model.heads * (sizes.qk_head_dim + sizes.v_head_dim))]
        for part, width, outputs in columns:
            yield from self._column(f"{name}.{part}", width, outputs, has_bias=False)
        if model.has_query_norm:
            if sizes.q_lora_rank:
                yield from self.norm(f"{name}.q_layernorm", sizes.q_lora_rank)
            yield from self.norm(f"{name}.kv_layernorm", sizes.kv_lora_rank)

    def _experts(self, name: str) -> Iterator[Parameter]:
        experts = self.model.experts
        assert experts is not None
        yield Parameter(name=f"{name}.router.weight", numel=experts.number * self.model.hidden)
        for number in range(_cut("--num-experts", experts.number, self.ep)):
            local = f"{name}.experts.local_experts.{number}"
            yield from self._feed_forward(local, experts.ffn, self.etp, is_expert=True)
        if experts.shared_ffn:
            yield from self._feed_forward(f"{name}.shared_experts", experts.shared_ffn, self.tp)

    def _feed_forward(self, name: str, ffn: int, size: int, *, is_expert: bool = False) -> Iterator[Parameter]:
        hidden, own = self.model.hidden, _cut("a feed-forward size", ffn, size)
        inputs = own * (2 if self.model.is_gated else 1)
        biases = (inputs, hidden) if self.model.has_bias else (0, 0)
        for part, numel, bias in (("linear_fc1", inputs * hidden, biases[0]), ("linear_fc2", hidden * own, biases[1])):
            yield Parameter(name=f"{name}.{part}.weight", numel=numel, is_expert=is_expert)
            if bias:
                yield Parameter(name=f"{name}.{part}.bias", numel=bias, is_expert=is_expert)

    def _row(self, name: str, width: int, outputs: int) -> Iterator[Parameter]:
        """List a linear layer of which each rank has a part of the inputs, and the whole bias."""
        yield Parameter(name=f"{name}.weight", numel=_cut(name, width, self.tp) * outputs)
        if self.model.has_bias:
            yield Parameter(name=f"{name}.bias", numel=outputs)

    def _column(self, name: str, width: int, outputs: int, *, has_bias: bool) -> Iterator[Parameter]:
        """List a linear layer of which each rank has a part of the outputs."""
        own = _cut(name, outputs, self.tp)
        yield Parameter(name=f"{name}.weight", numel=width * own)
        if has_bias:
            yield Parameter(name=f"{name}.bias", numel=own)


def _cut(what: str, size: int, parts: int) -> int:
    if size % parts:
        raise ConfigError(f"{what} {size}; a stage cuts it into {parts} parts, which must divide it; use a multiple")
    return size // parts
