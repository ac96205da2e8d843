"""What a GPT is made of: its sizes, its parameters, and a vision tower in front.

The vision tower of a model that sees pictures: its sizes, and its parameters besides those of its layers.

Its layers are those of a GPT whose linear layers all have biases. In front of them squares of pixels become vectors,
behind them a projector makes a token of the language model of each square of vectors.

All parameters of a Megatron GPT: their names, their shapes, and how the ranks of a stage share them.

There is no other list of them. Memory counts what a rank holds of each (``vtp_plugin/plan/memory/footprint.py``), a
checkpoint without a map is read in their order (``vtp_plugin/checkpoint/format/shard_map.py``), and a row of a family
of Hugging Face names one (``vtp_plugin/checkpoint/hf/tensor_rows.py``).

They stand in the order in which Megatron's local layers register them; Transformer Engine's layers have as many. Read
in megatron/core of 0.15 to 0.19: ``models/gpt/gpt_model.py``, ``transformer/transformer_layer.py``,
``transformer/attention.py``, ``transformer/multi_latent_attention.py``, ``transformer/mlp.py``, ``transformer/moe`` and
``transformer/multi_token_prediction.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from vtp_plugin.plan.model.lora import Matrices


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
    """Sizes of the whole model; by default that of a Llama, whose positions are rotations.

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
    num_predicting: int = 0
    hidden: int
    heads: int
    groups: int
    kv_channels: int
    ffn: int
    vocab: int
    num_positions: int = 0
    is_gated: bool = True
    has_bias: bool = False
    has_qkv_bias: bool = False
    has_norm_bias: bool = False
    has_query_norm: bool = False
    is_tied: bool = False
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

    def matrices(self, *, has_experts: bool) -> Matrices:
        """Say which published matrices its layers have, those with experts or those without."""
        return Matrices(
            is_gated=self.is_gated,
            has_experts=has_experts,
            is_latent=self.latent is not None,
            has_latent_queries=self.latent is not None and self.latent.q_lora_rank > 0,
        )

    @property
    def num_experts(self) -> int:
        """Number of experts of a layer that has some; 0 without them."""
        return 0 if self.experts is None else self.experts.number


Needs = Callable[[GPTModel], bool]
Cut = Literal["rows", "columns"]
Kind = Literal["all", "dense", "experts"]

LAYERS: Final = "decoder.layers"
"""The module of the layers; what is in one is called by this, the layer's number, and its name in the layer."""
_VOCABULARY: Final = "the padded vocabulary"
_FEED_FORWARD: Final = "a feed-forward size"


def _always(model: GPTModel) -> bool:
    del model
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow:
    """A parameter of a GPT, in every layer that has it.

    Attributes:
        name: its name in a model of local layers, with ``{expert}``; of those of layers, inside the layer.
        stored_as: its name in a checkpoint, where layers and experts are dimensions; empty where it is the same.
        parts: sizes of what lies one behind another in its first dimension, by the names of :class:`GPTModel` or of
            sizes that follow from it; empty if memory is not planned with it, and only its place is known.
        width: its second dimension, likewise, or several more; empty of a vector.
        cut: the dimension of which each tensor-parallel rank has a part; None if each rank has all.
        cut_name: what an error calls that dimension; the name of the module where it is empty.
        is_by_group: each query group has rows of all parts in turn, and they are cut together; else each part is cut.
        is_gated: a gated model has its part twice.
        is_routed: there is one for each routed expert.
        kind: which layers have it: all, those with experts, or the others.
        needs: tells whether a model has it.
    """

    name: str
    stored_as: str = ""
    parts: tuple[str, ...] = ()
    width: str | tuple[str, ...] = ""
    cut: Cut | None = None
    cut_name: str = ""
    is_by_group: bool = False
    is_gated: bool = False
    is_routed: bool = False
    kind: Kind = "all"
    needs: Needs = _always

    @property
    def key(self) -> str:
        """Its name in a checkpoint."""
        return self.stored_as or self.name

    @property
    def module(self) -> str:
        """Name of the module that has it."""
        return self.name.rpartition(".")[0]

    @property
    def is_padded(self) -> bool:
        """Whether its rows are words, and Megatron adds some."""
        return self.cut_name == _VOCABULARY

    def rows(self, model: GPTModel) -> tuple[int, ...]:
        """Return the lengths of its parts in a model."""
        return tuple(_size(model, name) for name in self.parts) * (2 if self.is_gated and model.is_gated else 1)

    def rest(self, model: GPTModel) -> tuple[int, ...]:
        """Return its shape behind the first dimension."""
        names = self.width if isinstance(self.width, tuple) else (self.width,) if self.width else ()
        return tuple(_size(model, name) for name in names)


def _latent(model: GPTModel) -> Latent:
    assert model.latent is not None
    return model.latent


def _experts(model: GPTModel) -> Experts:
    assert model.experts is not None
    return model.experts


_DERIVED: Final[Mapping[str, Callable[[GPTModel], int]]] = {
    "attended": lambda model: model.heads * (model.kv_channels if model.latent is None else model.latent.v_head_dim),
    "latent queries": lambda model: model.heads * (_latent(model).qk_head_dim + _latent(model).qk_pos_emb_head_dim),
    "query rank": lambda model: _latent(model).q_lora_rank,
    "key rank": lambda model: _latent(model).kv_lora_rank,
    "key rank and position": lambda model: _latent(model).kv_lora_rank + _latent(model).qk_pos_emb_head_dim,
    "latent keys and values": lambda model: model.heads * (_latent(model).qk_head_dim + _latent(model).v_head_dim),
    "number of experts": lambda model: _experts(model).number,
    "expert ffn": lambda model: _experts(model).ffn,
    "shared ffn": lambda model: _experts(model).shared_ffn,
    "both hidden": lambda model: 2 * model.hidden,
}


def _size(model: GPTModel, name: str) -> int:
    return _DERIVED[name](model) if name in _DERIVED else getattr(model, name)


def _is_plain(model: GPTModel) -> bool:
    return model.latent is None


def _is_latent(model: GPTModel) -> bool:
    return model.latent is not None


def _has_query_rank(model: GPTModel) -> bool:
    return _is_latent(model) and _latent(model).q_lora_rank > 0


def _norm(
    name: str, width: str = "hidden", *, stored_as: str = "", needs: Needs = _always
) -> tuple[ParameterRow, ParameterRow]:
    """Return the rows of a norm; ``stored_as`` begins its keys where it is stored with the layer behind it."""

    def has_bias(model: GPTModel) -> bool:
        return needs(model) and model.has_norm_bias

    def row(leaf: str, needs: Needs) -> ParameterRow:
        key = stored_as and f"{stored_as}{leaf}"
        return ParameterRow(name=f"{name}.{leaf}", stored_as=key, parts=(width,), needs=needs)

    return row("weight", needs), row("bias", has_bias)


def _query_norm(name: str, width: str, needs: Needs) -> tuple[ParameterRow, ParameterRow]:
    return _norm(f"self_attention.{name}", width, needs=lambda model: needs(model) and model.has_query_norm)


def _linear(
    name: str,
    parts: tuple[str, ...],
    width: str,
    cut: Cut,
    has_bias: Needs = lambda model: model.has_bias,
    **fields: Any,
) -> tuple[ParameterRow, ParameterRow]:
    """Return the rows of a linear layer: its weight, and the bias, of which a rank has what it has of the rows."""
    weight = ParameterRow(name=f"{name}.weight", parts=parts, width=width, cut=cut, **fields)
    bias = replace(
        weight,
        name=f"{name}.bias",
        stored_as=weight.stored_as and f"{weight.stored_as.removesuffix('weight')}bias",
        width="",
        cut="rows" if cut == "rows" else None,
        needs=lambda model: weight.needs(model) and has_bias(model),
    )
    return weight, bias


def _latent_weight(name: str, rows: str, width: str, needs: Needs = _is_latent) -> ParameterRow:
    return ParameterRow(name=f"self_attention.{name}.weight", parts=(rows,), width=width, cut="rows", needs=needs)


def _feed_forward(name: str, ffn: str, stored_as: str = "", **fields: Any) -> tuple[ParameterRow, ...]:
    """Return the rows of a feed-forward layer."""

    def linear(layer: str, rows: str, width: str, cut: Cut, *, is_gated: bool) -> tuple[ParameterRow, ...]:
        key = stored_as and f"{stored_as}.{layer}.weight"
        own: dict[str, Any] = {"stored_as": key, "cut_name": _FEED_FORWARD, "is_gated": is_gated}
        return _linear(f"{name}.{layer}", (rows,), width, cut, **own, **fields)

    return (
        *linear("linear_fc1", ffn, "hidden", "rows", is_gated=True),
        *linear("linear_fc2", "hidden", ffn, "columns", is_gated=False),
    )


WORD_EMBEDDING: Final = ParameterRow(
    name="embedding.word_embeddings.weight", parts=("vocab",), width="hidden", cut="rows", cut_name=_VOCABULARY
)
OUTPUT: Final = replace(WORD_EMBEDDING, name="output_layer.weight")
"""The output layer. A model with one stage that is tied has none, one with several has a copy of the embedding."""
POSITION_EMBEDDING: Final = ParameterRow(
    name="embedding.position_embeddings.weight",
    parts=("num_positions",),
    width="hidden",
    needs=lambda model: model.num_positions > 0,
)
BEFORE_LAYERS: Final = (WORD_EMBEDDING, POSITION_EMBEDDING, ParameterRow(name="embedding.tokentype_embeddings.weight"))
"""What lies before the layers."""
FINAL_NORM: Final = _norm("decoder.final_layernorm")
"""The norm behind the layers."""
LAYER: Final = (
    *_norm("input_layernorm", stored_as="self_attention.linear_qkv.layer_norm_"),
    ParameterRow(name="self_attention.core_attention.softmax_offset"),
    *_linear("self_attention.linear_proj", ("hidden",), "attended", "columns"),
    *_linear(
        "self_attention.linear_qkv",
        ("queries", "keys", "keys"),
        "hidden",
        "rows",
        lambda model: model.has_bias or model.has_qkv_bias,
        is_by_group=True,
        needs=_is_plain,
    ),
    _latent_weight(
        "linear_q_proj",
        "latent queries",
        "hidden",
        lambda model: _is_latent(model) and not _has_query_rank(model),
    ),
    _latent_weight("linear_q_down_proj", "query rank", "hidden", _has_query_rank),
    _latent_weight("linear_q_up_proj", "latent queries", "query rank", _has_query_rank),
    _latent_weight("linear_kv_down_proj", "key rank and position", "hidden"),
    _latent_weight("linear_kv_up_proj", "latent keys and values", "key rank"),
    *_query_norm("q_layernorm", "kv_channels", _is_plain),
    *_query_norm("q_layernorm", "query rank", _has_query_rank),
    *_query_norm("k_layernorm", "kv_channels", _is_plain),
    *_query_norm("kv_layernorm", "key rank", _is_latent),
    *_norm("pre_mlp_layernorm", stored_as="mlp.linear_fc1.layer_norm_"),
    ParameterRow(name="mlp.router.weight", parts=("number of experts",), width="hidden", kind="experts"),
    ParameterRow(name="mlp.fc1_latent_proj.weight"),
    ParameterRow(name="mlp.fc2_latent_proj.weight"),
    *_feed_forward(
        "mlp.experts.local_experts.{expert}", "expert ffn", "mlp.experts.experts", kind="experts", is_routed=True
    ),
    ParameterRow(name="mlp.shared_experts.gate_weight"),
    *_feed_forward(
        "mlp.shared_experts", "shared ffn", kind="experts", needs=lambda model: _experts(model).shared_ffn > 0
    ),
    *_feed_forward("mlp", "ffn", kind="dense"),
)
"""What a layer has, whatever the model and the layer."""
PREDICTION: Final = (
    *_norm("enorm"),
    *_norm("hnorm"),
    ParameterRow(name="eh_proj.weight", parts=("hidden",), width="both hidden", cut="rows"),
)
"""What a layer of multi-token prediction has before the layer inside it, which is as the last one of the model."""
PREDICTION_NORM: Final = _norm("final_layernorm")
"""What it has behind that."""


DENSE_LAYER: Final = tuple(row for row in LAYER if row.kind != "experts" and row.parts)
"""What a layer without experts can have, and memory is planned with."""
EXPERT_LAYER: Final = tuple(row for row in LAYER if row.kind != "dense" and row.parts)
"""What a layer with experts can have, likewise."""

# Where several rows have one name, for different kinds of attention, the first of them.
_BY_NAME: Final = {row.name: row for row in (OUTPUT, *FINAL_NORM, *LAYER[::-1], *BEFORE_LAYERS)}


def parameter(name: str) -> ParameterRow:
    """Return the row of a parameter by its name: of those of attention, that without latent queries and keys.

    >>> parameter("self_attention.linear_qkv.weight").is_by_group
    True
    """
    return _BY_NAME[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionTower(GPTModel):
    """Sizes of a vision tower, with its projector.

    Attributes:
        channels: number of colours of a pixel.
        frames: number of pictures of a video that become one vector.
        patch: width of the squares of pixels that become one vector.
        merge: width of the squares of vectors that become one token.
        out: width of a token.
        vocab: it knows no words.
        has_bias: all linear layers have one.
        has_qkv_bias: see the base.
    """

    channels: int
    frames: int
    patch: int
    merge: int
    out: int
    vocab: int = 0
    has_bias: bool = True
    has_qkv_bias: bool = True

    @property
    def merged(self) -> int:
        """Width of a square of vectors."""
        return self.hidden * self.merge * self.merge


PATCHES: Final = ParameterRow(
    name="patch_embed.proj.weight", parts=("hidden",), width=("channels", "frames", "patch", "patch")
)
"""What makes vectors of squares of pixels."""
PROJECTOR_NORM: Final = ParameterRow(name="layernorm.weight", parts=("hidden",))
"""The norm before the projector."""
_FIRST: Final = ParameterRow(name="encoder.linear_fc1.weight", parts=("merged",), width="merged", cut="rows")
_SECOND: Final = ParameterRow(name="encoder.linear_fc2.weight", parts=("out",), width="merged", cut="columns")
PROJECTOR: Final = (
    (_FIRST, replace(_FIRST, name="encoder.linear_fc1.bias", width="")),
    (_SECOND, replace(_SECOND, name="encoder.linear_fc2.bias", width="", cut=None)),
)
"""The two linear layers of the projector, each with its weight and its bias."""


def tower_parameter(name: str) -> ParameterRow:
    """Return the row of a parameter of a layer, which a tower stores under the name that it has in the model.

    >>> tower_parameter("input_layernorm.weight").key
    'input_layernorm.weight'
    """
    return replace(parameter(name), stored_as="")
