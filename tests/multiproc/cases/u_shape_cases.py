"""U-shaped runs and the sequential ones that they must equal, from one common checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.multiproc.cases.core_cases import LR, Case, Run, Runs, assert_close, assert_weights_close
from tests.multiproc.test_parity import BF16_REL

LAYERS: dict[tuple[int, ...], tuple[int, ...]] = {
    (1, 1): (1, 2, 1),
    (1, 2): (1, 1, 2),
    (2, 1): (1, 1, 2),
    (1, 2, 2): (1, 1, 1, 1),
    (1, 1, 1): (1, 1, 1, 1),
    (1, 2, 1): (1, 1, 1, 1),
    (2, 1, 3): (1, 1, 1, 1),
    (1, 1, 1, 1): (1, 1, 2, 1, 1),
    (1, 2, 1, 2, 1): (1, 1, 1, 1, 1, 1),
}

Saved = Callable[[Case], str]
"""Gives start weights that the sequential model drew and saved, once for each kind of model."""


def u_shaped(*sizes: int, **fields: Any) -> Case:
    """Give a case with the layers of these tests."""
    return Case(sizes=sizes, layers=LAYERS[sizes], **fields)


def sequential(case: Case) -> Case:
    """Give the run without a pipeline that computes the same."""
    kept = (
        "dtype",
        "optimizer",
        "num_steps",
        "num_microbatches",
        "rampup",
        "masked",
        "per_token_loss",
        "loss_tuple",
    )
    kept += ("varying_lengths", "partial_batches", "seq", "length_step", "tied", "load", "clip", "count_zeros")
    kept += ("has_bias", "loss_scale", "attention", "mtp", "is_drawn")
    return Case(
        sizes=(1,),
        layers_per_chunk=case.num_layers,
        dp=case.dp_sizes[case.loss_stage],
        micro_batch=case.micro_batch_at(case.loss_stage),
        wants_weights=True,
        # A constant loss scale in fp32 exists in the distributed optimizer only.
        distributed_optimizer=case.loss_scale is not None and case.dtype == "fp32",
        inf_at=None if case.inf_at is None else (0, 0, case.inf_at[2]),
        **{name: getattr(case, name) for name in kept},
    )


def check_u_shape(runs: Runs, saved: Saved, case: Case, train: Callable[[Case], Run] | None = None) -> Run:
    """Train the case, with the executor unless told otherwise, and compare it with the sequential run."""
    case = replace(case, load=None if case.is_drawn else saved(case), wants_weights=True)
    run, oracle = (train or runs.run)(case), runs.kept_alike(case, sequential(case))
    if case.tied:
        output = run.weights.pop("output_layer.weight")
        # With prediction Megatron allocates this weight, too, and uses the prediction's copy of the embedding.
        assert case.mtp or output.equal(run.weights["embedding.word_embeddings.weight"])
    if case.dtype == "fp32":
        assert_close(run, oracle)
        assert_weights_close(run, oracle, atol=1e-5 if case.optimizer == "sgd" else LR["adam"] * case.num_steps)
    else:
        assert_close(run, oracle, rel=BF16_REL)
    return run
