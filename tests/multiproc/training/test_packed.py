"""Packed sequences in pipelines with unequal stages: every stage reads the lengths, none of them crosses a boundary."""

from __future__ import annotations

import pytest
import torch

from tests.multiproc.cases.core_cases import Case, Run, assemble, assert_close, assert_weights_close, oracle_of
from tests.support.pool import Pool

JOB = "tests.multiproc.jobs.variants:train_packed"


def packed(*sizes: int, **fields: object) -> Case:
    return Case.of(sizes=sizes, gathered_attention=True, seq=12, num_steps=5, **fields)  # pyright: ignore[reportArgumentType]


def train(pool: Pool, case: Case, num_samples: int = 3) -> tuple[Run, list[list[list[int]]]]:
    results = pool.run(case.world_size, JOB, {"case": case, "num_samples": num_samples})
    return assemble(case, [result for result, _ in results]), [seen for _, seen in results]


@pytest.mark.parametrize(
    "case",
    [
        packed(1, 2, 1, num_microbatches=3),
        pytest.param(packed(2, 3, vpp=2, num_microbatches=4, transport="rank0"), marks=pytest.mark.full),
        pytest.param(packed(1, 2, sequence_parallel=True, schedule="planned", tied=True), marks=pytest.mark.full),
        pytest.param(packed(2, 1, varying_lengths=True, recompute=True), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_parity(pool: Pool, case: Case) -> None:
    case = case.but(wants_weights=True)
    run, lengths = train(pool, case)
    oracle, uniform_lengths = train(pool, oracle_of(case))
    assert_close(run, oracle)
    assert_weights_close(run, oracle)
    # Every rank of every stage had the lengths of every microbatch, each as often as it has chunks.
    every = {tuple(ends) for ends in uniform_lengths[0]}
    assert len(every) > 3
    assert all({tuple(ends) for ends in seen} == every for seen in lengths)
    assert {len(seen) for seen in lengths} == {case.data.num_steps * case.data.num_microbatches * case.model.vpp}


def test_samples_of_a_row_do_not_see_each_other(pool: Pool) -> None:
    (results,) = pool.run(1, "tests.multiproc.jobs.variants:attend")
    torch.testing.assert_close(*results)


def test_megatrons_local_attention_does_not_take_them(pool: Pool) -> None:
    """The reason for the tests' own attention; no fault of the stages."""
    with pytest.raises(Exception, match="Packed sequence is not supported by DotProductAttention"):
        train(pool, packed(1).but(gathered_attention=False))
