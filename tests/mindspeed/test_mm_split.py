"""MindSpeed-MM's own script with split backwards: to the last bit what whole ones give, and what one rank gives.

Opt-in as :mod:`tests.mindspeed.test_mm_lane`, whose oracle this takes. Losses and norms have nine digits, which tell
all numbers of fp32 apart; every step trains with the weights of the one before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.mindspeed.split import SPLIT, costs, num_split
from tests.mindspeed.test_mm_lane import VISION_LAYERS, Numbers, assert_equal, needs_trees, numbers, oracle, start_u
from tests.mindspeed.test_mm_rings import NUM_VISION, TEXT, VISION

pytestmark = [pytest.mark.full, needs_trees]
ONE_RING = ([[2, 0], [0, 0]], [[1, 2], [1, 0]], costs(1, 2, 1))
TWO_RINGS = (VISION, TEXT, costs(1, 2, 1, 2, 1))
Layers = tuple[list[Any], list[Any], tuple[str, ...]]


def trained(layers: Layers, *extra: str) -> Numbers:
    """Train a U of `1,2` and return losses and norms."""
    vision, text, known = layers
    code, output = start_u("1,2", vision, text, *known, *extra)
    assert code == 0, output[-6000:]
    return numbers(output)


@pytest.mark.parametrize(
    ("layers", "num_vision"), [(ONE_RING, VISION_LAYERS), (TWO_RINGS, NUM_VISION)], ids=["one ring", "two rings"]
)
def test_it_is_the_run_with_whole_backwards(tmp_path: Path, layers: Layers, num_vision: int) -> None:
    found = trained(layers, SPLIT, "--vtp-trace", str(tmp_path))
    assert num_split(tmp_path) > 0
    assert found == trained(layers)
    assert_equal(found, oracle(vision=num_vision))


def test_a_gradient_that_is_left_out_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setenv("VTP_TEST_LEFT_OUT", "1")
    found = trained(ONE_RING, SPLIT)
    monkeypatch.delenv("VTP_TEST_LEFT_OUT")
    with pytest.raises(AssertionError):
        assert_equal(found, oracle())
