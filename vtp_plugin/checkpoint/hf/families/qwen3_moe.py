"""Qwen 3 with experts."""

from __future__ import annotations

from typing import Final

from vtp_plugin.checkpoint.hf.tensor_rows import (
    ATTENTION,
    ENDS,
    FUSED,
    QUERY_NORMS,
    ROUTER_LOSS,
    UNUSED_WINDOW,
    ExpertFields,
    Family,
    experts,
)

QWEN3_MOE: Final = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    rows=(*ENDS, *ATTENTION, *QUERY_NORMS, *experts("mlp", "gate_proj", "up_proj", "down_proj")),
    defaults={
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    fixed={
        "decoder_sparse_step": (1,),
        "mlp_only_layers": (),
    },
    harmless={**UNUSED_WINDOW, **ROUTER_LOSS},
    has_query_norm=True,
    fused=FUSED,
    experts=ExpertFields(
        number=("num_experts", "num_local_experts"), ffn="moe_intermediate_size", normalised="norm_topk_prob"
    ),
)
