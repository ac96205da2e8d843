"""What megatron.training does with iterators besides training: it skips steps, and stores how far a loader has read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multiproc.cases.script_cases import ScriptRun, Scripts, arguments, assert_same_training, losses
from tests.support.hosts import host_name

pytestmark = pytest.mark.needs("scripts_here")

LAYERS = ["--num-layers", "6"]
U_SHAPE = ["--layerwise-disaggregated-training", "--num-layer-list", "1,2,3"]
# The second step. Megatron 0.12 counts from 0.
SKIPPED = ["--iterations-to-skip", "1" if host_name() == "0.12" else "2"]


@pytest.fixture(scope="module")
def start(scripts: Scripts, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that begin with the weights of one process."""
    folder = str(tmp_path_factory.mktemp("start"))
    scripts.train("1", [*LAYERS, "--save", folder, "--save-interval", "1", "--train-iters", "1"])
    return [*LAYERS, "--load", folder, "--finetune"]


@pytest.fixture(scope="module")
def reference(scripts: Scripts, start: list[str]) -> list[ScriptRun]:
    """Stock Megatron on one process, without the second step."""
    return scripts.train("1", [*start, *SKIPPED])


def _case(name: str, sizes: str, num_ranks: int, *extra: str, full: bool = True) -> Any:
    return pytest.param(sizes, num_ranks, list(extra), id=name, marks=[pytest.mark.full] if full else [])


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "extra"),
    [
        _case("u", "1,2", 3, *U_SHAPE, full=False),
        _case("u-again", "2,1", 3, *U_SHAPE, "--rerun-mode", "validate_results"),
        _case("plain", "1,2", 3, "--no-load-rng", full=False),
        _case("uniform", "1,1,1", 3, "--no-load-rng"),
        # Stock ends in a middle stage, and in one with several chunks.
        _case("middle", "2,1,1", 4, "--no-load-rng", "--rerun-mode", "validate_results"),
        _case("interleaved", "2,1", 3, "--no-load-rng", "--num-virtual-stages-per-pipeline-rank", "3"),
        _case("replicas", "1,1", 3, "--no-load-rng", "--vtp-dp-list", "1,2"),
    ],
)
def test_a_step_is_skipped(
    scripts: Scripts, start: list[str], reference: list[ScriptRun], sizes: str, num_ranks: int, extra: list[str]
) -> None:
    """The samples of a step are read and not used, on all hosts and in all pipelines."""
    command = arguments(sizes, extra=[*start, *SKIPPED, *extra])
    runs = scripts.finish(num_ranks, {"arguments": command})
    assert len(losses(runs)) == 3
    assert_same_training(runs, reference)
    with pytest.raises(AssertionError):
        assert_same_training(runs, scripts.train("1", [*start, "--train-iters", "3"]))


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "extra"),
    [("1,2", U_SHAPE), ("2,1", []), ("1,2", ["--num-virtual-stages-per-pipeline-rank", "3"])],
    ids=["u", "plain", "interleaved"],
)
def test_how_far_a_loader_has_read_is_stored(scripts: Scripts, tmp_path: Path, sizes: str, extra: list[str]) -> None:
    """Four steps of four microbatches."""
    saving = ["--save", str(tmp_path), "--save-interval", "4", "--dataloader-type", "external"]
    scripts.train(sizes, [*LAYERS, *extra, *saving], hooks=["own_loader"])
    (file,) = (tmp_path / "loader").rglob("train_dataloader_dprank000.pt")
    assert torch.load(file, weights_only=True)["dataloader_state_dict"] == 16
