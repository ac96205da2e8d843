"""The optimizer of a run that trains adapters (LoRA) alone goes on in another list, in every form that hosts save."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiproc.cases.optimizer_state import assert_same_state
from tests.multiproc.cases.saved_runs import SavedRuns, resume
from tests.multiproc.cases.script_cases import ScriptRun, Scripts, assert_same_training
from tests.support.hosts import reshardable_flags
from vtp_plugin.cli import main

pytestmark = [pytest.mark.needs("scripts_here")]
DISTRIBUTED = ["--use-distributed-optimizer"]
# Where all of the model is frozen, Megatron 0.12 itself fails on a tied embedding that has no gradient.
UNTIED = ["--untie-embeddings-and-output-weights"]
HOOKS = ["add_adapters"]
NUM_ADAPTERS = 4 * 4 * 2
"""Layers, linear ones in each, halves of each adapter."""


def assert_goes_on(runs: list[ScriptRun], whole: list[ScriptRun]) -> None:
    """Check that only adapters have a state, that it is the same bit by bit, and the steps that follow."""
    names = {share.name for run in whole for share in run.facts["optimizer"]}
    assert len(names) == NUM_ADAPTERS and all(".lora_" in name for name in names)
    assert_same_state(runs, whole)
    assert_same_training(runs, whole, first=2)


@pytest.mark.needs("forms_of_0_15", cases=("reshardable",))
@pytest.mark.parametrize(
    ("source", "extra", "dp"),
    [
        pytest.param("1,2", [], 1, id="plain", marks=pytest.mark.full),
        pytest.param("1,2", DISTRIBUTED, 2, id="distributed"),
        pytest.param("1,1", DISTRIBUTED, 2, id="distributed-1,1", marks=pytest.mark.full),
        pytest.param("1,2", [*DISTRIBUTED, *reshardable_flags()], 2, id="reshardable", marks=pytest.mark.full),
    ],
)
def test_adapters_go_on_in_another_list(
    scripts: Scripts, saved_runs: SavedRuns, source: str, extra: list[str], dp: int
) -> None:
    flags = [*UNTIED, *extra]
    folder, whole = saved_runs(source, flags, dp=dp, hooks=HOOKS)
    assert_goes_on(resume(scripts, folder, "2,1", flags, hooks=HOOKS), whole)


@pytest.mark.full
def test_uniform_megatron_goes_on_with_adapters_that_were_written_again(
    scripts: Scripts, saved_runs: SavedRuns, tmp_path: Path
) -> None:
    flags = [*UNTIED, *DISTRIBUTED]
    folder, whole = saved_runs("1,2", flags, dp=2, hooks=HOOKS)
    main(["checkpoint", "reshard", "--from", str(folder), "--to", str(tmp_path)])
    assert_goes_on(resume(scripts, tmp_path, "1,1", flags, hooks=HOOKS, is_stock=True), whole)
