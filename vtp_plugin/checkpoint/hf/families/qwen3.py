"""Qwen 3, the dense ones."""

from __future__ import annotations

from typing import Final

from vtp_plugin.checkpoint.hf.tensor_rows import ATTENTION, DENSE, ENDS, QUERY_NORMS, UNUSED_WINDOW, Family

QWEN3: Final = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    rows=(*ENDS, *ATTENTION, *QUERY_NORMS, *DENSE),
    defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "num_key_value_heads": 32, "head_dim": 128},
    harmless=UNUSED_WINDOW,
    has_query_norm=True,
)
