"""Flags of Megatron's that say what a rank keeps of a microbatch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from vtp_plugin.footprint.activations import Microbatch, Recompute
from vtp_plugin.footprint.routing import Routing
from vtp_plugin.layout.pipeline import PipelineLayout

NUMBERS = {
    "--moe-router-topk": "experts of a token, default 2",
    "--moe-router-num-groups": "of experts, of which a token uses --moe-router-group-topk",
    "--moe-router-group-topk": "groups of a token",
    "--recompute-num-layers": "of a group, or how many are computed again",
}
SWITCHES = {
    "--moe-router-pre-softmax": "a softmax over all experts, before the best are chosen",
    "--recompute-activations": "as --recompute-granularity selective",
}
TEXTS = {
    "--moe-token-dispatcher-type": "alltoall or allgather, for activations; those of flex are not known",
    "--moe-router-score-function": "softmax, the default, or sigmoid",
    "--moe-router-dtype": "fp32, or as the model; for activations not fp64",
    "--recompute-granularity": "full, or selective: --recompute-modules",
    "--recompute-method": "uniform or block, of whole layers",
}
LISTS = {
    "--moe-router-load-balancing-type": "aux_loss, the default, seq_aux_loss, global_aux_loss or none",
    "--moe-aux-loss-coeff": "0, the default, keeps nothing for such a loss",
    "--recompute-modules": "core_attn, the default, and mlp; activations with others are not known",
}
_DISPATCHERS = ("alltoall", "allgather")
DROPOUTS = ("--attention-dropout", "--hidden-dropout")
_OF_EXPERTS = (
    *("--moe-grouped-gemm", "--moe-expert-capacity-factor", "--moe-router-fusion", "--moe-permute-fusion"),
    *("--moe-z-loss-coeff", "--moe-input-jitter-eps", "--moe-shared-expert-overlap", "--moe-layer-recompute"),
    *("--moe-apply-probs-on-input", "--moe-router-padding-for-quantization", "--moe-router-padding-for-fp8"),
    *("--moe-pad-expert-input-to-capacity", "--moe-enable-deepep", "--overlap-moe-expert-parallel-comm"),
)
# Other activations are kept with these.
OTHER_ACTIVATIONS = (
    *("--attention-softmax-in-fp32", "--fp32-residual-connection", "--distribute-saved-activations"),
    *("--apply-query-key-layer-scaling", "--cpu-offloading", "--fine-grained-activation-offloading", "--squared-relu"),
    *("--rotary-percent", "--rotary-interleaved", "--window-size", "--qk-l2-norm", "--fp8-format"),
    *("--variable-seq-lengths", "--cross-entropy-loss-fusion", "--attention-output-gate", "--quick-geglu"),
    *("--mla-down-proj-fusion", *_OF_EXPERTS),
)


def add_activation_flags(parser: argparse._ArgumentGroup) -> None:
    """Declare the flags."""
    for name, text in NUMBERS.items():
        parser.add_argument(name, type=int, metavar="N", help=text)
    for name, text in SWITCHES.items():
        parser.add_argument(name, action="store_true", help=text)
    for name, text in TEXTS.items():
        parser.add_argument(name, metavar="TEXT", help=text)
    for name, text in LISTS.items():
        parser.add_argument(name, nargs="+", metavar="VALUE", help=text)
    for name in DROPOUTS:
        parser.add_argument(name, type=float, metavar="SHARE", help="default 0.1; activations are known with 0 only")


def why_no_activations(args: argparse.Namespace, layout: PipelineLayout) -> str:
    """Say why the activations of a rank are not known; empty if they are."""
    given = {word.partition("=")[0] for word in args.unknown}
    odd = [flag for flag in OTHER_ACTIVATIONS if flag in given]
    balanced_by = args.moe_router_load_balancing_type or []
    kind, whole = args.position_embedding_type, args.recompute_granularity == "full"
    modelled = {
        "context parallelism": max(layout.cp_sizes) == 1,
        f"--position-embedding-type {kind}": kind in (None, "learned_absolute", "rope"),
        f"--recompute-modules {' '.join(args.recompute_modules or ())}": set(_again(args)) <= {"core_attn", "mlp"},
        f"--moe-router-load-balancing-type {' '.join(balanced_by)}": len(balanced_by) < 2
        and "sinkhorn" not in balanced_by,
        "--moe-router-dtype fp64": args.moe_router_dtype != "fp64",
        "--sft": not args.sft,
        "--dataloader-inter-document-masking": not args.dataloader_inter_document_masking,
        "--vtp-dp-mode split": args.vtp_dp_mode != "split",
    }
    odd += [name for name, is_modelled in modelled.items() if not is_modelled]
    if odd:
        return f"not known with {', '.join(odd)}"
    needed = {"--seq-length": args.seq_length, "--micro-batch-size": args.micro_batch_size}
    if whole:
        needed["--recompute-method"] = args.recompute_method
        needed["--recompute-num-layers"] = args.recompute_num_layers
    needed["--transformer-impl local"] = args.transformer_impl == "local"
    if _has_experts(args):
        needed["--moe-token-dispatcher-type alltoall or allgather"] = args.moe_token_dispatcher_type in _DISPATCHERS
        needed["--disable-bias-linear"] = args.disable_bias_linear
        needed["--no-bias-swiglu-fusion"] = args.no_bias_swiglu_fusion or not args.swiglu
    needed |= {f"{name} 0": getattr(args, name[2:].replace("-", "_")) == 0 for name in DROPOUTS}
    missing = [flag for flag, value in needed.items() if not value]
    return f"give {', '.join(missing)} to see them" if missing else ""


def about_activations(args: argparse.Namespace) -> str:
    """Say what the activations are, where they are known."""
    routing = ", with balanced routing" if _has_experts(args) else ""
    return f"of one microbatch, for as long as it is in flight on the stage{routing}"


def read_microbatch(args: argparse.Namespace) -> Microbatch:
    """Give the microbatch that the flags describe."""
    return Microbatch(
        length=args.seq_length,
        size=args.micro_batch_size,
        itemsize_bytes=2 if args.bf16 or args.fp16 else 4,
        is_sharded=args.sequence_parallel,
        has_rope=args.position_embedding_type == "rope",
        is_fused=not args.no_bias_swiglu_fusion,
        routing=_routing(args) if _has_experts(args) else None,
        recompute=_recompute(args),
    )


def _again(args: argparse.Namespace) -> Sequence[str]:
    """Give the modules that are computed again one by one."""
    if args.recompute_granularity != "selective" and not args.recompute_activations:
        return ()
    return args.recompute_modules or ("core_attn",)


def _recompute(args: argparse.Namespace) -> Recompute:
    modules, is_whole = _again(args), args.recompute_granularity == "full"
    return Recompute(
        core_attention="core_attn" in modules,
        feed_forward="mlp" in modules,
        method=args.recompute_method if is_whole else "",
        num_layers=args.recompute_num_layers if is_whole else 0,
    )


def _has_experts(args: argparse.Namespace) -> bool:
    return bool(getattr(args, "num_experts", None))


def _routing(args: argparse.Namespace) -> Routing:
    kinds = args.moe_router_load_balancing_type or ["aux_loss"]
    return Routing(
        topk=args.moe_router_topk or 2,
        has_sigmoid=args.moe_router_score_function == "sigmoid",
        is_pre_softmax=args.moe_router_pre_softmax,
        num_groups=args.moe_router_num_groups or 0,
        group_topk=args.moe_router_group_topk or 1,
        is_gathered=args.moe_token_dispatcher_type == "allgather",
        has_aux_loss=kinds != ["none"] and any(float(share) for share in args.moe_aux_loss_coeff or ()),
    )
