"""A script on megatron-core alone, which loads a checkpoint of somebody who means harm, runs nothing of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.multiproc.cases.core_cases import Case, Runs
from tests.support.hostile_files import NAME, is_there, spoil
from tests.support.pool import PoolError

CASE = Case.of(sizes=(1, 2), num_steps=0)


@pytest.fixture(scope="module")
def saved(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of weights."""
    folder = tmp_path_factory.mktemp("saved")
    runs.run(CASE.but(save=str(folder)))
    return folder


@pytest.mark.parametrize(
    "name",
    [
        ".metadata",
        "common.pt",
        "object common_state",
        pytest.param("object decoder", marks=pytest.mark.full),
        pytest.param("tensor", marks=pytest.mark.full),
    ],
)
def test_a_load_refuses_and_runs_nothing(runs: Runs, saved: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    if not is_there(folder, name):
        pytest.skip("this Megatron writes no such file")
    spoil(folder, name, tmp_path / "marker")
    with pytest.raises(PoolError, match=f"names {NAME}"):
        runs.run(CASE.but(load=str(folder)))
    assert not (tmp_path / "marker").exists()
