"""Batches that grow from step to step: by ``--rampup-batch-size``, and where Megatron ignores that by a schedule."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cases.script_cases import (
    GROWN,
    ScriptRun,
    Scripts,
    arguments,
    assert_same_training,
    growing,
    uniform,
)
from tests.support.hosts import resharding_flags
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
