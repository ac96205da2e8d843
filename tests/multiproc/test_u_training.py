"""Layerwise disaggregated training with megatron.training: an unmodified script, from a uniform run's checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiproc.training_cases import (
    ScriptRun,
    arguments,
    assert_refused,
    assert_same_training,
    launch,
    num_ranks,
    train,
)
from tests.pool import Pool

pytestmark = pytest.mark.timeout(280)

U_SHAPE = ["--layerwise-disaggregated-training", "--num-layer-list"]
EVALUATION = ["--eval-interval", "1", "--eval-iters", "1", "--split", "80,10,10"]


@pytest.fixture(scope="module")
def pool(script_pool: Pool) -> Pool:
    """Workers for scripts."""
    return script_pool


@pytest.fixture(scope="module")
def sequential(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[ScriptRun]]:
    """Four steps of one process, the checkpoint of the second one kept."""
    folder = tmp_path_factory.mktemp("sequential")
    runs = train(pool, "1", [*EVALUATION, "--save", str(folder), "--save-interval", "2"])
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    return folder, runs


@pytest.mark.parametrize(
    ("sizes", "layers"),
    [("1,2", "1,1,2"), pytest.param("1,2,2", "1,1,1,1", marks=pytest.mark.full)],
)
def test_continues_a_sequential_run_and_then_itself(
    pool: Pool, sequential: tuple[Path, list[ScriptRun]], tmp_path: Path, sizes: str, layers: str
) -> None:
    folder, reference = sequential
    saving = ["--save", str(tmp_path), "--save-interval", "1"]
    runs = train(pool, sizes, [*EVALUATION, *U_SHAPE, layers, "--load", str(folder), *saving])
    assert [run.steps[0].loss is not None for run in runs] == [rank == 0 for rank in range(len(runs))]
    assert_same_training(runs, reference, first=2)
    assert runs[0].evaluations == pytest.approx(reference[0].evaluations[2:], rel=1e-5)
    assert "lm loss" in runs[0].output
    assert not any("lm loss" in run.output for run in runs[1:])

    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    again = train(pool, sizes, [*EVALUATION, *U_SHAPE, layers, "--load", str(tmp_path)])
    assert_same_training(again, reference, first=3)


def test_layout_of_megatron_means_the_same(pool: Pool, sequential: tuple[Path, list[ScriptRun]]) -> None:
    folder, reference = sequential
    extra = ["--layerwise-disaggregated-training", "--pipeline-model-parallel-layout", "Et|tt|tL"]
    runs = train(pool, "1,1", [*EVALUATION, *extra, "--load", str(folder)])
    assert_same_training(runs, reference, first=2)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["1,1,1,1"], ["--num-layer-list", "4 parts", "3"]),
        (["1,1,1"], ["3 layers", "--num-layers is 4"]),
        (["1,2,x"], ["1,2,x"]),
        (["1,1,2", "--num-virtual-stages-per-pipeline-rank", "2"], ["--num-virtual-stages-per-pipeline-rank"]),
    ],
)
def test_refused(pool: Pool, extra: list[str], words: list[str]) -> None:
    command = arguments("1,2", extra=[*U_SHAPE, *extra])
    assert_refused(launch(pool, num_ranks("1,2"), {"arguments": command}), *words)
