"""Pipelines with unequal stages against one process without a pipeline, from one common checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.multiproc.cases.core_cases import (
    DISTRIBUTED,
    LR,
    Case,
    Runs,
    assert_close,
    assert_weights_close,
    defaults_first,
)

SEQUENTIAL = Case.of(sizes=(1,), layers_per_chunk=4, num_microbatches=4, wants_weights=True)
CASES = [
    Case.of(sizes=(1, 2), layers_per_chunk=2),
    Case.of(sizes=(2, 1), vpp=2),
    Case.of(sizes=(1, 2, 1, 2)),
    # Stock Megatron mixes up lengths on two stages here (over gloo), so there is no uniform run to compare with.
    Case.of(sizes=(1, 2), vpp=2, varying_lengths=True),
    Case.of(sizes=(1, 4), vpp=2, overlap_p2p=True, **DISTRIBUTED),
    Case.of(sizes=(1, 2), dp=2, layers_per_chunk=2, **DISTRIBUTED),
]
TIED = [pytest.param(False, id="untied"), pytest.param(True, id="tied", marks=pytest.mark.full)]


@pytest.fixture(scope="module", params=TIED)
def saved(request: pytest.FixtureRequest, runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Start weights that a pipeline with unequal stages drew and saved."""
    path: Path = tmp_path_factory.mktemp("start")
    case = Case.of(sizes=(2, 1), layers_per_chunk=2, tied=request.param, save=str(path), num_steps=0)
    runs.run(case)
    return case


@pytest.mark.needs("tied_and_distributed", cases=("tied-1,4 vpp=2",))
@pytest.mark.parametrize("case", defaults_first(CASES, 3))
def test_equals_the_sequential_model(runs: Runs, saved: Case, case: Case) -> None:
    case = case.but(tied=saved.model.tied, load=saved.checks.save, num_microbatches=4, wants_weights=True)
    assert case.num_layers == SEQUENTIAL.num_layers
    run = runs.run(case)
    oracle = runs.kept(
        SEQUENTIAL.but(
            tied=case.model.tied,
            load=case.checks.load,
            dp=case.stages.dp,
            optimizer=case.numerics.optimizer,
            varying_lengths=case.data.varying_lengths,
        )
    )
    run.weights = {name: run.weights[name] for name in oracle.weights}  # a pipeline holds a tied weight twice
    assert_close(run, oracle)
    assert_weights_close(
        run, oracle, atol=1e-5 if case.numerics.optimizer == "sgd" else LR["adam"] * case.data.num_steps
    )


def test_weights_saved_by_one_process_load_into_unequal_stages(runs: Runs, tmp_path: Path) -> None:
    source = runs.run(SEQUENTIAL.but(save=str(tmp_path), num_steps=0))
    for target in (Case.of(sizes=(2, 3), vpp=2), Case.of(sizes=(1, 2, 1, 2))):
        target = target.but(num_steps=0, wants_weights=True)
        loaded, drawn = runs.run(target.but(load=str(tmp_path))), runs.run(target)
        assert loaded.weights.keys() == source.weights.keys()
        assert all(torch.equal(weight, source.weights[name]) for name, weight in loaded.weights.items())
        assert any(not torch.equal(weight, source.weights[name]) for name, weight in drawn.weights.items())
