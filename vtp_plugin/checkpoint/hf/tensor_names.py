"""Rows that families have in common, with the names of transformers and of Megatron's models."""

from __future__ import annotations

from typing import Final

from vtp_plugin.checkpoint.hf.tensor_rows import TensorRow

_LAYER: Final = "model.layers.{layer}."
_OURS: Final = "decoder.layers."
_EXPERTS: Final = "mlp.experts.experts"
_BOTH: Final = "gate_and_up"


def layer_row(
    hf_names: tuple[str, ...], shapes: tuple[str, ...], *megatron_keys: str, is_by_group: bool = False
) -> TensorRow:
    """Make a row of every layer, from names inside the layer."""
    names = tuple(_LAYER + name for name in hf_names)
    return TensorRow(
        hf_names=names,
        shapes=shapes,
        megatron_keys=tuple(_OURS + name for name in megatron_keys),
        is_by_group=is_by_group,
    )


EMBEDDING: Final = TensorRow(
    hf_names=("model.embed_tokens.weight",),
    shapes=("vocab hidden",),
    megatron_keys=("embedding.word_embeddings.weight",),
)
FINAL_NORM: Final = TensorRow(
    hf_names=("model.norm.weight",), shapes=("hidden",), megatron_keys=("decoder.final_layernorm.weight",)
)
OUTPUT: Final = TensorRow(
    hf_names=("lm_head.weight",), shapes=("vocab hidden",), megatron_keys=("output_layer.weight",), is_of_untied=True
)
ENDS: Final = (EMBEDDING, FINAL_NORM, OUTPUT)
# Local layers have norms of their own, and store them under the names that Transformer Engine's fused layers have.
ATTENTION: Final = (
    layer_row(("input_layernorm.weight",), ("hidden",), "self_attention.linear_qkv.layer_norm_weight"),
    layer_row(
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        ("queries hidden", "keys hidden", "keys hidden"),
        "self_attention.linear_qkv.weight",
        is_by_group=True,
    ),
    layer_row(("self_attn.o_proj.weight",), ("hidden queries",), "self_attention.linear_proj.weight"),
)
QKV_BIAS: Final = layer_row(
    ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    ("queries", "keys", "keys"),
    "self_attention.linear_qkv.bias",
    is_by_group=True,
)
QUERY_NORMS: Final = (
    layer_row(("self_attn.q_norm.weight",), ("head_dim",), "self_attention.q_layernorm.weight"),
    layer_row(("self_attn.k_norm.weight",), ("head_dim",), "self_attention.k_layernorm.weight"),
)
DENSE: Final = (
    layer_row(("post_attention_layernorm.weight",), ("hidden",), "mlp.linear_fc1.layer_norm_weight"),
    layer_row(("mlp.gate_proj.weight", "mlp.up_proj.weight"), ("ffn hidden", "ffn hidden"), "mlp.linear_fc1.weight"),
    layer_row(("mlp.down_proj.weight",), ("hidden ffn",), "mlp.linear_fc2.weight"),
)


def experts(folder: str, gate: str, up: str, down: str) -> tuple[TensorRow, ...]:
    """Return the rows of a layer of experts.

    Args:
        folder: name of the layer's feed-forward part, in Hugging Face's names.
        gate: name of an expert's gate projection.
        up: name of the projection that the gate is multiplied with.
        down: name of the projection back.

    >>> [row.megatron_keys[-1] for row in experts("mlp", "gate_proj", "up_proj", "down_proj")][:2]
    ['decoder.layers.pre_mlp_layernorm.weight', 'decoder.layers.mlp.router.weight']
    """
    one = folder + ".experts.{expert}."
    return (
        # Local layers store the norm before experts as that of a dense layer; Transformer Engine's keep its name.
        layer_row(
            ("post_attention_layernorm.weight",),
            ("hidden",),
            "mlp.linear_fc1.layer_norm_weight",
            "pre_mlp_layernorm.weight",
        ),
        layer_row((f"{folder}.gate.weight",), ("num_experts hidden",), "mlp.router.weight"),
        layer_row(
            (f"{one}{gate}.weight", f"{one}{up}.weight"),
            ("expert_ffn hidden", "expert_ffn hidden"),
            f"{_EXPERTS}.linear_fc1.weight",
        ),
        layer_row((f"{one}{down}.weight",), ("hidden expert_ffn",), f"{_EXPERTS}.linear_fc2.weight"),
    )


# As transformers 5 has them while it computes, also those of Mixtral. A file holds them so where its writer did not let
# transformers take them apart.
FUSED: Final = (
    layer_row(("mlp.gate.weight",), ("num_experts hidden",), "mlp.router.weight"),
    layer_row(("mlp.experts.gate_up_proj",), (f"num_experts {_BOTH} hidden",), "mlp.experts.experts.linear_fc1.weight"),
    layer_row(("mlp.experts.down_proj",), ("num_experts hidden expert_ffn",), "mlp.experts.experts.linear_fc2.weight"),
)

# Harmless fields that several families have, with the reason.
UNUSED_WINDOW: Final = {
    "sliding_window": "not used, since use_sliding_window is false",
}
ROUTER_LOSS: Final = {
    "output_router_logits": "what transformers returns while it trains",
    "router_aux_loss_coef": "a loss of training: --moe-aux-loss-coeff",
}
