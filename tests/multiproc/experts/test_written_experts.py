"""Experts in checkpoints that were written again: which layouts of stock Megatron go on, and what is said of others."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.multiproc.cases.saved_runs import SavedRuns, resume, train_stock
from tests.multiproc.cases.script_cases import Scripts, assert_same_training, losses
from tests.multiproc.checkpoint.test_written_again import DISTRIBUTED, EXPERTS
from tests.support.checkpoints import run_action
from tests.support.hosts import reshardable_flags, resume_tolerance

pytestmark = [pytest.mark.needs("scripts_here"), pytest.mark.needs("experts_of_other_sizes")]
FORMS = {"bucket": DISTRIBUTED, "plain": (), "parameter": (*DISTRIBUTED, *reshardable_flags())}
# Flags of a list of 1,2.
SOURCES = {"apart": ("--vtp-ep-list", "1,2", "--vtp-etp-list", "1,1"), "together": ()}
# List, replicas and flags of stock Megatron, by what is its own.
READERS = {
    "apart-ep2-tp2": ("2,2", 1, ("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1")),
    "together-tp1": ("1,1", 1, ()),
    "apart-ep2-dp2": ("1,1", 2, ("--expert-model-parallel-size", "2")),
    "apart-etp1": ("2,2", 1, ("--expert-tensor-parallel-size", "1")),
    "together-tp2": ("2,2", 1, ()),
    "together-pp1": ("2", 1, ()),
}
FIRST = [("bucket", "apart", "apart-ep2-tp2"), ("bucket", "apart", "together-tp1")]


@pytest.mark.parametrize(
    ("form", "source", "reader"),
    [
        pytest.param(*case, id="-".join(case), marks=() if case in FIRST else pytest.mark.full)
        for case in itertools.product(FORMS, SOURCES, READERS)
    ],
)
def test_stock_megatron_goes_on_where_it_is_said(
    scripts: Scripts,
    saved_runs: SavedRuns,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    form: str,
    source: str,
    reader: str,
) -> None:
    """Elsewhere it takes the weights: the first loss is that of the run that wrote them."""
    folder, whole = saved_runs("1,2", [*EXPERTS, *FORMS[form], *SOURCES[source]])
    code, lines = run_action(capsys, "reshard", "--from", folder, "--to", tmp_path / "again")
    has_own = "experts have an optimizer of their own in it"
    has_none = "experts have no optimizer of their own in it"
    said = next(line for line in lines if line.startswith("experts have"))
    assert code == 0 and said.startswith(has_own if source == "apart" else has_none)
    assert said in run_action(capsys, "show", tmp_path / "again")[1]
    sizes, dp, flags = READERS[reader]
    own = [*EXPERTS, *(() if form == "plain" else DISTRIBUTED), *flags]
    if reader.startswith(source):
        runs = resume(scripts, tmp_path / "again", sizes, own, dp=dp, is_stock=True)
        assert_same_training(runs, whole, first=2, tolerance=resume_tolerance())
        return
    assert said.endswith("; load only the weights elsewhere, with --no-load-optim")
    loading = [*own, "--load", str(tmp_path / "again"), "--global-batch-size", "16"]
    with pytest.raises(AssertionError, match="'optimizer'|Expected 2 entries|Could not find parameter group"):
        train_stock(scripts, sizes, loading, dp=dp)
    runs = train_stock(scripts, sizes, [*loading, "--no-load-optim"], dp=dp)
    first, wanted = losses(runs)[0], losses(whole)[2]
    assert abs(first - wanted) <= resume_tolerance() * wanted
