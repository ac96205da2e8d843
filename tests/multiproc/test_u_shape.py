"""The U-shaped pipeline equals the sequential model, from one common checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.multiproc.cases import LR, Case, Run, Runs, assert_close, assert_weights_close
from tests.multiproc.test_ordering import Recordings
from tests.multiproc.test_parity import BF16_REL
from tests.pool import Pool
from vtp_plugin.ordering import MODELS, check

pytestmark = pytest.mark.timeout(240)

NUM_LAYERS = 4
LAYERS: dict[tuple[int, ...], tuple[int, ...]] = {
    (1, 1): (1, 2, 1),
    (1, 2): (1, 1, 2),
    (1, 2, 2): (1, 1, 1, 1),
    (2, 1, 3): (1, 1, 1, 1),
}
# Microbatches 1 to 8: fewer than stages, as many, and more.
RAMPUP: dict[str, Any] = {"num_microbatches": 1, "rampup": True, "num_steps": 8}


def u_shaped(*sizes: int, **fields: Any) -> Case:
    return Case(sizes=sizes, layers=LAYERS[sizes], **fields)


Saved = Callable[[Case], str]


@pytest.fixture(scope="module")
def saved(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Give start weights that the sequential model drew and saved, once for each kind of model."""
    paths: dict[tuple[bool, int], str] = {}

    def save(case: Case) -> str:
        key = case.tied, case.seq
        if key not in paths:
            paths[key] = str(tmp_path_factory.mktemp("start"))
            runs.run(replace(sequential(case), save=paths[key], load=None, num_steps=0))
        return paths[key]

    return save


def sequential(case: Case) -> Case:
    """Give the run without a pipeline that computes the same."""
    kept = (
        "dp",
        "dtype",
        "optimizer",
        "num_steps",
        "num_microbatches",
        "rampup",
        "masked",
        "per_token_loss",
        "loss_tuple",
    )
    kept += ("varying_lengths", "seq", "length_step", "tied", "load", "wants_weights")
    return Case(sizes=(1,), layers_per_chunk=NUM_LAYERS, **{name: getattr(case, name) for name in kept})


def check_u_shape(runs: Runs, saved: Saved, case: Case) -> Run:
    case = replace(case, load=saved(case), wants_weights=True)
    assert case.num_layers == NUM_LAYERS
    run, oracle = runs.run(case), runs.kept(sequential(case))
    if case.tied:
        ends = [run.weights.pop("output_layer.weight"), run.weights["embedding.word_embeddings.weight"]]
        assert ends[0].equal(ends[1])
    if case.dtype == "fp32":
        assert_close(run, oracle)
        assert_weights_close(run, oracle, atol=1e-5 if case.optimizer == "sgd" else LR["adam"] * case.num_steps)
    else:
        assert_close(run, oracle, rel=BF16_REL)
    return run


DISTRIBUTED: dict[str, Any] = {
    "optimizer": "adam",
    "distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "dp": 2,
}
CASES = [
    u_shaped(1, 2, 2, **RAMPUP),
    u_shaped(1, 2, tied=True, recompute=True, deallocate=True, masked=True, per_token_loss=True, loss_tuple=3),
    u_shaped(1, 1, tied=True, **DISTRIBUTED),
]
FULL_CASES = [
    u_shaped(1, 1, **RAMPUP),
    u_shaped(1, 2, **RAMPUP),
    u_shaped(2, 1, 3, **RAMPUP),
    u_shaped(1, 1, tied=True, **RAMPUP),
    u_shaped(1, 2, 2, tied=True, **RAMPUP),
    u_shaped(2, 1, 3, tied=True, recompute=True, **RAMPUP),
    u_shaped(1, 2, transport="rank0", varying_lengths=True, **RAMPUP),
    u_shaped(1, 2, 2, sequence_parallel=True, seq=6, recompute=True),
    u_shaped(2, 1, 3, sequence_parallel=True, seq=18, length_step=6, varying_lengths=True, transport="rank0"),
    u_shaped(1, 2, **DISTRIBUTED),
    u_shaped(1, 2, dtype="bf16", optimizer="adam"),
    u_shaped(1, 2, dp=2, overlap_grad_reduce=True, align_grad_reduce=False, masked=True, per_token_loss=True),
]


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in FULL_CASES)], ids=str
)
def test_equals_the_sequential_model(runs: Runs, saved: Saved, case: Case) -> None:
    check_u_shape(runs, saved, case)


def test_evaluation_sees_the_losses_of_the_step(runs: Runs, saved: Saved) -> None:
    case = u_shaped(1, 2, num_microbatches=2, num_evaluations=2)
    run = check_u_shape(runs, saved, case)
    for losses, evaluations in zip(run.losses, run.evaluations, strict=True):
        assert evaluations == [step for step in losses for _ in range(2)]


def test_both_chunks_of_the_edge_get_whole_batches(pool: Pool) -> None:
    batches = pool.run(3, "tests.multiproc.u_shape_job:batch_of_the_edge")
    rows = [[0, 1, 2], [3, 4, 5]]
    keys = ("tokens", "labels", "loss_mask", "position_ids")
    whole = {key: [[n + 10 * i for n in row] for row in rows] for i, key in enumerate(keys)}
    assert batches == [whole, whole, {}]


def test_only_the_edge_reads_data(runs: Runs) -> None:
    case = u_shaped(1, 2, num_steps=1)
    run = runs.run(case)
    assert [rank.read for rank in run.ranks] == [2 * case.num_microbatches, 0, 0]


@pytest.mark.parametrize(
    "case",
    [
        u_shaped(1, 2, num_steps=2),
        pytest.param(u_shaped(1, 2, 2, num_steps=2, varying_lengths=True, tied=True), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_recorded_steps_pass_all_models(pool: Pool, case: Case) -> None:
    assert check(Recordings(pool).of(case), MODELS) == ()
