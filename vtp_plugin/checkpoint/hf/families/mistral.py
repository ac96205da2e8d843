"""Mistral 7B from version 0.2 on, and others of its class without a window."""

from __future__ import annotations

from typing import Final

from vtp_plugin.checkpoint.hf.tensor_rows import ATTENTION, DENSE, ENDS, Family

MISTRAL: Final = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    rows=(*ENDS, *ATTENTION, *DENSE),
    defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "num_key_value_heads": 8, "sliding_window": 4096},
    fixed={"sliding_window": (None,)},
)
