"""A GPT as its sizes say it: what memory, the search and the checkpoints of Hugging Face know of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Sizes of multi-latent attention, in Megatron's names.

    Attributes:
        q_lora_rank: width of the latent queries; 0 if queries are projected directly.
        kv_lora_rank: width of the latent keys and values.
        qk_head_dim: channels of a head's keys without those of the position.
        qk_pos_emb_head_dim: channels of the position.
        v_head_dim: channels of a head's values.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Experts of the layers that have some.

    Attributes:
        number: number of experts in a layer.
        ffn: feed-forward size of an expert.
        shared_ffn: feed-forward size of all shared experts of a layer together; 0 without them.
        layers: whether a layer has experts, by its number in the model.
    """

    number: int
    ffn: int
    shared_ffn: int
    layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTModel:
    """Sizes of the whole model.

    Attributes:
        num_layers: number of layers, without those of multi-token prediction.
        num_predicting: number of layers of multi-token prediction, on the last stage.
        hidden: width between the layers.
        heads: number of attention heads.
        groups: number of groups of query heads that share keys and values.
        kv_channels: number of channels of a head.
        ffn: feed-forward size of a layer without experts.
        vocab: padded size of the vocabulary.
        num_positions: number of positions of a learned embedding; 0 without one.
        is_gated: a feed-forward layer has a second input projection (SwiGLU).
        has_bias: whether all linear layers have a bias.
        has_qkv_bias: whether the projection to queries, keys and values has a bias.
        has_norm_bias: norms have a bias (LayerNorm; RMSNorm has none).
        has_query_norm: queries and keys, or the latent ones, are normed.
        is_tied: the output layer uses the word embedding.
        latent: multi-latent attention.
        experts: None without.
    """

    num_layers: int
    num_predicting: int
    hidden: int
    heads: int
    groups: int
    kv_channels: int
    ffn: int
    vocab: int
    num_positions: int
    is_gated: bool
    has_bias: bool
    has_qkv_bias: bool
    has_norm_bias: bool
    has_query_norm: bool
    is_tied: bool
    latent: Latent | None = None
    experts: Experts | None = None

    @property
    def queries(self) -> int:
        """Channels of the queries of all heads."""
        return self.heads * self.kv_channels

    @property
    def keys(self) -> int:
        """Channels of all keys, and of all values."""
        return self.groups * self.kv_channels

    @property
    def num_experts(self) -> int:
        """Number of experts of a layer that has some; 0 without them."""
        return 0 if self.experts is None else self.experts.number
