"""What goes wrong in one context-parallel replica, or on one stage, with a context-parallel size per stage."""

from __future__ import annotations

import pytest

from tests.multiproc.cases.core_cases import Case, Runs
from tests.multiproc.training.test_parity import check_parity, contextual, mixed
from tests.support.pool import Pool

ADAM = {"optimizer": "adam", "distributed_optimizer": True, "loss_scale": 1024.0}


@pytest.mark.parametrize(
    "case",
    [
        mixed((1, 1), (1, 2), inf_at=(1, 0, 1), inf_cp_rank=1, **ADAM),
        pytest.param(mixed((2, 1), (2, 1), inf_at=(0, 1, 1), inf_cp_rank=1, **ADAM), marks=pytest.mark.full),
        pytest.param(contextual(1, 2, inf_at=(1, 1, 1), inf_cp_rank=0, **ADAM), marks=pytest.mark.full),
        pytest.param(
            mixed((1, 2), (2, 1), inf_at=(0, 0, 1), inf_cp_rank=1, dtype="fp16", optimizer="adam", loss_scale=1024.0),
            marks=pytest.mark.full,
        ),
    ],
    ids=str,
)
def test_inf_in_one_replica_only(runs: Runs, case: Case) -> None:
    """It is summed into the gradients of all replicas of the stage, and every rank of every stage skips the step."""
    run = check_parity(runs, case)
    assert run.successful == [True, False, True, True]
    assert run.successful == runs.oracle(case.but(wants_weights=True)).successful
    assert run.grad_norms[1] == -1.0


@pytest.mark.parametrize(
    ("sizes", "refusal"),
    [
        ({1: 1}, "the model's config says context_parallel_size=1, but stage 1 has 2; build the config with"),
        pytest.param(
            {0: 2},
            "the model's config says context_parallel_size=2, but stage 0 has 1; build the config with",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_config_of_another_stage_is_refused(pool: Pool, sizes: dict[int, int], refusal: str) -> None:
    """By all ranks together, in the first step."""
    kwargs = {"case": mixed((1, 1), (1, 2)), "sizes": sizes}
    lines = pool.run(3, "tests.multiproc.jobs.context_job:train_with", kwargs)
    assert all(refusal in line for line in lines), lines
