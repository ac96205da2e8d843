"""Adapters (LoRA) by PEFT: what fails in its layers for Megatron, and that unequal stages train them alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.multiproc.cases.core_cases import (
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
from tests.multiproc.jobs.split_job import TARGETS
from tests.support.pool import Pool, PoolError


def test_layers_of_peft_cannot_be_built(pool: Pool) -> None:
    """Stock Megatron, one rank. When this fails, PEFT is mended: take the mends out of the job."""
    pytest.importorskip("peft", reason="it is about PEFT's layers")
    with pytest.raises(PoolError, match=r"KeyError: '(fan_in_fan_out|default)'|has no attribute 'get'"):
        pool.run(1, "tests.multiproc.jobs.split_job:build_adapters")


# With PEFT of other versions, other things are broken.
mended = pytest.mark.needs("mended_adapters")


def train(
    pool: Pool, case: Case, *, load: Path | None = None, save: Path | None = None, targets: Sequence[str] = TARGETS
) -> Run:
    pytest.importorskip("peft", minversion="0.19", reason="it is about PEFT's layers")
    case = case.but(wants_weights=True)
    folders = {"load": str(load or ""), "save": str(save or "")}
    results = pool.run(
        case.world_size, "tests.multiproc.jobs.split_job:train_adapters", {"case": case, "targets": targets, **folders}
    )
    assert all(num_frozen > 0 for _, num_frozen in results)
    return assemble(case, [result for result, _ in results])


def adapted(*sizes: int, **fields: object) -> Case:
    return Case.of(sizes=sizes, num_steps=5, **fields)  # pyright: ignore[reportArgumentType]


# The first two run by default.
CASES = [
    adapted(1, 2),
    adapted(1, 2, schedule="planned", num_microbatches=4, split_backward=True),
    adapted(2, 3, tied=True, **OVERLAPPED, clip=0.05),
    adapted(2, 1, seq=8, sequence_parallel=True, dp=2),
    adapted(1, 3, vpp=2, num_microbatches=4),
    adapted(1, 2, dp_list=(2, 1), schedule="planned", num_microbatches=4),
    adapted(1, 2, per_token_loss=True, loss_tuple=3, masked=True),
    adapted(2, 1, 3, seq=12, sequence_parallel=True, schedule="planned", num_microbatches=6, split_backward=True),
]


@mended
@pytest.mark.parametrize("case", defaults_first(CASES, 2))
def test_adapters(pool: Pool, case: Case) -> None:
    """Losses, norms and adapters are those of the uniform run; the job checks that the base stays to the last bit."""
    run, oracle = train(pool, case), train(pool, oracle_of(case))
    assert_close(run, oracle)
    assert_weights_close(
        run, oracle, atol=1e-5 if case.numerics.optimizer == "sgd" else 0.01 * LR["adam"] * case.data.num_steps
    )


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


# Only the last stage holds it, of which one of two chunks does, and in a U the edge.
HEADS = [
    adapted(1, 2),
    adapted(2, 1, **OVERLAPPED, dp=2),
    adapted(2, 1, seq=8, sequence_parallel=True, clip=0.05),
    adapted(1, 2, vpp=2, num_microbatches=4),
    adapted(1, 2, schedule="planned", dtype="bf16"),
    adapted(1, 2, layers=(1, 2, 1)),
]


@mended
@pytest.mark.parametrize("case", defaults_first(HEADS, 1))
def test_adapters_that_one_stage_holds(pool: Pool, case: Case) -> None:
    """The other stages are frozen, and pass on activations and gradients."""
    run, oracle = train(pool, case, targets=["output_layer"]), train(pool, oracle_of(case), targets=["output_layer"])
    is_rounded = case.numerics.dtype == "bf16"
    assert_close(run, oracle, rel=0.02 if is_rounded else 1e-5)
    adapters = [name for name in run.weights if ".lora_" in name]
    assert adapters and all(name.startswith("output_layer.") for name in adapters)
    if not is_rounded:
        assert_weights_close(
            run, oracle, atol=1e-5 if case.numerics.optimizer == "sgd" else 0.01 * LR["adam"] * case.data.num_steps
        )


LAYERS = "1 linear_fc1, 1 linear_fc2, 1 linear_proj, 1 linear_qkv"
REFUSED = (
    "no stage holds such a layer: "
    f"stage 0 has 6 layers ({LAYERS}, 1 position_embeddings, 1 word_embeddings), "
    f"stage 1 has 5 layers ({LAYERS}, 1 output_layer); name layers that a stage holds"
)


def test_layers_that_a_stage_or_no_stage_holds(pool: Pool) -> None:
    """Every rank gets the names that its stage holds, or the same refusal as all others; PEFT is not needed for it."""
    pattern = r".*\.(linear_qkv|output_layer)"
    asked = [["linear_qkv", "output_layer"], ["word_embeddings"], pattern]
    refused = [["linear_qk", "linear_qkv", "input_layernorm"], "linear_qkv", [], "linear_(qkv", "rank"]
    ranks = pool.run(3, "tests.multiproc.jobs.split_job:ask", {"sizes": (1, 2), "targets": [*asked, *refused]})
    assert ranks[0][:3] == [[["linear_qkv"]], [["word_embeddings"]], [pattern]]
    assert ranks[1][:3] == ranks[2][:3] == [[["linear_qkv", "output_layer"]], [[]], [pattern]]
    assert ranks[0][3:] == ranks[1][3:] == ranks[2][3:]
    nobody, part, none, no_pattern, unequal, again = ranks[0][3:]
    assert nobody == f"adapters for linear_qk, input_layernorm; {REFUSED}"
    assert part == f"adapters for linear_qkv; {REFUSED}"  # an expression matches whole names
    assert "adapters for []; layers have names" in none
    assert "adapters for 'linear_(qkv'; it is no regular expression (missing ), unterminated subpattern" in no_pattern
    assert "ranks disagree: layers with adapters is rank 0 on rank 0 and rank 1 on rank 1" in unequal
    assert again == [["linear_fc1"]]
