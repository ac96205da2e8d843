"""What is planted into the logs of a run with faults is found: a sample that is read twice, and a wrong load."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.multiproc.faults.elastic import Step
from tests.multiproc.faults.fault_log import require_losses, require_samples

LOSSES = {step: 5.0 - 0.1 * step for step in range(1, 7)}


def reads(pid: int, steps: range, upto: int = 2) -> list[dict[str, Any]]:
    """Microbatches of one sample, two in a step; of the last step only so many."""
    return [
        {"event": "samples", "pid": pid, "step": step, "samples": [2 * (step - 1) + number]}
        for step in steps
        for number in range(upto if step == steps[-1] else 2)
    ]


def test_a_step_that_is_computed_again_counts_once() -> None:
    require_samples([*reads(1, range(1, 5), upto=1), *reads(2, range(3, 7))], batch_size=2)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([*reads(1, range(1, 5)), {"event": "samples", "pid": 1, "step": 5, "samples": [7]}], "step 5 of process 1"),
        ([*reads(1, range(1, 5)), *reads(1, range(4, 5))], "step 4 of process 1 read other samples"),
        ([*reads(1, range(1, 4)), *reads(2, range(5, 7))], "step 4 has not read"),
        ([*reads(1, range(1, 4), upto=1), *reads(2, range(4, 7))], "step 3 has not read"),
    ],
)
def test_a_planted_sample_is_found(entries: list[dict[str, Any]], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        require_samples(entries, batch_size=2)


def steps() -> list[Step]:
    first = [Step(1, "2,2", step, 8 * step, LOSSES[step]) for step in (1, 2, 3)]
    means = {3: LOSSES[3], 4: (LOSSES[3] + LOSSES[4]) / 2, 5: LOSSES[5], 6: LOSSES[6]}
    return [*first, *(Step(2, "2,1", step, 8 * step, loss) for step, loss in means.items())]


def test_losses_of_a_run_that_went_on() -> None:
    require_losses(steps(), LOSSES)


@pytest.mark.parametrize("number", range(7))
def test_a_planted_wrong_load_is_found(number: int) -> None:
    wrong = steps()
    wrong[number] = replace(wrong[number], loss=wrong[number].loss * 1.0001)
    with pytest.raises(AssertionError):
        require_losses(wrong, LOSSES)
