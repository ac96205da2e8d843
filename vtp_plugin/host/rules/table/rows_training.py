"""Options of training, of data and of checkpoints."""

from __future__ import annotations

from dataclasses import replace

from vtp_plugin.host.rules.rule import (
    OptionContext,
    OptionRule,
    above,
    case,
    given,
    on,
    only,
    refused,
    refused_unequal,
    refused_unequal_dp,
    warned,
    warned_uniform,
)
from vtp_plugin.host.versions import capability


def _has_flat_master_weights(args: object, _context: OptionContext) -> bool:
    """Tell whether weights have master weights beside them (in fp32 they are their own), and a rank a flat part."""
    has_master_weights = getattr(args, "bf16", False) or getattr(args, "fp16", False)
    return has_master_weights and getattr(args, "use_distributed_optimizer", False)


DATA_RULES: tuple[OptionRule, ...] = (
    *refused_unequal_dp(
        "it shuffles in buckets of the data-parallel size, so stages would read different samples",
        "--dataloader-type cyclic",
        way_out="use --dataloader-type single or give every stage the same data-parallel size",
    ),
    *refused_unequal_dp(
        "GPTFIMDataset draws how it turns a sample around from one generator, sample after sample, so stages whose "
        "replicas read others would have tokens and labels that do not fit",
        "--fim-data",
    ),
    *refused(
        "ranks that read no data end with len() of None in build_train_valid_test_data_iterators, and with one set all "
        "end with \"'int' object is not subscriptable\" in evaluate_and_print_results, in stock Megatron, too",
        "--full-validation",
        way_out="leave it out and give --eval-iters",
    ),
    *refused_unequal("rollouts and weight transfer are built on one tensor-parallel size", "--perform-rl-step"),
    *refused_unequal(
        "all ranks gather number after number of their groups, and a stage of another size has others, which hangs",
        case("--gpu-sniff-test-interval", given),
    ),
    *refused_unequal(
        "the inference engine broadcasts over the pipeline group, which hangs between unequal stages",
        "--inference-dynamic-batching",
        "--use-legacy-static-engine",
        "--flash-decode",
        case("--inference-shards", given),
        case("--inference-batch-times-seqlen-threshold", above(-1)),
        way_out="load the checkpoint into a uniform run for inference",
    ),
)


CHECKPOINT_RULES: tuple[OptionRule, ...] = (
    *refused_unequal(
        "these formats belong to fully sharded data parallelism",
        "--ckpt-format torch_dcp",
        "--ckpt-format fsdp_dtensor",
        way_out="use --ckpt-format torch_dist",
    ),
    *refused_unequal(
        "MCoreTensorAwareStateDict.to_state_dict gives a rank its own file back and does not look whether it fits, so "
        "another layout would load other parts of the weights",
        "--non-persistent-ckpt-type local",
        way_out="use --non-persistent-ckpt-type global",
    ),
    *refused_unequal(
        "it takes one tensor-parallel size for all stages from the checkpoint",
        "--use-mp-args-from-checkpoint-args",
        way_out="leave it out and give --vtp-size-list",
    ),
    *refused_unequal(
        "Megatron checks such a file with one tensor-parallel size",
        case("--yaml-cfg", given),
        way_out="give the options on the command line",
    ),
)


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
    *refused_unequal(
        "it works on the shard of a matrix that a rank holds, so its result depends on the sizes",
        "--optimizer muon",
        "--optimizer dist_muon",
        "--optimizer adaptive_muon",
        "--optimizer soap",
        way_out="use --optimizer adam or sgd",
    ),
    *refused_unequal(
        "clip_qk cuts a whole master weight into heads, and with --bf16 or --fp16 that optimizer keeps a flat part, so "
        'Megatron itself ends with "The size of tensor a must match the size of tensor b", on equal stages, too',
        only("--qk-clip with --use-distributed-optimizer", _has_flat_master_weights, on),
        way_out="leave one of them out",
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
    *warned_uniform(
        "in NVIDIA's get_batch the ranks of a stage that do not read make memory for --micro-batch-size, so stock ends "
        "at the first evaluation",
        "tests/multiproc/training/test_evaluation_batches.py::test_stock_ends_and_says_so_at_the_start",
        "give --eval-micro-batch-size the value of --micro-batch-size",
        replace(case("--eval-micro-batch-size", given), applies=_evaluates_otherwise),
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
