"""Options of kernels, and MindSpeed's.

The rows for MindSpeed's own options (branches for Megatron 0.12 and 0.16, and MindSpeed-LLM 26.1.0).

Decided by reading what each feature puts in the place of a Megatron function. An option that is not listed stays inside
a rank or a stage as far as its code says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vtp_plugin.host.rules.rule import (
    OptionContext,
    OptionRule,
    Test,
    above,
    case,
    given,
    on,
    refused,
    refused_u_shaped,
    refused_unequal,
    refused_unequal_dp,
    warned_uniform,
)
from vtp_plugin.host.rules.table.rows_parallelism import has_experts
from vtp_plugin.host.versions import is_in

_CHUNKS = (
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    "virtual_pipeline_model_parallel_size",  # of MindSpeed-MM
)
_OVERTAKEN = (
    "it fetches a layer's input back while the next layer of the rank computes gradients, once for each microbatch, "
    "and from one chunk to the next microbatches overtake each other"
)


def _is_mindspeed(args: object) -> bool:
    """Tell by an attribute that only MindSpeed declares whether it carries out Megatron's options."""
    return hasattr(args, "attention_mask_type")


def _resets_mask(args: object, context: OptionContext) -> bool:
    return _is_mindspeed(args) and bool(getattr(args, "reset_attention_mask", False))


def _splits_sequences(args: object, context: OptionContext) -> bool:
    return _is_mindspeed(args) and max(context.cp_sizes, default=1) > 1


def _swaps_in_chunks(args: object, context: OptionContext) -> bool:
    chunks = (getattr(args, name, None) for name in _CHUNKS)
    return bool(getattr(args, "swap_layer_input", False)) and any(chunks)


# The defaults of MindSpeed-LLM 26.1.0 and of MindSpeed-MM 26.1.0.
_LORA_HOOKS = (
    ["word_embeddings", "input_layernorm"],
    ["word_embeddings", "input_layernorm", "final_layernorm"],
)


def _is_other_than(*defaults: object) -> Test:
    return lambda value: value is not None and value not in defaults


def _mindspeed_lora(*flags: tuple[str, Test, str]) -> Iterator[OptionRule]:
    """Make the rows of MindSpeed's adapters: each flag, when it is in use, and the plugin's flag that says the same."""
    for flag, is_used, ours in flags:
        same = f", with {ours} in its place" if ours else ", where nothing like it is needed"
        yield from refused(
            "MindSpeed's adapters have one A for a fused matrix, which is another model than a pair for each published "
            "one, and it sums the gradients of tied embeddings in its own way",
            case(flag, is_used),
            way_out=f"leave it out, or use the plugin's adapters (Megatron 0.19){same}",
        )


MINDSPEED_RULES: tuple[OptionRule, ...] = (
    *refused(
        "it sends between stages in its own way, which the plugin's channels bypass",
        case("--dist-train"),
        case("--optimize-send-recv-comm"),
        case("--use-multiparameter-pipeline-model-parallel"),
        OptionRule(option="--reset-attention-mask", attribute="reset_attention_mask", applies=_resets_mask),
    ),
    *refused(
        "it runs the step in an order of its own, which was not tried between stages of unequal size",
        case("--schedules-method", given),
        case("--moe-fb-overlap"),
        case("--recompute-in-bubble"),
        case("--recompute-in-advance"),
        case("--enable-mhc"),
        case("--enable-high-availability"),
        case("--enable-elastic-training"),
        case("--stage dpo"),
    ),
    *refused(
        "MindSpeed makes the groups of context parallelism itself, for one size",
        OptionRule(option="--context-parallel-size", attribute="context_parallel_size", applies=_splits_sequences),
        way_out="leave it out, or split sequences with --sequence-parallel",
    ),
    *refused(
        "it makes groups of its own for one tensor-parallel size",
        case("--tp-2d"),
        case("--layerzero"),
        case("--balanced-moe-experts"),
        case("--hetero-parallel"),
        case("--aiqos"),
        case("--ttp-enabled"),
    ),
    *refused(
        "it cuts weights in parts of unequal size inside a stage, for one tensor-parallel size",
        case("--unaligned-linear"),
    ),
    *_mindspeed_lora(
        ("--lora-target-modules", on, "--vtp-lora-targets"),
        ("--lora-r", _is_other_than(8, 16), "--vtp-lora-rank"),
        ("--lora-alpha", _is_other_than(16, 32), "--vtp-lora-alpha"),
        ("--lora-load", on, "--load"),
        ("--lora-ckpt-filter", on, ""),
        ("--lora-fusion", on, ""),
        ("--lora-register-forward-hook", _is_other_than(*_LORA_HOOKS), ""),
    ),
    *refused("the plugin's adapters leave all else frozen", case("--lora-modules-to-save", on)),
    *refused(
        "MindSpeed-MM's adapters are PEFT's layers for Megatron, which looks for their targets in what one rank holds",
        case("--lora-target-parameters", on),
        case("--lora-mixed-training", on),
        case("--load-base-model", on),
        way_out="leave it out: train all weights",
    ),
    *refused(
        "it keeps a second, whole model on every rank, and takes the loss from outputs that only the last stage has",
        case("--qad-enable"),
    ),
    *refused(
        _OVERTAKEN,
        OptionRule(
            option="--swap-layer-input in an interleaved pipeline",
            attribute="swap_layer_input",
            applies=_swaps_in_chunks,
        ),
    ),
    *refused_u_shaped(_OVERTAKEN, case("--swap-layer-input")),
    *refused(
        "it makes files of weights for one tensor-parallel size, and only rank 0 says which",
        case("--enable-hf2mg-convert"),
        case("--enable-mg2hf-convert"),
        way_out="convert in a uniform run, and cross by a torch_dist checkpoint (docs/guides/ascend.md)",
    ),
    *refused_u_shaped(
        "the U-shape says how many layers each part has",
        case("--noop-layers", on),
        case("--pipeline-num-transformer-layers", on),
    ),
)
"""Rows as in :data:`~vtp_plugin.host.rules.table.rows.RULES`; without MindSpeed no argument has these names."""


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
    *refused_unequal(
        "these layers are made for inference, which is not supported between unequal stages",
        "--transformer-impl inference_optimized",
        way_out="use --transformer-impl transformer_engine or local",
    ),
    *warned_uniform(
        "Megatron gives such experts an optimizer whose loss scale follows their overflows alone, but the loss has the "
        "others' scale, so after an overflow the experts' gradients are divided by another number than they have",
        "tests/multiproc/experts/test_experts.py::test_loss_scales_of_megatron_part",
        "use --bf16, or a constant --loss-scale, or stages of different sizes, which have one loss scale",
        replace(case("--fp16 with experts that have groups of their own", on, "fp16"), applies=_scales_experts_apart),
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
    *refused_unequal(
        "Megatron's TransformerConfig allows it for one stage only, 'there is no support for Pipeline "
        "parallelism with CPU offloading'",
        case("--cpu-offloading-num-layers", above(0)),
        way_out="use --recompute-granularity",
    ),
)
