"""Options of training, of data and of checkpoints."""

from __future__ import annotations

from dataclasses import replace

from vtp_plugin.host.rules.rule import (
    CLIPPING,
    DEVICE,
    ENGINE,
    NEEDS_ENGINE,
    OPTIONS,
    PARITY,
    OptionContext,
    OptionRule,
    above,
    case,
    given,
    off,
    on,
    only,
    refused,
    refused_unequal,
    refused_unequal_dp,
    supported,
    warned,
    warned_uniform,
)
from vtp_plugin.host.versions import capability

_DATA = "tests/multiproc/training/test_parity.py::test_only_leaders_of_first_and_last_stage_read_data"


def _has_flat_master_weights(args: object, _context: OptionContext) -> bool:
    """Tell whether weights have master weights beside them (in fp32 they are their own), and a rank a flat part."""
    has_master_weights = getattr(args, "bf16", False) or getattr(args, "fp16", False)
    return has_master_weights and getattr(args, "use_distributed_optimizer", False)


DATA_RULES: tuple[OptionRule, ...] = (
    *supported(
        "only tensor-parallel rank 0 of the first and the last stage reads", _DATA, "--dataloader-type external"
    ),
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
    *supported(
        "the batch stays inside the stages that read it",
        "tests/multiproc/training/test_packed_training.py::test_positions_start_anew",
        "--reset-position-ids",
    ),
    *supported(
        "the batch stays inside the stages that read it",
        "tests/multiproc/options/test_options.py::test_masks_of_the_data_set",
        "--reset-attention-mask",
    ),
    *supported("the loss mask stays inside the stage that reads it", OPTIONS, "--eod-mask-loss"),
    *supported(
        "every stage has the lengths of the samples, so microbatches are single rows of one cp size",
        "tests/multiproc/training/test_packed_training.py::test_documents_of_a_row",
        "--dataloader-inter-document-masking",
    ),
    *supported(
        "every stage has the lengths of the samples, so microbatches are single rows of one cp size",
        "tests/multiproc/training/test_packed_training.py::test_conversations",
        "--sft",
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


_CHECKPOINT = "tests/multiproc/checkpoint/test_checkpoint.py::test_save_and_resume"
_RESHARD = "tests/multiproc/checkpoint/test_checkpoint.py::test_load_into_another_list"


CHECKPOINT_RULES: tuple[OptionRule, ...] = (
    *supported(
        "the sharded format records for every tensor which part a rank holds, whatever the sizes",
        _CHECKPOINT,
        "--ckpt-format torch_dist",
        case("--save", given),
        case("--no-ckpt-fully-parallel-save", off, "ckpt_fully_parallel_save"),
    ),
    *supported(
        "replicas of a stage share the work, and a stage with one replica takes the same steps",
        "tests/multiproc/checkpoint/test_replicas_saved.py::test_saves_and_loads_with_shared_work",
        "--ckpt-fully-parallel-load",
        "--ckpt-assume-constant-structure",
    ),
    *supported(
        "weights and optimizer states load into any layout, in the formats of docs/reference/sharding-formats.md",
        _RESHARD,
        case("--load", given),
        "--dist-ckpt-optim-fully-reshardable",
    ),
    *supported(
        "one file per rank position, so it loads only into the layout that wrote it", _CHECKPOINT, "--ckpt-format torch"
    ),
    *refused_unequal(
        "these formats belong to fully sharded data parallelism",
        "--ckpt-format torch_dcp",
        "--ckpt-format fsdp_dtensor",
        way_out="use --ckpt-format torch_dist",
    ),
    *supported(
        "the ranks of the world agree that all have written, whatever each has written",
        "tests/multiproc/checkpoint/test_checkpoint.py::test_saved_in_the_background",
        "--async-save",
    ),
    *supported("it is the same save into another folder", _CHECKPOINT, "--non-persistent-ckpt-type global"),
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
    *supported(
        "every rank reads the options of the model before the plugin checks them against the stages",
        "tests/multiproc/checkpoint/test_checkpoint.py::test_options_of_the_model_from_a_checkpoint",
        "--use-checkpoint-args",
    ),
    *supported(
        "it is a load and a save",
        "tests/multiproc/checkpoint/test_checkpoint.py::test_converted",
        case("--ckpt-convert-format", given),
    ),
    *refused_unequal(
        "Megatron checks such a file with one tensor-parallel size",
        case("--yaml-cfg", given),
        way_out="give the options on the command line",
    ),
)


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
    *refused_unequal(
        "clip_qk cuts a whole master weight into heads, and with --bf16 or --fp16 that optimizer keeps a flat part, so "
        'Megatron itself ends with "The size of tensor a must match the size of tensor b", on equal stages, too',
        only("--qk-clip with --use-distributed-optimizer", _has_flat_master_weights, on),
        way_out="leave one of them out",
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
