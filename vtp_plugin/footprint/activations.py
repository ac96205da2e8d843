"""Bytes that the forward pass of one microbatch keeps for its backward pass, on one rank.

Counted are the storages that autograd saves in Megatron's local layers, each once, weights left out. Read in
megatron/core of 0.19: ``transformer/attention.py``, ``transformer/dot_product_attention.py``, ``transformer/mlp.py``,
``models/common/embeddings/rope_utils.py`` and ``tensor_parallel/layers.py``, ``cross_entropy.py``. Without dropout,
recomputation, experts, latent attention and prediction of several tokens: those are not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vtp_plugin.footprint.model import Chunk, Model

_FULL_BYTES, _INDEX_BYTES = 4, 8


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
    """

    length: int
    size: int
    itemsize_bytes: int
    is_sharded: bool
    has_rope: bool
    is_fused: bool


def activation_bytes(model: Model, batch: Microbatch, chunks: Sequence[Chunk], tp: int) -> int:
    """Give what the chunks of a stage keep of one microbatch on one of ``tp`` ranks.

    Args:
        model: the whole model, dense.
        batch: the microbatch.
        chunks: of the stage.
        tp: tensor-parallel size of the stage.

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
        layer = _attention(model, batch, tp) + _feed_forward(model, batch, tp)
        total += len(chunk.layers) * (layer + 2 * _norm(model, batch, model.hidden, slices))
        if chunk.is_first:
            # Numbers of the words; and of the positions, where these have weights.
            total += (2 if model.num_positions else 1) * positions * _INDEX_BYTES
        if chunk.is_last:
            # Probabilities of the vocabulary, which target is whose, and the target.
            loss = positions * (model.vocab // tp * _FULL_BYTES + 1 + _INDEX_BYTES)
            total += _norm(model, batch, model.hidden, slices) + loss
    return total


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
    positions, heads, groups = batch.length * batch.size, model.heads // tp, model.groups // tp
    queries, keys = heads * model.kv_channels, groups * model.kv_channels
    is_grouped, is_normed = groups < heads, model.has_query_norm
    # Where nothing changes queries, keys or values, they are views of the projection's output.
    kept = (2 if is_grouped or batch.has_rope or is_normed else 0) * queries + (queries if is_grouped else 0)
    is_raised = not model.has_norm_bias and batch.itemsize_bytes < _FULL_BYTES
    if not is_grouped or (is_normed and not is_raised):
        kept += queries + 2 * keys
    total = positions * kept * batch.itemsize_bytes
    if is_normed:
        total += _head_norms(model, batch, heads, groups, is_raised=is_raised)
    if batch.has_rope:  # cosine and sine, for queries and for keys
        total += 4 * batch.length * model.kv_channels * batch.itemsize_bytes
    mask = batch.length**2
    scores = batch.size * heads * batch.length**2 * batch.itemsize_bytes
    return total + mask + scores + positions * queries * batch.itemsize_bytes


def _head_norms(model: Model, batch: Microbatch, heads: int, groups: int, *, is_raised: bool) -> int:
    """Give what the norms of queries and keys keep besides the projection's output and their own outputs."""
    positions = batch.length * batch.size
    # Grouped queries are copied out of the projection's output.
    copied = positions * heads * model.kv_channels * batch.itemsize_bytes if groups < heads and not is_raised else 0
    if model.has_norm_bias:
        return copied + positions * (heads + groups) * 2 * batch.itemsize_bytes
    scaled = 2 if is_raised else 1
    return copied + positions * (heads + groups) * (scaled * model.kv_channels + 1) * _FULL_BYTES


def _feed_forward(model: Model, batch: Microbatch, tp: int) -> int:
    """Give what a feed-forward layer keeps behind its norm: in front of its activation, inside it, and behind it."""
    parts = (3 if batch.is_fused else 5) if model.is_gated else 2
    return batch.length * batch.size * parts * (model.ffn // tp) * batch.itemsize_bytes
