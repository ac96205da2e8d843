"""What the tests leave out on each host and Python, with the reason; delete a line to switch its tests on.

A key is the beginning of a test's name as pytest prints it. ``tests/conftest.py`` skips these tests; ``make test`` runs
all others, on every host.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from vtp_plugin.hosts import family_of, find_megatron

ROOT = Path(__file__).resolve().parent.parent
# A Megatron-LM tree with megatron.training and NVIDIA's scripts, which wheels before 0.19 lack.
TREE = os.environ.get("VTP_MEGATRON_LM", "")
# Of processes that tests start. The repository comes first: the tree has a folder "tests" too.
PYTHON_PATH = os.pathsep.join(path for path in (str(ROOT), TREE) if path)

GROUPS = "this test compares with the groups of Megatron 0.19"
DOCS = "the documents show Megatron 0.19"
BRIDGES = "it has no bridges that the plugin replaces, and the plugin says so"
RINGS = "two rings were run with Megatron 0.19 only, and the plugin says so"
RECORDS = "this test is about the records of Megatron 0.19"
FLAGS = "this test is about the flags of Megatron 0.19"
_NUMBERS = "tests/multiproc/test_logged_numbers.py::test_numbers_are_those_of_the_uniform_run"
_AUDITED = "tests/multiproc/test_audited.py::test_equals_the_uniform_run"
# Whole scripts run in them.
_SCRIPTS = (
    "tests/multiproc/test_audited",
    "tests/multiproc/test_checkpoint.py",
    "tests/multiproc/test_edge_cloud_example.py",
    "tests/multiproc/test_executor.py",
    "tests/multiproc/test_presets.py::test_preset",
    "tests/multiproc/test_experts_training.py",
    "tests/multiproc/test_leaks.py",
    "tests/multiproc/test_log",
    "tests/multiproc/test_measured_order.py",
    "tests/multiproc/test_options.py",
    "tests/multiproc/test_probe.py",
    "tests/multiproc/test_starts.py::test_a_script",
    "tests/multiproc/test_training",
    "tests/multiproc/test_u_training.py",
    "tests/multiproc/test_u_traps.py",
    "tests/multiproc/test_unequal_dp_training.py",
)
_OLDER: dict[str, str] = {
    "tests/multiproc/test_edge_cloud_example.py": "examples/pretrain_gpt.py is for Megatron 0.19",
    "tests/multiproc/test_u_shape.py::test_both_chunks": "batches are shared by a function of megatron.training",
    "tests/multiproc/test_packed_training.py": "it has no --dataloader-inter-document-masking; 0.12 has no --sft, that "
    "of 0.16 ends in its own rotary embeddings, that of others has not been run",
    "tests/hang/test_hangs.py::test_a_rank_that_is_lost_inside_a_bridge": BRIDGES,
    "tests/multiproc/test_bridges.py": BRIDGES,
    "tests/multiproc/test_mimo": BRIDGES,
    "tests/multiproc/test_pictures.py::test_with_layers_of_the_encoder": RINGS,
    "tests/multiproc/test_pictures.py::test_no_picture_and_no_word_leaves_the_edge[two": RINGS,
    "tests/multiproc/test_pictures.py::test_configurations": RINGS,
    "tests/multiproc/test_pictures.py::test_the_example": RINGS,
    "tests/multiproc/test_training_bad_input.py::test_sizes_and_options_are_refused[logits]": "it has no "
    "--logits-load-dir",
    f"{_AUDITED}[own-batch": "it has no --eval-micro-batch-size",
    f"{_NUMBERS}[packed": "it has no --dataloader-inter-document-masking",
    f"{_NUMBERS}[experts-own": "it logs the routers' losses of one replica, another one than the uniform run",
    "tests/unit/test_bridges.py::test_a_list": BRIDGES,
    "tests/unit/test_bridges.py::test_names": BRIDGES,
    "tests/unit/test_checkpoint_validation.py::test_equal_stages": "its check raises what that of 0.19 returns",
    "tests/unit/test_cli.py::test_doctor_leaves_nothing": RECORDS,
    "tests/unit/test_cli.py::test_run_shows_the_help": "this test is about a help text of Megatron 0.19",
    "tests/unit/test_docs.py::test_generated_docs": DOCS,
    "tests/unit/test_docs_commands.py::test_first_run_of_the_readme": "examples/pretrain_gpt.py is for Megatron 0.19",
    "tests/unit/test_docs_text.py::test_flags_that_are_named": DOCS,
    "tests/unit/test_host_seam.py": RECORDS,
    "tests/unit/test_layout.py::test_explicit_expert_tp": GROUPS,
    "tests/unit/test_layout.py::test_unequal_creation_order": GROUPS,
    "tests/unit/test_layout.py::test_uniform_": GROUPS,
    "tests/unit/test_options.py::test_every_attribute": FLAGS,
    "tests/unit/test_options.py::test_line_names": FLAGS,
    "tests/unit/test_options.py::test_equal_data_parallel_sizes": FLAGS,
    "tests/unit/test_options.py::test_no_flag_of_megatron": FLAGS,
    "tests/unit/test_sites.py::test_every_name": FLAGS,
    "tests/multiproc/test_experts_training.py::test_logged_router_losses[1,2-dp-2]": "it logs another replica",
    "tests/multiproc/test_attention.py::test_latent": "latent attention is refused",
    "tests/multiproc/test_presets.py::test_latent": "latent attention is refused",
    "tests/multiproc/test_presets.py::test_preset[deepseek": "latent attention is refused",
    "tests/unit/test_platform_cpu.py::test_features": "its losses in bf16 differ from those in fp32 by 2 %, not 1 %",
    "tests/unit/test_u_edge.py::test_edge_gets_all_of_a_batch": RECORDS,
}
_EXPERTS = dict.fromkeys(
    (
        "tests/multiproc/test_experts",
        "tests/multiproc/test_presets.py::test_preset",
        "tests/multiproc/test_host_grid.py::test_it_trains_as_the_uniform_run[(1, 2)-{'experts'",
    ),
    "experts have not been run with it, and the plugin refuses them",
)
_FP4 = {
    f"tests/unit/{test}[--fp4-param-gather]": "it keeps this under another name; --fp4-format, which it needs, is "
    "refused"
    for test in (
        "test_options.py::test_refused_option_gives_one_line_with_a_way_out",
        "test_options.py::test_rule_applies_to_what_its_option_parses_to",
        "test_options_enforced.py::test_a_run_is_refused",
    )
}
_OVERLAPPED = dict.fromkeys(
    (
        "tests/multiproc/test_options.py::test_supported_option[gather-in-step-1,2]",
        "tests/multiproc/test_options.py::test_supported_option[unaligned-1,2]",
        "tests/multiproc/test_options.py::test_supported_option[warmup-flush-2,1,1]",
        "tests/multiproc/test_training.py::test_bf16_stays_near_the_uniform_run[1,2-interleaved]",
        "tests/multiproc/test_training.py::test_equals_uniform_run[interleaved-recompute-2,1-dp1]",
        "tests/multiproc/test_training.py::test_equals_uniform_run[overlapped-interleaved-1,2-dp2]",
        "tests/multiproc/test_training.py::test_equals_uniform_run[replica-major-1,2-dp2]",
        f"{_AUDITED}[blocks-interleaved",
        "tests/multiproc/test_training_context.py::test_trains_as_the_uniform_run[2,1-cp-1,2-interleaved]",
        "tests/multiproc/test_training_context.py::test_trains_as_the_uniform_run[1,1-cp-2,1-dp2]",
    ),
    "its uniform run needs overlapped transfers, which gloo has not: two interleaved stages, or warm-up and flush",
)
_BACKGROUND = {
    "tests/multiproc/test_checkpoint.py::test_saved_in_the_background": "its worker, which --async-save needs, is for "
    "CUDA, and the plugin refuses it on CPUs"
}
_PREDICTION = {
    "tests/multiproc/test_mtp.py::test_prediction[2,1 dp=2 tied attention=rotary mtp=1 masked": "its prediction "
    "divides by the tokens of a microbatch, also where all are masked"
}
_RAMP_UP = dict.fromkeys(
    ("tests/multiproc/test_options.py::test_supported_option[ramp-up", f"{_AUDITED}[ramp-up", f"{_NUMBERS}[ramp-up"),
    "it ramps up batches of sample-based runs only",
)
LEFT_OUT: dict[str, dict[str, str]] = {
    "0.12": {
        **_OLDER,
        **{
            f"tests/multiproc/test_attention.py::test_attention[{sizes} ": "no stage may have more ranks than groups "
            "of heads"
            for sizes in ("1,4", "2,4", "4,1", "4,2")
        },
        "tests/multiproc/test_attention.py::test_attention[1,2 layers-per-chunk=2 num-microbatches=3 "
        "attention=windows": "its TransformerConfig has no window_attn_skip_freq",
        "tests/multiproc/test_checkpoint.py::test_random_states_of_another_list": "it ends, and names --no-load-rng",
        **{
            f"tests/multiproc/test_experts.py::test_experts[{sizes} dp=2 num-steps=5 seq=12 sequence-parallel "
            "experts=by batch": "it has no balancing loss by batch"
            for sizes in ("1,2", "2,1")
        },
        "tests/multiproc/test_experts.py::test_experts[3,1 tied": "in the sizes that it needs, see fitted(), Adam "
        "makes more of rounding: with SGD they pass",
        **{
            f"tests/multiproc/test_experts.py::test_tokens_are_dropped_by_the_ranks[{case} gathered": "losses of "
            "routers with different context-parallel sizes are refused"
            for case in (
                "1,1 num-steps=5 seq=12 cp-list=(1, 2)",
                "1,2 num-steps=5 seq=12 sequence-parallel cp-list=(2, 1)",
            )
        },
        "tests/multiproc/test_experts_training.py::test_logged_router_losses[U": "one gradient norm of five is 2.6e-5 "
        "off, and 2e-5 are allowed",
        "tests/multiproc/test_presets.py::test_preset": "resuming is up to 3.1e-5 off in it, and its presets were "
        "not yet compared with a uniform run that resumes",
        "tests/multiproc/test_experts_training.py::test_checkpoints_of_one_list": "it cannot save this, and the plugin "
        "refuses it at the start",
        "tests/multiproc/test_bad_input.py::test_what_one_rank_finds_ends_all[a subclass]": "it has no P2PCommunicator",
        **dict.fromkeys(
            (
                *(
                    f"tests/multiproc/test_checkpoint.py::test_save_and_resume[{case}]"
                    for case in ("2,1-distributed", "1,2-distributed", "1,2-reshardable", "1,2-bf16-distributed")
                ),
                "tests/multiproc/test_checkpoint.py::test_save_and_resume[2,1-parallel-load]",
                "tests/multiproc/test_checkpoint.py::test_load_into_another_list[1,2-to-2,1-reshardable]",
                "tests/multiproc/test_checkpoint.py::test_load_into_another_list[2,1-to-1,1-reshardable]",
                "tests/multiproc/test_checkpoint.py::test_saved_in_the_background[2,1-distributed]",
                "tests/multiproc/test_checkpoint.py::test_what_only_its_own_list_can_load_is_refused[distributed-unequal]",
                "tests/multiproc/test_training_context.py::test_save_and_resume[distributed]",
                "tests/multiproc/test_unequal_dp_training.py::test_save_and_resume[distributed]",
                "tests/multiproc/test_unequal_dp_training.py::test_checkpoint_of_another_dp_list[distributed]",
            ),
            "it cannot save this, and the plugin refuses it at the start",
        ),
        "tests/multiproc/test_checkpoint.py::test_what_only_its_own_list_can_load_is_refused[distributed]": "any list "
        "can load it",
        "tests/multiproc/test_checkpoint.py::test_save_and_resume[2,1-bf16]": "it resumes in bf16 with gradient norms "
        "that are 1.5e-4 off",
        **_OVERLAPPED,
        "tests/multiproc/test_training.py::test_equals_uniform_run[overlapped-2,1-dp2]": "a tied embedding with the "
        "distributed optimizer fails in Megatron itself, with the sizes of these tests",
        "tests/multiproc/test_options.py::test_a_step_is_repeated_from_its_checkpoint": "it loads no checkpoint of "
        "iteration 0",
        "tests/multiproc/test_options.py::test_layers_of_a_file[4,1": "no stage may have more ranks than groups of "
        "heads",
        "tests/multiproc/test_options.py::test_sequence_parallel_with_unequal_stages[1,2,1,2]": "its schedule for one "
        "virtual stage fails on the last stage, in Megatron itself",
        "tests/multiproc/test_training_prediction.py": "it has no --pipeline-model-parallel-layout",
        "tests/multiproc/test_options.py::test_supported_option[layout": "it has no --pipeline-model-parallel-layout",
        f"{_AUDITED}[layout": "it has no --pipeline-model-parallel-layout",
        f"{_NUMBERS}[overlapped": "it cannot save this, and the plugin refuses it at the start",
        f"{_NUMBERS}[experts-cp-list": "losses of routers with different context-parallel sizes are refused",
        **_RAMP_UP,
        **_PREDICTION,
        **dict.fromkeys(
            (
                "tests/multiproc/test_u_training.py::test_refused[fine-tuning]",
                "tests/multiproc/test_u_training.py::test_refused[two-layouts]",
                "tests/multiproc/test_u_training.py::test_refused[validation]",
                "tests/multiproc/test_u_traps.py::test_several_packed_rows",
                "tests/multiproc/test_unequal_dp_training.py::test_refused[full-validation]",
            ),
            "it has none of --sft, --full-validation and --pipeline-model-parallel-layout",
        ),
        "tests/multiproc/test_parity.py::test_parity[2,3 vpp=2 tied optimizer=adam distributed-optimizer "
        "overlap-grad-reduce overlap-param-gather dtype=bf16": "in the sizes that it needs, see fitted(), bf16 rounds "
        "gradient norms by 3 %",
        "tests/multiproc/test_pictures.py": "it reads no layout of the pipeline",
        "tests/multiproc/test_training_bad_input.py::test_sizes_and_options_are_refused[vocabulary": "it has no "
        "--padded-vocab-size",
        "tests/unit/test_docs_commands.py::test_command_is_accepted[fine-tuning.md: torchrun": "it has no SFTTokenizer",
        "tests/multiproc/test_sequential.py::test_equals_the_sequential_model[tied-1,4 vpp=2": "a tied embedding with "
        "the distributed optimizer fails in Megatron itself, with the sizes of these tests",
        "tests/multiproc/test_u_training.py::test_layout": "it has no --pipeline-model-parallel-layout",
        **dict.fromkeys(
            (
                "tests/multiproc/test_mtp.py::test_prediction[1,2,1 ",
                "tests/multiproc/test_mtp.py::test_prediction[1,2,2 seq=8 sequence-parallel attention=rotary mtp=1 ",
                "tests/multiproc/test_mtp.py::test_prediction[2,1 tied attention=rotary mtp=1 layout",
                "tests/multiproc/test_mtp.py::test_prediction[2,1,3 tied optimizer=adam distributed-optimizer "
                "attention=rotary mtp=1 layout",
                "tests/multiproc/test_mtp.py::test_prediction_that_would_be_wrong",
            ),
            "it has no layout of the pipeline, so the last stage predicts",
        ),
        **dict.fromkeys(
            (
                "tests/multiproc/test_mtp.py::test_prediction[1,3 dp=2 tied optimizer=adam distributed-optimizer",
                "tests/multiproc/test_mtp.py::test_prediction_on_the_edge[2,1 dp=2 layers=(1, 1, 2) optimizer=adam",
            ),
            "a tied embedding with the distributed optimizer fails in Megatron itself, with the sizes of these tests",
        ),
        "tests/multiproc/test_mtp.py::test_prediction[1,4 ": "no stage may have more ranks than groups of heads",
        "tests/multiproc/test_u_shape.py::test_equals_the_sequential_model[1,1 dp=2": "a tied embedding with the "
        "distributed optimizer fails in Megatron itself, with the sizes of these tests",
    },
    "0.16": {
        **_OLDER,
        **_FP4,
        **_OVERLAPPED,
        **_RAMP_UP,
        **_PREDICTION,
        **_BACKGROUND,
    },
    "0.17": {**_OLDER, **_BACKGROUND, **_EXPERTS},
    "0.18": {
        **_OLDER,
        **_BACKGROUND,
        **_EXPERTS,
        "tests/multiproc/test_mtp.py::test_prediction[1,2 attention=rotary mtp=2 recompute]": "its prediction cannot "
        "recompute: _checkpointed_forward lacks padding_mask",
    },
    "0.19": {"tests/multiproc/test_host_grid.py": "test_parity.py tries more", **_BACKGROUND},
}


def use_tree() -> None:
    """Let this process, and those that inherit its environment, import Megatron from the tree, if there is one."""
    if TREE:
        sys.path.insert(1, TREE)
        os.environ["PYTHONPATH"] = PYTHON_PATH


def tree_problem() -> str:
    """Say what whole scripts of the tree would end at; empty where there is a tree without fault, or none."""
    datasets = Path(TREE) / "megatron" / "core" / "datasets"
    compiled = any((datasets / f"helpers_cpp{suffix}").exists() for suffix in EXTENSION_SUFFIXES)
    if not TREE or compiled or importlib.util.find_spec("pybind11"):
        return ""
    return (
        f"VTP_MEGATRON_LM={TREE}: its helpers_cpp is not compiled for this Python, and pybind11, which that needs, is "
        f"not installed; copy megatron/core/datasets/helpers_cpp*.so of the installed megatron-core into {datasets}"
    )


def is_older() -> bool:
    """Tell whether the host is a known one before 0.19."""
    return host_name() not in ("0.19", "")


def example_script() -> str:
    """Return the path of the training script that tests run: ours is for Megatron 0.19, else it is NVIDIA's own."""
    return str(Path(TREE) / "pretrain_gpt.py" if is_older() else ROOT / "examples" / "pretrain_gpt.py")


def has_training() -> bool:
    """Tell whether there is a megatron.training."""
    return importlib.util.find_spec("megatron.training") is not None


def stock_flags() -> tuple[str, ...]:
    """Return flags that Megatron's own schedules need; over gloo older ones may use a tensor too early."""
    return ("--no-overlap-p2p-communication",) if host_name() in ("0.12", "0.16") else ()


def resharding_flags() -> tuple[str, ...]:
    """Return flags with which a script goes on in another list; without them Megatron 0.12 ends, and names them."""
    return ("--no-load-rng",) if host_name() == "0.12" else ()


def resume_tolerance() -> float:
    """Return how far a resumed run may lie from one that went on; 0.12 itself is 1.06e-5 off with torch_dist."""
    return 2e-5 if host_name() == "0.12" else 1e-5


def norm_tolerance() -> float:
    """Return how far gradient norms may lie apart; 0.12 alone is 1.2e-5 off, between its uniform runs 3,3 and 1,1.

    Its tests have a vocabulary of 4127 rows (see :func:`vocab_size`), whose squares are added up in other shares.
    """
    return 2e-5 if host_name() == "0.12" else 1e-5


def reshardable_flags() -> tuple[str, ...]:
    """Return flags with which the distributed optimizer is stored for any list; 0.12 stores a uniform one so."""
    return () if host_name() == "0.12" else ("--dist-ckpt-optim-fully-reshardable",)


def saves_distributed() -> bool:
    """Tell whether stages of different sizes can save a distributed optimizer that another list can load."""
    return host_name() != "0.12"


def logs_one_replica() -> bool:
    """Tell whether the log has the routers' losses of one replica only; Megatron 0.19 averages all."""
    return is_older()


def exact_resume_tolerance() -> float:
    """Return as :func:`resume_tolerance`, where only 0.12 is not the same to the last bit."""
    return resume_tolerance() if host_name() == "0.12" else 0.0


def counts_over_context() -> bool:
    """Tell whether a loss function gives the tokens of all context-parallel ranks, not of its own."""
    return host_name() == "0.12"


def counts_all_zeros() -> bool:
    """Tell whether the optimizer counts the zeros of the gradients though nobody asked; one more reduction."""
    return host_name() == "0.12"


def prints_first_step() -> bool:
    """Tell whether the line of the second step holds the mean of two; Megatron 0.12 prints no line early."""
    return host_name() != "0.12"


def is_usual(warning: str) -> bool:
    """Tell whether Megatron says so of uniform stages too: 0.12 compares the order of the optimizer's groups."""
    return host_name() == "0.12" and "'param_groups'" in warning and "'args'" not in warning


def vocab_size() -> int:
    """Return the size of the vocabulary that scripts are given; documents that Megatron 0.12 makes up count to 4095."""
    return 4127 if host_name() == "0.12" else 60


def host_name() -> str:
    """Return the name of the host whose Megatron the tests import; empty where there is no known one."""
    megatron = find_megatron()
    host = None if megatron is None else family_of(megatron.version)
    return "" if host is None else host.name


def fitted(case: Any, host: str) -> Any:
    """Give a training case in sizes that the Megatron of a host takes by itself.

    With the distributed optimizer Megatron 0.12 puts a shared embedding into a bucket of its own, which begins at a
    multiple of 128 elements; the embedding itself begins at one of 64, and ends at an assertion where that is another
    place. With these sizes all parameters end at multiples of 128.
    """
    if host == "0.12" and case.tied and case.distributed_optimizer and case.load is None:
        return dataclasses.replace(case, hidden=128, has_bias=False)
    return case


def reason_to_skip(test: str, host: str) -> str:
    """Say why a host leaves a test out; empty if it runs.

    >>> reason_to_skip("tests/multiproc/test_parity.py::test_x", "0.12")
    ''
    >>> reason_to_skip("tests/multiproc/test_parity.py::test_x", "0.19")
    ''
    """
    return next((f"host {host}: {reason}" for reason in _reasons(test, host)), "")


def _reasons(test: str, host: str) -> Iterator[str]:
    for beginning, reason in LEFT_OUT.get(host, {}).items():
        if test.startswith(beginning):
            yield reason
    if test.startswith(_SCRIPTS) and is_older() and not TREE:
        yield "its wheel has no megatron.training; name a Megatron-LM tree in VTP_MEGATRON_LM"
