"""Layers of MindSpeed-MM's lists: their numbers, as which parts they are stored, recomputation, and bf16.

Opt-in, as :mod:`tests.mindspeed.test_mm_lane`, whose oracle this takes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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
def test_in_bf16_stages_of_unequal_size_are_as_near_as_uniform_runs(is_tied: bool) -> None:
    pipeline = (*DEVICE, "--vtp-size-list", "1,2", "--bf16")
    code, output = start_u("1,2", [[2, 0], [0, 0]], [[1, 2], [1, 0]], "--bf16", is_tied=is_tied)
    assert code == 0, output[-6000:]
    plain = trained(3, [2, 0], [2, 2], *pipeline, is_run=True, is_tied=is_tied)
    assert_as_near([plain, numbers(output)], VISION_LAYERS, is_tied=is_tied)


def test_in_bf16_two_rings_are_as_near_as_uniform_runs() -> None:
    code, output = start_u("1,2", [[1, 1], [1, 0], [0, 0]], [[0, 0], [1, 2], [1, 0]], "--bf16")
    assert code == 0, output[-6000:]
    assert_as_near([numbers(output)], 3)


def assert_as_near(runs: Sequence[Numbers], vision: int, *, is_tied: bool = False) -> None:
    """Compare with what the script alone is off by in bf16 from itself in fp32, with tensor-parallel size 1 and 2.

    Rounding to 8 bits depends on the order of sums. What two runs in bf16 differ by says nothing of either: it changes
    with the processor.
    """
    truth = oracle(vision=vision, is_tied=is_tied)
    size_2 = ("--bf16", "--tensor-model-parallel-size", "2")
    uniform = [
        oracle("--bf16", vision=vision, is_tied=is_tied),
        trained(2, [vision], [TEXT_LAYERS], *size_2, is_tied=is_tied),
    ]
    usual = [_off(run, truth) for run in uniform]
    off = [_off(run, truth) for run in runs]
    print(f"off by {off}, uniform runs by {usual}")
    for name in truth:
        assert max(one[name] for one in off) < 2 * max(one[name] for one in usual), (name, off, usual)
