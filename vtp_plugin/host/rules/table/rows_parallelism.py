"""Options of parallelism, that of replicas included, of experts and of split backwards."""

from __future__ import annotations

from dataclasses import replace

from vtp_plugin.host.rules.rule import (
    OptionContext,
    OptionRule,
    Test,
    above,
    case,
    given,
    off,
    on,
    only,
    refused,
    refused_planned,
    refused_split,
    refused_u_shaped,
    refused_unequal,
    refused_unequal_dp,
    warned,
    warned_uniform,
)


def has_experts(args: object, _context: OptionContext) -> bool:
    """Tell whether there are routers; a model's configuration has another name for the number of experts."""
    return bool(getattr(args, "num_experts", None) or getattr(args, "num_moe_experts", None))


def _has_capacity(args: object, context: OptionContext) -> bool:
    """Tell whether a factor limits what experts take; to Megatron one below 0 is none."""
    factor = getattr(args, "moe_expert_capacity_factor", None)
    return has_experts(args, context) and isinstance(factor, (int, float)) and factor >= 0


def _drops_without_experts(args: object, _context: OptionContext) -> bool:
    """Tell whether experts are given a capacity in a model that has none."""
    return getattr(args, "moe_expert_capacity_factor", None) is not None and not getattr(args, "num_experts", None)


def _divides_dense_layers(args: object, _context: OptionContext) -> bool:
    """Tell whether each dense layer becomes several experts."""
    return bool(getattr(args, "moe_use_upcycling", False)) and above(1)(getattr(args, "moe_upcycling_granularity", 1))


def _cuts_tokens(_args: object, context: OptionContext) -> bool:
    """Tell whether some ranks share the tokens of a microbatch."""
    return max((*context.tp_sizes, *context.cp_sizes), default=1) > 1


def _counts_in_half(args: object, context: OptionContext) -> bool:
    """Tell whether routers count tokens in a type of 16 bits: Megatron converts their counts with the model."""
    return has_experts(args, context) and bool(getattr(args, "bf16", False) or getattr(args, "fp16", False))


def _balances_by(kind: str) -> Test:
    """Make a test for a loss of the routers; newer Megatrons take several kinds at once."""
    return lambda value: value == kind or (isinstance(value, list) and kind in value)


MOE_RULES: tuple[OptionRule, ...] = (
    *warned(
        "each rank counts tokens in the type of the model, which rounds counts above 256 (--bf16) or 2048 (--fp16), "
        "and the sizes decide how many a rank counts, so the bias may repeat none of other sizes",
        "tests/multiproc/experts/test_experts.py::test_a_bias_whose_counts_are_rounded_moves_alike",
        "train in fp32 what is compared, or compare with runs of the same sizes",
        only("--moe-router-enable-expert-bias", _counts_in_half),
    ),
    *warned(
        "every rank drops tokens among its own, which the tensor- and context-parallel sizes cut, so a run that drops "
        "some repeats none of other sizes",
        "tests/multiproc/experts/test_experts.py::test_tokens_are_dropped_by_the_ranks",
        "leave it out, or give a factor that drops nothing",
        only("--moe-expert-capacity-factor", _has_capacity, given),
        only("--moe-token-drop-policy position", _has_capacity),
        only("--moe-pad-expert-input-to-capacity", _has_capacity),
    ),
    *warned(
        "every rank draws numbers for the tokens that it routes, so the run repeats none of other sizes",
        "tests/multiproc/experts/test_experts_training.py::test_noise_of_the_routers",
        "leave it out of runs that are compared",
        only("--moe-input-jitter-eps", has_experts),
        only("--moe-router-force-load-balancing", has_experts),
    ),
    *warned(
        "apply_biased_logits takes random logits, which every rank draws for its own tokens, and adds a bias that all "
        "ranks of a stage share, so the run repeats none of other sizes",
        "tests/multiproc/experts/test_experts_training.py::test_noise_of_the_routers",
        "leave it out of runs that are compared",
        only("--moe-router-force-biased", has_experts, given),
    ),
    *refused_unequal(
        "each rank divides its own part of the dense layers, so which neurons form an expert depends on the size",
        replace(case("--moe-upcycling-granularity", above(1)), applies=_divides_dense_layers),
        way_out="use --moe-upcycling-granularity 1, or upcycle in a run whose stages have one size",
    ),
    *warned_uniform(
        "each rank divides its own part of the dense layers, so which neurons form an expert depends on the size",
        "not run: read in _convert_to_moe_state_dict of upcycling_utils.py",
        "upcycle with the tensor-parallel size of the run that is compared",
        replace(case("--moe-upcycling-granularity", above(1)), applies=_divides_dense_layers),
    ),
    *refused(
        "no stage has a layer of experts, and Megatron ignores the capacity without a word",
        replace(
            case("--moe-expert-capacity-factor without --num-experts", given, "moe_expert_capacity_factor"),
            applies=_drops_without_experts,
        ),
        way_out="add --num-experts, or leave it out",
    ),
    *warned_uniform(
        "Megatron balances among the tokens of each rank, which the tensor- and context-parallel sizes cut, so the run "
        "repeats none of other sizes",
        "tests/multiproc/experts/test_experts.py::test_megatron_shares_out_the_tokens_of_a_rank",
        "compare with runs of this size only, or with stages of different sizes, which balance as one rank",
        only("--moe-router-load-balancing-type sinkhorn", _cuts_tokens, _balances_by("sinkhorn")),
    ),
    *refused_unequal_dp(
        "the global loss is a running average over a stage's microbatches, whose number differs between the stages",
        case("--moe-router-load-balancing-type global_aux_loss", _balances_by("global_aux_loss")),
        way_out="use aux_loss or seq_aux_loss, or give every stage the same data-parallel size",
    ),
    *refused_unequal_dp(
        "which tokens are dropped is decided among those of a replica, whose number differs between the stages",
        only("--moe-expert-capacity-factor", _has_capacity, given),
    ),
    *refused_unequal(
        "its dispatchers need CUDA (DeepEP, HybridEP), so no test here can run them",
        "--moe-token-dispatcher-type flex",
        way_out="use --moe-token-dispatcher-type alltoall or give every stage the same size",
    ),
    *refused_unequal(
        "its schedule (combined_1f1b) overlaps two microbatches on CUDA streams, so no test here can run it",
        "--overlap-moe-expert-parallel-comm",
    ),
)


_IN_LAYERS = (
    *refused_split(
        "its kernel adds the gradients of weights while those of inputs are computed, and was never run here alone",
        "--gradient-accumulation-fusion",
        way_out="add --no-gradient-accumulation-fusion, or leave --vtp-split-backward out",
    ),
    *refused_split(
        "scaling factors of low precision belong to one whole backward",
        case("--fp8-format", given, "fp8"),
        case("--fp4-format", given, "fp4"),
    ),
    *refused_split("it decides itself when gradients of weights are computed", "--delay-wgrad-compute"),
)
SPLIT_RULES: tuple[OptionRule, ...] = (
    *refused_split(
        "the gradients of weights can be left for later only in Megatron's own linear layers, not in those of "
        "Transformer Engine, whose own way (delay_wgrad_compute) was never run here",
        "--transformer-impl transformer_engine",
        "--transformer-impl inference_optimized",
        way_out="add --transformer-impl local, or leave --vtp-split-backward out",
    ),
    *_IN_LAYERS,
)
"""Rows as of :mod:`vtp_plugin.host.rules.table.rows`."""

SPLIT_CONFIG_RULES = tuple(replace(rule, option=f"config.{rule.attribute}") for rule in _IN_LAYERS)
"""The same for what a script sets in the model's configuration, which does not say whose layers are used."""


PARALLELISM_RULES: tuple[OptionRule, ...] = (
    # The pipeline: its schedule, layers and rank order.
    *refused(
        "the plugin's channels replace Megatron's point-to-point calls and have no ring exchange",
        "--use-ring-exchange-p2p",
    ),
    *refused(
        "the plugin's channels use the backend of the run, not UCC",
        "--pipeline-model-parallel-comm-backend ucc",
        way_out="leave it out or use nccl",
    ),
    *refused("the start-up checks and the channels need real peers", "--fake-process-group"),
    *refused("it leaves out the group creation that gives every stage its size", "--lazy-mpu-init"),
    # Tensor, sequence and context parallelism.
    *refused(
        "the plugin's group builder does not make the groups of nested context parallelism",
        case("--hierarchical-context-parallel-sizes", given),
        "--hybrid-context-parallel",
        way_out="leave it out and use plain --context-parallel-size",
    ),
    *refused_unequal(
        "Transformer Engine makes its overlap groups from one tensor-parallel size for the whole world",
        "--tp-comm-overlap",
    ),
    *refused_unequal(
        "it asserts a tensor-parallel size above 1, which fails on some stages only", "--distribute-saved-activations"
    ),
    *refused(
        "the plugin's group builder does not make the weight-sharding groups, whose number is tied to one size",
        case("--tensor-parallel-num-weight-shards", given),
        case("--expert-tensor-parallel-num-weight-shards", given),
    ),
)

DATA_PARALLEL_RULES: tuple[OptionRule, ...] = (
    *refused(
        "the plugin's group builder makes one distributed-optimizer instance",
        case("--num-distributed-optimizer-instances", above(1)),
    ),
    *refused(
        "the plugin's group builder makes no second gather group, Megatron's makes it from one size",
        "--create-all-gather-group",
    ),
    *refused("the plugin's group builder does not set up SHARP", "--use-sharp"),
    *refused(
        "the plugin's group builder does not read NCCL options per group, so they would have no effect",
        case("--nccl-communicator-config-path", given),
        "--high-priority-stream-groups",
    ),
    *refused_unequal(
        "_ParamAndGradBuffer waits for the whole world at every buffer, whose number differs between stages with "
        "experts or in a U-shape, and on CPUs stock ends with \"Error building extension 'nccl_allocator'\"",
        case("--use-nccl-ub", on, "nccl_ub"),
    ),
    *refused_unequal(
        "fully sharded data parallelism makes its device mesh from one tensor-parallel size",
        "--use-megatron-fsdp",
        "--use-torch-fsdp2",
        way_out="use --use-distributed-optimizer or give every stage the same size",
    ),
    *refused_unequal(
        "weights that appear after start-up miss the copy of the tied embedding between stages",
        "--init-model-with-meta-device",
    ),
    *(
        replace(rule, versions=("<0.18",))
        for rule in refused_unequal(
            "weights that are not drawn are not marked as cut, so norms and clipping count only what the first rank of "
            "a stage has (Megatron up to 0.17)",
            case("--no-initialization", off, "perform_initialization"),
        )
    ),
)

ORDER_RULES: tuple[OptionRule, ...] = (
    *refused_planned(
        "only Megatron's schedules do this, the plugin's executor does not",
        "--defer-embedding-wgrad-compute",
        "--fine-grained-activation-offloading",
    ),
    *refused_unequal_dp(
        "no interleaved order is known for different data-parallel sizes",
        case("--num-virtual-stages-per-pipeline-rank", given),
        case("--num-layers-per-virtual-pipeline-stage", given),
    ),
    *refused_u_shaped(
        "--num-layer-list alone says which layers each part of the U holds",
        "--num-virtual-stages-per-pipeline-rank",
        "--num-layers-per-virtual-pipeline-stage",
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
    ),
    *refused_u_shaped(
        "masks of the edge's samples do not cross to the cloud, only lengths of packed ones do",
        "--reset-attention-mask",
    ),
)
"""What only some orders refuse."""
