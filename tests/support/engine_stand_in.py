"""Stands for Transformer Engine where no GPU is: its layers on one rank, with its names of parameters, in plain torch.

Written from what Megatron 0.19 asks of version 1.12; what no layer of a GPT needs is not there. A forward saves for its
backward what version 2.9 says: ``pytorch/module/linear.py``, ``layernorm_linear.py``, ``grouped_linear.py``,
``ops/basic/rmsnorm.py``, ``layer_norm.py``, ``attention/rope.py`` and, for flash attention,
``attention/dot_product_attention/backends.py``. Nothing runs backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import layer_norm, linear, rms_norm, scaled_dot_product_attention

VERSION = "1.12.0"


def _unset(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full(shape, float("nan")))


class _Saved(torch.autograd.Function):
    """Computes without a graph, and saves what the computation says."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., tuple[torch.Tensor, Sequence[torch.Tensor]]], *inputs: Any) -> Any:
        """Compute it."""
        output, saved = compute(*inputs)
        ctx.save_for_backward(*saved)
        return output


class Layer(torch.nn.Module):
    """A layer: besides parameters it stores a state, which is empty unless it computes with 8 bits."""

    fp8 = fp8_calibration = False
    fp8_meta = {"fp8_checkpoint": False}
    keeps_eight_bits = False
    """Of its input a linear layer keeps a byte for each number. It computes as without."""

    def get_extra_state(self) -> torch.Tensor:
        """Give what it stores."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Take what was stored: nothing."""
        assert state is None, state

    def kept(self, x: torch.Tensor) -> torch.Tensor:
        """Give what is kept of an input."""
        return torch.empty_like(x, dtype=torch.uint8) if Layer.keeps_eight_bits else x


def _normed(x: torch.Tensor, eps: float, weight: Any, bias: Any = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Compute a norm; give what it saves, too: its input, which is copied if it is not in one piece, and scales."""
    x, rows = x.contiguous(), torch.empty(x[..., 0].numel(), dtype=torch.float32)
    if bias is None:
        return rms_norm(x, weight.shape, weight, eps), [x, rows]
    return layer_norm(x, weight.shape, weight, bias, eps), [x, rows, torch.empty_like(rows)]


class RMSNorm(Layer):
    """A norm on its own."""

    def __init__(self, *, normalized_shape: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = _unset(normalized_shape), None, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute it."""
        return _Saved.apply(lambda x, *own: _normed(x, self.eps, *own), x, self.weight, self.bias)  # type: ignore[no-any-return]


class LayerNorm(RMSNorm):
    """A norm with a bias."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.bias = _unset(*self.weight.shape)


class Linear(Layer):
    """A linear layer."""

    def __init__(
        self, *, in_features: int, out_features: int, bias: bool, return_bias: bool, parallel_mode: Any, **_: Any
    ) -> None:
        super().__init__()
        self.parallel_mode, self.weight = parallel_mode, _unset(out_features, in_features)
        self.bias, self.returns_bias = _unset(out_features) if bias else None, return_bias

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Compute it."""
        bias = None if self.returns_bias else self.bias
        out = _Saved.apply(self.compute, x, self.weight, bias, *self.norm())
        return (out, self.bias) if self.returns_bias else out

    def norm(self) -> tuple[torch.Tensor | None, ...]:
        """Give the weights of a norm in front of it."""
        return ()

    def compute(self, x: Any, weight: Any, bias: Any, *norm: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Give the output, and what is saved."""
        x = x.contiguous()
        return linear(x, weight, bias), [self.kept(x), weight]


class LayerNormLinear(Linear):
    """A norm and a linear layer in one."""

    def __init__(self, *, in_features: int, eps: float, normalization: str, **options: Any) -> None:
        super().__init__(in_features=in_features, **options)
        self.layer_norm_weight, self.eps = _unset(in_features), eps
        self.layer_norm_bias = _unset(in_features) if normalization == "LayerNorm" else None

    def norm(self) -> tuple[torch.Tensor | None, ...]:
        """Give them."""
        return self.layer_norm_weight, self.layer_norm_bias

    def compute(self, x: Any, weight: Any, bias: Any, *norm: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Compute both."""
        normed, saved = _normed(x, self.eps, *norm)
        return linear(normed, weight, bias), [*saved, self.kept(normed), weight]


class GroupedLinear(Layer):
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
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]

        def compute(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
            parts = torch.split(x, m_splits)
            outputs = [linear(part, weight) for part, weight in zip(parts, weights, strict=True)]
            return torch.cat(outputs), [*map(self.kept, parts), *weights]

        return _Saved.apply(compute, x, *weights)  # type: ignore[no-any-return]


class DotProductAttention(torch.nn.Module):
    """Attention: it has no weights, and lets its state be missing."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, mask: Any, *, attn_mask_type: str) -> torch.Tensor:
        """Compute it: ``[S, B, heads, size]`` in, ``[S, B, heads times size]`` out."""
        assert attn_mask_type == "causal"
        heads = [each.transpose(0, 1).contiguous() for each in (query, key, value)]
        return _Saved.apply(_flash, *heads).flatten(2).transpose(0, 1).contiguous()


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    times, (size, length, heads, _) = query.shape[2] // key.shape[2], query.shape
    repeated = (query, key.repeat_interleave(times, 2), value.repeat_interleave(times, 2))
    out = scaled_dot_product_attention(*(each.transpose(1, 2) for each in repeated), is_causal=True)
    out = out.transpose(1, 2).contiguous()
    sums, seed = torch.empty(size, heads, length, dtype=torch.float32), torch.empty(2, dtype=torch.int64)
    return out, [query, key, value, out, sums, seed]


def apply_rotary_pos_emb(t: torch.Tensor, freqs: torch.Tensor, *, tensor_format: str, fused: bool) -> torch.Tensor:
    """Rotate ``[S, B, heads, size]`` in one kernel."""
    assert tensor_format == "sbhd" and fused

    def compute(t: torch.Tensor, freqs: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        angles, (low, high) = freqs[: len(t)], t.chunk(2, -1)
        return t * angles.cos().to(t.dtype) + torch.cat((-high, low), -1) * angles.sin().to(t.dtype), [freqs]

    return _Saved.apply(compute, t, freqs)  # type: ignore[no-any-return]


def install() -> None:
    """Let ``import transformer_engine`` find this; to be called before Megatron is imported."""
    nothing = type("Nothing", (), {})
    layers = (DotProductAttention, GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm)
    modules: dict[str, dict[str, Any]] = {
        "": {"__version__": VERSION},
        ".common": {},
        ".common.recipe": {"DelayedScaling": nothing},
        ".pytorch": {layer.__name__: layer for layer in layers},
        ".pytorch.attention": {"apply_rotary_pos_emb": apply_rotary_pos_emb},
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
