"""Options of kernels and number formats."""

from __future__ import annotations

from dataclasses import replace

from vtp_plugin.host.rules.context import OptionContext
from vtp_plugin.host.rules.table.evidence import CLIPPING, DEVICE, ENGINE, NEEDS_ENGINE, PARITY
from vtp_plugin.host.rules.table.rows_moe import has_experts
from vtp_plugin.host.rules.table.rule import (
    OptionRule,
    above,
    case,
    given,
    on,
    refused,
    refused_unequal,
    refused_unequal_dp,
    supported,
    warned_uniform,
)
from vtp_plugin.host.versions import is_in


def _engine_on_cpu(args: object, context: OptionContext) -> bool:
    """Tell whether a run on CPUs asks for Transformer Engine; its row is the only one that looks at the device."""
    return context.device == "cpu" and getattr(args, "transformer_impl", None) == "transformer_engine"


def _scales_losses(args: object) -> bool:
    """Tell whether loss scales follow overflows."""
    return bool(getattr(args, "fp16", False)) and not getattr(args, "loss_scale", None)


def _scales_experts_apart(args: object, context: OptionContext) -> bool:
    """Tell whether experts have groups, and so an optimizer and a loss scale, of their own."""
    has_parts = max((getattr(args, "expert_model_parallel_size", None) or 1, *context.ep_sizes)) > 1
    # Before Megatron 0.19 other sizes alone made no such groups.
    is_known = not context.version or is_in(context.version, ">=0.19")
    has_sizes = is_known and any(etp != tp for etp, tp in zip(context.etp_sizes, context.tp_sizes, strict=False))
    return _scales_losses(args) and has_experts(args, context) and (has_parts or has_sizes)


def _scales_over_replicas(args: object, _context: OptionContext) -> bool:
    """Tell whether Transformer Engine looks for scaling factors among all replicas, inside every compute."""
    is_used = getattr(args, "fp8", None) or getattr(args, "fp4", None)
    return bool(is_used) and getattr(args, "fp8_recipe", None) == "delayed"


KERNEL_RULES: tuple[OptionRule, ...] = (
    *refused(
        "Transformer Engine is Megatron's default and has no CPU path",
        replace(case("--transformer-impl transformer_engine on the cpu platform"), applies=_engine_on_cpu),
        way_out="use --transformer-impl local",
    ),
    *supported(
        "its layers take their size from the tensor-parallel group of their stage",
        NEEDS_ENGINE,
        "--transformer-impl transformer_engine",
    ),
    *supported(
        "its layers take their size from the tensor-parallel group of their stage", PARITY, "--transformer-impl local"
    ),
    *refused_unequal(
        "these layers are made for inference, which is not supported between unequal stages",
        "--transformer-impl inference_optimized",
        way_out="use --transformer-impl transformer_engine or local",
    ),
    *supported("master weights and scales stay on a rank, found-inf travels on the model group", CLIPPING, "--fp16"),
    *supported(
        "all optimizers of a rank have one loss scale, which follows the overflows of all",
        "tests/multiproc/experts/test_experts.py::test_experts_and_the_rest_have_one_loss_scale",
        replace(case("--fp16 with experts that have groups of their own", on, "fp16"), applies=_scales_experts_apart),
    ),
    *warned_uniform(
        "Megatron gives such experts an optimizer whose loss scale follows their overflows alone, but the loss has the "
        "others' scale, so after an overflow the experts' gradients are divided by another number than they have",
        "tests/multiproc/experts/test_experts.py::test_loss_scales_of_megatron_part",
        "use --bf16, or a constant --loss-scale, or stages of different sizes, which have one loss scale",
        replace(case("--fp16 with experts that have groups of their own", on, "fp16"), applies=_scales_experts_apart),
    ),
    *supported("activations cross a boundary in the pipeline dtype", PARITY, "--bf16"),
    *supported(
        "get_fp8_context and get_fp4_context share the scaling factors of a tensor among the ranks of its stage, and "
        "stages exchange activations in the pipeline dtype",
        NEEDS_ENGINE,
        case("--fp8-format", given, "fp8"),
        case("--fp4-format", given, "fp4"),
    ),
    *refused_unequal_dp(
        "delayed scaling finds its factors among all replicas, which run their microbatches in orders of their own and "
        "would wait for each other inside a forward",
        replace(case("--fp8-recipe delayed"), applies=_scales_over_replicas),
        way_out="use another recipe or give every stage the same data-parallel size",
    ),
    *refused_unequal_dp(
        "it compares the norms of queries and keys between the replicas in every forward, which they run in orders of "
        "their own",
        "--test-mode",
    ),
    *supported(
        "quantize_param_shard finds the scaling factors of a weight among the replicas of its stage",
        NEEDS_ENGINE,
        "--fp8-param-gather",
        "--fp4-param-gather",
    ),
    *supported(
        "its rules name modules and numbers of layers in the whole model",
        NEEDS_ENGINE,
        case("--te-precision-config-file", given),
    ),
    *refused(
        "a graph of the whole iteration would capture the plugin's transfers, which the CPU completes",
        "--cuda-graph-impl full_iteration",
    ),
    *refused_unequal(
        "_CudaGraphRunner replays a layer into memory that it uses again, where a channel may still be sending, and on "
        "CPUs stock ends with 'graphsafe_get_state is not supported in this Generator'",
        "--cuda-graph-impl local",
        "--enable-cuda-graph",
    ),
    *refused_unequal(
        "TECudaGraphHelper uses the memory of outputs again in the order of Megatron's schedule, where a channel may "
        "still be sending, and stock ends with 'CUDA Graphs are not supported without TE.'",
        "--cuda-graph-impl transformer_engine",
        "--external-cuda-graph",
    ),
    *refused_unequal(
        "OptimizerCudaGraphWrapper would capture the sums over the model group, which the CPU waits for, and on CPUs "
        "stock ends with 'If capturable=True, params and state_steps must be on supported devices'",
        "--optimizer-cuda-graph",
    ),
    *refused_unequal(
        "TransformerConfig wants --overlap-moe-expert-parallel-comm with it, which is not supported, and stock ends "
        "with 'Delaying wgrad compute is only supported with transformer_engine implementation'",
        "--delay-wgrad-compute",
    ),
    *supported(
        "finish_embedding_wgrad_compute gathers among the ranks of the last stage, before gradients are summed",
        f"not run: needs CUDA and APEX's fused weight gradients, {DEVICE} does it",
        "--defer-embedding-wgrad-compute",
    ),
    *supported(
        "PipelineOffloadManager moves what a rank has saved for its backward pass between its own device and host "
        "memory",
        ENGINE,
        "--fine-grained-activation-offloading",
    ),
    *refused_unequal(
        "Megatron's TransformerConfig allows it for one stage only, 'there is no support for Pipeline "
        "parallelism with CPU offloading'",
        case("--cpu-offloading-num-layers", above(0)),
        way_out="use --recompute-granularity",
    ),
)
