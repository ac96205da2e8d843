"""What a layer keeps for its backward, by rows, and the sizes that it has.

What each module keeps of a microbatch for its backward pass, as a table: all activations are sums of its rows.

Counted are the storages that autograd saves, each once, weights left out, where each expert gets as many tokens as any
other. Sources are files of Megatron 0.19 (``megatron/core``) and, after a semicolon, of Transformer Engine 2.9
(``transformer_engine/pytorch``). Megatron's local core attention takes no latent heads; counted is one that keeps what
the local one does. Transformer Engine's attention is that of flash-attn; cuDNN's keeps as much, or less with several
samples. A mask of dropout has a byte for each number, as torch's on CUDA devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vtp_plugin.plan.model.gpt_model import GPTModel
from vtp_plugin.plan.model.lora import EXPERTS, Lora, LoraTarget

FULL_BYTES, INDEX_BYTES = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How tokens find their experts, in Megatron's names.

    Attributes:
        topk: number of experts of a token.
        has_sigmoid: scores are sigmoids, not a softmax.
        is_pre_softmax: a softmax is taken over all experts, before the best are chosen.
        num_groups: number of groups of experts, of which a token uses a few; 0 without groups.
        group_topk: number of groups that a token uses.
        has_aux_loss: experts are balanced by a loss.
        is_gathered: ranks gather all tokens, and each takes out those of its experts.
        is_grouped: the products of experts are computed together.
    """

    topk: int
    has_sigmoid: bool = False
    is_pre_softmax: bool = False
    num_groups: int = 0
    group_topk: int = 1
    has_aux_loss: bool = False
    is_gathered: bool = False
    is_grouped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Activation recomputation: what is recomputed in the backward pass, and not kept for it.

    Attributes:
        core_attention: the probabilities of the attention.
        feed_forward: what a feed-forward layer without experts makes of its input.
        method: method for whole layers: ``uniform`` keeps the input of every group of layers, those of multi-token
            prediction included, ``block`` the inputs of the first layers of a chunk; empty for none.
        num_layers: number of layers of a group (``uniform``), or of the first ones (``block``).
    """

    core_attention: bool = False
    feed_forward: bool = False
    method: Literal["", "uniform", "block"] = ""
    num_layers: int = 0

    def parted(self, layers: Sequence[int]) -> tuple[int, Sequence[int]]:
        """Say how many inputs of layers a chunk keeps, and which of its layers keep all.

        >>> Recompute(method="uniform", num_layers=2).parted([3, 4, 5])
        (2, [])
        >>> Recompute(method="block", num_layers=2).parted([3, 4, 5])
        (2, [5])
        """
        if not self.method:
            return 0, layers
        if self.method == "uniform":
            return -(-len(layers) // self.num_layers), layers[:0]
        return min(self.num_layers, len(layers)), layers[self.num_layers :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """A microbatch, and how the layers compute it.

    Attributes:
        length: length of the sequences, in tokens.
        size: number of sequences.
        itemsize_bytes: bytes of one element of the tensors between the layers.
        is_sharded: whether a rank has its slice of the sequence between the layers (sequence parallelism).
        has_rope: positions are rotations, in every layer by itself.
        is_fused: a gated feed-forward layer keeps its input and its output only.
        is_engine: layers are Transformer Engine's, with flash attention; else Megatron's local ones.
        has_fused_rope: Transformer Engine's layers rotate in one kernel, which keeps the angles only.
        has_hidden_dropout, has_attention_dropout: whether there is dropout between layers; and of attention
            probabilities.
        eight_bits: Transformer Engine's linear layers compute with 8 bits: with one scale for a tensor, or for a block.
        has_own_output: context parallelism gives the attention's output in a copy (a2a and all_gather; not p2p).
        routing: how tokens find their experts; None without experts.
        recompute: what is recomputed.
    """

    length: int
    size: int
    itemsize_bytes: int
    is_sharded: bool
    has_rope: bool
    is_fused: bool
    is_engine: bool = False
    has_fused_rope: bool = False
    has_hidden_dropout: bool = False
    has_attention_dropout: bool = False
    eight_bits: Literal["", "tensor", "block"] = ""
    has_own_output: bool = False
    routing: Routing | None = None
    recompute: Recompute = Recompute()

    @property
    def is_estimated(self) -> bool:
        """Whether no run on CPUs has shown the bytes: they are what the sources of Transformer Engine and torch say."""
        return self.is_engine or self.has_hidden_dropout or self.has_attention_dropout


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A layer, or an end of a chunk, on one rank.

    Attributes:
        model, batch, tp, etp: whose sizes these are; tensor-parallel sizes of the stage, and of its experts.
        cp: context-parallel size of the stage.
        has_experts: the layer has some.
        lora: the adapters of a model that is frozen otherwise; None where all weights are trained.
        has_adapters: the layer has some.
        starts_at: the linear layer before which nothing has a gradient, where that is in this layer; else empty.
        num_again: inputs that recomputed layers keep in this chunk.
        num_layers: number of layers of the chunk, with those of multi-token prediction.
        length, positions, slices: tokens on the rank: of one sequence; of all sequences; and between the layers.
        heads, groups: attention heads and query groups of the rank; each rank has at least one group, cut out of the
            projection of all ranks.
        queries, keys, context: elements of a position: of queries; of keys, and as many values; of attention's output.
    """

    model: GPTModel
    batch: Microbatch
    tp: int
    etp: int = 1
    cp: int = 1
    has_experts: bool = False
    lora: Lora | None = None
    has_adapters: bool = False
    starts_at: str = ""
    num_again: int = 0
    num_layers: int = 0
    length: int = field(init=False)
    positions: int = field(init=False)
    slices: int = field(init=False)
    heads: int = field(init=False)
    groups: int = field(init=False)
    queries: int = field(init=False)
    keys: int = field(init=False)
    context: int = field(init=False)

    def __post_init__(self) -> None:
        model, length, heads = self.model, self.batch.length // self.cp, self.model.heads // self.tp
        positions, groups = length * self.batch.size, max(1, model.groups // self.tp)
        slices = positions // (self.tp if self.batch.is_sharded else 1)
        width = model.kv_channels if model.latent is None else model.latent.v_head_dim
        derived = {"length": length, "positions": positions, "slices": slices, "heads": heads, "groups": groups}
        derived |= {"queries": heads * model.kv_channels, "keys": groups * model.kv_channels, "context": heads * width}
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def numbers(self, numel: int) -> int:
        """Give the bytes of so many numbers."""
        return numel * self.batch.itemsize_bytes

    def inputs(self, numel: int) -> int:
        """Give the bytes of so many numbers that a linear layer keeps of its input."""
        if not self.batch.eight_bits:
            return self.numbers(numel)
        # mxfp8 has a byte of scale for 32 numbers, blockwise 4 for 128.
        return numel + (numel // 32 if self.batch.eight_bits == "block" else 0)

    def needs_input(self, linear: str) -> bool:
        """Tell whether a gradient needs the input of a linear layer: of its weights, or of its adapters."""
        if self.lora is None:
            return True
        is_read = self.has_adapters and not self.lora.dropout  # else each pair keeps what it has of it
        return is_read and linear in map(row_of, self.pairs)

    @property
    def pairs(self) -> tuple[LoraTarget, ...]:
        """The published matrices of the layer that have adapters, if it has some."""
        return () if self.lora is None else self.lora.pairs(self.model.matrices(has_experts=self.has_experts))


def row_of(target: LoraTarget) -> str:
    """Name the module of :data:`ROWS` that holds the input of a published matrix.

    >>> from vtp_plugin.plan.model.lora import TARGETS
    >>> [row_of(target) for target in TARGETS[3:8:2]]
    ['linear_qkv', 'self_attention', 'self_attention']
    """
    if target.block == EXPERTS:
        return "experts" if target.linear == "linear_fc1" else "experts.linear_fc2"
    return {
        "linear_q_proj": "linear_qkv",
        "linear_q_down_proj": "linear_qkv",
        "linear_kv_down_proj": "linear_qkv",
        "linear_q_up_proj": "self_attention",
        "linear_kv_up_proj": "self_attention",
        "linear_fc2": "mlp",
    }.get(target.linear, target.linear)


@dataclass(frozen=True, slots=True)
class KeptRow:
    """One tensor that a module keeps for its backward.

    Attributes:
        module: name of the module in Megatron.
        kept: what the tensor is.
        source: files of Megatron or torch that say so.
        local: returns the bytes in Megatron's local layers.
        engine: returns the bytes in Transformer Engine's layers; None if they are the same.
        when: tells whether the module is there and keeps the tensor.
    """

    module: str
    kept: str
    source: str
    local: Callable[[Sizes], int]
    engine: Callable[[Sizes], int] | None = None
    when: Callable[[Sizes], object] = lambda sizes: True

    def size_bytes(self, sizes: Sizes) -> int:
        """Give what it keeps on one rank."""
        if not self.when(sizes):
            return 0
        return (self.engine or self.local if sizes.batch.is_engine else self.local)(sizes)


def _scales(s: Sizes, width: int, rows: int) -> int:
    """Give what a norm keeps besides its output, which the next layer keeps."""
    if s.batch.is_engine:  # its input; the scale and, of LayerNorm, the mean in full precision
        return s.numbers(rows * width) + rows * (2 if s.model.has_norm_bias else 1) * FULL_BYTES
    if s.model.has_norm_bias:  # LayerNorm: its input, mean and deviation
        return s.numbers(rows * (width + 2))
    # RMSNorm: its input and the scale and, for the gradient of its weights, the scaled input, all in full precision.
    return rows * ((1 if s.lora else 2) * width + 1) * FULL_BYTES


def _is_raised(s: Sizes) -> bool:
    """Whether local norms compute in full precision, and so keep a copy of their input, and not the input."""
    return not s.model.has_norm_bias and s.batch.itemsize_bytes < FULL_BYTES


def _norm(s: Sizes) -> int:
    return _scales(s, s.model.hidden, s.slices)


def _hidden(s: Sizes) -> int:
    return s.numbers(s.slices * s.model.hidden)


def _hidden_inputs(s: Sizes) -> int:
    return s.inputs(s.slices * s.model.hidden)


def _is_again(s: Sizes) -> bool:
    return s.batch.recompute.core_attention


def _has_dense_again(s: Sizes) -> bool:
    return s.batch.recompute.feed_forward and not s.has_experts


def _projected(s: Sizes) -> int:
    heads = s.model.heads + 2 * s.model.groups
    return heads * s.model.kv_channels if s.model.groups < s.tp else s.queries + 2 * s.keys


def _given(s: Sizes) -> int:
    """Give queries, keys and values as core attention gets them: views where nothing changes what was projected."""
    kept = _projected(s)
    if s.batch.has_rope or s.model.has_query_norm:
        kept += s.queries + s.keys
    elif s.tp <= s.model.groups and s.groups < s.heads:
        kept += s.queries
    return s.numbers(s.positions * kept)


def _heads(s: Sizes) -> int:
    """Give queries, keys and values of local attention, which repeats keys and values for each query of a group."""
    if s.batch.recompute.core_attention:
        return _given(s)
    is_grouped, is_normed = s.groups < s.heads, s.model.has_query_norm
    kept = (2 if is_grouped or s.batch.has_rope or is_normed else 0) * s.queries + (s.queries if is_grouped else 0)
    if not is_grouped or (is_normed and not _is_raised(s)):
        kept += _projected(s)
    elif s.model.groups < s.tp and s.batch.size == 1 and not s.batch.has_rope:  # one sample's queries need no copy
        kept += _projected(s) - s.queries
    return s.numbers(s.positions * kept)


def _head_norms(s: Sizes) -> int:
    """Give what local norms of queries and keys keep besides the projection's output and their own outputs."""
    rows = s.positions * (s.heads + s.groups)
    # Queries of several groups are copied out of the projection's output.
    is_copied = s.groups < s.heads and s.tp <= s.model.groups and not _is_raised(s)
    copied = s.numbers(s.positions * s.queries) if is_copied else 0
    if s.model.has_norm_bias:
        return copied + s.numbers(2 * rows)
    return copied + rows * ((2 if _is_raised(s) else 1) * s.model.kv_channels + 1) * FULL_BYTES


def _latents(s: Sizes) -> int:
    latent, is_normed, total = s.model.latent, s.model.has_query_norm, 0
    assert latent is not None
    # The keys' positions lie beside the latent keys; where ranks have gathered them, each has all rows.
    widths = [(latent.kv_lora_rank, latent.kv_lora_rank + latent.qk_pos_emb_head_dim)]
    widths += [(latent.q_lora_rank, latent.q_lora_rank)] if latent.q_lora_rank else []
    for width, beside in widths:
        total += _scales(s, width, s.slices) if is_normed else 0
        if s.batch.is_engine:  # which copies what lies beside something else
            total += s.inputs(s.slices * width)
        elif s.lora is None or s.needs_input("self_attention"):
            total += s.numbers(s.slices * width if is_normed and _is_raised(s) else s.positions * beside)
    return total


def _latent_heads(s: Sizes) -> int:
    assert s.model.latent is not None
    keys = s.model.latent.qk_head_dim + s.model.latent.qk_pos_emb_head_dim
    return s.numbers(s.positions * (2 * s.heads * keys + s.context))


def _rotated(s: Sizes) -> int:
    return s.model.kv_channels if s.model.latent is None else s.model.latent.qk_pos_emb_head_dim


def _context(s: Sizes) -> int:
    return s.numbers(s.positions * s.context)


def _scores(s: Sizes) -> int:
    return s.numbers(s.length**2 * s.batch.size * s.heads)


def _is_copied(s: Sizes) -> bool:
    """Whether flash attention's output is turned, sent or cast to become the input of the next layer."""
    batch = s.batch
    return bool(batch.recompute.core_attention or batch.eight_bits or batch.size > 1 or batch.has_own_output)


def _around(s: Sizes, ffn: int, rows: int, place: str = "mlp", *, is_weighted: bool = False) -> int:
    """Give what is in front of an activation and inside it, and behind it as input of the second linear layer."""
    inside = ((2 if s.batch.is_fused else 4) if s.model.is_gated else 1) + is_weighted
    before = 0 if s.starts_at == place else s.numbers(rows * inside * ffn)
    return before + (s.inputs(rows * ffn) if s.needs_input(place) else 0)


def _routed_rows(s: Sizes) -> int:
    """Count the tokens for a rank's experts, with those of the ranks that share the experts."""
    assert s.batch.routing is not None
    return s.slices * s.batch.routing.topk * s.etp


def _between_factors(s: Sizes) -> int:
    assert s.lora is not None
    routed = [pair for pair in s.pairs if pair.block == EXPERTS]
    numel = s.slices * (len(s.pairs) - len(routed))
    if routed:
        numel += _routed_rows(s) * len(routed)
    return s.numbers(numel * s.lora.rank)


def _dropped(s: Sizes) -> int:
    """Give what each pair keeps of its inputs, and which of them it left out."""
    assert s.lora is not None
    model, latent, places = s.model, s.model.latent, (s.slices, s.positions)
    wide = {"linear_proj": s.context, "linear_fc2": model.ffn // s.tp}
    if latent is not None:
        wide |= {"linear_q_up_proj": latent.q_lora_rank, "linear_kv_up_proj": latent.kv_lora_rank}
    pairs = s.pairs
    cut = [target.linear in ("linear_proj", "linear_fc2") for target in pairs]
    numel = sum(places[is_cut] * wide.get(each.linear, model.hidden) for each, is_cut in zip(pairs, cut, strict=True))
    return s.numbers(numel) + numel


def _router(s: Sizes) -> int:
    """Give what a router keeps, and where its dispatcher sends tokens."""
    routing, experts = s.batch.routing, s.model.experts
    assert routing is not None and experts is not None
    scores, best = s.slices * experts.number, s.slices * routing.topk
    if routing.is_gathered:
        # For every gathered token and expert of this rank its weight and whether it goes there, which makes as much as
        # all experts of the rank's own tokens; for every row whose it is, and its weight.
        total = s.etp * (scores * (FULL_BYTES + 1) + best * (INDEX_BYTES + FULL_BYTES))
    else:
        # For every token and expert where the token goes, for every row whose it is; for every row its weight.
        total = (scores + best) * INDEX_BYTES + best * s.etp * FULL_BYTES
    total += best * INDEX_BYTES
    if routing.has_sigmoid:  # scores are divided by their sum
        total += (scores + (best + s.slices if routing.topk > 1 else 0)) * FULL_BYTES
    else:
        total += (scores if routing.is_pre_softmax else best) * FULL_BYTES
    if routing.num_groups:
        in_groups = routing.num_groups * (routing.topk // routing.group_topk) + routing.group_topk
        total += s.slices * (in_groups * INDEX_BYTES + experts.number)
    if routing.has_aux_loss:
        total += (scores + (s.slices if routing.has_sigmoid else 0)) * FULL_BYTES + best * INDEX_BYTES
    return total


def _experts(s: Sizes) -> int:
    assert s.model.experts is not None
    rows = _routed_rows(s)
    # Where one kernel does not do both, the output of the activation is kept before it is weighted.
    is_weighted = not (s.model.is_gated and s.batch.is_fused)
    inputs = s.inputs(rows * s.model.hidden) if s.needs_input("experts") else 0
    return inputs + _around(s, s.model.experts.ffn // s.etp, rows, "experts.linear_fc2", is_weighted=is_weighted)


def _shared_ffn(s: Sizes) -> int:
    return s.model.experts.shared_ffn // s.tp if s.has_experts and s.model.experts is not None else 0


def _waiting_ffn(s: Sizes, ffn: int) -> int:
    """Give both inputs, and the gradients of both outputs, of a feed-forward layer."""
    return _hidden(s) + s.numbers(s.positions * ((3 if s.model.is_gated else 2) * ffn + s.model.hidden))


def _waiting_experts(s: Sizes) -> int:
    """Give as for a feed-forward layer; the experts' inputs are parts of one tensor, and so are the last gradients."""
    assert s.model.experts is not None
    rows = _routed_rows(s)
    return s.numbers(rows * (2 * s.model.hidden + (3 if s.model.is_gated else 2) * s.model.experts.ffn // s.etp))


def _waiting_latents(s: Sizes) -> int:
    """Give the input that the projections to latents share, those of the projections from them, and the gradients."""
    latent, is_normed = s.model.latent, s.model.has_query_norm
    assert latent is not None
    # Without a norm the latent keys are a part of a tensor, and a rank's slice is one of the whole sequence.
    beside = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
    keys = s.slices * latent.kv_lora_rank if is_normed else s.positions * beside
    queries = (s.slices if is_normed else s.positions) * latent.q_lora_rank
    down = (beside + latent.q_lora_rank) // s.tp
    up = s.heads * (2 * latent.qk_head_dim + latent.qk_pos_emb_head_dim + latent.v_head_dim)
    return _hidden(s) + s.numbers(keys + queries + s.positions * (down + up))


def _has_angles(s: Sizes) -> bool:
    """Whether the layers of a chunk share the angles: they are recomputed, or rotate in one kernel."""
    again = s.num_again or (s.batch.recompute.method == "uniform" and s.num_layers)
    is_kept = again if s.model.latent is None and s.batch.has_rope else 0
    return bool(is_kept or (s.batch.has_fused_rope and s.num_layers))


_NORMS = "transformer/torch_norm.py; module/layernorm_linear.py, ops/basic/rmsnorm.py and layer_norm.py"
_LINEAR = "tensor_parallel/layers.py; module/linear.py and layernorm_linear.py"
_HEADS = "transformer/attention.py; attention/dot_product_attention/backends.py"
_CORE = "transformer/dot_product_attention.py; attention/dot_product_attention/backends.py"
_LATENT = "transformer/multi_latent_attention.py; module/layernorm_linear.py"
_ROPE = "models/common/embeddings/rope_utils.py; attention/rope.py"
_MLP = "transformer/mlp.py; module/linear.py"
_WORDS = "models/common/embeddings/language_model_embedding.py"
_MTP = "transformer/multi_token_prediction.py"

ROWS: Mapping[str, tuple[KeptRow, ...]] = {
    "layer": (
        KeptRow("input_layernorm", "input and scales", _NORMS, _norm),
        # With 8 bits each of the two projections to latents has a copy of its own.
        KeptRow("linear_qkv", "input", _LINEAR, _hidden,
            lambda s: _hidden_inputs(s) * (2 if s.model.latent and s.batch.eight_bits else 1),
            when=lambda s: s.needs_input("linear_qkv")),
        KeptRow("self_attention", "latents, with their norms", _LATENT, _latents, when=lambda s: s.model.latent),
        KeptRow("self_attention", "cosines and sines, for queries and for keys", _ROPE,
            lambda s: 4 * s.numbers(s.length * _rotated(s)),
            when=lambda s: (s.batch.has_rope or s.model.latent) and not s.batch.has_fused_rope),
        KeptRow("q_layernorm and k_layernorm", "inputs and scales", _NORMS, _head_norms,
            lambda s: _scales(s, s.model.kv_channels, s.positions * (s.heads + s.groups)),
            when=lambda s: s.model.has_query_norm and not s.model.latent),
        KeptRow("core_attention", "queries, keys, values", _HEADS, _heads,
            lambda s: _given(s) if _is_again(s) else s.numbers(s.positions * (s.queries + 2 * s.keys)),
            when=lambda s: not s.model.latent),
        KeptRow("core_attention", "latent queries, keys, values", _LATENT, _latent_heads,
            when=lambda s: s.model.latent),
        KeptRow("core_attention", "probabilities and their mask; of flash attention the sums of the rows", _CORE,
            lambda s: s.length**2 + _scores(s), lambda s: s.positions * s.heads * FULL_BYTES,
            when=lambda s: not _is_again(s)),
        KeptRow("core_attention", "which mask it is, to recompute it", _CORE, lambda s: INDEX_BYTES,
            when=_is_again),
        KeptRow("core_attention", "dropped probabilities, and their mask", _CORE,
            lambda s: _scores(s) + _scores(s) // s.batch.itemsize_bytes, lambda s: 0,
            when=lambda s: s.batch.has_attention_dropout and not _is_again(s)),
        KeptRow("core_attention", "output of flash attention", _CORE, lambda s: 0, _context,
            when=lambda s: not _is_again(s)),
        KeptRow("linear_proj", "input, where it is not that output", _LINEAR, _context,
            lambda s: s.inputs(s.positions * s.context) if _is_copied(s) else 0,
            when=lambda s: s.needs_input("linear_proj")),
        KeptRow("self_attn_bda and mlp_bda", "masks of dropout", "fusions/fused_bias_dropout.py",
            lambda s: 2 * s.slices * s.model.hidden, when=lambda s: s.batch.has_hidden_dropout),
        # Without experts Transformer Engine's norm is a part of the linear layer, and recomputed with it.
        KeptRow("pre_mlp_layernorm", "input and scales", _NORMS, _norm,
            lambda s: _hidden(s) if _has_dense_again(s) else _norm(s)),
        KeptRow("linear_fc1", "input", _LINEAR, _hidden, lambda s: 0 if _has_dense_again(s) else _hidden_inputs(s),
            when=lambda s: not s.has_experts and s.needs_input("linear_fc1")),
        KeptRow("mlp", "around the activation", _MLP, lambda s: _around(s, s.model.ffn // s.tp, s.positions),
            when=lambda s: not s.has_experts and not s.batch.recompute.feed_forward),
        KeptRow("adapters", "what is between two factors", "vtp_plugin/patches/lora_layers.py", _between_factors,
            when=lambda s: s.has_adapters),
        KeptRow("adapters", "with dropout: what is left of inputs, and its mask", "vtp_plugin/patches/lora_layers.py",
            _dropped, when=lambda s: s.has_adapters and s.lora and s.lora.dropout),
        KeptRow("router", "input", "transformer/moe/router.py", _hidden, when=lambda s: s.has_experts),
        KeptRow("router", "scores, and where tokens go", "transformer/moe/router.py and token_dispatcher.py", _router,
            when=lambda s: s.has_experts),
        KeptRow("experts", "inputs, and around the activation", "transformer/moe/experts.py; module/grouped_linear.py",
            _experts, when=lambda s: s.has_experts),
        KeptRow("shared_experts", "around the activation; with 8 bits the input", _MLP,
            lambda s: _around(s, _shared_ffn(s), s.positions) + (_hidden_inputs(s) if s.batch.eight_bits else 0),
            when=_shared_ffn),
    ),
    "chunk": (
        KeptRow("recomputed layers", "inputs", "transformer/transformer_block.py",
            lambda s: s.num_again * _hidden(s)),
        KeptRow("rotary_pos_emb", "angles", _ROPE, lambda s: s.length * _rotated(s) * FULL_BYTES, when=_has_angles),
    ),
    "first": (
        KeptRow("embedding", "tokens, and positions with weights", _WORDS,
            lambda s: (2 if s.model.num_positions else 1) * s.positions * INDEX_BYTES),
        KeptRow("embedding", "mask of dropout", _WORDS, lambda s: s.slices * s.model.hidden,
            when=lambda s: s.batch.has_hidden_dropout),
    ),
    "last": (
        KeptRow("final_layernorm", "input and scales", _NORMS, _norm),
        KeptRow("output_layer", "input", _LINEAR, _hidden, when=lambda s: s.lora is None),
    ),
    "loss": (
        KeptRow("loss", "probabilities of the vocabulary, targets and whose they are",
            "tensor_parallel/cross_entropy.py",
            lambda s: s.positions * (s.model.vocab // s.tp * FULL_BYTES + 1 + INDEX_BYTES)),
    ),
    "prediction": (
        # Where ranks share the vocabulary, also whose the tokens are; and which of the targets count.
        KeptRow("mtp", "next tokens and targets", _MTP,
            lambda s: s.positions * (2 * INDEX_BYTES + (1 if s.tp > 1 else 0) + FULL_BYTES)),
        KeptRow("mtp", "mask of dropout", _WORDS, lambda s: s.slices * s.model.hidden * s.batch.has_hidden_dropout),
        KeptRow("mtp", "input of eh_proj", _MTP, lambda s: 2 * _hidden(s), lambda s: 2 * _hidden_inputs(s)),
        KeptRow("mtp", "output, beside the model's", _MTP, _hidden),
        KeptRow("mtp", "inputs and scales of three norms", _NORMS, lambda s: 3 * _norm(s),
            when=lambda s: s.batch.recompute.method != "uniform"),
        KeptRow("mtp", "what its layer's input was cut from", _MTP,
            lambda s: s.numbers((s.positions - s.slices) * s.model.hidden),
            when=lambda s: s.batch.recompute.method != "uniform" and (s.batch.is_engine or not _is_raised(s))),
    ),
}  # fmt: skip
"""The rows of a layer; of a chunk; of the first and the last chunk; of a loss; and of a layer of multi-token prediction
besides its loss and the layer in it."""

WAITING: Mapping[str, tuple[KeptRow, ...]] = {
    "layer": (
        KeptRow("linear_qkv", "input; gradient of the output", _LINEAR,
            lambda s: _hidden(s) + s.numbers(s.positions * (s.model.queries + 2 * s.model.keys) // s.tp),
            when=lambda s: not s.model.latent),
        KeptRow("self_attention", "inputs; gradients of the outputs", _LATENT, _waiting_latents,
            when=lambda s: s.model.latent),
        KeptRow("linear_proj", "input; gradient of the output", _LINEAR,
            lambda s: _context(s) + s.numbers(s.positions * s.model.hidden)),
        KeptRow("mlp", "inputs; gradients of the outputs", _MLP, lambda s: _waiting_ffn(s, s.model.ffn // s.tp),
            when=lambda s: not s.has_experts),
        KeptRow("experts", "inputs; gradients of the outputs", "transformer/moe/experts.py", _waiting_experts,
            when=lambda s: s.has_experts),
        KeptRow("shared_experts", "inputs; gradients of the outputs", _MLP, lambda s: _waiting_ffn(s, _shared_ffn(s)),
            when=_shared_ffn),
    ),
    "prediction": (
        KeptRow("mtp", "input of eh_proj; gradient of its output", _MTP,
            lambda s: 2 * _hidden(s) + s.numbers(s.positions * s.model.hidden // s.tp)),
    ),
}  # fmt: skip
"""What local linear layers keep of a microbatch from the gradient of its input to those of its weights, recomputed or
not. Norms, routers, embeddings and the output layer keep nothing: their backwards are whole."""
