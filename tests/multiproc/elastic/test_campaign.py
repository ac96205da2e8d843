"""A short part of the campaign of faults; ``python -m benchmarks.lost_cards`` is the whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lost_cards import FIRST, draw, run_once
from tests.multiproc.cases.script_cases import Scripts
from tests.multiproc.faults.elastic import undisturbed

# A rank is killed while it saves, and its card is bad from then on; then one fails in the optimizer, and all are back.
SEED, NUM_FAULTS = 1, 2


@pytest.mark.needs("our_example")
def test_a_run_goes_on_after_faults(scripts: Scripts, tmp_path: Path) -> None:
    """Each strikes in its phase; losses and samples are right, and no process and no file is left."""
    faults = draw(SEED)[:NUM_FAULTS]
    struck = tmp_path / "struck"
    struck.mkdir()
    losses = undisturbed(scripts, FIRST, 40)
    run_once(SEED, struck, tmp_path / "results.jsonl", losses, NUM_FAULTS)
    *trials, end = (json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines())
    assert [trial["outcome"] for trial in trials] == ["went on"] * NUM_FAULTS
    phases = ["start-up" if fault.phase == "restart" else fault.phase for fault in faults]
    assert [trial["struck"] for trial in trials] == phases
    assert end["run"]["steps"] >= 4
    assert {name: end["run"][name] for name in ("problem", "orphans", "files")} == {
        "problem": "",
        "orphans": [],
        "files": [],
    }
