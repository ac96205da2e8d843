"""Options of checkpoints."""

from __future__ import annotations

from vtp_plugin.host.rules.table.rule import OptionRule, case, given, off, refused_unequal, supported

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
        "weights and optimizer states load into any layout, in the forms of the table in docs/guides/checkpoints.md",
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
