"""Stands for Transformer Engine where no GPU is: its layers on one rank, with its names of parameters, in plain torch.

Written from what Megatron 0.19 asks of version 1.12; what no layer of a GPT needs is not there.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

VERSION = "1.12.0"


def _unset(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full(shape, float("nan")))


class _Layer(torch.nn.Module):
    """A layer: besides parameters it stores a state, which is empty unless it computes with 8 bits."""

    fp8 = fp8_calibration = False
    fp8_meta = {"fp8_checkpoint": False}

    def get_extra_state(self) -> torch.Tensor:
        """Give what it stores."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Take what was stored: nothing."""
        assert state is None, state


class RMSNorm(_Layer):
    """A norm on its own."""

    def __init__(self, *, normalized_shape: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.weight, self.eps = _unset(normalized_shape), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute it."""
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


class Linear(_Layer):
    """A linear layer."""

    def __init__(
        self, *, in_features: int, out_features: int, bias: bool, return_bias: bool, parallel_mode: Any, **_: Any
    ) -> None:
        super().__init__()
        assert not return_bias
        self.parallel_mode, self.weight = parallel_mode, _unset(out_features, in_features)
        self.bias = _unset(out_features) if bias else None

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """Compute it."""
        return linear(x, self.weight, self.bias)


class LayerNormLinear(Linear):
    """A norm and a linear layer in one."""

    def __init__(self, *, in_features: int, eps: float, normalization: str, **options: Any) -> None:
        super().__init__(in_features=in_features, **options)
        assert normalization == "RMSNorm"
        self.layer_norm_weight, self.eps = _unset(in_features), eps

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """Compute both."""
        return super().forward(rms_norm(x, self.layer_norm_weight.shape, self.layer_norm_weight, self.eps))


class GroupedLinear(_Layer):
    """A linear layer of every expert."""

    def __init__(self, *, num_gemms: int, in_features: int, out_features: int, bias: bool, **_: Any) -> None:
        super().__init__()
        assert not bias
        self.num_gemms, self.use_bias, self.in_features, self.out_features = num_gemms, bias, in_features, out_features
        for number in range(num_gemms):
            self.register_parameter(f"weight{number}", _unset(out_features, in_features))

    def init_fp8_metadata(self, num_gemms: int) -> None:
        """Do nothing, without 8 bits."""

    def forward(self, x: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> torch.Tensor:
        """Compute all."""
        parts = torch.split(x, m_splits)
        return torch.cat([linear(part, getattr(self, f"weight{number}")) for number, part in enumerate(parts)])


class DotProductAttention(torch.nn.Module):
    """Attention: it has no weights, and lets its state be missing."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, mask: Any, *, attn_mask_type: str) -> torch.Tensor:
        """Compute it: ``[S, B, heads, size]`` in, ``[S, B, heads times size]`` out."""
        assert attn_mask_type == "causal"
        times = query.shape[2] // key.shape[2]
        heads = (query, key.repeat_interleave(times, 2), value.repeat_interleave(times, 2))
        found = scaled_dot_product_attention(*(each.permute(1, 2, 0, 3) for each in heads), is_causal=True)
        return found.permute(2, 0, 1, 3).flatten(2)


def install() -> None:
    """Let ``import transformer_engine`` find this; to be called before Megatron is imported."""
    nothing = type("Nothing", (), {})
    layers = (DotProductAttention, GroupedLinear, LayerNormLinear, Linear, RMSNorm)
    modules: dict[str, dict[str, Any]] = {
        "": {"__version__": VERSION},
        ".common": {},
        ".common.recipe": {"DelayedScaling": nothing},
        ".pytorch": {layer.__name__: layer for layer in layers},
        ".pytorch.cpp_extensions": {"cast_to_fp8": None},
        ".pytorch.distributed": {"CudaRNGStatesTracker": nothing, "activation_recompute_forward": nullcontext},
        ".pytorch.float8_tensor": {"Float8Tensor": type("Float8Tensor", (torch.Tensor,), {})},
        ".pytorch.fp8": {
            "FP8GlobalStateManager": nothing, "fp8_autocast": nullcontext, "fp8_model_init": nullcontext,
        },
    }  # fmt: skip
    for name, held in modules.items():
        whole = f"transformer_engine{name}"
        module = sys.modules[whole] = ModuleType(whole)
        module.__spec__ = ModuleSpec(whole, None)
        vars(module).update(held)
        above, _, last = whole.rpartition(".")
        if above:
            setattr(sys.modules[above], last, module)
