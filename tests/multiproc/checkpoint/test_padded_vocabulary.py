"""The padded vocabulary of a checkpoint, where another list pads it to another number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.multiproc.cases.saved_runs import SavedRuns, resume
from tests.multiproc.cases.script_cases import (
    ScriptRun,
    Scripts,
    arguments,
    assert_refused,
    assert_same_training,
    losses,
    num_ranks,
)
from tests.support.hosts import reshardable_flags, resume_tolerance
from vtp_plugin.cli import main

pytestmark = [pytest.mark.needs("scripts_here")]
UNTIED = ("--untie-embeddings-and-output-weights",)
DEFAULT = ("--make-vocab-size-divisible-by", "128")
DISTRIBUTED = ("--use-distributed-optimizer",)
FORMS = {"plain": (), "bucket": DISTRIBUTED, "parameter": (*DISTRIBUTED, *reshardable_flags())}


def _load(scripts: Scripts, folder: Path, sizes: str, extra: Sequence[str]) -> list[ScriptRun]:
    command = arguments(sizes, extra=[*extra, "--load", str(folder), "--global-batch-size", "16"])
    return scripts.launch(num_ranks(sizes), {"arguments": command})


def _text(runs: Sequence[ScriptRun]) -> str:
    """Return what rank 0 printed, on one line."""
    return re.sub(r"\s+(\[vtp[^]]*\])?\s*", " ", runs[0].output)


def _said(text: str) -> tuple[int, int]:
    """Return the numbers of a line: stored, and here."""
    found = re.search(r"has a padded vocabulary of (\d+) tokens, and this run one of (\d+)", text)
    assert found is not None, text[-3000:]
    return int(found.group(1)), int(found.group(2))


def _flags(text: str, beginning: str) -> list[str]:
    """Return the flag that a line names behind some words."""
    found = re.search(beginning + r" (--[a-z-]+ \d+)", text)
    assert found is not None, text[-3000:]
    return found.group(1).split()


@pytest.mark.needs("forms_of_0_15", cases=("parameter",))
@pytest.mark.parametrize(
    "form", ["bucket", *(pytest.param(form, marks=pytest.mark.full) for form in ("plain", "parameter"))]
)
def test_the_same_padding_keeps_the_loss(scripts: Scripts, saved_runs: SavedRuns, form: str) -> None:
    """A list that pads to another number, which the number of the checkpoint divides, goes on with the flag named."""
    flags = [*FORMS[form], *UNTIED, *DEFAULT]
    folder, whole = saved_runs("1,2", flags, dp=2)
    if form == "bucket":
        runs = _load(scripts, folder, "4,1", flags)
        there, here = _said(runs[0].output)
        words = (
            f"a padded vocabulary of {there} tokens, and this run one of {here}; an optimizer that is stored by bucket"
        )
        assert_refused(runs, words, "; give --")
        keeps = "; give"
    else:
        runs = resume(scripts, folder, "4,1", flags)
        there, here = _said(_text(runs))
        assert f"{here - there} tokens are new, which are untrained" in _text(runs)
        assert abs(losses(runs)[0] / losses(whole)[2] - 1) > 1e-3, "the words that are new are in the loss"
        keeps = "to keep the loss, give"
    assert here > there
    runs = resume(scripts, folder, "4,1", [*flags, *_flags(_text(runs), keeps)])
    assert_same_training(runs, whole, first=2, tolerance=resume_tolerance())
    assert "has a padded vocabulary" not in _text(runs)


@pytest.mark.full
def test_stages_that_cannot_cut_the_vocabulary_add_words(
    scripts: Scripts, saved_runs: SavedRuns, tmp_path: Path
) -> None:
    """By bucket they are refused; what is written again they load, and say that the loss rises."""
    flags = [*DISTRIBUTED, *UNTIED, *DEFAULT]
    folder, whole = saved_runs("1,2", flags, dp=2)
    runs = _load(scripts, folder, "3,1", flags)
    there, here = _said(runs[0].output)
    assert there % 3 and not here % 3
    assert_refused(runs, f"use TP sizes of which the first and the last divide {there}", f"--from {folder} --to DIR")
    again = tmp_path / "again"
    main(["checkpoint", "reshard", "--from", str(folder), "--to", str(again)])
    runs = resume(scripts, again, "3,1", flags)
    change = f"{here - there} tokens are new" if here > there else f"{there - here} tokens are dropped"
    assert change in _text(runs) and f"first and the last divide {there}" in _text(runs)
    other = [size for size in ("2,1", "1,1") if there % int(size[0]) == 0][0]
    keeps = _flags(_text(_load(scripts, again, "4,1", flags)), "to keep the loss, give")
    assert_same_training(resume(scripts, again, other, [*flags, *keeps]), whole, first=2, tolerance=resume_tolerance())


def test_the_first_start_says_what_all_lists_share(scripts: Scripts, saved_runs: SavedRuns, tmp_path: Path) -> None:
    """Started so, any list goes on at the same loss, with the flag that its refusal names."""
    flags = [*DISTRIBUTED, *UNTIED, *DEFAULT]
    text = _text(saved_runs("1,2", flags, dp=2)[1])
    words = r"for all sizes that this model can have, up to 16, start with"
    shared = [*DISTRIBUTED, *UNTIED, *_flags(text, words)]
    folder, whole = saved_runs("1,2", shared, dp=2)
    assert not re.search(words, _text(whole)), "it is shared now"
    flags[-1] = "160"  # another number with each list
    for sizes in ("3,1", "4,1"):
        keeps = _flags(_text(_load(scripts, folder, sizes, flags)), "; give")
        runs = resume(scripts, folder, sizes, [*flags, *keeps])
        assert_same_training(runs, whole, first=2, tolerance=resume_tolerance())


@pytest.mark.full
def test_nothing_is_said_where_nothing_is_saved_or_stages_are_alike(scripts: Scripts, tmp_path: Path) -> None:
    for sizes, extra in (("1,2", []), ("1,1", ["--save", str(tmp_path)])):
        runs = scripts.train(sizes, [*DEFAULT, "--train-iters", "1", "--save-interval", "9", *extra])
        assert "sizes that this model can have" not in _text(runs)
