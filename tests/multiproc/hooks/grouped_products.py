"""What stands for the package grouped_gemm, whose products of grouped experts need a GPU."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch


def stand_in_for_grouped_gemm() -> None:
    """Give Megatron's experts a `gmm` for CPUs, for as long as this process lives; newer Megatrons ask for none."""
    util: Any = importlib.import_module("megatron.core.transformer.moe.grouped_gemm_util")
    util.ops = SimpleNamespace(gmm=_gmm)
    util.grouped_gemm = SimpleNamespace(ops=util.ops)


def _gmm(rows: torch.Tensor, weights: torch.Tensor, num_rows: torch.Tensor, trans_b: bool = False) -> torch.Tensor:
    """Multiply the rows of each expert, which follow each other, with its weights; an expert may have none.

    Args:
        rows: `[tokens, in]`.
        weights: `[experts, in, out]`.
        num_rows: of each expert.
        trans_b: whether weights are transposed; Megatron does not ask for that.

    Returns:
        The products, `[tokens, out]`.
    """
    assert not trans_b
    parts = rows.split(num_rows.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])
