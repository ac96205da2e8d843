"""``--dist-ckpt-strictness`` in moves between lists: only what is really missing, or too much, is seen."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.multiproc.cases.saved_runs import SavedRuns, resume
from tests.multiproc.cases.script_cases import Scripts, arguments, assert_same_training, num_ranks
from tests.support.hosts import reshardable_flags, resharding_flags, resume_tolerance

pytestmark = [pytest.mark.needs("scripts_here")]
STRICT = "--dist-ckpt-strictness"
DISTRIBUTED = ("--use-distributed-optimizer",)
UNTIED = ("--untie-embeddings-and-output-weights",)
EXPERTS = (
    *("--num-experts", "6", "--moe-router-topk", "2", "--no-bias-gelu-fusion", "--disable-bias-linear"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-ffn-hidden-size", "128", "--sequence-parallel"),
)
FORMS = {"plain": (), "bucket": DISTRIBUTED, "parameter": (*DISTRIBUTED, *reshardable_flags())}
VALUES = (
    *("assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all"),
    *("return_unexpected", "return_all", "ignore_all"),
)
FIRST = [("bucket", "raise_all"), ("bucket", "return_all"), ("plain", "raise_all")]


@pytest.mark.parametrize(
    ("form", "value"),
    [
        pytest.param(form, value, marks=() if (form, value) in FIRST else pytest.mark.full)
        for form, value in sorted(itertools.product(FORMS, VALUES), key=lambda pair: pair not in FIRST)
    ],
)
def test_a_move_misses_nothing(scripts: Scripts, saved_runs: SavedRuns, form: str, value: str) -> None:
    """What the plugin itself answers, and what no other list can take, is not compared."""
    folder, whole = saved_runs("1,2", [*FORMS[form], *UNTIED], dp=2)
    runs = resume(scripts, folder, "2,1", [*FORMS[form], *UNTIED, STRICT, value])
    assert_same_training(runs, whole, first=2, tolerance=resume_tolerance())
    for run in runs:
        assert not any(word in run.output for word in ("Missing keys", "Unexpected keys")), run.output[-3000:]


@pytest.mark.parametrize("value", ["raise_all", pytest.param("return_all", marks=pytest.mark.full)])
@pytest.mark.parametrize("form", ["plain", "bucket"])
def test_the_same_list_misses_nothing(scripts: Scripts, saved_runs: SavedRuns, form: str, value: str) -> None:
    """An idle state of repeated steps, which Megatron stores and does not ask for, is not compared either."""
    folder, whole = saved_runs("1,2", [*FORMS[form], *UNTIED], dp=2)
    runs = resume(scripts, folder, "1,2", [*FORMS[form], *UNTIED, STRICT, value], dp=2)
    assert_same_training(runs, whole, first=2, tolerance=resume_tolerance())


@pytest.mark.full
@pytest.mark.parametrize("target", ["2", "2,2", "1,2"])
def test_moves_into_stages_of_one_size_miss_nothing(scripts: Scripts, saved_runs: SavedRuns, target: str) -> None:
    """As a fit to other cards makes them, and into fewer replicas."""
    folder, whole = saved_runs("1,2", [*DISTRIBUTED, *UNTIED], dp=2)
    runs = resume(scripts, folder, target, [*DISTRIBUTED, *UNTIED, STRICT, "raise_all", "--vtp-force"])
    assert_same_training(runs, whole, first=2, tolerance=resume_tolerance())


@pytest.mark.full
@pytest.mark.needs("experts_of_other_sizes")
def test_a_move_of_experts_misses_nothing(scripts: Scripts, saved_runs: SavedRuns) -> None:
    """They have an optimizer of their own."""
    model = [*DISTRIBUTED, *UNTIED, *EXPERTS]
    folder, whole = saved_runs("1,2", [*model, "--vtp-ep-list", "1,2", "--vtp-etp-list", "1,1"], dp=2)
    flags = [*model, "--vtp-ep-list", "2,1", "--vtp-etp-list", "1,1", STRICT, "raise_all"]
    assert_same_training(resume(scripts, folder, "2,1", flags), whole, first=2, tolerance=resume_tolerance())


def _load(scripts: Scripts, folder: Path, extra: Sequence[str]) -> list[str]:
    """Load into another list, and return what every rank printed."""
    command = arguments("2,1", extra=["--load", str(folder), "--global-batch-size", "16", *resharding_flags(), *extra])
    return [run.output for run in scripts.launch(num_ranks("2,1"), {"arguments": command})]


@pytest.mark.parametrize("form", ["bucket", pytest.param("plain", marks=pytest.mark.full)])
def test_a_weight_that_nobody_takes_is_seen(scripts: Scripts, saved_runs: SavedRuns, form: str) -> None:
    """The output layer of an untied model, in one that ties it."""
    folder, _ = saved_runs("1,2", [*FORMS[form], *UNTIED], dp=2)
    for value, shown in (("raise_all", 2), ("log_all", 1), ("return_all", 1)):
        outputs = _load(scripts, folder, [*FORMS[form], STRICT, value])
        lines = [line for output in outputs for line in output.splitlines() if "issing keys" in line]
        assert len(lines) >= shown, outputs
        for line in lines:
            assert "output_layer.weight" in line and "rng_state" not in line and "dp_group_idx" not in line, line
        is_over = [not any("successfully loaded checkpoint" in output for output in outputs)]
        assert is_over == [value == "raise_all"]


def test_a_weight_that_is_not_stored_is_seen(scripts: Scripts, saved_runs: SavedRuns) -> None:
    """The norms of queries and keys, in a checkpoint that has none."""
    folder, _ = saved_runs("1,2", UNTIED, dp=2)
    for value in ("raise_unexpected", "raise_all"):
        outputs = _load(scripts, folder, [*UNTIED, "--qk-layernorm", "--no-load-optim", STRICT, value])
        assert all("q_layernorm" in output for output in outputs), outputs
        assert not any("successfully loaded checkpoint" in output for output in outputs)
