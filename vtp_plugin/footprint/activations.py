"""Bytes that the forward pass of one microbatch keeps for its backward pass, on one rank.

Counted are the storages that autograd saves in Megatron's local layers, each once, weights left out. Read in
megatron/core of 0.19: ``transformer/attention.py``, ``transformer/dot_product_attention.py``, ``transformer/mlp.py``,
``models/common/embeddings/rope_utils.py``, ``tensor_parallel/layers.py``, ``cross_entropy.py``,
``transformer/multi_latent_attention.py``, ``transformer/multi_token_prediction.py``, ``recompute.py`` and
``transformer/moe``. Without dropout: that is not modelled. Each expert gets as many tokens as any other. Megatron's
local core attention takes no latent heads; counted is one that keeps what the local one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vtp_plugin.footprint.model import Chunk, Latent, Model
from vtp_plugin.footprint.routing import Routing, routed_bytes

_FULL_BYTES, _INDEX_BYTES = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """What is computed again in the backward pass, and not kept for it.

    Attributes:
        core_attention: the probabilities of the attention.
        feed_forward: what a feed-forward layer without experts makes of its input.
        method: of whole layers: ``uniform`` keeps the input of every group of layers, ``block`` those of the first
            layers of a chunk; empty for none.
        num_layers: of a group, or how many are the first.
    """

    core_attention: bool = False
    feed_forward: bool = False
    method: Literal["", "uniform", "block"] = ""
    num_layers: int = 0

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are computed again, those of multi-token prediction too: Megatron's blocks spare them."""
        return self.method == "uniform"

    def parted(self, layers: Sequence[int]) -> tuple[int, Sequence[int]]:
        """Say how many inputs of layers a chunk keeps, and which of its layers keep all.

        >>> Recompute(method="uniform", num_layers=2).parted([3, 4, 5])
        (2, [])
        >>> Recompute(method="block", num_layers=2).parted([3, 4, 5])
        (2, [5])
        """
        if not self.method:
            return 0, layers
        if self.is_uniform:
            return -(-len(layers) // self.num_layers), layers[:0]
        return min(self.num_layers, len(layers)), layers[self.num_layers :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """What goes through the layers at a time.

    Attributes:
        length: of the sequences.
        size: number of sequences.
        itemsize_bytes: of one number between the layers.
        is_sharded: between the layers a rank has its slice of the sequence (sequence parallelism).
        has_rope: positions are rotations, in every layer anew.
        is_fused: a gated feed-forward layer keeps its input and its output only.
        routing: how tokens find their experts; None without experts.
        recompute: what is computed again.
    """

    length: int
    size: int
    itemsize_bytes: int
    is_sharded: bool
    has_rope: bool
    is_fused: bool
    routing: Routing | None = None
    recompute: Recompute = Recompute()


def activation_bytes(model: Model, batch: Microbatch, chunks: Sequence[Chunk], tp: int, etp: int = 1) -> int:
    """Give what the chunks of a stage keep of one microbatch on one of ``tp`` ranks.

    Args:
        model: the whole model.
        batch: the microbatch.
        chunks: of the stage.
        tp: tensor-parallel size of the stage.
        etp: tensor-parallel size of its experts.

    >>> model = Model(num_layers=1, num_predicting=0, hidden=64, heads=12, groups=12, kv_channels=4, ffn=192, vocab=60,
    ...     num_positions=12, is_gated=False, has_bias=True, has_qkv_bias=False, has_norm_bias=True,
    ...     has_query_norm=False, is_tied=True)
    >>> batch = Microbatch(length=12, size=2, itemsize_bytes=4, is_sharded=False, has_rope=False, is_fused=True)
    >>> chunk = Chunk(layers=(0,), is_first=True, is_last=True, is_whole=True)
    >>> activation_bytes(model, batch, [chunk], 1)
    113064
    """
    positions = batch.length * batch.size
    slices = positions // tp if batch.is_sharded else positions
    total = 0
    for chunk in chunks:
        num_inputs, layers = batch.recompute.parted(chunk.layers)
        total += sum(_layer(model, batch, layer, tp, etp) for layer in layers)
        total += num_inputs * slices * model.hidden * batch.itemsize_bytes
        num_again = model.num_predicting if chunk.is_last and batch.recompute.is_uniform else 0
        if num_inputs + num_again and batch.has_rope and model.latent is None:  # their angles
            total += batch.length * model.kv_channels * _FULL_BYTES
        if chunk.is_first:
            # Numbers of the words; and of the positions, where these have weights.
            total += (2 if model.num_positions else 1) * positions * _INDEX_BYTES
        if chunk.is_last:
            # Probabilities of the vocabulary, which target is whose, and the target.
            loss = positions * (model.vocab // tp * _FULL_BYTES + 1 + _INDEX_BYTES)
            total += (1 + model.num_predicting) * loss + _norm(model, batch, model.hidden, slices)
            total += model.num_predicting * _prediction(model, batch, tp, etp)
    return total


def _layer(model: Model, batch: Microbatch, layer: int, tp: int, etp: int) -> int:
    """Give what a layer keeps on one rank."""
    positions = batch.length * batch.size
    slices = positions // tp if batch.is_sharded else positions
    latent, experts = model.latent, model.experts
    total = 2 * _norm(model, batch, model.hidden, slices)
    total += _attention(model, batch, tp) if latent is None else _latent_attention(model, batch, latent, tp)
    if experts is None or batch.routing is None or not experts.layers[layer]:
        return total + (0 if batch.recompute.feed_forward else _feed_forward(model, batch, model.ffn // tp))
    if experts.shared_ffn:
        total += _feed_forward(model, batch, experts.shared_ffn // tp)
    # One part more: the output of the activation before it is weighted.
    ffn, width = experts.ffn // etp * (1 + _num_parts(model, batch)), model.hidden
    return total + routed_bytes(batch.routing, experts.number, slices, etp, (width + ffn) * batch.itemsize_bytes)


def _prediction(model: Model, batch: Microbatch, tp: int, etp: int) -> int:
    """Give what a layer of multi-token prediction keeps besides its loss."""
    positions, width = batch.length * batch.size, model.hidden
    slices = positions // tp if batch.is_sharded else positions
    # The next words and, where ranks share the vocabulary, whose they are; the next targets, and which of them count.
    total = positions * (2 * _INDEX_BYTES + (1 if tp > 1 else 0) + _FULL_BYTES)
    # Both inputs, side by side where they are kept for the layer; its output beside the model's, as input of the head.
    total += 3 * slices * width * batch.itemsize_bytes
    if batch.recompute.is_uniform:
        return total
    # Three norms of its own.
    total += _layer(model, batch, model.num_layers - 1, tp, etp) + 3 * _norm_inputs(model, batch, width, slices)
    if not _is_raised(model, batch):  # its input is a part of what was gathered
        total += (positions - slices) * width * batch.itemsize_bytes
    return total


def _is_raised(model: Model, batch: Microbatch) -> bool:
    """Whether norms compute in full precision, and so keep a copy of their input, and not the input."""
    return not model.has_norm_bias and batch.itemsize_bytes < _FULL_BYTES


def _norm(model: Model, batch: Microbatch, width: int, rows: int) -> int:
    """Give what a norm keeps, with its output, which the next layer keeps."""
    return _norm_inputs(model, batch, width, rows) + rows * width * batch.itemsize_bytes


def _norm_inputs(model: Model, batch: Microbatch, width: int, rows: int) -> int:
    if model.has_norm_bias:  # LayerNorm: its input, mean and deviation
        return rows * (width + 2) * batch.itemsize_bytes
    # RMSNorm: its input and the scaled input, both in full precision, and the scale.
    return rows * (2 * width + 1) * _FULL_BYTES


def _attention(model: Model, batch: Microbatch, tp: int) -> int:
    """Give what attention keeps behind its norm, up to the input of its last projection."""
    # Where there are fewer groups than ranks, each rank has one, cut out of what all have projected.
    positions, heads, groups = batch.length * batch.size, model.heads // tp, max(1, model.groups // tp)
    queries, keys = heads * model.kv_channels, groups * model.kv_channels
    is_spread, projected = model.groups < tp, queries + 2 * keys
    if is_spread:
        projected = (model.heads + 2 * model.groups) * model.kv_channels
    is_grouped, is_normed = groups < heads, model.has_query_norm
    # Where nothing changes queries, keys or values, they are views of the projection's output.
    kept, is_raised = 0, _is_raised(model, batch)
    if batch.recompute.core_attention:  # it takes queries, keys and values as they are
        kept = projected + (
            queries + keys if batch.has_rope or is_normed else 0 if is_spread or not is_grouped else queries
        )
    else:
        kept = (2 if is_grouped or batch.has_rope or is_normed else 0) * queries + (queries if is_grouped else 0)
        if not is_grouped or (is_normed and not is_raised):
            kept += projected
        elif is_spread and batch.size == 1 and not batch.has_rope:  # one sample's queries need no copy
            kept += projected - queries
    total = positions * kept * batch.itemsize_bytes
    if is_normed:
        is_copied = is_grouped and not is_spread and not is_raised
        total += _head_norms(model, batch, heads, groups, is_copied=is_copied, is_raised=is_raised)
    if batch.has_rope:  # cosine and sine, for queries and for keys
        total += 4 * batch.length * model.kv_channels * batch.itemsize_bytes
    return total + _scores(batch, heads) + positions * queries * batch.itemsize_bytes


def _scores(batch: Microbatch, heads: int) -> int:
    """Give the probabilities of the core attention, and its mask."""
    if batch.recompute.core_attention:
        return _INDEX_BYTES  # which kind of mask it is
    return batch.length**2 * (1 + batch.size * heads * batch.itemsize_bytes)


def _latent_attention(model: Model, batch: Microbatch, sizes: Latent, tp: int) -> int:
    """Give what latent attention keeps behind its norm, up to the input of its last projection."""
    positions, heads = batch.length * batch.size, model.heads // tp
    slices = positions // tp if batch.is_sharded else positions
    # The keys' positions lie beside the latent keys; where ranks have gathered them, each has all rows.
    latents = [(sizes.kv_lora_rank, sizes.kv_lora_rank + sizes.qk_pos_emb_head_dim)]
    latents += [(sizes.q_lora_rank, sizes.q_lora_rank)] if sizes.q_lora_rank else []
    total = 0
    for rank, width in latents:
        if model.has_query_norm:
            total += _norm(model, batch, rank, slices)
        if not model.has_query_norm or not _is_raised(model, batch):
            total += positions * width * batch.itemsize_bytes
        if model.has_query_norm and not _is_raised(model, batch):  # counted just now
            total -= slices * rank * batch.itemsize_bytes
    # Cosine and sine, for queries and for keys; queries, keys, values and what attention makes of them.
    total += 4 * batch.length * sizes.qk_pos_emb_head_dim * batch.itemsize_bytes
    of_head = 2 * (sizes.qk_head_dim + sizes.qk_pos_emb_head_dim) + 2 * sizes.v_head_dim
    return total + _scores(batch, heads) + positions * heads * of_head * batch.itemsize_bytes


def _head_norms(model: Model, batch: Microbatch, heads: int, groups: int, *, is_copied: bool, is_raised: bool) -> int:
    """Give what the norms of queries and keys keep besides the projection's output and their own outputs."""
    positions = batch.length * batch.size
    # Queries of several groups are copied out of the projection's output.
    copied = positions * heads * model.kv_channels * batch.itemsize_bytes if is_copied else 0
    if model.has_norm_bias:
        return copied + positions * (heads + groups) * 2 * batch.itemsize_bytes
    scaled = 2 if is_raised else 1
    return copied + positions * (heads + groups) * (scaled * model.kv_channels + 1) * _FULL_BYTES


def _feed_forward(model: Model, batch: Microbatch, ffn: int) -> int:
    """Give what a feed-forward layer with so many channels on a rank keeps behind its norm."""
    return batch.length * batch.size * _num_parts(model, batch) * ffn * batch.itemsize_bytes


def _num_parts(model: Model, batch: Microbatch) -> int:
    """Count what a feed-forward layer keeps: in front of its activation, inside it, and behind it."""
    return (3 if batch.is_fused else 5) if model.is_gated else 2
