"""What tests need of a Megatron, by name, and what else differs between hosts.

``@pytest.mark.needs("two_rings")`` says that a test needs a capability of
``vtp_plugin/host/versions/known_versions.py``, or something of ``NEEDS`` here; ``cases=("1,2-", "3,1]")`` that only
cases do whose names begin so, or with a bracket at the end are so. ``tests/conftest.py`` skips what the host has not;
``make test`` runs all others, on every host.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from vtp_plugin.host.versions import MegatronFamily, capability, family_of, find_megatron, host_named, is_in

ROOT = Path(__file__).resolve().parents[2]
# A Megatron-LM tree with megatron.training and NVIDIA's scripts, which wheels before 0.19 lack.
TREE = os.environ.get("VTP_MEGATRON_LM", "")
# Of processes that tests start. The repository comes first: the tree has a folder "tests" too.
PYTHON_PATH = os.pathsep.join(path for path in (str(ROOT), TREE) if path)

# What a test may need of a Megatron beside the capabilities in vtp_plugin/host/versions/known_versions.py: which
# versions have it, and why the others leave the test out.
_SINCE_0_19 = (">=0.19",)
_SINCE_0_15 = (">=0.15",)
NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    "scripts_here": (
        ("<1",) if TREE else _SINCE_0_19,
        "its wheel has no megatron.training; name a Megatron-LM tree in VTP_MEGATRON_LM",
    ),
    "judged_options": (("<0.17", ">=0.19"), "of its options nobody has judged which depend on the sizes"),
    # Of Megatron 0.19.
    "our_example": (_SINCE_0_19, "examples/pretrain_gpt.py is for Megatron 0.19"),
    "engine_of_0_19": (_SINCE_0_19, "what stands for Transformer Engine has what Megatron 0.19 asks for"),
    "records_of_0_19": (_SINCE_0_19, "this test is about the records of Megatron 0.19"),
    "flags_of_0_19": (_SINCE_0_19, "this test is about the flags of Megatron 0.19"),
    "help_of_0_19": (_SINCE_0_19, "this test is about a help text of Megatron 0.19"),
    "groups_of_0_19": (_SINCE_0_19, "this test compares with the groups of Megatron 0.19"),
    "documents_of_0_19": (_SINCE_0_19, "the documents show Megatron 0.19"),
    "batches_shared_in_core": (_SINCE_0_19, "batches are shared by a function of megatron.training"),
    "document_masking": (_SINCE_0_19, "it has no --dataloader-inter-document-masking"),
    "groups_by_rates": (_SINCE_0_19, "it tells groups of parameters apart by other numbers than their rates"),
    "loaded_logits": (_SINCE_0_19, "it has no --logits-load-dir"),
    "own_evaluation_batch": (_SINCE_0_19, "it has no --eval-micro-batch-size"),
    "log_of_all_replicas": (
        _SINCE_0_19,
        "it logs the routers' losses of one replica, another one than the uniform run",
    ),
    "own_tokens_over_context": (_SINCE_0_15, "its loss function counts the tokens of all context-parallel ranks"),
    "forced_balance": (_SINCE_0_15, "it has no --moe-router-force-load-balancing"),
    "biased_balance": ((">=0.17",), "it has no --moe-router-force-biased"),
    "returned_validation": (_SINCE_0_19, "its check raises what that of 0.19 returns"),
    "bf16_to_a_percent": (_SINCE_0_19, "its losses in bf16 differ from those in fp32 by 2 %, not 1 %"),
    "detector_of_0_19": (_SINCE_0_19, "older detectors were not read"),
    "measured_memory": (_SINCE_0_19, "experts are refused, or what they hold was not measured"),
    "words_of_hybrid_models": (_SINCE_0_19, "older Megatrons say it in other words"),
    "mended_adapters": ((">=0.19,<0.20",), "PEFT's layers were mended for 0.19 only"),
    # Since 0.17, and what only some have.
    "stock_without_overlap": (
        (">=0.17",),
        "its uniform run needs overlapped transfers, which gloo has not: two interleaved stages, or warm-up and flush",
    ),
    "ignored_ramp": ((">=0.18",), "it does as --rampup-batch-size says"),
    "masked_prediction": (
        (">=0.17",),
        "its prediction divides by the tokens of a microbatch, also where all are masked",
    ),
    "recomputed_prediction": (
        ("<0.18", ">=0.19"),
        "its prediction cannot recompute: _checkpointed_forward lacks padding_mask",
    ),
    "fp4_param_gather": (
        ("<0.15", ">=0.17"),
        "it keeps this under another name; --fp4-format, which it needs, is refused",
    ),
    "worker_on_cpus": (
        ("<0.15", ">=0.19"),
        "its worker, which --async-save needs, is for CUDA, and the plugin refuses it on CPUs",
    ),
    "latent_without_engine": (
        ("<0.15", ">=0.19"),
        "it builds latent attention with Transformer Engine only, which no run of these tests has",
    ),
    "grouped_without_engine": (
        ("<0.17",),
        "it computes experts together with Transformer Engine only, and else one after another",
    ),
    "experts_of_other_sizes": (
        ("<0.12", ">=0.15"),
        "stages of one size whose experts nobody cuts (EP 1, ETP 1) end in gloo, in Megatron itself",
    ),
    "older_buckets": (("<0.15",), "it places every tied embedding"),
    "forgotten_blocks": ((">=0.16",), "it reads optimizers that are stored in blocks of parameters"),
    "optimizer_by_rank": (("<0.15",), "it stores no optimizer as one object for each rank in a distributed checkpoint"),
    "no_bridges": (("<0.19",), "it has bridges"),
    "core_grid_of_older": (("<0.19",), "test_parity.py tries more"),
    # Since 0.15.
    "forms_of_0_15": (_SINCE_0_15, "it has no --dist-ckpt-optim-fully-reshardable"),
    "flags_after_0_12": (_SINCE_0_15, "it has none of --sft, --full-validation and --pipeline-model-parallel-layout"),
    "padded_vocabulary": (_SINCE_0_15, "it has no --padded-vocab-size"),
    "sft_tokenizer": (_SINCE_0_15, "it has no SFTTokenizer"),
    "sinks": (_SINCE_0_15, "its attention has no sinks"),
    "skipped_windows": (_SINCE_0_15, "its TransformerConfig has no window_attn_skip_freq"),
    "padded_experts": (_SINCE_0_15, "its models take no padding mask"),
    "balance_by_batch": (_SINCE_0_15, "it has no balancing loss by batch"),
    "router_losses_by_context": (
        _SINCE_0_15,
        "losses of routers with different context-parallel sizes are refused",
    ),
    "random_states_of_other_lists": (_SINCE_0_15, "it ends, and names --no-load-rng"),
    "iteration_0": (_SINCE_0_15, "it loads no checkpoint of iteration 0"),
    "ranks_beyond_groups_of_heads": (_SINCE_0_15, "no stage may have more ranks than groups of heads"),
    "one_virtual_stage": (
        _SINCE_0_15,
        "its schedule for one virtual stage fails on the last stage, in Megatron itself",
    ),
    "tied_and_distributed": (
        _SINCE_0_15,
        "a tied embedding with the distributed optimizer fails in Megatron itself, with the sizes of these tests",
    ),
    "prediction_of_any_size": (_SINCE_0_15, "it multiplies gradients through prediction by the size of their stage"),
    "adam_with_tied_experts": (
        _SINCE_0_15,
        "in the sizes that it needs, see fitted(), Adam makes more of rounding: with SGD they pass",
    ),
    "exact_bf16_resume": (_SINCE_0_15, "it resumes in bf16 with gradient norms that are 1.5e-4 off"),
    "norms_of_a_u_with_experts": (_SINCE_0_15, "one gradient norm of five is 2.6e-5 off, and 2e-5 are allowed"),
    "presets_that_resume": (
        _SINCE_0_15,
        "resuming is up to 3.1e-5 off in it, and its presets were not yet compared with a uniform run that resumes",
    ),
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
    host = known_host()
    return host is not None and not is_in(host.first, *_SINCE_0_19)


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


def background_flags() -> tuple[str, ...]:
    """Return flags with which Megatron's own strategy saves in the background; 0.12 forks a process for each save."""
    stays = ("--use-persistent-ckpt-worker", "--async-strategy", "mcore")
    return ("--async-save",) if host_name() == "0.12" else ("--async-save", *stays)


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


def ramps_up() -> bool:
    """Tell whether batches grow by --rampup-batch-size; newer Megatrons ignore it."""
    return not reason_to_skip("ramp_up", host_name())


def is_usual(warning: str) -> bool:
    """Tell whether Megatron says so of uniform stages too: 0.12 compares the order of the optimizer's groups."""
    return host_name() == "0.12" and "'param_groups'" in warning and "'args'" not in warning


def vocab_size() -> int:
    """Return the size of the vocabulary that scripts are given; documents that Megatron 0.12 makes up count to 4095."""
    return 4127 if host_name() == "0.12" else 60


def counts_end_of_document() -> bool:
    """Tell whether a tokenizer that makes up words has one more than it is told, the end of a document."""
    return host_name() in ("0.12", "0.16", "0.17")


def known_host() -> MegatronFamily | None:
    """Return the host whose Megatron the tests import; None where there is no known one."""
    megatron = find_megatron()
    return None if megatron is None else family_of(megatron.version)


def host_name() -> str:
    """Return its name; empty where there is no known one."""
    host = known_host()
    return "" if host is None else host.name


def fitted(case: Any, host: str) -> Any:
    """Give a training case in sizes that the Megatron of a host takes by itself.

    With the distributed optimizer Megatron 0.12 puts a shared embedding into a bucket of its own, which begins at a
    multiple of 128 elements; the embedding itself begins at one of 64, and ends at an assertion where that is another
    place. With these sizes all parameters end at multiples of 128.
    """
    if host == "0.12" and case.model.tied and case.execution.distributed_optimizer and case.checks.load is None:
        return case.but(hidden=128, has_bias=False)
    return case


def reason_to_skip(need: str, host: str) -> str:
    """Say why a host leaves out the tests that need something; empty if it runs them, as an unknown one does.

    Raises:
        KeyError: nothing is called so.

    >>> reason_to_skip("two_rings", "0.18")
    'Megatron 0.18: an encoder in a U (`--vtp-encoder-layer-list`): not supported'
    >>> reason_to_skip("two_rings", "0.19"), reason_to_skip("padded_vocabulary", "0.19")
    ('', '')
    """
    if need in NEEDS:
        versions, reason = NEEDS[need]
    else:
        row = capability(need)
        versions, reason = row.versions, f"{row.what}: {row.said_of(host_named(host).first) if host else ''}"
    has_it = not host or is_in(host_named(host).first, *versions)
    return "" if has_it else f"Megatron {host}: {reason}"


def left_out(items: Iterable[Any], host: str) -> Iterator[tuple[Any, str]]:
    """Yield the tests that a host leaves out, by their marks ``needs(name)`` or ``needs(name, cases=beginnings)``."""
    for item in items:
        for mark in item.iter_markers("needs"):
            reason = reason_to_skip(mark.args[0], host)
            if reason and case_of(item).startswith(cases_of(mark)):
                yield item, reason


def unfitting(items: Iterable[Any]) -> set[str]:
    """Return the beginnings of cases in marks that no case begins with, among all tests of their files."""
    asked: set[tuple[str, str]] = set()
    found: set[tuple[str, str]] = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        for beginning in (beginning for mark in item.iter_markers("needs") for beginning in cases_of(mark)):
            asked.add((test, beginning))
            if case_of(item).startswith(beginning):
                found.add((test, beginning))
    return {f"{test}[{beginning}" for test, beginning in asked - found}


def case_of(item: Any) -> str:
    """Return the name of a test's case with the bracket that ends it; empty if it has no cases."""
    return f"{item.callspec.id}]" if hasattr(item, "callspec") else ""


def cases_of(mark: Any) -> tuple[str, ...]:
    """Return the beginnings of the cases that a mark is about; one empty beginning for all."""
    return mark.kwargs.get("cases", ("",))
