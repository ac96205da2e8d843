"""What goes wrong in one context-parallel replica, or on one stage, with a context-parallel size per stage."""

from __future__ import annotations

import pytest

from tests.multiproc.cases.core_cases import Case, Runs, assert_close, assert_weights_close, defaults_first
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


# Every microbatch has another share of tokens that count, and so has every context-parallel rank.
MASKED = {"masked": True, "loss_tuple": 3, "wants_weights": True}
LOSS_ON_MANY = mixed((1, 1), (1, 2), **MASKED)
MASKED_CASES = [
    LOSS_ON_MANY,
    mixed((1, 1), (2, 1), **MASKED),
    mixed((1, 2), (2, 1), **MASKED, tied=True, dp=2),
    mixed((1, 2), (1, 2), **MASKED, vpp=2, num_microbatches=4),
    mixed((1, 1), (1, 2), **MASKED, schedule="planned"),
    mixed((1, 1), (1, 2), **MASKED, dp_list=(2, 1), num_microbatches=4),
]


def _uniform(case: Case, cp: int) -> Case:
    """Give the uniform run with a context-parallel size, and as many replicas as the stage with the loss has."""
    stages = case.stages
    alone = {"sizes": (1,) * len(stages.sizes), "cp_list": (), "cp": cp, "dp_list": (), "dp": stages.dp_sizes[-1]}
    return case.but(**alone, plugin="stock", schedule="stock")


@pytest.mark.parametrize("case", defaults_first(MASKED_CASES, 1))
@pytest.mark.needs("own_tokens_over_context")
def test_a_mean_per_microbatch_is_that_of_the_last_stages_size(runs: Runs, case: Case) -> None:
    """Megatron lets each context-parallel rank divide by its own tokens, so uniform runs of cp 1 and 2 differ."""
    first, *_, last = case.stages.cp_sizes
    run = runs.run(case)
    oracle = runs.kept(_uniform(case, last))
    assert_close(run, oracle)
    assert_weights_close(run, oracle)
    with pytest.raises(AssertionError):
        assert_close(run, runs.kept(_uniform(case, first)))


@pytest.mark.full
@pytest.mark.needs("own_tokens_over_context")
@pytest.mark.parametrize("cp_list", [(1, 2), (2, 1)])
def test_a_loss_per_token_is_one_for_all_sizes(runs: Runs, cp_list: tuple[int, int]) -> None:
    case = mixed((1, 1), cp_list, **MASKED, per_token_loss=True)
    run = runs.run(case)
    for cp in (1, 2):
        assert_close(run, runs.kept(_uniform(case, cp)))


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
    lines = pool.run(3, "tests.multiproc.jobs.variants:train_with", kwargs)
    assert all(refusal in line for line in lines), lines
