"""Fixtures for tests that train on several processes."""

from __future__ import annotations

import pytest

from tests.multiproc.cases.core_cases import Case, Runs
from tests.multiproc.cases.saved_runs import SavedRuns
from tests.multiproc.cases.u_shape_cases import Saved, sequential
from tests.support.pool import Pool


@pytest.fixture(scope="session")
def runs(pool: Pool) -> Runs:
    """Training runs on the pool; uniform runs are kept for all tests of the session."""
    return Runs(pool)


@pytest.fixture(scope="session")
def saved(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Start weights that the sequential model drew and saved, once for each kind of model."""
    paths: dict[tuple[object, ...], str] = {}

    def save(case: Case) -> str:
        key = case.num_layers, case.model.tied, case.model.has_bias, case.data.seq, case.model.attention, case.model.mtp
        if key not in paths:
            paths[key] = str(tmp_path_factory.mktemp("start"))
            runs.run(sequential(case).but(save=paths[key], load=None, num_steps=0))
        return paths[key]

    return save


@pytest.fixture(scope="module")
def saved_runs(script_pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> SavedRuns:
    """Runs of scripts that have saved, kept for the tests of a module."""
    return SavedRuns(script_pool, tmp_path_factory.mktemp)
