"""Holds functions of Megatron under their names, and a class that replaces one of Megatron's."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads as finalize_model_grads


class Norm:
    """As MindSpeed's norm: calling the class makes one of torch's."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> Any:
        """Make a layer norm that marks its weights as Megatron's does."""
        norm = torch.nn.LayerNorm(hidden_size, eps=eps)
        norm.config = config
        for weight in (norm.weight, norm.bias):
            weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        return norm
