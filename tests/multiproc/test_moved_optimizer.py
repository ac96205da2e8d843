"""The distributed optimizer, stored as Megatron stores it by default, goes on in any other layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.multiproc.optimizer_state import assert_same_state
from tests.multiproc.script_cases import (
    ScriptRun,
    assert_same_training,
    train,
)
from tests.pool import Pool

pytestmark = [pytest.mark.needs("scripts_here"), pytest.mark.needs("our_example")]
DISTRIBUTED = ["--use-distributed-optimizer"]
MAP = "vtp_optimizer_map.json"
Writer = Callable[..., tuple[Path, list[ScriptRun]]]


@pytest.fixture(scope="module")
def pool(script_pool: Pool) -> Pool:
    """Workers for scripts."""
    return script_pool


@pytest.fixture(scope="module")
def written(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Writer:
    """Runs of four steps that save after the second one; each is made once."""
    known: dict[tuple[object, ...], tuple[Path, list[ScriptRun]]] = {}

    def write(sizes: str, extra: Sequence[str] = (), *, dp: int = 1) -> tuple[Path, list[ScriptRun]]:
        key = (sizes, tuple(extra), dp)
        if key not in known:
            folder = tmp_path_factory.mktemp("written")
            saving = [*DISTRIBUTED, *extra, "--save", str(folder), "--save-interval", "2"]
            runs = train(pool, sizes, [*saving, "--global-batch-size", "16"], dp=dp, hooks=["dump_optimizer"])
            (folder / "latest_checkpointed_iteration.txt").write_text("2")
            known[key] = folder, runs
        return known[key]

    return write


def _resume(pool: Pool, folder: Path, sizes: str, extra: Sequence[str], *, dp: int = 1) -> list[ScriptRun]:
    """Train the last two steps from the checkpoint of the second one, and take the optimizer down before."""
    loading = [*DISTRIBUTED, *extra, "--load", str(folder), "--global-batch-size", "16"]
    runs = train(pool, sizes, loading, dp=dp, hooks=["dump_optimizer"])
    assert "successfully loaded checkpoint" in runs[0].output
    assert [len(run.steps) for run in runs] == [2] * len(runs)
    return runs


@pytest.mark.parametrize(
    ("source", "source_dp", "target", "dp", "extra"),
    [
        pytest.param("1,2", 2, "2,1", 1, [], id="1,2-to-2,1"),
        pytest.param("1,2", 2, "1", 1, [], id="1,2-to-1"),
        pytest.param("1,2", 2, "2,2", 1, [], id="1,2-to-2,2"),
    ],
)
def test_the_optimizer_goes_on_in_another_layout(
    pool: Pool, written: Writer, source: str, source_dp: int, target: str, dp: int, extra: list[str]
) -> None:
    """Masters, moments and steps are those of the writer bit by bit, and the next steps are those that it took."""
    folder, whole = written(source, extra, dp=source_dp)
    runs = _resume(pool, folder, target, extra, dp=dp)
    assert_same_state(runs, whole)
    assert_same_training(runs, whole, first=2)
