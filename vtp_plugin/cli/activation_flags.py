"""Megatron's flags that determine the activations that a rank keeps."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Literal

from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.memory.layer_sizes import Microbatch, Recompute, Routing

# Exchanges of context parallelism.
_WITH_OWN_OUTPUT = (("a2a",), ("all_gather",))
_DISPATCHERS = ("alltoall", "allgather")
_SCALED_BLOCKS = ("mxfp8", "blockwise")
_BACKENDS = (None, "auto", "flash", "fused")
_OF_EXPERTS = (
    *("--moe-expert-capacity-factor", "--moe-router-fusion", "--moe-permute-fusion"),
    *("--moe-z-loss-coeff", "--moe-input-jitter-eps", "--moe-shared-expert-overlap", "--moe-layer-recompute"),
    *("--moe-apply-probs-on-input", "--moe-router-padding-for-quantization", "--moe-router-padding-for-fp8"),
    *("--moe-pad-expert-input-to-capacity", "--moe-enable-deepep", "--overlap-moe-expert-parallel-comm"),
)
# Other activations are kept with these.
OTHER_ACTIVATIONS = (
    *("--attention-softmax-in-fp32", "--fp32-residual-connection", "--distribute-saved-activations"),
    *("--apply-query-key-layer-scaling", "--cpu-offloading", "--fine-grained-activation-offloading", "--squared-relu"),
    *("--rotary-percent", "--rotary-interleaved", "--window-size", "--qk-l2-norm"),
    *("--first-last-layers-bf16", "--use-transformer-engine-op-fuser", "--use-te-activation-func", "--tp-comm-overlap"),
    *("--variable-seq-lengths", "--cross-entropy-loss-fusion", "--attention-output-gate", "--quick-geglu"),
    *("--mla-down-proj-fusion", *_OF_EXPERTS),
)


def why_no_activations(args: argparse.Namespace, layout: PipelineLayout) -> str:
    """Say why the activations of a rank are not known; empty if they are."""
    given = {word.partition("=")[0] for word in args.unknown}
    odd = [flag for flag in OTHER_ACTIVATIONS if flag in given]
    balanced_by, exchanges = args.moe_router_load_balancing_type, tuple(args.cp_comm_type)
    kind, is_local = args.position_embedding_type, args.transformer_impl == "local"
    modelled = {
        "context parallelism and --transformer-impl local": max(layout.cp_sizes) == 1 or not is_local,
        f"--cp-comm-type {' '.join(exchanges)}": exchanges in (("p2p",), *_WITH_OWN_OUTPUT),
        f"--transformer-impl {args.transformer_impl}": is_local or _is_engine(args),
        f"--attention-backend {args.attention_backend}": is_local or args.attention_backend in _BACKENDS,
        f"--fp8-format {args.fp8_format}": args.fp8_format in (None, "e4m3", "hybrid"),
        f"--fp8-recipe {args.fp8_recipe}": args.fp8_recipe in (None, "delayed", "tensorwise", *_SCALED_BLOCKS),
        "--fp4-format": not args.fp4_format,
        "--fp8-format and --transformer-impl local": not (args.fp8_format and is_local),
        f"--position-embedding-type {kind}": kind in ("learned_absolute", "rope"),
        f"--recompute-modules {' '.join(args.recompute_modules)}": set(_again(args)) <= {"core_attn", "mlp"},
        f"--moe-router-load-balancing-type {' '.join(balanced_by)}": len(balanced_by) < 2
        and "sinkhorn" not in balanced_by,
        "--moe-router-dtype fp64": args.moe_router_dtype != "fp64",
        "--sft": not args.sft,
        "--dataloader-inter-document-masking": not args.dataloader_inter_document_masking,
    }
    odd += [name for name, is_modelled in modelled.items() if not is_modelled]
    if odd:
        return f"not known with {', '.join(odd)}"
    needed = {"--seq-length": args.seq_length, "--micro-batch-size": args.micro_batch_size}
    if args.recompute_granularity == "full":
        needed["--recompute-method"] = args.recompute_method
        needed["--recompute-num-layers"] = args.recompute_num_layers
    if not is_local:  # flash attention takes no others
        needed["--bf16 or --fp16, or --transformer-impl local"] = args.bf16 or args.fp16
    if _has_experts(args):
        needed["--moe-token-dispatcher-type alltoall or allgather"] = args.moe_token_dispatcher_type in _DISPATCHERS
        needed["--disable-bias-linear"] = args.disable_bias_linear
    missing = [flag for flag, value in needed.items() if not value]
    return f"give {', '.join(missing)} to see them" if missing else ""


def about_activations(args: argparse.Namespace) -> str:
    """Say what the activations are, where they are known."""
    estimated = "estimated, " if read_microbatch(args).is_estimated else ""
    routing = ", with balanced routing" if _has_experts(args) else ""
    return f"{estimated}of one microbatch, for as long as it is in flight on the stage{routing}"


def read_microbatch(args: argparse.Namespace) -> Microbatch:
    """Give the microbatch that the flags describe."""
    again, is_whole, has_rope = (
        _again(args),
        args.recompute_granularity == "full",
        args.position_embedding_type == "rope",
    )
    return Microbatch(
        length=args.seq_length,
        size=args.micro_batch_size,
        itemsize_bytes=2 if args.bf16 or args.fp16 else 4,
        is_sharded=args.sequence_parallel,
        has_rope=has_rope,
        is_fused=not args.no_bias_swiglu_fusion,
        is_engine=_is_engine(args),
        has_fused_rope=has_rope and _is_engine(args) and not args.no_rope_fusion,
        has_hidden_dropout=args.hidden_dropout != 0,
        has_attention_dropout=args.attention_dropout != 0,
        eight_bits=_eight_bits(args),
        has_own_output=tuple(args.cp_comm_type) in _WITH_OWN_OUTPUT,
        routing=_routing(args) if _has_experts(args) else None,
        recompute=Recompute(
            core_attention="core_attn" in again,
            feed_forward="mlp" in again,
            method=args.recompute_method if is_whole else "",
            num_layers=args.recompute_num_layers if is_whole else 0,
        ),
    )


def _is_engine(args: argparse.Namespace) -> bool:
    return args.transformer_impl in (None, "transformer_engine")


def _eight_bits(args: argparse.Namespace) -> Literal["", "tensor", "block"]:
    if not args.fp8_format:
        return ""
    return "block" if args.fp8_recipe in _SCALED_BLOCKS else "tensor"


def _again(args: argparse.Namespace) -> Sequence[str]:
    """Give the modules that are recomputed one by one."""
    if args.recompute_granularity != "selective" and not args.recompute_activations:
        return ()
    return args.recompute_modules


def _has_experts(args: argparse.Namespace) -> bool:
    return bool(getattr(args, "num_experts", None))


def _routing(args: argparse.Namespace) -> Routing:
    kinds, shares = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff or ()
    return Routing(
        topk=args.moe_router_topk,
        has_sigmoid=args.moe_router_score_function == "sigmoid",
        is_pre_softmax=args.moe_router_pre_softmax,
        num_groups=args.moe_router_num_groups or 0,
        group_topk=args.moe_router_group_topk or 1,
        is_gathered=args.moe_token_dispatcher_type == "allgather",
        is_grouped=args.moe_grouped_gemm,
        has_aux_loss=kinds != ["none"] and any(map(float, shares)),
    )
