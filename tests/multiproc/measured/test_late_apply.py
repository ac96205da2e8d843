"""A script that took functions from Megatron by name before ``apply()`` trains as the uniform run does."""

from __future__ import annotations

import pytest

from tests.multiproc.cases.core_cases import Case, Runs, assemble, assert_close
from tests.support.pool import Pool


@pytest.mark.parametrize("schedule", ["stock", "planned"])
def test_names_taken_before_applying_give_the_right_gradients(pool: Pool, runs: Runs, schedule: str) -> None:
    case = Case.of(sizes=(1, 2), tied=True, schedule=schedule)  # pyright: ignore[reportArgumentType]
    run = assemble(case, pool.run(case.world_size, "tests.multiproc.jobs.variants:train_late", {"case": case}))
    oracle = runs.oracle(case)
    assert_close(run, oracle, rel=1e-5)
    assert run.grad_norms == pytest.approx(oracle.grad_norms, rel=1e-5) and len(run.grad_norms) == 4
