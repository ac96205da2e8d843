"""Stages with different numbers of replicas compute what the uniform run with the loss stage's replicas computes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.multiproc.boundaries.test_ordering import Recordings
from tests.multiproc.cases.core_cases import (
    DISTRIBUTED,
    LR,
    OVERLAPPED,
    PER_TOKEN,
    Case,
    Run,
    Runs,
    assert_close,
    assert_identical,
    assert_weights_close,
    defaults_first,
)
from tests.multiproc.cases.u_shape_cases import Saved, check_u_shape
from tests.multiproc.training.test_parity import check_parity
from tests.ordering.check import check
from tests.ordering.models import MODELS
from tests.ordering.trace import END_OF_STEP, Kind
from tests.support.hosts import counts_all_zeros
from tests.support.pool import Pool
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout

SHARDED: dict[str, Any] = {"sequence_parallel": True, "seq": 6}
LAYERS = {2: (1, 2, 1), 3: (1, 1, 1, 1), 4: (1, 1, 1, 1, 1)}
LISTS = [
    *product([(1, 2), (2, 1)], [(1, 2), (2, 1)]),
    *product([(1, 2, 2)], [(1, 2, 2), (2, 2, 1)]),
    ((1, 1, 1, 1), (1, 2, 2, 2)),
    ((1, 1, 1), (1, 4, 4)),
]


def unequal(sizes: tuple[int, ...], dp_list: tuple[int, ...], **fields: Any) -> Case:
    """Give a case whose batch all stages share."""
    return Case.of(sizes=sizes, dp_list=dp_list, **{"num_microbatches": 4, **fields})


def u_shaped(sizes: tuple[int, ...], dp_list: tuple[int, ...], **fields: Any) -> Case:
    """Give a case whose loss is on the first stage."""
    return unequal(sizes, dp_list, layers=LAYERS[len(sizes)], **fields)


def contextual(sizes: tuple[int, ...], dp_list: tuple[int, ...], cp_list: tuple[int, ...], **fields: Any) -> Case:
    """Give a case whose stages differ in all three sizes, with the tests' own attention."""
    return unequal(sizes, dp_list, cp_list=cp_list, gathered_attention=True, seq=8, **fields)


def check_case(runs: Runs, saved: Saved, case: Case) -> Run:
    return check_u_shape(runs, saved, case) if case.model.layers else check_parity(runs, case)


CASES = [
    unequal((1, 2), (1, 2), **PER_TOKEN),
    unequal((2, 1), (2, 1), dp_mode="split", tied=True, transport="rank0"),
    u_shaped((1, 2), (1, 2), tied=True, **OVERLAPPED),
    u_shaped((1, 2), (2, 1), dp_mode="split", masked=True, clip=0.05),
]
GRID = [
    make(sizes, dp_list, dp_mode=mode, num_steps=4)
    for (sizes, dp_list), mode, make in product(LISTS, ("multiplex", "split"), (unequal, u_shaped))
]
FULL_CASES = [
    *GRID,
    unequal((1, 2), (1, 2), varying_lengths=True, **PER_TOKEN, num_microbatches=3),
    unequal((2, 3), (2, 1), varying_lengths=True, transport="rank0"),
    unequal((1, 2), (1, 2), **SHARDED, optimizer="adam"),
    unequal((1, 2), (1, 2), **SHARDED, transport="rank0", dp_mode="split"),
    unequal((2, 1, 2), (1, 2, 1), **SHARDED, dp_mode="split"),
    unequal((2, 1, 2), (1, 2, 1), **SHARDED, tied=True, **OVERLAPPED),
    unequal((1, 2), (1, 2), tied=True, **OVERLAPPED, dp_mode="split"),
    unequal((1, 2), (2, 1), tied=True, **OVERLAPPED),
    unequal((1, 2), (2, 4), tied=True, **OVERLAPPED, align_grad_reduce=False),
    unequal((1, 1), (2, 4), dp_mode="split", overlap_grad_reduce=True),
    unequal((1, 1), (1, 3), num_microbatches=1, recompute=True, deallocate=True),
    unequal((1, 1, 1), (2, 1, 3), num_microbatches=2, clip=0.05, masked=True),
    unequal((1, 2), (1, 2), optimizer="adam", dtype="bf16"),
    unequal((2, 1), (1, 2), optimizer="adam", **PER_TOKEN, dp_mode="split"),
    u_shaped((1, 2), (1, 2), varying_lengths=True, num_microbatches=4, **PER_TOKEN),
    u_shaped((1, 2), (1, 2), **SHARDED, dp_mode="split", overlap_grad_reduce=True),
    u_shaped((1, 2, 2), (1, 2, 1), **OVERLAPPED),
    u_shaped((1, 2, 2), (2, 1, 2), rampup=True, num_microbatches=1),
    contextual((1, 1), (1, 2), (1, 2)),
    Case.of(sizes=(1, 2), dp=2, sites=("edge", "cloud"), **PER_TOKEN),
    unequal((1, 2), (1, 2), sites=("edge", "cloud"), **OVERLAPPED),
    contextual((2, 1), (2, 1), (1, 2), dp_mode="split", **PER_TOKEN),
]


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in FULL_CASES)], ids=str
)
def test_parity(runs: Runs, saved: Saved, case: Case) -> None:
    check_case(runs, saved, case)


def check_optimizer(runs: Runs, case: Case, *, rel: float = 1e-5) -> Run:
    case = case.but(wants_weights=True)
    run, oracle = runs.run(case), runs.oracle(case)
    assert_close(run, oracle, rel=rel)
    assert (run.successful, run.num_zeros) == (oracle.successful, oracle.num_zeros)
    if case.numerics.dtype == "fp32":
        unit = 1e-5 if case.numerics.optimizer == "sgd" else LR["adam"] * case.data.num_steps
        assert_weights_close(run, oracle, atol=unit)
    return run


INF: dict[str, Any] = {"optimizer": "adam", "distributed_optimizer": True, "loss_scale": 1024.0}


@pytest.mark.parametrize(
    ("case", "rel"),
    [
        # Halves keep 11 bits.
        (unequal((1, 2), (1, 2), inf_at=(1, 1, 1), inf_dp_rank=0, dtype="fp16"), 2e-3),
        # The replica that has the element in its shard.
        pytest.param(unequal((1, 2), (1, 2), inf_at=(1, 1, 1), inf_dp_rank=1, **INF), 1e-5, marks=pytest.mark.full),
        pytest.param(unequal((1, 2), (1, 2), inf_at=(0, 0, 1), **INF), 1e-5, marks=pytest.mark.full),
        pytest.param(
            unequal((2, 1), (2, 1), inf_at=(0, 1, 1), inf_dp_rank=1, **INF, dp_mode="split"),
            1e-5,
            marks=pytest.mark.full,
        ),
    ],
    ids=str,
)
def test_inf_in_one_replica_stops_all(runs: Runs, case: Case, rel: float) -> None:
    run = check_optimizer(runs, case, rel=rel)
    assert run.successful == [True, False, True, True]
    assert run.grad_norms[1] == -1.0


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(unequal((1, 2), (1, 2), num_microbatches=1), marks=pytest.mark.full),
        pytest.param(unequal((2, 1), (2, 1), num_microbatches=2, tied=True), marks=pytest.mark.full),
        unequal((1, 2), (1, 2), num_microbatches=2, **DISTRIBUTED, dp_mode="split"),
    ],
    ids=str,
)
def test_zero_count(runs: Runs, case: Case) -> None:
    check_optimizer(runs, case.but(count_zeros=True, has_bias=False))


def assert_reads_every_sample_once(case: Case, run: Run) -> None:
    """Of a step's 8 microbatches a narrow end reads 8, in its one replica; those of a wide end read 4 each."""
    ends, num_steps = (0, len(case.stages.sizes) - 1), case.data.num_steps
    for rank in run.ranks:
        is_read = rank.stage in ends and rank.tp_rank == 0
        assert rank.read == is_read * sum(case.num_microbatches_at(rank.stage, step) for step in range(num_steps))


@pytest.mark.parametrize(
    "case",
    [
        unequal((1, 2), (1, 2), num_evaluations=1),
        pytest.param(unequal((2, 1), (2, 1), num_evaluations=2, dp_mode="split"), marks=pytest.mark.full),
        pytest.param(unequal((1, 2), (1, 2), num_evaluations=2, **OVERLAPPED), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_evaluation_changes_nothing(runs: Runs, case: Case) -> None:
    case = case.but(wants_weights=True)
    plain, evaluated = runs.run(case.but(num_evaluations=0)), runs.run(case)
    assert_reads_every_sample_once(case, plain)
    assert_identical(evaluated, plain)
    assert_close(evaluated, runs.oracle(case))
    for ours, evaluations in zip(evaluated.losses, evaluated.evaluations, strict=True):
        assert evaluations == [losses for losses in ours for _ in range(case.checks.num_evaluations)]


RECORDED = [
    unequal((1, 2), (1, 2)),
    unequal((1, 1, 1), (1, 2, 2), varying_lengths=True),
    unequal((2, 1), (2, 1), dp_mode="split", tied=True),
    unequal((1, 2), (1, 2), **OVERLAPPED),
    unequal((2, 1), (2, 1), tied=True, **OVERLAPPED, transport="rank0"),
    unequal((1, 1, 1, 1), (1, 2, 2, 2)),
    unequal((1, 1, 1), (1, 4, 4), overlap_grad_reduce=True),
    unequal((1, 1, 1), (2, 1, 3), num_microbatches=2),
    u_shaped((1, 2), (1, 2)),
    u_shaped((1, 2, 2), (2, 2, 1), **OVERLAPPED),
    u_shaped((1, 2), (1, 2), dp_mode="split", overlap_grad_reduce=True),
]


@pytest.mark.parametrize("case", defaults_first(RECORDED, 1))
def test_recorded_steps_pass_all_models(pool: Pool, case: Case) -> None:
    assert check(Recordings(pool).of(case.but(num_steps=2)), MODELS) == ()


@pytest.mark.parametrize(
    "case",
    [
        unequal((1, 2), (1, 2), **PER_TOKEN),
        pytest.param(unequal((1, 2), (1, 2), **OVERLAPPED), marks=pytest.mark.full),
        pytest.param(unequal((1, 2, 1), (2, 2, 2), **PER_TOKEN), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_each_reduction_crosses_the_border_of_sites_once(pool: Pool, case: Case) -> None:
    """Per step: the norm of the gradients and, per token, the count of these; both among the leaders of the stages."""
    case = case.but(num_steps=2, sites=("edge", *["cloud"] * (len(case.stages.sizes) - 1)))
    layout = PipelineLayout.from_sizes(case.stages.sizes, world_size=case.world_size, dp=case.stages.dp_sizes)
    leaders = tuple(layout.leader(stage) for stage in range(layout.num_stages))
    edge = set(layout.stage_ranks(0))
    for rank, trace in enumerate(Recordings(pool).of(case)):
        ends = [i for i, event in enumerate(trace.events) if event.name == END_OF_STEP]
        step = trace.events[ends[0] + 1 : ends[1]]
        groups = [event.group.ranks for event in step if event.kind is Kind.COLLECTIVE and event.group is not None]
        crossing = [ranks for ranks in groups if 0 < len(edge & set(ranks)) < len(ranks)]
        assert crossing == [leaders] * (rank in leaders) * (1 + case.numerics.per_token_loss + counts_all_zeros())


@pytest.mark.full
def test_batches_that_differ_between_stages_are_refused(pool: Pool) -> None:
    """A script without megatron.training tells each stage's sizes itself."""
    case = unequal((1, 1), (1, 2), dp_mode="split")
    texts = pool.run(case.world_size, "tests.multiproc.jobs.unequal_dp_job:run_one_size_on_all_stages", {"case": case})
    assert all("samples of a step is 8 on rank 0 and 16 on rank 1" in text for text in texts), texts
