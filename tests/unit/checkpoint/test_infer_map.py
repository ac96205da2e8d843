"""Checkpoints of stock Megatron, without a map: it is worked out, and proved by the master weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import (
    FC1,
    FC2,
    NORM,
    QKV,
    STOCK_SHAPES,
    Model,
    as_stock,
    by_name,
    make_model,
    run_action,
)
from vtp_plugin.checkpoint.format.shard_map import MAP

Run = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an action; return exit code and lines, of the error stream if it was refused."""
    return partial(run_action, capsys)


def stock_model(dtype: torch.dtype = torch.float32) -> Model:
    return make_model(dtype=dtype, shapes=STOCK_SHAPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("is_older", [False, True], ids=["0.19", "older"])
def test_each_parameter_is_found(run: Run, tmp_path: Path, dtype: torch.dtype, is_older: bool) -> None:
    a = as_stock(tmp_path / "a", stock_model(dtype), is_older=is_older)
    b = by_name(tmp_path / "b", stock_model(dtype))
    assert not (a / MAP).exists()
    assert run("diff", a, b)[0] == 0
    assert run("reshard", "--from", a, "--to", tmp_path / "c")[0] == 0
    assert run("diff", tmp_path / "c", b)[0] == run("verify", tmp_path / "c")[0] == 0


def _swapped(folder: Path) -> Path:
    """Put two parameters of one size into each other's place."""
    names = [FC2 if name == FC1 else FC1 if name == FC2 else name for name in STOCK_SHAPES]
    return as_stock(folder, stock_model(), order=names)


def _other_master(folder: Path) -> Path:
    """Let one master weight be rounded to another weight."""
    model = stock_model(torch.bfloat16)
    model.states["param", FC2][2, 31, 3] *= 1.01
    return as_stock(folder, model)


def _other_order(folder: Path) -> Path:
    """Write the norm behind what it comes before, which has another size."""
    return as_stock(folder, stock_model(), order=[name for name in STOCK_SHAPES if name != NORM] + [NORM])


def _other_name(folder: Path) -> Path:
    model = stock_model()
    name = "decoder.layers.mixer.in_proj.weight"
    model.weights = {name if known == QKV else known: value for known, value in model.weights.items()}
    model.states = {(state, name if known == QKV else known): value for (state, known), value in model.states.items()}
    return as_stock(folder, model, order=[name if known == QKV else known for known in STOCK_SHAPES])


@pytest.mark.parametrize(
    ("write", "words"),
    [
        pytest.param(_swapped, f"{FC2} at [", id="swapped"),
        pytest.param(_other_master, f"{FC2} at [", id="master"),
        pytest.param(_other_order, "where no stored piece begins and ends", id="order"),
        pytest.param(_other_name, "decoder.layers.mixer.in_proj.weight is no parameter of a GPT model", id="name"),
    ],
)
def test_a_parameter_that_does_not_fit_is_named(
    run: Run, tmp_path: Path, write: Callable[[Path], Path], words: str
) -> None:
    folder = write(tmp_path / "a")
    for action in (("diff", folder, folder), ("reshard", "--from", folder, "--to", tmp_path / "b")):
        code, (line,) = run(*action)
        assert code == 2 and f"a/{MAP} is missing, and where the optimizer's parameters lie" in line
        assert words in line and line.count(";") >= 2, line
    assert not (tmp_path / "b").exists()
    assert run("diff", folder, folder, "--weights-only")[0] == 0
