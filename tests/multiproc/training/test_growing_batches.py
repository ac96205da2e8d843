"""Batches that grow from step to step, steps that are skipped, and how far a loader has read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multiproc.cases.script_cases import (
    GROWN,
    ScriptRun,
    Scripts,
    arguments,
    assert_same_training,
    growing,
    losses,
    uniform,
)
from tests.support.hosts import host_name, resharding_flags
from tests.support.lines import warnings

pytestmark = pytest.mark.needs("scripts_here")

U_SHAPE = ["--layerwise-disaggregated-training", "--num-layer-list", "1,2,1"]


def batches(runs: Sequence[ScriptRun]) -> list[int]:
    """Give the samples of every step, from the log."""
    (output,) = [run.output for run in runs if "lm loss:" in run.output]
    return [int(size) for size in re.findall(r"global batch size: +(\d+)", output)]


def _case(sizes: str, *own: str, world: int, dp: int = 1, name: str = "", full: bool = True) -> Any:
    return pytest.param(sizes, [*own], world, dp, id=f"{name}{sizes}", marks=[pytest.mark.full] if full else [])


@pytest.mark.parametrize(
    ("sizes", "own", "world", "dp"),
    [
        _case("1,2", world=3, full=False),
        _case("1,1", "--vtp-dp-list", "1,2", world=3, dp=2, name="dp-", full=False),
        _case("2,1", "--vtp-dp-list", "2,1", "--use-distributed-optimizer", world=5, dp=2, name="dp-"),
        _case("1,2", "--vtp-dp-list", "1,2", "--vtp-dp-mode", "split", world=5, dp=2, name="split-"),
        _case("2,1", "--vtp-schedule", "planned", world=3, name="planned-"),
        _case("1,2", "--vtp-dp-list", "1,2", *U_SHAPE, world=5, dp=2, name="U-dp-"),
        _case("2,1", *U_SHAPE, world=3, name="U-"),
    ],
)
def test_batches_that_grow(scripts: Scripts, tmp_path: Path, sizes: str, own: list[str], world: int, dp: int) -> None:
    reference, start = uniform(sizes), []
    if "--num-layer-list" in own:
        reference, start = "1", ["--load", str(tmp_path), "--finetune"]
        scripts.train("1", ["--save", str(tmp_path), "--save-interval", "1", "--exit-interval", "1"])
        own = [*own, *resharding_flags()]
    command = growing(arguments(sizes, dp=dp, extra=[*start, *own]))
    runs = scripts.finish(world, {"arguments": command})
    num_ranks = dp * len(reference.split(","))
    wanted = scripts.finish(num_ranks, {"arguments": growing(arguments(reference, dp=dp, extra=start))})
    assert batches(runs) == batches(wanted) == GROWN
    assert_same_training(runs, wanted)


@pytest.mark.needs("ignored_ramp")
@pytest.mark.parametrize(
    ("sizes", "own"), [("1,1", ["--vtp-dp-list", "1,2"]), pytest.param("1", [], marks=pytest.mark.full)]
)
def test_a_ramp_that_is_ignored(scripts: Scripts, sizes: str, own: list[str]) -> None:
    """Megatron warns that it is old, and every step has the whole batch, also if stages could not share the ramp's."""
    ramp = ["--rampup-batch-size", "4", "2", "64", "--global-batch-size", "8"]
    world = 3 if own else 1
    runs = scripts.finish(world, {"arguments": arguments(sizes, extra=[*ramp, *own])})
    assert batches(runs) == [8] * 4
    (line,) = [line for run in runs for line in warnings(run.output)]
    assert line.startswith("--rampup-batch-size 4 2 64 with --vtp-size-list ") and "Megatron ignores it" in line


LAYERS = ["--num-layers", "6"]
U_OF_SIX = ["--layerwise-disaggregated-training", "--num-layer-list", "1,2,3"]
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


def _skipping(name: str, sizes: str, num_ranks: int, *extra: str, full: bool = True) -> Any:
    return pytest.param(sizes, num_ranks, list(extra), id=name, marks=[pytest.mark.full] if full else [])


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "extra"),
    [
        _skipping("u", "1,2", 3, *U_OF_SIX, full=False),
        _skipping("u-again", "2,1", 3, *U_OF_SIX, "--rerun-mode", "validate_results"),
        _skipping("plain", "1,2", 3, "--no-load-rng", full=False),
        _skipping("uniform", "1,1,1", 3, "--no-load-rng"),
        # Stock ends in a middle stage, and in one with several chunks.
        _skipping("middle", "2,1,1", 4, "--no-load-rng", "--rerun-mode", "validate_results"),
        _skipping("interleaved", "2,1", 3, "--no-load-rng", "--num-virtual-stages-per-pipeline-rank", "3"),
        _skipping("replicas", "1,1", 3, "--no-load-rng", "--vtp-dp-list", "1,2"),
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
    [("1,2", U_OF_SIX), ("2,1", []), ("1,2", ["--num-virtual-stages-per-pipeline-rank", "3"])],
    ids=["u", "plain", "interleaved"],
)
def test_how_far_a_loader_has_read_is_stored(scripts: Scripts, tmp_path: Path, sizes: str, extra: list[str]) -> None:
    """Four steps of four microbatches."""
    saving = ["--save", str(tmp_path), "--save-interval", "4", "--dataloader-type", "external"]
    scripts.train(sizes, [*LAYERS, *extra, *saving], hooks=["own_loader"])
    (file,) = (tmp_path / "loader").rglob("train_dataloader_dprank000.pt")
    assert torch.load(file, weights_only=True)["dataloader_state_dict"] == 16
