"""Layers of MindSpeed-MM's lists: their numbers, as which parts they are stored, and recomputation.

Opt-in, as :mod:`tests.mindspeed.test_mm_lane`, whose oracle this takes.
"""

from __future__ import annotations

import re

import pytest

from tests.mindspeed.test_mm_lane import (
    DEVICE,
    assert_equal,
    needs_trees,
    numbers,
    oracle,
    start,
    start_u,
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
