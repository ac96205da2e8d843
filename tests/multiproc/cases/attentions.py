"""Kinds of attention that models of today have, as small as their structure allows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from tests.multiproc.hooks.gathered_attention import GatheredAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What a kind of attention asks of Megatron.

    Attributes:
        config: fields of the configuration.
        attributes: what megatron.training sets in the configuration besides.
        spec: keywords of the layer's specification.
        model: keywords of the model.
        config_class: of the configuration.
    """

    config: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    config_class: type[TransformerConfig] = TransformerConfig


# With Megatron's start weights, small ones, all scores of models this narrow are about zero: keys would hardly matter.
_SHARP = {"init_method_std": 0.2}
_ROTARY = {"position_embedding_type": "rope", "rotary_base": 100}
# All widths differ, and a head of values is wider than one of keys.
_LATENT = {
    **_SHARP,
    "q_lora_rank": 36,
    "kv_lora_rank": 20,
    "qk_head_dim": 2,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rotary_base": 100,
    "rope_type": "rope",
}
ATTENTIONS = {
    "": Attention(),
    "latent": Attention(
        config=_LATENT,
        spec={"multi_latent_attention": True},
        model={"position_embedding_type": "rope"},
        config_class=MLATransformerConfig,
    ),
    "latent normed": Attention(
        config={**_LATENT, "qk_layernorm": True},
        spec={"multi_latent_attention": True, "qk_layernorm": True},
        model={"position_embedding_type": "rope"},
        config_class=MLATransformerConfig,
    ),
    "latent without ranks of queries": Attention(
        config={**_LATENT, "q_lora_rank": None},
        spec={"multi_latent_attention": True},
        model={"position_embedding_type": "rope"},
        config_class=MLATransformerConfig,
    ),
    # Of 12 heads each 6 share keys and values; stages of 4 ranks hold them twice.
    "grouped": Attention(config={**_SHARP, "num_query_groups": 2}, model=_ROTARY),
    "one group": Attention(config={**_SHARP, "num_query_groups": 1}, model=_ROTARY),
    # In heads of two channels a norm would divide by almost nothing now and then.
    "normed": Attention(
        config={**_SHARP, "qk_layernorm": True, "normalization": "RMSNorm", "kv_channels": 6},
        spec={"qk_layernorm": True},
    ),
    # Each head has a logit that takes a share of the attention and gives nothing.
    "sinks": Attention(config={**_SHARP, "softmax_type": "learnable"}),
    # Every second layer sees three positions back only.
    "windows": Attention(config={**_SHARP, "window_size": (3, 0), "window_attn_skip_freq": 2}),
    "rotary": Attention(config=_SHARP, model=_ROTARY),
    "partly rotary": Attention(config={**_SHARP, "kv_channels": 4}, model={**_ROTARY, "rotary_percent": 0.5}),
    "yarn": Attention(
        config=_SHARP,
        attributes={
            **{"yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 4, "yarn_beta_fast": 32.0},
            **{"yarn_beta_slow": 1.0, "yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0},
            "yarn_correction_range_round_to_int": True,
        },
        model={"position_embedding_type": "yarn", "rotary_base": 100},
    ),
}


def layer_spec(name: str, *, is_gathered: bool) -> ModuleSpec:
    """Give the layer with a kind of attention; ``is_gathered`` takes the core of the tests."""
    spec = get_gpt_layer_local_spec(**ATTENTIONS[name].spec)
    if is_gathered:
        submodules: Any = spec.submodules
        submodules.self_attention.submodules.core_attention = GatheredAttention
    return spec
