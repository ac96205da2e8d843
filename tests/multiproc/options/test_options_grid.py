"""The grid of options: every value of every option that a CPU can run, one rank beside stages ``1,2``.

It is whole in ``make test-full``, where what was run before is not run again: results stay in pytest's cache, by the
sources of the plugin and the version of Megatron, so a grid that was cut off goes on. Every change runs a few cases,
and those of which ``tests/options/ran.txt`` does not say that they were run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cases.script_cases import ScriptRun, launch, num_ranks
from tests.options.grid import SCRIPT, SIZES, GridCase, cases, compare, digest, is_recorded, keep, kept, version
from tests.options.judged import Judgement
from tests.support.pool import Pool

pytestmark = [pytest.mark.needs("scripts_here"), pytest.mark.needs("judged_options")]

Bare = Callable[[GridCase], list[ScriptRun]]
_SAMPLE = ("--normalization RMSNorm in dense", "--moe-router-score-function sigmoid in experts")
MAX_NEW = 12
# What models need of a Megatron.
_NEEDS = {
    "latent": pytest.mark.needs("latent_attention"),
    "prediction": pytest.mark.needs("prediction_of_any_size"),
}


def _full(case: GridCase) -> list[Any]:
    return [pytest.mark.full] if is_recorded(case) and str(case) not in _SAMPLE else []


@pytest.fixture(scope="module")
def pool(script_pool: Pool) -> Pool:
    """Workers for scripts."""
    return script_pool


def _params() -> list[Any]:
    return [pytest.param(case, id=case.name, marks=[*_needed(case), *_full(case)]) for case in cases()]


def _needed(case: GridCase) -> list[Any]:
    return [_NEEDS[case.base]] if case.base in _NEEDS else []


@pytest.mark.parametrize("case", _params())
def test_option(pool: Pool, bare: Bare, case: GridCase, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    name, folder = digest(case, version()), pytestconfig.cache.mkdir("options-grid")
    found = kept(folder, name)
    if found is None:
        run, reference = (run_case(pool, case, sizes, tmp_path) for sizes in (SIZES, "1"))
        found = compare(case, run, reference, bare(case))
    assert found.outcome == case.expected, found
    assert found.is_idle or not case.is_idle or found.effect is None, found
    keep(folder, name, case, found, version())


def run_case(pool: Pool, case: GridCase, sizes: str, folder: Path) -> list[ScriptRun]:
    """Run a case on a list of sizes."""
    kwargs = {"arguments": case.command(sizes, str(folder / sizes)), "hooks": case.hooks, "script": SCRIPT}
    return launch(pool, num_ranks(sizes, case.dp), kwargs)


@pytest.fixture(scope="module")
def bare(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Bare:
    """Runs of one rank without the option, each once."""
    known: dict[GridCase, list[ScriptRun]] = {}

    def run(case: GridCase) -> list[ScriptRun]:
        key = replace(case.without, judgement=Judgement.SAME)
        if key not in known:
            known[key] = run_case(pool, key, "1", tmp_path_factory.mktemp("bare"))
        return known[key]

    return run


def test_most_of_the_grid_was_run_as_it_is() -> None:
    """Else every change would run it: run the whole grid, then ``python -m tests.options.grid`` with its folder."""
    new = [case.name for case in cases() if not (is_recorded(case) or _needed(case))]
    assert len(new) <= MAX_NEW, new
