"""Kinds of attention in pipelines with unequal stages: grouped and normed heads, rotary forms; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiproc.cases.core_cases import DISTRIBUTED, Case, Runs, assert_close, assert_weights_close
from tests.multiproc.training.test_parity import check_parity


def attending(attention: str, *sizes: int, **fields: Any) -> Case:
    return Case.of(**{"sizes": sizes, "attention": attention, "num_steps": 5, **fields})


FULL = pytest.mark.full
CASES = [
    attending("grouped", 1, 4),
    pytest.param(attending("normed", 2, 1, seq=10, sequence_parallel=True), marks=pytest.mark.full),
    pytest.param(attending("grouped", 2, 4, tied=True, **DISTRIBUTED), marks=pytest.mark.full),
    pytest.param(attending("grouped", 4, 1, seq=8, sequence_parallel=True), marks=pytest.mark.full),
    pytest.param(attending("one group", 4, 2, dp=2, **DISTRIBUTED), marks=pytest.mark.full),
    pytest.param(attending("normed", 1, 3, vpp=2, num_microbatches=4), marks=pytest.mark.full),
    pytest.param(attending("partly rotary", 1, 2, varying_lengths=True), marks=pytest.mark.full),
    pytest.param(attending("yarn", 2, 3), marks=pytest.mark.full),
    attending("windows", 1, 2, layers_per_chunk=2, num_microbatches=3),
    pytest.param(
        attending("windows", 4, 1, seq=8, sequence_parallel=True, vpp=2, num_microbatches=4), marks=pytest.mark.full
    ),
]


@pytest.mark.needs(
    "skipped_windows", cases=("1,2 layers-per-chunk=2 num-steps=5 num-microbatches=3 attention=windows",)
)
@pytest.mark.needs("ranks_beyond_groups_of_heads", cases=("1,4 ", "2,4 ", "4,1 ", "4,2 "))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(runs: Runs, case: Case) -> None:
    check_parity(runs, case)


# They start as Megatron draws them: each run from its own draws, with one rank per stage and with several.
SINKS = [
    attending("sinks", 1, 2, count_zeros=True, has_bias=False),
    *(
        pytest.param(attending("sinks", *sizes, count_zeros=True, has_bias=False, **fields), marks=FULL)
        for sizes, fields in [
            ((2, 1), {**DISTRIBUTED, "dp": 2}),
            ((1, 3), {"layers": (1, 2, 1), "num_microbatches": 4}),
            ((3, 2), {"dp_list": (1, 2), "num_microbatches": 4, **DISTRIBUTED}),
            ((4, 1), {"vpp": 2, "num_microbatches": 4, "seq": 8, "sequence_parallel": True}),
        ]
    ),
]


@pytest.mark.needs("sinks")
@pytest.mark.parametrize("case", SINKS, ids=str)
def test_sinks_of_the_softmax(runs: Runs, case: Case) -> None:
    run, oracle = check_parity(runs, case), runs.oracle(case.but(wants_weights=True))
    assert run.num_zeros == oracle.num_zeros and min(run.num_zeros) >= 0


LATENT = [
    attending("latent", 1, 2, gathered_attention=True),
    *(
        pytest.param(attending("latent", *sizes, gathered_attention=True, **fields), marks=FULL)
        for sizes, fields in [
            ((2, 3), {**DISTRIBUTED}),
            ((4, 1), {"seq": 8, "sequence_parallel": True}),
            ((1, 2), {"seq": 10, "sequence_parallel": True, "dp": 2, **DISTRIBUTED}),
            ((2, 1), {"dp_list": (1, 2), "schedule": "planned", "num_microbatches": 4}),
            ((1, 3), {"vpp": 2, "num_microbatches": 4, "recompute": True}),
        ]
    ),
    attending("latent normed", 1, 3, gathered_attention=True),
    *(
        pytest.param(attending("latent normed", *sizes, gathered_attention=True, **fields), marks=FULL)
        for sizes, fields in [
            ((2, 1), {**DISTRIBUTED, "overlap_grad_reduce": True, "dp": 2}),
            ((1, 2), {"seq": 10, "sequence_parallel": True}),
            ((1, 2), {"layers": (1, 2, 1), "recompute": True}),
            ((1, 2), {"dp_list": (2, 1), "num_microbatches": 4}),
        ]
    ),
    pytest.param(attending("latent without ranks of queries", 2, 1, gathered_attention=True), marks=FULL),
]


@pytest.mark.needs("latent_attention")
@pytest.mark.parametrize("case", LATENT, ids=str)
def test_latent_attention(runs: Runs, case: Case) -> None:
    check_parity(runs, case)


@pytest.mark.needs("latent_attention")
@pytest.mark.full
def test_latent_attention_of_megatron_depends_on_the_size(runs: Runs) -> None:
    """Why `latent-attention-grad` is needed: with local layers stages of two ranks compute other gradients than of one.

    The positional part of the keys is gathered from the ranks; in the backward pass each rank keeps what came from its
    own heads, and nobody adds the others. The grid above has the same sizes with the plugin.
    """
    one = attending("latent", 1, 1, gathered_attention=True, plugin="stock", wants_weights=True)
    two = one.but(sizes=(2, 2))
    with pytest.raises(AssertionError, match="not close"):
        assert_weights_close(runs.run(two), runs.run(one))


@pytest.mark.needs("sinks")
@pytest.mark.full
def test_sinks_of_megatron_depend_on_the_size(runs: Runs) -> None:
    """Why `attention-sinks`, `sharding-marks` are needed: they start alike on all ranks, and one rank's are counted."""
    one = attending("sinks", 1, 1, plugin="stock")
    with pytest.raises(AssertionError, match="losses differ"):
        assert_close(runs.run(one.but(sizes=(2, 2))), runs.run(one))
