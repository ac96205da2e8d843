"""The rows for MindSpeed's own options (branches for Megatron 0.12 and 0.16, and MindSpeed-LLM 26.1.0).

Decided by reading what each feature puts in the place of a Megatron function. An option that is not listed stays inside
a rank or a stage as far as its code says.
"""

from __future__ import annotations

from vtp_plugin.host.rules.context import OptionContext
from vtp_plugin.host.rules.table.rule import OptionRule, case, given, on, refused, refused_u_shaped, supported

_LANE = "tests/mindspeed/test_lane.py::test_layout"
_NOT_RUN = "not run: needs an NPU"
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
    *refused(
        "it sums the gradients of tied embeddings in its own way",
        case("--lora-target-modules", on),
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
    *supported(
        "it says how many layers each stage has, which does not depend on tensor-parallel sizes",
        _LANE,
        case("--num-layer-list of MindSpeed-LLM", on, "num_layer_list"),
    ),
    *supported(
        "the plugin's channels send the shape before each tensor; MindSpeed's own exchange of shapes is not called",
        "tests/mindspeed/test_mm_own_data.py::test_a_pipeline_of_own_lengths_equals_one_rank",
        case("--variable-seq-lengths"),
    ),
    *supported(
        "it sets options of Megatron's groups inside a stage",
        _NOT_RUN,
        case("--hccl-group-buffer", on),
        case("--hccl-group-buffer-adaptive"),
        case("--hccl-op-mode", on),
    ),
    *supported(
        "it works inside a rank or a tensor-parallel group",
        _NOT_RUN,
        case("--use-ascend-mc2"),
        case("--use-ascend-coc"),
        case("--swap-attention"),
        case("--swap-layer-input"),
        case("--swap-optimizer"),
        case("--smart-swap"),
        case("--reuse-fp32-param"),
        case("--virtual-optimizer", given),
        case("--recompute-activation-function"),
        case("--recompute-norm"),
    ),
)
"""Rows as in :data:`~vtp_plugin.host.rules.table.rows.RULES`; without MindSpeed no argument has these names."""
