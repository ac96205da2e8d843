"""examples/core_only.py: unequal stages print the losses of the uniform list."""

from __future__ import annotations

import pytest

from tests.multiproc.cases.example_runs import CORE_ONLY, losses_and_norms, run_example, start_example
from tests.multiproc.cases.script_cases import Scripts


@pytest.fixture(scope="module")
def uniform(scripts: Scripts) -> list[float]:
    """Losses and norms of the uniform list."""
    return losses_and_norms(run_example(scripts, CORE_ONLY, 2, "--sizes 1,1"))


def test_unequal_stages_print_what_the_uniform_list_prints(scripts: Scripts, uniform: list[float]) -> None:
    unequal = losses_and_norms(run_example(scripts, CORE_ONLY, 3, "--sizes 1,2"))
    assert unequal == pytest.approx(uniform, rel=1e-5)
    assert uniform[0] == pytest.approx(5.58, abs=0.3)  # about ln 256, so it did compute something


@pytest.mark.full
def test_started_by_torchrun(uniform: list[float]) -> None:
    assert losses_and_norms(start_example(CORE_ONLY, 3, "--sizes 1,2")) == pytest.approx(uniform, rel=1e-5)
