"""Mixtral."""

from __future__ import annotations

from typing import Final

from vtp_plugin.checkpoint.hf.tensor_rows import ATTENTION, ENDS, FUSED, ROUTER_LOSS, ExpertFields, Family, experts

MIXTRAL: Final = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    rows=(*ENDS, *ATTENTION, *experts("block_sparse_moe", "w1", "w3", "w2")),
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "num_key_value_heads": 8, "num_experts_per_tok": 2},
    fixed={"sliding_window": (None,), "router_jitter_noise": (0.0,)},
    harmless=ROUTER_LOSS,
    fused=FUSED,
    experts=ExpertFields(number=("num_local_experts", "num_experts"), ffn="intermediate_size"),
)
