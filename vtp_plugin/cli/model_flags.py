"""Flags that describe a model, its activations and what to fit."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from typing import Literal

from vtp_plugin.cli.command_base import with_values
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.host.rules.checks.divisibility import feed_forward_size
from vtp_plugin.host.rules.checks.stage_layers import COUNTED_AS_LAYERS, ELSEWHERE, check_stage_layers
from vtp_plugin.host.rules.rule import OptionContext
from vtp_plugin.plan.layout.layer_lists import Chunk, plain_chunks, u_chunks
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.layout.replica_map import ReplicaMap
from vtp_plugin.plan.memory.activation_rows import Microbatch, Recompute, Routing
from vtp_plugin.plan.memory.footprint import Footprint, Training, footprints
from vtp_plugin.plan.model.gpt_model import Experts, GPTModel, Latent
from vtp_plugin.plan.model.lora import lora_of
from vtp_plugin.util.text import argument_of

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
    odd = [flag for flag in OTHER_ACTIVATIONS if flag in _unknown(args)]
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
    again, is_whole = _again(args), args.recompute_granularity == "full"
    has_rope = args.position_embedding_type == "rope"
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
    return args.transformer_impl == "transformer_engine"


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


# Weights, buffers or optimizer state are others with these.
_NOT_MODELLED = (
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split", "--ddp-num-buckets"),
    *("--ddp-pad-buckets-for-high-nccl-busbw", "--experimental-attention-variant"),
    "--heterogeneous-layers-config-path",
    *("--heterogeneous-layers-config-encoded-json", "--hybrid-layer-pattern", "--hybrid-override-pattern"),
    *("--is-hybrid-model", "--moe-latent-size", "--moe-shared-expert-gate", "--mtp-standalone"),
    *("--mtp-use-repeated-layer", "--mtp-detach-heads", "--mtp-hybrid-override-pattern", "--no-pad-vocab-size"),
    *("--num-distributed-optimizer-instances", "--optimizer-cpu-offload", "--overlap-param-gather-with-optimizer-step"),
    *("--use-megatron-fsdp", "--use-torch-fsdp2", "--use-precision-aware-optimizer", "--fp8-param-gather"),
    *("--fp4-param-gather", "--apply-layernorm-1p", "--yaml-cfg", "--use-checkpoint-args"),
)
_NUM_MOMENTS = {"adam": 2, "sgd": 1}


def why_unknown(args: argparse.Namespace, *, lacks_parts: bool) -> str:
    """Say why the memory of a rank is not known; empty if it is.

    Args:
        args: parsed arguments; ``unknown`` holds those that no flag declares.
        lacks_parts: whether the run is a U-shape whose parts' layers were not given.
    """
    given = _unknown(args)
    if args.pipeline_model_parallel_layout:
        given.add("--pipeline-model-parallel-layout")
    # With these the model is another one than these flags say.
    odd = [flag for flag in (*_NOT_MODELLED, "--pipeline-model-parallel-layout") if flag in given]
    if args.optimizer not in _NUM_MOMENTS:
        odd.append(f"--optimizer {args.optimizer}")
    if odd:
        return f"not known with {', '.join(odd)}"
    needed = {
        "--num-layers": args.num_layers,
        "--hidden-size": args.hidden_size,
        "--num-attention-heads": args.num_attention_heads,
        "--vocab-size": args.vocab_size or args.padded_vocab_size,
    }
    if _has_positions(args):
        needed["--max-position-embeddings"] = args.max_position_embeddings
    if lacks_parts:
        needed["--num-layer-list"] = None
    missing = [flag for flag, value in needed.items() if not value]
    return f"give {', '.join(missing)} to see it" if missing else ""


def check_layers(args: argparse.Namespace, context: OptionContext) -> None:
    """Reject layers that the stages cannot share, where these flags say all of it.

    Args:
        args: parsed arguments; ``unknown`` holds those that no flag declares.
        context: the run.

    Raises:
        ConfigError: the layers cannot be shared out.
    """
    refuse(check_stage_layers(with_values(args, **dict.fromkeys(_said_elsewhere(args), True)), context))


def says_layers(args: argparse.Namespace) -> bool:
    """Tell whether these flags say which layers the stages of a pipeline have that is no U."""
    return bool(args.num_layers) and not (args.pipeline_model_parallel_layout or _said_elsewhere(args))


def _said_elsewhere(args: argparse.Namespace) -> list[str]:
    """List the arguments without a flag here that say which layers a stage has."""
    unknown = {*map(argument_of, _unknown(args))}
    return [name for name in (*ELSEWHERE, *COUNTED_AS_LAYERS) if name in unknown]


def _unknown(args: argparse.Namespace) -> set[str]:
    return {word.partition("=")[0] for word in args.unknown}


def read_model(args: argparse.Namespace, layout: PipelineLayout) -> GPTModel:
    """Give the model that the flags describe."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    multiple = (args.make_vocab_size_divisible_by or 128) * layout.vocab_multiple()
    return GPTModel(
        num_layers=args.num_layers,
        num_predicting=args.mtp_num_layers or 0,
        hidden=hidden,
        heads=heads,
        groups=(args.num_query_groups or 1) if args.group_query_attention else heads,
        kv_channels=args.kv_channels or hidden // heads,
        ffn=feed_forward_size(args)[0],
        vocab=args.padded_vocab_size or -(-args.vocab_size // multiple) * multiple,
        num_positions=args.max_position_embeddings if _has_positions(args) else 0,
        is_gated=args.swiglu,
        has_bias=not args.disable_bias_linear,
        has_qkv_bias=args.add_qkv_bias,
        has_norm_bias=args.normalization != "RMSNorm",
        has_query_norm=args.qk_layernorm,
        is_tied=not args.untie_embeddings_and_output_weights,
        latent=_latent(args) if args.multi_latent_attention else None,
        experts=_experts(args) if getattr(args, "num_experts", None) else None,
    )


def read_training(args: argparse.Namespace, layout: PipelineLayout) -> Training:
    """Give how the model is kept while it is trained, by the flags."""
    is_half = args.bf16 or args.fp16
    has_half_gradients = args.grad_reduce_in_bf16 if args.bf16 else is_half
    # Megatron's default; only the first stage has more than one bucket.
    first = layout.stages[0]
    bucket_size = args.ddp_bucket_size or max(40_000_000, 1_000_000 * first.dp * first.cp)
    return Training(
        weight_itemsize_bytes=2 if is_half else 4,
        gradient_itemsize_bytes=2 if has_half_gradients and not args.accumulate_allreduce_grads_in_fp32 else 4,
        num_moments=_NUM_MOMENTS[args.optimizer],
        is_distributed=args.use_distributed_optimizer,
        bucket_size=bucket_size if args.overlap_grad_reduce else None,
        backend=args.distributed_backend,
        lora=lora_of(vars(args)),
    )


def read_footprints(
    args: argparse.Namespace, layout: PipelineLayout, chunks: Sequence[Sequence[Chunk]], replicas: ReplicaMap
) -> tuple[Footprint, ...]:
    """Give the memory of every rank, without activations where these are not known.

    Args:
        args: parsed arguments.
        layout: layout of the run.
        chunks: the chunks of every stage, see :func:`read_chunks`.
        replicas: the replicas of all stages.
    """
    model, training = read_model(args, layout), read_training(args, layout)
    if why_no_activations(args, layout):
        return footprints(model, training, layout, chunks)
    microbatch = read_microbatch(args)
    samples = [replicas.micro_batch(stage, microbatch.size) for stage in range(layout.num_stages)]
    return footprints(model, training, layout, chunks, microbatch, samples)


def read_chunks(
    args: argparse.Namespace,
    layout: PipelineLayout,
    num_chunks: int,
    u_layers: Sequence[int] | None,
    layers: Sequence[int] | None,
) -> tuple[tuple[Chunk, ...], ...]:
    """Share out the layers over the chunks of all stages.

    Args:
        args: parsed arguments.
        layout: layout of the run.
        num_chunks: number of model chunks of every stage.
        u_layers: number of layers of every part of a U-shape; None without one.
        layers: number of layers of every stage, where they were fitted.

    Raises:
        ConfigError: the layers cannot be shared out.
    """
    if u_layers is not None:
        return u_chunks(u_layers)
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    return plain_chunks(args.num_layers, layout.num_stages, num_chunks, first=first, last=last, layers=layers)


def expert_layers(text: str, num_layers: int) -> tuple[bool, ...]:
    """Read ``--moe-layer-freq``: a period, or an expression of lists of 0 and 1.

    Raises:
        ConfigError: the text is neither, or has another number of layers.

    >>> expert_layers("2", 3), expert_layers("([0]*1+[1]*2)", 3)
    ((True, False, True), (False, True, True))
    """
    try:
        value = _evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError):
        value = 0
    pattern = value if isinstance(value, list) else [i % value == 0 for i in range(num_layers)] if value else []
    if len(pattern) != num_layers or not set(pattern) <= {0, 1}:
        raise ConfigError(
            f"--moe-layer-freq {text}; it is a period, or a pattern of 0 and 1 for all {num_layers} layers; "
            "give one such as 2 or ([0]*1+[1]*3)"
        )
    return tuple(map(bool, pattern))


def _evaluate(node: ast.expr) -> int | list[int]:
    """Compute whole numbers, lists of them, and their sums and products."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        return [number for number in map(_evaluate, node.elts) if isinstance(number, int)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            return left * right
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
    raise ValueError(ast.dump(node))


def _has_positions(args: argparse.Namespace) -> bool:
    return args.position_embedding_type == "learned_absolute"


def _latent(args: argparse.Namespace) -> Latent:
    return Latent(
        q_lora_rank=args.q_lora_rank or 0,
        kv_lora_rank=args.kv_lora_rank,
        qk_head_dim=args.qk_head_dim,
        qk_pos_emb_head_dim=args.qk_pos_emb_head_dim,
        v_head_dim=args.v_head_dim,
    )


def _experts(args: argparse.Namespace) -> Experts:
    return Experts(
        number=args.num_experts,
        ffn=args.moe_ffn_hidden_size or feed_forward_size(args)[0],
        shared_ffn=args.moe_shared_expert_intermediate_size or 0,
        layers=expert_layers(args.moe_layer_freq, args.num_layers),
    )
