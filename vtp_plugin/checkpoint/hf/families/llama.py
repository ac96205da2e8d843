"""Llama 2, and Llama 3 to 3.3."""

from __future__ import annotations

from typing import Final

from vtp_plugin.checkpoint.hf.tensor_rows import ATTENTION, DENSE, ENDS, Family

LLAMA: Final = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    rows=(*ENDS, *ATTENTION, *DENSE),
    defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0},
)
