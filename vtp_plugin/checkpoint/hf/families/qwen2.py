"""Qwen 2 and Qwen 2.5."""

from __future__ import annotations

from typing import Final

from vtp_plugin.checkpoint.hf.tensor_rows import ATTENTION, DENSE, ENDS, QKV_BIAS, UNUSED_WINDOW, Family

QWEN2: Final = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    rows=(*ENDS, *ATTENTION, QKV_BIAS, *DENSE),
    defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "num_key_value_heads": 32},
    harmless={
        **UNUSED_WINDOW,
        **dict.fromkeys(("attention_bias", "qkv_bias"), "its class has biases, whatever it says"),
    },
    has_qkv_bias=True,
)
