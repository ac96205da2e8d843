"""U-shaped runs and the sequential ones that they must equal, from one common checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.multiproc.cases.case_parts import Checks, Execution, Model, Stages
from tests.multiproc.cases.core_cases import LR, Case, Run, Runs, assert_close, assert_weights_close
from tests.multiproc.training.test_parity import BF16_REL

LAYERS: dict[tuple[int, ...], tuple[int, ...]] = {
    **{(1, 1): (1, 2, 1), (1, 2): (1, 1, 2), (2, 1): (1, 1, 2)},
    **{(1, 2, 2): (1, 1, 1, 1), (1, 1, 1): (1, 1, 1, 1), (1, 2, 1): (1, 1, 1, 1)},
    **{(2, 1, 3): (1, 1, 1, 1), (1, 1, 1, 1): (1, 1, 2, 1, 1), (1, 2, 1, 2, 1): (1, 1, 1, 1, 1, 1)},
}

Saved = Callable[[Case], str]
"""Gives start weights that the sequential model drew and saved, once for each kind of model."""


def u_shaped(*sizes: int, **fields: Any) -> Case:
    """Give a case with the layers of these tests."""
    return Case.of(sizes=sizes, layers=LAYERS[sizes], **fields)


def sequential(case: Case) -> Case:
    """Give the run without a pipeline that computes the same."""
    model, numerics, inf_at = case.model, case.numerics, case.checks.inf_at
    return Case(
        stages=Stages(sizes=(1,), dp=case.stages.dp_sizes[case.loss_stage]),
        model=Model(
            layers_per_chunk=case.num_layers,
            tied=model.tied,
            has_bias=model.has_bias,
            attention=model.attention,
            mtp=model.mtp,
            is_drawn=model.is_drawn,
        ),
        data=replace(case.data, micro_batch=case.micro_batch_at(case.loss_stage)),
        numerics=numerics,
        # A constant loss scale in fp32 exists in the distributed optimizer only.
        execution=Execution(distributed_optimizer=numerics.loss_scale is not None and numerics.dtype == "fp32"),
        checks=Checks(inf_at=inf_at and (0, 0, inf_at[2]), load=case.checks.load, wants_weights=True),
    )


def check_u_shape(runs: Runs, saved: Saved, case: Case, train: Callable[[Case], Run] | None = None) -> Run:
    """Train the case, with the executor unless told otherwise, and compare it with the sequential run."""
    case = case.but(load=None if case.model.is_drawn else saved(case), wants_weights=True)
    run, oracle = (train or runs.run)(case), runs.kept_alike(case, sequential(case))
    if case.model.tied:
        output = run.weights.pop("output_layer.weight")
        # With prediction Megatron allocates this weight, too, and uses the prediction's copy of the embedding.
        assert case.model.mtp or output.equal(run.weights["embedding.word_embeddings.weight"])
    if case.numerics.dtype == "fp32":
        assert_close(run, oracle)
        assert_weights_close(
            run, oracle, atol=1e-5 if case.numerics.optimizer == "sgd" else LR["adam"] * case.data.num_steps
        )
    else:
        assert_close(run, oracle, rel=BF16_REL)
    return run
