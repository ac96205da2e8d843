"""A job that says which options of Megatron change the function of a tiny GPT: its logits with the same weights."""

from __future__ import annotations

import argparse
import contextlib
import io
import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

from tests.support.mended_wheel import mend_wheel
from tests.support.pool import init_gloo

SIZES = (
    *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "4", "--seq-length", "12"),
    *("--max-position-embeddings", "12"),
)


def compare(bases: Mapping[str, Sequence[str]], cases: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Give for each case, a base with more flags, ``same``, ``differs``, or why there is no such model.

    Args:
        bases: flags of models, by name.
        cases: name of a base, and the flags besides.
    """
    init_gloo()
    parallel_state.initialize_model_parallel()
    mended = mend_wheel()
    try:
        # Megatron asks for a device by itself.
        on_cpu = mock.patch("torch.cuda.current_device", return_value="cpu")
        no_states = mock.patch.object(CudaRNGStatesTracker, "fork", lambda *args: contextlib.nullcontext())
        with on_cpu, no_states, warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            weights: dict[str, Any] = {}
            plain = {name: _logits(flags, weights, name) for name, flags in bases.items()}
            return [_outcome(plain[base], [*bases[base], *flags], weights, base) for base, flags in cases]
    finally:
        mended.revert()
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _outcome(plain: torch.Tensor, flags: Sequence[str], weights: dict[str, Any], base: str) -> str:
    try:
        found = _logits(flags, weights, base)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return "same" if torch.allclose(found, plain, rtol=1e-5, atol=1e-6) else "differs"


def _logits(flags: Sequence[str], weights: dict[str, Any], base: str) -> torch.Tensor:
    """Compute logits with the weights of the base, which are those of its first model."""
    from megatron.training import arguments

    with contextlib.redirect_stderr(io.StringIO()):
        parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        args = parser.parse_args([*SIZES, *flags])
    args.params_dtype, args.use_cpu_initialization = torch.float32, True
    args.add_position_embedding = True
    args.no_persist_layer_norm, args.gradient_accumulation_fusion, args.masked_softmax_fusion = True, False, False
    args.bias_gelu_fusion = args.bias_swiglu_fusion = args.bias_dropout_fusion = args.apply_rope_fusion = False
    # What validate_args makes of flags.
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        if isinstance(value := getattr(args, name), list) and len(value) == 1:
            setattr(args, name, value[0])
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    args.kv_channels = args.kv_channels or 4
    args.ffn_hidden_size = args.ffn_hidden_size or 24
    if args.num_experts:
        args.moe_ffn_hidden_size = args.moe_ffn_hidden_size or 24
    args.virtual_pipeline_model_parallel_size = None
    args.variable_seq_lengths, args.pipeline_dtype = False, torch.float32
    if not hasattr(args, "cp_comm_type") or isinstance(args.cp_comm_type, list):
        args.cp_comm_type = (getattr(args, "cp_comm_type", None) or ["p2p"])[0]
    config: Any = arguments.core_transformer_config_from_args(args)
    spec = get_gpt_layer_local_spec(
        args.num_experts, args.moe_grouped_gemm, args.qk_layernorm, normalization=args.normalization
    )
    torch.manual_seed(1)
    model = GPTModel(
        config,
        spec,
        vocab_size=32,
        max_sequence_length=12,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        share_embeddings_and_output_weights=False,
    )
    own = {name: value for name, value in model.state_dict().items() if value is not None and "_extra" not in name}
    drawn = torch.Generator().manual_seed(7)
    for name, value in own.items():
        if isinstance(value, torch.Tensor) and name not in weights.setdefault(base, {}):
            is_norm = "norm" in name and name.endswith("weight")
            weights[base][name] = torch.randn(value.shape, generator=drawn) * (0.1 if is_norm else 0.6) + 0.5 * is_norm
    model.load_state_dict(weights[base], strict=False)
    model.eval()
    tokens = torch.arange(24).reshape(2, 12) % 29
    mask = torch.ones(12, 12, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        return model(tokens, torch.arange(12).expand(2, 12), mask)
