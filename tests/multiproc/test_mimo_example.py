"""examples/mimo/train.py, as a user starts it: what it prints, with the plugin's bridges and with Megatron's."""

from __future__ import annotations

import re

import pytest

from tests.multiproc.example_runs import STEP, run_example

DIFFERENCE = re.compile(r"^largest relative difference of losses, norms and weights: (\S+)$", re.MULTILINE)


@pytest.mark.parametrize(
    ("num_ranks", "words"),
    [
        (3, "--vision 1,1,1 --language 1,1,2 --vtp-bridges"),
        pytest.param(7, "--vision 1,1,2 --stages 1,2,2 --language 1,1,1 --vtp-bridges", marks=pytest.mark.full),
        pytest.param(6, "--vision 1,1,2 --stages 1:2,2:1 --language 1,1,1 --vtp-bridges", marks=pytest.mark.full),
        pytest.param(4, "--vision 1,1,2 --language 1,2,1", marks=pytest.mark.full),
    ],
)
def test_it_trains_as_on_one_rank(num_ranks: int, words: str) -> None:
    printed = run_example("examples/mimo/train.py", num_ranks, words)
    steps = STEP.findall(printed)
    # Spread over two grids, then alone.
    assert [number for number, *_ in steps] == ["1", "2", "3"] * 2, printed
    assert [float(value) for value in steps[0][1:]] == pytest.approx([float(value) for value in steps[3][1:]], rel=1e-5)
    assert len({loss for _, loss, _ in steps}) >= 3, "it trains nothing"
    found = DIFFERENCE.search(printed)
    assert found is not None and float(found[1]) < 1e-5, printed


@pytest.mark.full
def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    words = "--vision 1,1,1 --stages 1:2,1:5 --language 1,1,1 --vtp-bridges"
    errors = run_example("examples/mimo/train.py", 8, words, is_refused=True)
    lines = [line for line in errors.splitlines() if line.startswith("[vtp rank ")]
    assert lines and all("batch 12 cannot be cut for the 5 replicas of ranks (3, 4, 5, 6, 7)" in line for line in lines)
