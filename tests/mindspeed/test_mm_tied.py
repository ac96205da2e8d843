"""Qwen2.5-VL with tied embeddings, as in its model of 3 billion parameters: both copies' gradients are summed.

Opt-in, as :mod:`tests.mindspeed.test_mm_lane`, whose oracle this takes: one rank holds the weight once.
"""

from __future__ import annotations

import pytest

from tests.mindspeed.test_mm_lane import (
    DEVICE,
    OF_THE_ORACLE,
    assert_equal,
    needs_trees,
    numbers,
    oracle,
    start_u,
    trained,
)
from tests.multiproc.cases.script_cases import num_ranks

pytestmark = needs_trees
U_OF_TWO = ([[2, 0], [0, 0]], [[1, 2], [1, 0]])
"""Layers of the vision tower and of the language model."""


@pytest.mark.parametrize(
    ("sizes", "dp", "extra"),
    [
        ("1,2", 1, ()),
        pytest.param("2,1", 1, (), marks=pytest.mark.full),
        pytest.param("1,2", 2, OF_THE_ORACLE, marks=pytest.mark.full),
    ],
    ids=["1,2", "2,1", "dp 2"],
)
def test_a_pipeline_with_tied_embeddings_equals_the_oracle(sizes: str, dp: int, extra: tuple[str, ...]) -> None:
    words = (*DEVICE, "--vtp-size-list", sizes, *extra)
    found = trained(num_ranks(sizes, dp), [2, 0], [2, 2], *words, is_run=True, dp=dp, is_tied=True)
    assert_equal(found, oracle(*extra, dp=dp, is_tied=True))


@pytest.mark.parametrize(
    ("sizes", "vision", "text", "dp", "extra"),
    [
        ("1,2", *U_OF_TWO, 1, ()),
        pytest.param("1,1,2", [[2, 0, 0], [0, 0, 0]], [[1, 1, 1], [1, 0, 0]], 1, (), marks=pytest.mark.full),
        pytest.param("1,2", *U_OF_TWO, 2, OF_THE_ORACLE, marks=pytest.mark.full),
    ],
    ids=["1,2", "1,1,2", "dp 2"],
)
def test_a_u_with_tied_embeddings_equals_the_oracle(
    sizes: str, vision: list[list[int]], text: list[list[int]], dp: int, extra: tuple[str, ...]
) -> None:
    code, output = start_u(sizes, vision, text, *extra, dp=dp, is_tied=True)
    assert code == 0, output[-6000:]
    assert_equal(numbers(output), oracle(*extra, dp=dp, is_tied=True))
