"""Multi-token prediction in pipelines with unequal stages: on the last one, on one before it, on the edge of a U."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.multiproc.cases.case_parts import VOCAB
from tests.multiproc.cases.core_cases import (
    DISTRIBUTED,
    OVERLAPPED,
    PER_TOKEN,
    Case,
    Run,
    Runs,
    assert_close,
    assert_weights_close,
    defaults_first,
)
from tests.multiproc.cases.u_shape_cases import Saved, check_u_shape, u_shaped
from tests.multiproc.training.test_parity import check_parity
from tests.support.pool import Pool, PoolError

PREDICTING: dict[str, Any] = {"mtp": 1, "attention": "rotary"}


def predicting(*sizes: int, **fields: Any) -> Case:
    return Case.of(**{"sizes": sizes, **PREDICTING, **fields})


CASES = [
    predicting(1, 2),
    predicting(2, 1, tied=True, dp=2, masked=True),
    # Alone on a stage before the last one; tied, three stages hold the embedding.
    predicting(1, 2, 1, layout="Ett|m|L", tied=True),
    predicting(1, 2, 1, layout="Ett|m|L"),
    predicting(2, 1, 3, layout="Et|tm|L", tied=True, **DISTRIBUTED, dp=1),
    predicting(2, 1, layout="Ettm|L", tied=True),
    predicting(2, 3, mtp=2, **PER_TOKEN),
    predicting(1, 2, dp=2, **OVERLAPPED),
    predicting(1, 3, tied=True, dp=2, **DISTRIBUTED),
    predicting(3, 1, 2, vpp=2, num_microbatches=3, tied=True),
    predicting(1, 4, seq=8, sequence_parallel=True, tied=True, attention="grouped"),
    predicting(1, 2, 2, seq=8, sequence_parallel=True, layout="Et|tm|L"),
    predicting(2, 1, varying_lengths=True),
    predicting(1, 2, recompute=True, mtp=2),
    predicting(1, 1, dp_list=(1, 2), schedule="planned", num_microbatches=4),
    predicting(1, 2, dp_list=(2, 1), schedule="planned", num_microbatches=4, tied=True),
    predicting(2, 2, plugin="forced", schedule="planned", tied=True),
]


@pytest.mark.needs("layouts")
def test_a_chunk_that_only_predicts(runs: Runs) -> None:
    """The last chunk of two on the last stage has a layer of prediction and no other."""
    check_parity(runs, predicting(1, 2, layout="Et|tt|t|mL", vpp=2, num_microbatches=4))


def copies_over_time(case: Case, run: Run) -> list[list[torch.Tensor]]:
    """Give the whole weight of every copy and replica of the word embedding, by moment: start, after step 0, ..."""
    holders = sorted({(r.stage, r.dp_rank) for r in run.ranks if r.tied})
    return [
        [torch.cat([r.tied[moment] for r in run.ranks if (r.stage, r.dp_rank) == holder]) for holder in holders]
        for moment in range(case.data.num_steps + 1)
    ]


@pytest.mark.needs("recomputed_prediction", cases=("1,2 attention=rotary mtp=2 recompute",))
@pytest.mark.needs("ranks_beyond_groups_of_heads", cases=("1,4 ",))
@pytest.mark.needs("tied_and_distributed", cases=("1,3 dp=2 tied optimizer=adam distributed-optimizer",))
@pytest.mark.needs(
    "layouts",
    cases=(
        "1,2,1 ",
        "1,2,2 seq=8 sequence-parallel attention=rotary mtp=1 ",
        "2,1 tied attention=rotary mtp=1 layout",
        "2,1,3 tied optimizer=adam distributed-optimizer attention=rotary mtp=1 layout",
    ),
)
@pytest.mark.needs("masked_prediction", cases=("2,1 dp=2 tied attention=rotary mtp=1 masked",))
@pytest.mark.parametrize("case", defaults_first(CASES, 2))
def test_prediction(runs: Runs, case: Case) -> None:
    """Losses and weights are those of the uniform run; all copies of the embedding are equal to the last bit."""
    run = check_parity(runs, case.but(wants_tied=True, num_steps=5))
    stages = {r.stage for r in run.ranks if r.tied}
    parts = case.model.layout.split("|")
    assert stages == {0, *(i for i, part in enumerate(parts) if "m" in part)} | (
        {len(case.stages.sizes) - 1} if case.model.tied or not case.model.layout else set()
    )
    moments = copies_over_time(case, run)
    for moment, copies in enumerate(moments):
        assert all(copy.shape[0] == VOCAB and torch.equal(copy, copies[0]) for copy in copies), f"after step {moment}"
    assert not torch.equal(moments[0][0], moments[-1][0]), "nothing was trained"


U_CASES = [
    u_shaped(1, 2, **PREDICTING),
    u_shaped(2, 1, **{**PREDICTING, "mtp": 2}, **DISTRIBUTED, dp=2),
    u_shaped(1, 2, 2, **PREDICTING, **PER_TOKEN),
    u_shaped(1, 2, **PREDICTING, dp_list=(1, 2), num_microbatches=4),
    # Megatron cannot save a tied one, so these start from weights that are drawn by their names.
    u_shaped(1, 2, **PREDICTING, tied=True, is_drawn=True),
    u_shaped(2, 1, **{**PREDICTING, "mtp": 2}, **DISTRIBUTED, dp=2, tied=True, is_drawn=True),
    u_shaped(1, 2, 2, **PREDICTING, **PER_TOKEN, tied=True, is_drawn=True),
]


@pytest.mark.needs("tied_and_distributed", cases=("2,1 dp=2 layers=(1, 1, 2) optimizer=adam",))
@pytest.mark.parametrize("case", defaults_first(U_CASES, 1))
def test_prediction_on_the_edge(runs: Runs, saved: Saved, case: Case) -> None:
    """The edge's last part predicts too; its copy of the embedding stays that of the first part."""
    run = check_u_shape(runs, saved, case.but(wants_tied=True, num_steps=5))
    edge = [r for r in run.ranks if r.stage == 0]
    assert all(len(r.tied) == 12 for r in edge)
    for r in edge:
        assert all(torch.equal(first, last) for first, last in zip(r.tied[::2], r.tied[1::2], strict=True))


@pytest.mark.needs("layouts")
@pytest.mark.parametrize(
    ("case", "line"),
    [
        pytest.param(
            predicting(1, 2, 1, layout="Ett|m|L", embedding_stages=(0, 2)),
            "stages 0, 1 hold the word embedding; .* a get_embedding_ranks that returns those of all",
            id="copy",
        ),
        pytest.param(
            predicting(1, 1, 2, layout="Ett|m|L", seq=8, sequence_parallel=True, tied=True),
            r"multi-token prediction before the last stage with sequence parallelism on stages of tp \(1, 2\); ",
            id="slices",
            marks=pytest.mark.full,
        ),
        pytest.param(
            predicting(1, 1, 1, layout="Ett|m|L", seq=8, cp_list=(1, 1, 2), gathered_attention=True),
            r"multi-token prediction before the last stage with context parallelism on stages of cp \(1, 2\); ",
            id="chunks",
        ),
    ],
)
def test_prediction_that_would_be_wrong_is_refused(pool: Pool, case: Case, line: str) -> None:
    """Megatron would leave the copy at zero, and take slices of one prediction for those of another."""
    with pytest.raises(PoolError, match=line):
        pool.run(case.world_size, "tests.multiproc.jobs.core_job:train", {"case": case})


MASKED: dict[str, Any] = {"masked": True, "loss_tuple": 3, "gathered_attention": True, "seq": 8, "num_steps": 5}


@pytest.mark.needs("masked_prediction")
@pytest.mark.parametrize("is_per_token", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("cp_list", [(1, 2), pytest.param((2, 1), marks=pytest.mark.full)])
def test_masked_prediction_is_that_of_the_last_stages_size(
    runs: Runs, cp_list: tuple[int, int], is_per_token: bool
) -> None:
    """Each context-parallel rank divides by its own tokens that count, also where the main loss is one per token."""
    case = predicting(1, 1, cp_list=cp_list, **MASKED, per_token_loss=is_per_token, wants_weights=True)
    of_last, of_first = (
        runs.kept_alike(case, case.but(cp=cp, cp_list=(), plugin="stock")) for cp in (cp_list[-1], cp_list[0])
    )
    run = runs.run(case)
    assert_close(run, of_last)
    assert_weights_close(run, of_last)
    with pytest.raises(AssertionError):
        assert_close(run, of_first)


@pytest.mark.full
@pytest.mark.parametrize("cp_list", [(), (1, 2)], ids=["equal", "per stage"])
def test_prediction_with_context_parallelism(runs: Runs, cp_list: tuple[int, ...]) -> None:
    """Megatron averages over a rank's tokens, so the oracle is as context-parallel as the stage with the loss."""
    case = predicting(1, 2, cp=1 if cp_list else 2, cp_list=cp_list, gathered_attention=True, seq=16, num_steps=5)
    case = case.but(wants_weights=True)
    oracle = runs.kept_alike(case, case.but(sizes=(1, 1), cp=2, cp_list=(), plugin="stock"))
    run = runs.run(case)
    assert_close(run, oracle)
    assert_weights_close(run, oracle)
