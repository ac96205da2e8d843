"""Adapters (LoRA) by PEFT: what fails in its layers for Megatron, and that unequal stages train them alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.hosts import host_name
from tests.multiproc.adapters_job import TARGETS
from tests.multiproc.core_cases import (
    LR,
    OVERLAPPED,
    Case,
    Run,
    assemble,
    assert_close,
    assert_weights_close,
    defaults_first,
    oracle_of,
)
from tests.pool import Pool, PoolError


def test_layers_of_peft_cannot_be_built(pool: Pool) -> None:
    """Stock Megatron, one rank. When this fails, PEFT is mended: take the mends out of the job."""
    pytest.importorskip("peft", reason="it is about PEFT's layers")
    with pytest.raises(PoolError, match=r"KeyError: '(fan_in_fan_out|default)'|has no attribute 'get'"):
        pool.run(1, "tests.multiproc.adapters_job:build_adapters")


# With PEFT of other versions, other things are broken.
mended = pytest.mark.skipif(host_name() != "0.19", reason="PEFT's layers were mended for 0.19 only")


def train(
    pool: Pool, case: Case, *, load: Path | None = None, save: Path | None = None, targets: Sequence[str] = TARGETS
) -> Run:
    pytest.importorskip("peft", minversion="0.19", reason="it is about PEFT's layers")
    case = replace(case, wants_weights=True)
    folders = {"load": str(load or ""), "save": str(save or "")}
    results = pool.run(
        case.world_size, "tests.multiproc.adapters_job:train", {"case": case, "targets": targets, **folders}
    )
    assert all(num_frozen > 0 for _, num_frozen in results)
    return assemble(case, [result for result, _ in results])


def adapted(*sizes: int, **fields: object) -> Case:
    return Case(sizes=sizes, num_steps=5, **fields)  # pyright: ignore[reportArgumentType]


# The first one runs by default.
CASES = [
    adapted(1, 2),
    adapted(2, 3, tied=True, **OVERLAPPED, clip=0.05),
    adapted(2, 1, seq=8, sequence_parallel=True, dp=2),
    adapted(1, 3, vpp=2, num_microbatches=4),
    adapted(1, 2, dp_list=(2, 1), schedule="planned", num_microbatches=4),
    adapted(1, 2, per_token_loss=True, loss_tuple=3, masked=True),
]


@mended
@pytest.mark.parametrize("case", defaults_first(CASES, 1))
def test_adapters(pool: Pool, case: Case) -> None:
    """Losses, norms and adapters are those of the uniform run; the job checks that the base stays to the last bit."""
    run, oracle = train(pool, case), train(pool, oracle_of(case))
    assert_close(run, oracle)
    assert_weights_close(run, oracle, atol=1e-5 if case.optimizer == "sgd" else 0.01 * LR["adam"] * case.num_steps)


@mended
@pytest.mark.full
def test_a_checkpoint_of_adapters_alone(pool: Pool, tmp_path: Path) -> None:
    """One list writes the adapters; another goes on with them as the uniform run does, not as from the start."""
    train(pool, adapted(1, 2, dp=2), save=tmp_path)
    case = adapted(3, 1)
    run, oracle = train(pool, case, load=tmp_path), train(pool, oracle_of(case), load=tmp_path)
    assert_close(run, oracle)
    assert_weights_close(run, oracle)
    with pytest.raises(AssertionError):
        assert_close(run, train(pool, oracle_of(case)))


@mended
def test_adapters_for_a_layer_that_no_stage_holds(pool: Pool) -> None:
    """PEFT finds it on every rank, before anything is trained."""
    with pytest.raises(PoolError, match=r"Target modules \{?\[?'linear_of_nobody'\]?\}? not found in the base model"):
        train(pool, adapted(1, 2), targets=["linear_of_nobody"])
