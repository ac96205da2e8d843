"""Options of a training step: optimizer, batches, evaluation, what is logged."""

from __future__ import annotations

from dataclasses import replace

from vtp_plugin.host.rules.context import OptionContext
from vtp_plugin.host.rules.table.evidence import CLIPPING, DEVICE, ENGINE, NEEDS_ENGINE, OPTIONS, PARITY
from vtp_plugin.host.rules.table.rule import (
    OptionRule,
    above,
    case,
    given,
    refused,
    refused_unequal,
    refused_unequal_dp,
    supported,
    warned,
    warned_uniform,
)
from vtp_plugin.host.versions import capability

_GROWING = "tests/multiproc/training/test_growing_batches.py::test_batches_that_grow"


def _evaluates_otherwise(args: object, context: OptionContext) -> bool:
    """Tell whether ranks that read nothing will wait for microbatches of another size than those of training."""
    size = getattr(args, "eval_micro_batch_size", None)
    return bool(
        size
        and getattr(args, "eval_iters", None)
        and size != getattr(args, "micro_batch_size", None)
        and max(context.tp_sizes, default=1) > 1
    )


TRAINING_RULES: tuple[OptionRule, ...] = (
    *supported("it works on each weight element alone", PARITY, "--optimizer adam", "--optimizer sgd"),
    *refused_unequal(
        "it works on the shard of a matrix that a rank holds, so its result depends on the sizes",
        "--optimizer muon",
        "--optimizer dist_muon",
        "--optimizer adaptive_muon",
        "--optimizer soap",
        way_out="use --optimizer adam or sgd",
    ),
    *supported(
        "it works on each weight element alone",
        "tests/multiproc/options/test_options.py::test_lion",
        "--optimizer lion",
    ),
    *supported(
        "HybridDeviceOptimizer moves what a rank has of the optimizer's state between its own device and host memory",
        NEEDS_ENGINE,
        "--optimizer-cpu-offload",
    ),
    *supported(
        "norms and counts are summed over the model group, which holds every weight shard once",
        CLIPPING,
        case("--clip-grad", above(0)),
        "--log-num-zeros-in-grad",
    ),
    *supported(
        "the norm is summed over the model group, but with --overlap-param-gather Megatron takes it before the shards "
        "of a step are gathered, so it depends on the replicas",
        "tests/multiproc/training/test_logged_numbers.py::test_numbers_are_those_of_the_uniform_run",
        "--log-params-norm",
    ),
    *supported(
        "clip_qk takes the maximum of a layer's heads over the replicas of its stage",
        ENGINE,
        "--log-max-attention-logit",
    ),
    *supported(
        "clip_qk takes the maximum of a layer's heads over the replicas of its stage",
        f"not run: needs CUDA and Transformer Engine 2.9, {DEVICE} does it",
        "--qk-clip",
    ),
    *supported(
        "the plugin sends the token count from the last stage to every rank of every stage",
        "tests/multiproc/training/test_optimizer.py::test_uneven_masks_with_per_token_loss",
        "--calculate-per-token-loss",
    ),
    *supported(
        "the batch arithmetic uses the data-parallel size of this rank's stage, and every batch is checked against all",
        _GROWING,
        replace(case("--rampup-batch-size", given), versions=capability("ramp_up").versions),
        case("--step-batch-size-schedule", given),
    ),
    *warned(
        "from 0.18 on Megatron ignores it, so every step has the whole batch",
        "tests/multiproc/training/test_growing_batches.py::test_a_ramp_that_is_ignored",
        "use --step-batch-size-schedule, or leave it out",
        replace(case("--rampup-batch-size", given), versions=capability("ramp_up").missing),
    ),
    *refused_unequal_dp(
        "it rounds a batch to a multiple of the data-parallel size, which differs between stages",
        "--decrease-batch-size-if-needed",
    ),
    *supported(
        "evaluation uses the same communicator",
        "tests/multiproc/training/test_optimizer.py::test_evaluation_changes_nothing",
        case("--eval-iters", above(0)),
    ),
    *supported(
        "the arguments have this microbatch size while a stage evaluates, so scripts share batches of evaluation",
        "tests/multiproc/training/test_evaluation_batches.py::test_batches_of_evaluation",
        case("--eval-micro-batch-size", given),
    ),
    *warned_uniform(
        "in NVIDIA's get_batch the ranks of a stage that do not read make memory for --micro-batch-size, so stock ends "
        "at the first evaluation",
        "tests/multiproc/training/test_evaluation_batches.py::test_stock_ends_and_says_so_at_the_start",
        "give --eval-micro-batch-size the value of --micro-batch-size",
        replace(case("--eval-micro-batch-size", given), applies=_evaluates_otherwise),
    ),
    *supported(
        "every stage cuts it by its own number of replicas, and it is checked against all",
        "tests/multiproc/training/test_evaluation_batches.py::test_batches_of_evaluation",
        case("--eval-global-batch-size", given),
    ),
    *supported(
        "its decisions are reduced over the whole world",
        OPTIONS,
        "--rerun-mode validate_results",
        "--rerun-mode report_stats",
    ),
    *supported(
        "all ranks of the world agree to repeat a step, and then exchange as in any other",
        "tests/multiproc/options/test_options.py::test_a_step_is_repeated",
        case("--error-injection-rate", above(0)),
    ),
    *supported(
        "it compares the replicas of one stage",
        OPTIONS,
        case("--check-weight-hash-across-dp-replicas-interval", given),
    ),
    *supported(
        "timers are gathered over the whole world, and a planned order has none of single messages",
        "tests/multiproc/training/test_logged_numbers.py::test_numbers_are_those_of_the_uniform_run",
        case("--timing-log-level", above(0)),
    ),
    *supported(
        "it gathers one record per rank over the whole world",
        "tests/multiproc/options/test_options.py::test_stragglers",
        "--log-straggler",
    ),
    *supported(
        "every rank talks to its own monitor process only",
        f"not run: needs nvidia-resiliency-ext 0.6, {DEVICE} does it",
        "--enable-ft-package",
    ),
    *refused(
        "it builds the groups again in the same process, and the plugin's channels would be stale",
        "--inprocess-restart",
        way_out="leave it out and restart the processes",
    ),
    *refused_unequal(
        "it replaces reduce-scatter with all-reduce, which the sum of the tied embedding does not expect",
        case("--save-wgrads-interval", given),
    ),
    *refused_unequal(
        "LogitsSaverHooks and StudentLogitsCapture hook model.output_layer on every stage, and only the last one has "
        "it, so Megatron itself ends with \"'GPTModel' object has no attribute 'output_layer'\"",
        case("--logits-save-dir", given),
        case("--logits-load-dir", given),
        way_out="run teacher and student with one stage, --vtp-size-list N",
    ),
)
