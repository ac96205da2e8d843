"""Runs with the plugin's adapters: their flags, and what their factors are as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.multiproc.cases.script_cases import ScriptRun

LORA = ["--vtp-lora-rank", "5", "--vtp-lora-alpha", "15"]
LLAMA_LIKE = ["--swiglu", "--disable-bias-linear", "--group-query-attention", "--num-query-groups", "6"]
LLAMA_LIKE += ["--normalization", "RMSNorm", "--position-embedding-type", "rope", "--no-rope-fusion"]
LLAMA_LIKE += ["--no-bias-swiglu-fusion", "--untie-embeddings-and-output-weights"]
# As DeepSeek-V3, whose queries have a latent form, and V2 Lite, whose queries have none.
_LATENT = "--swiglu --disable-bias-linear --normalization RMSNorm --multi-latent-attention --kv-lora-rank 20"
_LATENT += " --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 8 --position-embedding-type rope --no-rope-fusion"
LATENT_KEYS = [*_LATENT.split(), "--no-bias-swiglu-fusion", "--untie-embeddings-and-output-weights"]
LATENT = [*LATENT_KEYS, "--q-lora-rank", "36", "--qk-layernorm"]
EXPERTS = [*LLAMA_LIKE, "--num-experts", "6", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "40"]
EXPERTS += ["--moe-token-dispatcher-type", "alltoall", "--moe-router-load-balancing-type", "none"]
NUM_FACTORS = 4 * 7 * 2
"""Layers, published matrices of each, factors of each pair."""
Factors = dict[str, np.ndarray[Any, Any]]


def whole_factors(runs: Sequence[ScriptRun], fact: str = "adapters") -> Factors:
    """Join the parts of all factors; copies must be equal to the bit, and no rank's base may have changed."""
    parts: dict[str, dict[int, Any]] = {}
    for run in runs:
        assert run.facts["base is as it was"] and run.facts["num_base"] > 0
        for name, part in run.facts[fact].items():
            others = parts.setdefault(name, {})
            rank = run.facts["etp_rank" if "experts" in name else "tp_rank"]
            if rank in others:
                np.testing.assert_array_equal(part, others[rank])
            others[rank] = part
    return {name: _join(name, [of_ranks[rank] for rank in sorted(of_ranks)]) for name, of_ranks in parts.items()}


def _join(name: str, parts: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    is_row = any(layer in name for layer in ("linear_proj", "linear_fc2"))
    is_cut = ("linear_in" in name) == is_row
    if is_cut:
        return np.concatenate(parts, axis=1 if is_row else 0)
    for other in parts[1:]:
        np.testing.assert_array_equal(other, parts[0])
    return parts[0]


def assert_same_factors(
    runs: Sequence[ScriptRun], reference: Sequence[ScriptRun], *, number: int = NUM_FACTORS, atol: float = 1e-5
) -> None:
    """Check that both trained the same factors, and that each of them was trained."""
    found, wanted, start = whole_factors(runs), whole_factors(reference), whole_factors(reference, "start")
    for name, factor in whole_factors(runs, "start").items():
        np.testing.assert_array_equal(factor, start[name], err_msg=name)
    assert found.keys() == wanted.keys() and len(found) == number
    for name, factor in found.items():
        np.testing.assert_allclose(factor, wanted[name], rtol=1e-5, atol=atol, err_msg=name)
        assert np.abs(factor - start[name]).max() > 0, f"{name} was not trained"
