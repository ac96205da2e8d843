"""Clipping, found-inf, zero count, token count and evaluation over unequal stages."""

from __future__ import annotations

import pytest

from tests.multiproc.cases.core_cases import (
    DISTRIBUTED,
    LR,
    OVERLAPPED,
    Case,
    Runs,
    assert_close,
    assert_identical,
    assert_weights_close,
    defaults_first,
)
from tests.support.pool import Pool


def check(runs: Runs, case: Case, *, rel: float = 1e-5) -> None:
    case = case.but(wants_weights=True)
    run, oracle = runs.run(case), runs.oracle(case)
    assert_close(run, oracle, rel=rel)
    assert run.successful == oracle.successful
    assert run.num_zeros == oracle.num_zeros
    if case.numerics.dtype == "fp32":
        assert_weights_close(
            run, oracle, atol=1e-5 if case.numerics.optimizer == "sgd" else LR["adam"] * case.data.num_steps
        )


@pytest.mark.parametrize(
    "case",
    [
        Case.of(sizes=(1, 2), **DISTRIBUTED, overlap_grad_reduce=True),
        pytest.param(
            Case.of(sizes=(1, 1), cp_list=(1, 2), gathered_attention=True, seq=4), id="cp 1,2", marks=pytest.mark.full
        ),
    ],
    ids=str,
)
def test_a_run_leaves_no_process_groups_behind(runs: Runs, pool: Pool, case: Case) -> None:
    """Threads of gloo groups wake a hundred times a second: some thousand left over, and every test takes minutes."""
    counts = []
    for _ in range(2):
        runs.run(case)
        counts.append(pool.run(case.world_size, "tests.multiproc.jobs.core_job:count_threads"))
    assert counts[0] == counts[1]


CLIPPED = [Case.of(sizes=(2, 3)), Case.of(sizes=(3, 1, 2), **DISTRIBUTED), Case.of(sizes=(1, 2), dp=2, tied=True)]


@pytest.mark.parametrize("case", defaults_first(CLIPPED, 1))
def test_clip_threshold_below_the_norm(runs: Runs, case: Case) -> None:
    case = case.but(clip=0.05, wants_weights=True)
    free = runs.oracle(case.but(clip=0.0))
    oracle = runs.oracle(case)
    assert min(oracle.grad_norms) > 2 * case.numerics.clip, "the threshold cuts nothing"
    assert free.losses != oracle.losses
    check(runs, case)


OVERFLOWING = [
    Case.of(sizes=(1, 2), inf_at=(1, 1, 1), dtype="fp16"),
    Case.of(sizes=(3, 1, 2), inf_at=(0, 2, 1), dtype="fp16"),
    Case.of(sizes=(1, 4), inf_at=(1, 3, 1), **DISTRIBUTED, loss_scale=1024.0),
    Case.of(sizes=(2, 3), vpp=2, num_microbatches=4, inf_at=(0, 1, 1), **DISTRIBUTED, loss_scale=1024.0),
    Case.of(sizes=(2, 1, 1), inf_at=(0, 1, 1), dtype="bf16", loss_scale=1024.0),
]


@pytest.mark.parametrize("case", defaults_first(OVERFLOWING, 1))
def test_inf_on_a_rank_that_leads_nothing(runs: Runs, case: Case) -> None:
    """All ranks skip the step together, and the next ones are as if it had never been there."""
    assert case.checks.inf_at is not None and 0 < case.checks.inf_at[1] < case.stages.sizes[case.checks.inf_at[0]]
    run = runs.kept(case)
    assert run.successful == [True, False, True, True]
    assert run.grad_norms[1] == -1.0
    # Half precision keeps 11 or 8 bits of every activation.
    check(runs, case, rel={"fp32": 1e-5, "fp16": 2e-3, "bf16": 0.02}[case.numerics.dtype])


COUNTED = [
    Case.of(sizes=(1, 2)),
    Case.of(sizes=(2, 3), tied=True),
    Case.of(sizes=(3, 1, 2), **DISTRIBUTED),
    Case.of(sizes=(1, 2), dp=2, **DISTRIBUTED, tied=True),
]


@pytest.mark.parametrize("case", defaults_first(COUNTED, 1))
def test_zero_count(runs: Runs, case: Case) -> None:
    case = case.but(count_zeros=True, has_bias=False, num_microbatches=1)
    oracle = runs.oracle(case)
    if not case.model.tied:
        assert min(oracle.num_zeros) > 0, "tokens that do not occur have zero gradients in the embedding"
    else:
        assert min(oracle.num_zeros) >= 0
    check(runs, case)


@pytest.mark.parametrize("vpp", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((3, 1, 2), marks=pytest.mark.full)], ids=str)
def test_uneven_masks_with_per_token_loss(runs: Runs, sizes: tuple[int, ...], vpp: int) -> None:
    case = Case.of(
        sizes=sizes, vpp=vpp, masked=True, loss_tuple=3, per_token_loss=True, num_microbatches=2 * len(sizes)
    )
    if sizes == (1, 2):
        case = case.but(dp=2, optimizer="adam" if vpp == 2 else "sgd", distributed_optimizer=vpp == 2)
    check(runs, case)
    averaged = runs.oracle(case.but(per_token_loss=False, loss_tuple=2))
    assert averaged.grad_norms != runs.oracle(case).grad_norms, "the masks are even, so the token count shows nothing"


@pytest.mark.parametrize("loss_tuple", [pytest.param(2, marks=pytest.mark.full), 3])
def test_loss_functions(runs: Runs, loss_tuple: int) -> None:
    check(runs, Case.of(sizes=(2, 1), masked=True, loss_tuple=loss_tuple, dp=2))


EVALUATED = [
    Case.of(sizes=(2, 3)),
    Case.of(sizes=(1, 2, 1, 2), vpp=2, num_microbatches=4, overlap_p2p=True, tied=True),
    Case.of(sizes=(1, 2), dp=2, **OVERLAPPED),
]


@pytest.mark.parametrize("case", defaults_first(EVALUATED, 1))
def test_evaluation_changes_nothing(runs: Runs, case: Case) -> None:
    case = case.but(wants_weights=True)
    plain, evaluated = runs.run(case), runs.run(case.but(num_evaluations=2))
    assert_identical(evaluated, plain)
    assert_close(evaluated, runs.oracle(case))
    for ours, evaluations in zip(evaluated.losses, evaluated.evaluations, strict=True):
        assert evaluations == [losses for losses in ours for _ in range(2)]
