"""Options of input data, and of modes other than pretraining."""

from __future__ import annotations

from vtp_plugin.host.rules.table.evidence import OPTIONS
from vtp_plugin.host.rules.table.rule import (
    OptionRule,
    above,
    case,
    given,
    refused,
    refused_unequal,
    refused_unequal_dp,
    supported,
)

_DATA = "tests/multiproc/training/test_parity.py::test_only_leaders_of_first_and_last_stage_read_data"


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
