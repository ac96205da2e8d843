"""Layers of MindSpeed-MM's lists: their numbers, as which parts they are stored, recomputation, and bf16.

Opt-in, as :mod:`tests.mindspeed.test_mm_lane`, whose oracle this takes.
"""

from __future__ import annotations

import re

import pytest

from tests.mindspeed.mm.model import TEXT_LAYERS, VISION_LAYERS
from tests.mindspeed.test_mm_lane import (
    DEVICE,
    Numbers,
    assert_equal,
    needs_trees,
    numbers,
    oracle,
    start,
    start_u,
    trained,
)

pytestmark = [pytest.mark.full, needs_trees]
_HOLDS = re.compile(r"stage (\d), chunk (\d) holds vision (\[.*?\]) of (\[.*?\]); text (\[.*?\]) of (\[.*?\])")


def held(output: str) -> dict[str, tuple[str, ...]]:
    """Return what the chunks say that they hold, by stage and chunk."""
    return {f"{stage}.{chunk}": tuple(lists) for stage, chunk, *lists in _HOLDS.findall(output)}


def test_layers_of_an_uneven_pipeline_have_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VTP_TEST_LAYERS", "1")
    code, output = start(3, [2, 0], [1, 3], *DEVICE, "--vtp-size-list", "1,2", is_run=True, is_recomputed=True)
    assert code == 0, output[-6000:]
    assert held(output) == {
        "0.0": ("[1, 2]", "[(0, 2), (1, 2)]", "[1]", "[(0, 4)]"),
        "1.0": ("[]", "[]", "[2, 3, 4]", "[(1, 4), (2, 4), (3, 4)]"),
    }
    assert_equal(numbers(output), oracle(is_recomputed=True))


def test_layers_of_a_u_have_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VTP_TEST_LAYERS", "1")
    code, output = start_u("1,2", [[2, 0], [0, 0]], [[1, 2], [1, 0]], is_recomputed=True)
    assert code == 0, output[-6000:]
    assert held(output) == {
        "0.0": ("[1, 2]", "[(0, 2), (1, 2)]", "[1]", "[(0, 4)]"),
        "1.0": ("[]", "[]", "[2, 3]", "[(1, 4), (2, 4)]"),
        "0.1": ("[]", "[]", "[4]", "[(3, 4)]"),
        "1.1": ("[]", "[]", "[]", "[]"),
    }
    assert_equal(numbers(output), oracle(is_recomputed=True))


def _off(found: Numbers, expected: Numbers) -> dict[str, float]:
    """Return the largest relative difference of losses, and of norms."""
    return {
        name: max(abs(mine - theirs) / theirs for mine, theirs in zip(found[name], values, strict=True))
        for name, values in expected.items()
    }


@pytest.mark.parametrize("is_tied", [False, True])
def test_in_bf16_stages_of_unequal_size_differ_as_uniform_runs_do(is_tied: bool) -> None:
    """Rounding to 8 bits depends on the order of sums: tensor-parallel size 1 and 2 of the script alone differ, too."""
    one = oracle("--bf16", is_tied=is_tied)
    two = trained(2, [VISION_LAYERS], [TEXT_LAYERS], "--bf16", "--tensor-model-parallel-size", "2", is_tied=is_tied)
    usual = _off(two, one)
    pipeline = (*DEVICE, "--vtp-size-list", "1,2", "--bf16")
    code, output = start_u("1,2", [[2, 0], [0, 0]], [[1, 2], [1, 0]], "--bf16", is_tied=is_tied)
    assert code == 0, output[-6000:]
    for found in (trained(3, [2, 0], [2, 2], *pipeline, is_run=True, is_tied=is_tied), numbers(output)):
        assert_no_further(_off(found, one), usual)


def test_in_bf16_two_rings_differ_as_uniform_runs_do() -> None:
    one = oracle("--bf16", vision=3)
    usual = _off(trained(2, [3], [TEXT_LAYERS], "--bf16", "--tensor-model-parallel-size", "2"), one)
    code, output = start_u("1,2", [[1, 1], [1, 0], [0, 0]], [[0, 0], [1, 2], [1, 0]], "--bf16")
    assert code == 0, output[-6000:]
    assert_no_further(_off(numbers(output), one), usual)


def assert_no_further(off: dict[str, float], usual: dict[str, float]) -> None:
    """Compare what a run is off by with what two uniform runs differ by."""
    print(f"off by {off}, uniform runs by {usual}")
    assert all(off[name] < 2 * usual[name] for name in usual), (off, usual)
