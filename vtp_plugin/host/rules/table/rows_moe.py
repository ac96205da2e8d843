"""Options of experts and their routers."""

from __future__ import annotations

from dataclasses import replace

from vtp_plugin.host.rules.context import OptionContext
from vtp_plugin.host.rules.table.evidence import NEEDS_ENGINE
from vtp_plugin.host.rules.table.rule import (
    OptionRule,
    Test,
    above,
    case,
    given,
    only,
    refused,
    refused_unequal,
    refused_unequal_dp,
    supported,
    warned,
    warned_uniform,
)

_EXPERTS = "tests/multiproc/experts/test_experts.py::test_experts"


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
    *supported(
        "every stage cuts its experts by its own sizes and sums their gradients over its own copies",
        _EXPERTS,
        "--num-experts",
        case("--expert-model-parallel-size", above(1)),
        case("--expert-tensor-parallel-size", given),
        case("--moe-shared-expert-intermediate-size", given),
        case("--moe-layer-freq", lambda value: value not in (None, 1)),
        "--moe-token-dispatcher-type allgather",
        "--moe-token-dispatcher-type alltoall",
    ),
    *supported(
        "routers balance inside a stage, and their losses count as often as the model's",
        _EXPERTS,
        case("--moe-router-load-balancing-type aux_loss", _balances_by("aux_loss")),
        case("--moe-router-load-balancing-type seq_aux_loss", _balances_by("seq_aux_loss")),
        case("--moe-z-loss-coeff", given),
        "--moe-router-enable-expert-bias",
    ),
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
    *supported(
        "the logits of all ranks that share a microbatch are gathered, and each takes its own tokens",
        "tests/multiproc/experts/test_experts.py::test_tokens_are_shared_out_among_those_of_a_microbatch",
        case("--moe-router-load-balancing-type sinkhorn", _balances_by("sinkhorn")),
    ),
    *warned_uniform(
        "Megatron balances among the tokens of each rank, which the tensor- and context-parallel sizes cut, so the run "
        "repeats none of other sizes",
        "tests/multiproc/experts/test_experts.py::test_megatron_shares_out_the_tokens_of_a_rank",
        "compare with runs of this size only, or with stages of different sizes, which balance as one rank",
        only("--moe-router-load-balancing-type sinkhorn", _cuts_tokens, _balances_by("sinkhorn")),
    ),
    *supported("experts that are computed together lie on one rank", NEEDS_ENGINE, "--moe-grouped-gemm"),
    *supported(
        "the losses of the routers are summed inside each stage, then over the stages",
        "tests/multiproc/experts/test_experts_training.py::test_logged_router_losses",
        "--moe-per-layer-logging",
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
