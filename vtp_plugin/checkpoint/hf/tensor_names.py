"""Rows that families have in common, with the names of transformers and of Megatron's models."""

from __future__ import annotations

from typing import Final

from vtp_plugin.checkpoint.hf.tensor_rows import TensorRow
from vtp_plugin.plan.model.gpt_parameters import FINAL_NORM, OUTPUT, WORD_EMBEDDING, parameter

_LAYER: Final = "model.layers.{layer}."
_EXPERTS: Final = "mlp.experts.local_experts.{expert}"


def layer_row(hf_names: tuple[str, ...], name: str, *, has_own_name: bool = False) -> TensorRow:
    """Make a row of every layer, from names inside the layer: theirs, and that of Megatron's parameter."""
    names = tuple(_LAYER + each for each in hf_names)
    return TensorRow(hf_names=names, parameter=parameter(name), has_own_name=has_own_name)


ENDS: Final = (
    TensorRow(hf_names=("model.embed_tokens.weight",), parameter=WORD_EMBEDDING),
    TensorRow(hf_names=("model.norm.weight",), parameter=FINAL_NORM[0]),
    TensorRow(hf_names=("lm_head.weight",), parameter=OUTPUT),
)
ATTENTION: Final = (
    layer_row(("input_layernorm.weight",), "input_layernorm.weight"),
    layer_row(
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "self_attention.linear_qkv.weight",
    ),
    layer_row(("self_attn.o_proj.weight",), "self_attention.linear_proj.weight"),
)
QKV_BIAS: Final = layer_row(
    ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"), "self_attention.linear_qkv.bias"
)
QUERY_NORMS: Final = (
    layer_row(("self_attn.q_norm.weight",), "self_attention.q_layernorm.weight"),
    layer_row(("self_attn.k_norm.weight",), "self_attention.k_layernorm.weight"),
)
DENSE: Final = (
    layer_row(("post_attention_layernorm.weight",), "pre_mlp_layernorm.weight"),
    layer_row(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "mlp.linear_fc1.weight"),
    layer_row(("mlp.down_proj.weight",), "mlp.linear_fc2.weight"),
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
        layer_row(("post_attention_layernorm.weight",), "pre_mlp_layernorm.weight", has_own_name=True),
        layer_row((f"{folder}.gate.weight",), "mlp.router.weight"),
        layer_row((f"{one}{gate}.weight", f"{one}{up}.weight"), f"{_EXPERTS}.linear_fc1.weight"),
        layer_row((f"{one}{down}.weight",), f"{_EXPERTS}.linear_fc2.weight"),
    )


# As transformers 5 has them while it computes, also those of Mixtral. A file holds them so where its writer did not let
# transformers take them apart.
FUSED: Final = (
    layer_row(("mlp.gate.weight",), "mlp.router.weight"),
    layer_row(("mlp.experts.gate_up_proj",), f"{_EXPERTS}.linear_fc1.weight"),
    layer_row(("mlp.experts.down_proj",), f"{_EXPERTS}.linear_fc2.weight"),
)

# Harmless fields that several families have, with the reason.
UNUSED_WINDOW: Final = {
    "sliding_window": "not used, since use_sliding_window is false",
}
ROUTER_LOSS: Final = {
    "output_router_logits": "what transformers returns while it trains",
    "router_aux_loss_coef": "a loss of training: --moe-aux-loss-coeff",
}
