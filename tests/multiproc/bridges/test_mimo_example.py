"""examples/mimo/train.py: what it prints, with the plugin's bridges and with Megatron's."""

from __future__ import annotations

import re

import pytest

from tests.multiproc.cases.example_runs import STEP, refuse_example, run_example, start_example
from tests.multiproc.cases.script_cases import Scripts

pytestmark = pytest.mark.needs("bridges")

MIMO = "examples/mimo/train.py"
SMALL = (3, "--vision 1,1,1 --language 1,1,2 --vtp-bridges")
DIFFERENCE = re.compile(r"^largest relative difference of losses, norms and weights: (\S+)$", re.MULTILINE)


@pytest.mark.parametrize(
    ("num_ranks", "words"),
    [
        SMALL,
        pytest.param(7, "--vision 1,1,2 --stages 1,2,2 --language 1,1,1 --vtp-bridges", marks=pytest.mark.full),
        pytest.param(6, "--vision 1,1,2 --stages 1:2,2:1 --language 1,1,1 --vtp-bridges", marks=pytest.mark.full),
        pytest.param(4, "--vision 1,1,2 --language 1,2,1", marks=pytest.mark.full),
    ],
)
def test_it_trains_as_on_one_rank(scripts: Scripts, num_ranks: int, words: str) -> None:
    assert_right(run_example(scripts, MIMO, num_ranks, words))


@pytest.mark.full
def test_started_by_torchrun() -> None:
    assert_right(start_example(MIMO, *SMALL))


def assert_right(printed: str) -> None:
    steps = STEP.findall(printed)
    # Spread over two grids, then alone.
    assert [number for number, *_ in steps] == ["1", "2", "3"] * 2, printed
    assert [float(value) for value in steps[0][1:]] == pytest.approx([float(value) for value in steps[3][1:]], rel=1e-5)
    assert len({loss for _, loss, _ in steps}) >= 3, "it trains nothing"
    found = DIFFERENCE.search(printed)
    assert found is not None and float(found[1]) < 1e-5, printed


@pytest.mark.full
def test_a_batch_that_cannot_be_cut_is_refused(scripts: Scripts) -> None:
    words = "--vision 1,1,1 --stages 1:2,1:5 --language 1,1,1 --vtp-bridges"
    for printed in refuse_example(scripts, MIMO, 8, words):
        lines = [line for line in printed.splitlines() if line.startswith("[vtp rank ")]
        assert lines and all(
            "batch 12 cannot be cut for the 5 replicas of ranks (3, 4, 5, 6, 7)" in line for line in lines
        )
