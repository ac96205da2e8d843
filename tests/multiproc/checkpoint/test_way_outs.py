"""Ways out that a refused load names, done. ``tests/unit/checkpoint/test_ways_out.py`` says which test does which."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.multiproc.cases.saved_runs import SavedRuns, resume
from tests.multiproc.cases.script_cases import (
    Scripts,
    arguments,
    assert_refused,
    assert_same_training,
    losses,
    num_ranks,
)
from tests.multiproc.checkpoint.test_written_again import DISTRIBUTED, EXPERTS, UNTIED
from tests.support.hosts import exact_resume_tolerance, resharding_flags, resume_tolerance
from vtp_plugin.checkpoint.format.index import MANIFEST, dump_manifest, make_manifest
from vtp_plugin.checkpoint.format.shard_map import MAP

pytestmark = [pytest.mark.needs("scripts_here")]
FLAGS = [*DISTRIBUTED, *UNTIED]


def _assert_weights_load(
    scripts: Scripts, folder: Path, sizes: str, flags: Sequence[str], wanted: float, *words: str
) -> None:
    """Check that a load is refused with --no-load-optim as a way out, and that with it the weights are there."""
    loading = [*flags, *resharding_flags(), "--global-batch-size", "16", "--load", str(folder)]
    runs = scripts.launch(num_ranks(sizes), {"arguments": arguments(sizes, extra=loading)})
    assert_refused(runs, *words, "load only the weights with --no-load-optim")
    found = losses(scripts.train(sizes, [*loading, "--no-load-optim"]))[0]
    assert abs(found - wanted) <= resume_tolerance() * wanted, (found, wanted)


def _spoiled(folder: Path, target: Path, text: str | None) -> Path:
    """Copy a folder, with another map or without one, as if it had been saved so."""
    copy = shutil.copytree(folder, target)
    file = copy / "iter_0000002" / MAP
    file.unlink() if text is None else file.write_text(text)
    (file.parent / MANIFEST).write_text(dump_manifest(make_manifest(file.parent)))
    return copy


def _other_numel(folder: Path) -> str:
    read = json.loads((folder / "iter_0000002" / MAP).read_text())
    read["buckets"][0][1] += 1
    return json.dumps(read)


@pytest.mark.parametrize("how", ["unfit", *(pytest.param(how, marks=pytest.mark.full) for how in ("newer", "missing"))])
def test_weights_load_without_the_map(scripts: Scripts, saved_runs: SavedRuns, tmp_path: Path, how: str) -> None:
    folder, whole = saved_runs("1,2", FLAGS, dp=2)
    texts = {"unfit": _other_numel(folder), "newer": '{"version": 2}', "missing": None}
    _assert_weights_load(scripts, _spoiled(folder, tmp_path / "copy", texts[how]), "2,1", FLAGS, losses(whole)[2], MAP)


@pytest.mark.full
def test_the_layout_that_wrote_it_loads_without_the_map(
    scripts: Scripts, saved_runs: SavedRuns, tmp_path: Path
) -> None:
    """What it saves has one, and goes on anywhere."""
    folder, whole = saved_runs("1,2", FLAGS, dp=2)
    copy, saved = _spoiled(folder, tmp_path / "copy", None), tmp_path / "saved"
    saving = [*FLAGS, "--global-batch-size", "16", "--load", str(copy), "--save", str(saved), "--save-interval", "1"]
    runs = scripts.train("1,2", saving, dp=2)
    assert_same_training(runs, whole, first=2, tolerance=exact_resume_tolerance())
    (saved / "latest_checkpointed_iteration.txt").write_text("3")
    loading = [*FLAGS, *resharding_flags(), "--global-batch-size", "16", "--load", str(saved)]
    assert_same_training(scripts.train("2,1", loading), whole, first=3, tolerance=resume_tolerance())


@pytest.mark.full
def test_weights_load_where_more_is_trained(scripts: Scripts, saved_runs: SavedRuns) -> None:
    """With the options of the run that was saved the optimizer goes on, too."""
    hooks = ["freeze_weights"]
    folder, whole = saved_runs("1,2", FLAGS, dp=2, hooks=hooks)
    words = "is not stored, and this run trains it", "start with the options of that run"
    _assert_weights_load(scripts, folder, "2,1", FLAGS, losses(whole)[2], *words)
    runs = resume(scripts, folder, "2,1", FLAGS, hooks=hooks)
    assert_same_training(runs, whole, first=2, tolerance=resume_tolerance())


@pytest.mark.full
@pytest.mark.needs("experts_of_other_sizes")
def test_weights_of_experts_load_without_their_optimizer(scripts: Scripts, saved_runs: SavedRuns) -> None:
    flags = [*DISTRIBUTED, *EXPERTS]
    folder, whole = saved_runs("1,2", [*flags, "--vtp-ep-list", "1,2", "--vtp-etp-list", "1,1"], dp=2)
    _assert_weights_load(
        scripts, folder, "2,1", flags, losses(whole)[2], "only in one of them experts have an optimizer"
    )


@pytest.mark.full
def test_a_step_is_chosen_in_one_way(scripts: Scripts, saved_runs: SavedRuns) -> None:
    folder, whole = saved_runs("1,2", FLAGS, dp=2)
    loading = [*FLAGS, *resharding_flags(), "--global-batch-size", "16", "--load", str(folder)]
    ways = (["--vtp-load-newest-valid"], ["--ckpt-step", "2"])
    both = {"arguments": arguments("2,1", extra=[*loading, *ways[0], *ways[1]])}
    assert_refused(scripts.launch(3, both), "--vtp-load-newest-valid with --ckpt-step 2; leave one of them out")
    for way in ways:
        runs = scripts.train("2,1", [*loading, *way])
        assert_same_training(runs, whole, first=2, tolerance=resume_tolerance())
