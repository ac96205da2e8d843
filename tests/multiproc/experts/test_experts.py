"""Experts in pipelines with unequal stages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.multiproc.cases.core_cases import DISTRIBUTED, Case, Run, Runs, assert_close, defaults_first, oracle_of
from tests.multiproc.training.test_parity import check_parity
from tests.support.hosts import is_older
from tests.support.pool import PoolError

pytestmark = pytest.mark.needs("experts")


def mixing(experts: str, *sizes: int, **fields: Any) -> Case:
    shape: dict[str, Any] = {"has_bias": False, "seq": 12, "sequence_parallel": max(sizes) > 1, "num_steps": 5}
    return Case.of(sizes=sizes, experts=experts, **{**shape, **fields})


OVERLAPPED = {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True}
COUNTED = {"per_token_loss": True, "loss_tuple": 3, "masked": True}
# With losses of routers it is refused before Megatron 0.19.
PER_TOKEN = "plain" if is_older() else "balanced"
# The first ones run by default.
CASES = [
    mixing("balanced", 2, 1, dp=2, etp=1, ep_list=(2, 1), **OVERLAPPED),
    mixing("biased", 1, 2, dp_list=(2, 1), ep_list=(2, 1), num_microbatches=4),
    # One expert-parallel size, and experts that are as many copies on every stage.
    mixing("plain", 1, 1),
    mixing("balanced", 1, 2),
    mixing("balanced", 1, 2, dp=2, ep=2),
    mixing("gathered", 1, 2, dp=2, ep=2),
    mixing("by sequence", 2, 1, dp=2, ep=2),
    mixing("by batch", 1, 2, dp=2),
    # With Adam one norm of five is 1.7e-5 off: it divides by the size of gradients that are near zero.
    mixing("by batch", 2, 1, dp=2, ep_list=(2, 1), etp=1),
    mixing("shared", 2, 1),
    mixing("biased", 1, 2, dp=2, ep=2),
    mixing("every second", 1, 2, layers_per_chunk=2),
    # A stage without experts: the first one, or the one with the loss.
    mixing("the last two", 1, 2, layers_per_chunk=2, ep_list=(1, 2), etp=1, **OVERLAPPED),
    mixing("the first two", 2, 1, layers_per_chunk=2, dp=2, ep_list=(2, 1), etp=1),
    mixing("the last two", 1, 2, layers_per_chunk=2, dp_list=(2, 1), num_microbatches=4),
    mixing("capacity", 1, 2, dp=2, ep=2),
    mixing("balanced", 3, 1, tied=True, **DISTRIBUTED),
    # Other numbers of copies on every stage.
    mixing("balanced", 1, 2, ep_list=(1, 2), etp_list=(1, 1), **DISTRIBUTED),
    mixing("balanced", 2, 1, dp=2, etp=1, count_zeros=True, overlap_grad_reduce=True),
    mixing("gathered", 1, 2, etp=1, ep_list=(1, 2)),
    mixing("shared", 2, 3, etp=1, ep_list=(1, 3), **OVERLAPPED),
    mixing("balanced", 1, 3, vpp=2, num_microbatches=4, ep_list=(1, 3), etp=1),
    mixing(PER_TOKEN, 1, 2, dp=2, ep=2, schedule="planned", **COUNTED),
    mixing("balanced", 1, 2, layers=(1, 2, 1), etp=1),
    mixing("balanced", 1, 2, layers=(1, 2, 1), ep_list=(1, 2), etp=1, **OVERLAPPED),
    mixing("balanced", 1, 2, sites=("edge", "cloud"), etp=1, ep_list=(1, 2)),
    # Replicas too.
    mixing("balanced", 1, 2, dp_list=(2, 1), num_microbatches=4),
    mixing(PER_TOKEN, 1, 2, dp_list=(1, 2), ep_list=(1, 2), num_microbatches=4, **COUNTED, **DISTRIBUTED),
    mixing("gathered", 1, 2, dp_list=(1, 2), ep_list=(1, 2), etp=1, num_microbatches=4),
    mixing("by sequence", 2, 1, dp_list=(1, 2), num_microbatches=4),
    mixing("shared", 2, 1, dp_list=(1, 3), ep_list=(2, 3), etp=1, num_microbatches=3, **DISTRIBUTED),
]


@pytest.mark.needs("adam_with_tied_experts", cases=("3,1 tied",))
@pytest.mark.needs(
    "balance_by_batch",
    cases=(
        "1,2 dp=2 num-steps=5 seq=12 sequence-parallel experts=by batch",
        "2,1 dp=2 num-steps=5 seq=12 sequence-parallel experts=by batch",
    ),
)
@pytest.mark.parametrize("case", defaults_first(CASES, 1))
def test_experts(runs: Runs, case: Case) -> None:
    run = check_parity(runs, case)
    biases = [bias for name, bias in run.weights.items() if name.endswith("expert_bias")]
    assert bool(biases) == (case.model.experts == "biased") and all(bias.any() for bias in biases), "no bias moved"


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(1, 2), (2, 2)])
def test_a_bias_whose_counts_are_rounded_moves_alike(runs: Runs, sizes: tuple[int, int]) -> None:
    """In bf16 counts above 256 are rounded; only the sign of their distance from the mean moves a bias."""
    counted: dict[str, Any] = {"dtype": "bf16", "seq": 300, "micro_batch": 2, "num_microbatches": 2, "num_steps": 4}
    found = [
        {name: bias for name, bias in runs.run(case).weights.items() if name.endswith("expert_bias")}
        for case in (mixing("biased", *of, wants_weights=True, **counted) for of in ((1, 1), sizes))
    ]
    assert len(found[0]) == 2 and found[0].keys() == found[1].keys()
    for name, bias in found[0].items():
        assert bias.any()
        np.testing.assert_array_equal(found[1][name], bias, err_msg=name)


def _by_batch(cp_list: tuple[int, int], *sizes: int, **fields: Any) -> Case:
    return mixing("by batch", *sizes, dp=2, cp_list=cp_list, gathered_attention=True, **fields)


@pytest.mark.needs("balance_by_batch")
@pytest.mark.parametrize(
    "case", defaults_first([_by_batch((1, 2), 1, 1), _by_batch((2, 1), 1, 1), _by_batch((1, 2), 2, 1)], 1)
)
def test_a_loss_by_batch_is_one_for_all_context_parallel_sizes(runs: Runs, case: Case) -> None:
    """Each stage counts the tokens of all its ranks, and these are the same ones."""
    check_parity(runs, case)


@pytest.mark.full
@pytest.mark.needs("balance_by_batch")
@pytest.mark.needs("own_tokens_over_context")
@pytest.mark.parametrize("cp_list", [(1, 2), (2, 1)])
def test_a_loss_by_batch_beside_uneven_masks_is_that_of_the_last_stage(runs: Runs, cp_list: tuple[int, int]) -> None:
    """It changes nothing of which uniform run is the same one: that of the stage with the loss."""
    case = _by_batch(cp_list, 1, 1, masked=True, loss_tuple=3)
    uniform = case.but(cp_list=(), plugin="mapped")
    run = runs.run(case)
    assert_close(run, runs.kept(uniform.but(cp=cp_list[1])))
    _assert_differs(run, runs.kept(uniform.but(cp=cp_list[0])))


# The first one runs by default.
SHARED_OUT = [
    mixing("sinkhorn", 1, 2, layers=(1, 2, 1), num_microbatches=2, num_steps=4),
    mixing("sinkhorn", 1, 3, dp=2, ep_list=(1, 3), etp=1, num_evaluations=1, **OVERLAPPED),
    mixing("sinkhorn of one", 2, 1, recompute=True),
    mixing("sinkhorn", 2, 1, dp_list=(1, 2), num_microbatches=4),
    mixing("sinkhorn", 1, 1, cp_list=(1, 2), gathered_attention=True),
    mixing("sinkhorn", 1, 2, cp_list=(2, 1), gathered_attention=True),
    mixing("sinkhorn", 2, 2, ep_list=(1, 2), etp_list=(2, 1), vpp=2, num_microbatches=4),
]


@pytest.mark.parametrize("case", defaults_first(SHARED_OUT, 1))
def test_tokens_are_shared_out_among_those_of_a_microbatch(runs: Runs, case: Case) -> None:
    check_parity(runs, case)


@pytest.mark.full
def test_megatron_shares_out_the_tokens_of_a_rank(runs: Runs) -> None:
    """Why `sinkhorn-routing` is needed: sequence parallelism cuts what sinkhorn balances."""
    two = mixing("sinkhorn", 2, 2, plugin="mapped")
    with pytest.raises(AssertionError, match="losses differ"):
        assert_close(runs.run(two), runs.run(two.but(sizes=(1, 1), sequence_parallel=False)))


# The first one runs by default.
OVERFLOWING = [
    mixing("balanced", 1, 2, dp=2, etp=1, ep_list=(2, 1), inf_at=(1, 1, 1), loss_scale=1024.0, **DISTRIBUTED),
    mixing("balanced", 2, 1, ep_list=(2, 1), etp=1, inf_at=(0, 1, 1), loss_scale=1024.0, **DISTRIBUTED),
]


@pytest.mark.parametrize("case", defaults_first(OVERFLOWING, 1))
def test_inf_in_one_expert_stops_all(runs: Runs, case: Case) -> None:
    """The stages have other numbers of copies of an expert; a gradient of one is infinite in the second step."""
    run, oracle = check_parity(runs, case), runs.oracle(case.but(wants_weights=True))
    assert run.successful == oracle.successful == [True, False, True, True, True]
    assert run.grad_norms[1] == -1.0


@pytest.mark.parametrize(
    "case",
    defaults_first(
        [
            mixing("plain", 2, 1, ep_list=(2, 1), etp=1, inf_at=(0, 1, 1), dtype="fp16"),
            mixing("plain", 1, 2, dp=2, etp=1, ep_list=(2, 1), inf_at=(1, 1, 1), dtype="fp16"),
        ],
        1,
    ),
)
def test_experts_and_the_rest_have_one_loss_scale(runs: Runs, case: Case) -> None:
    """A gradient of one expert is infinite in the second step; with one rank per stage all have one optimizer."""
    run, oracle = runs.run(case), runs.oracle(case)
    assert_close(run, oracle, rel=2e-3)
    assert run.successful == oracle.successful == [True, False, True, True, True]


@pytest.mark.full
def test_loss_scales_of_megatron_part(runs: Runs) -> None:
    """Why `shared-loss-scale` is needed: experts with groups of their own divide gradients by another number."""
    apart = mixing("balanced", 1, 1, dp=2, ep=2, inf_at=(1, 0, 1), dtype="fp16", plugin="mapped")
    with pytest.raises(AssertionError, match="grad norms differ"):
        assert_close(runs.run(apart), runs.run(apart.but(ep=1)), rel=0.02)


# The first one runs by default.
DROPPING = [
    mixing("dropping", 1, 2),
    mixing("dropping", 2, 3, **DISTRIBUTED),
    mixing("dropping", 3, 1, dp=2, ep_list=(1, 2), etp=1, **OVERLAPPED),
    mixing("dropping the last", 1, 2, dp=2, ep=2),
    mixing("dropping and padding", 2, 1, ep_list=(2, 1), etp=1),
    mixing("dropping", 1, 2, layers=(1, 2, 1), schedule="planned"),
    # Without sequence parallelism.
    mixing("dropping", 1, 1, cp_list=(1, 2), gathered_attention=True),
    mixing("dropping", 1, 2, cp_list=(2, 1), gathered_attention=True),
]


@pytest.mark.needs(
    "router_losses_by_context",
    cases=(
        "1,1 num-steps=5 seq=12 cp-list=(1, 2) gathered",
        "1,2 num-steps=5 seq=12 sequence-parallel cp-list=(2, 1) gathered",
    ),
)
@pytest.mark.parametrize("case", defaults_first(DROPPING, 1))
def test_tokens_are_dropped_by_the_ranks(runs: Runs, case: Case) -> None:
    """Against one rank per stage, which drops tokens among the same ones as the ranks of the stage do.

    Neither a run without drops nor one rank that decides among all its tokens would do as a reference.
    """
    run = check_parity(runs, case)
    whole = oracle_of(case.but(wants_weights=True))
    _assert_differs(run, runs.kept(whole.but(shards=())))
    _assert_differs(run, runs.kept(whole.but(shards=(), experts="balanced")))


def _assert_differs(run: Run, other: Run) -> None:
    with pytest.raises(AssertionError):
        assert_close(run, other)


PADDED = {"masked": True, "padded": True, "per_token_loss": True, "loss_tuple": 3}


@pytest.mark.needs("padded_experts")
def test_a_padding_mask_is_refused(runs: Runs) -> None:
    line = "padding_mask with experts on stages of different sizes; .*; leave padding_mask out"
    with pytest.raises(PoolError, match=line):
        runs.run(mixing("balanced", 1, 2, **PADDED))


@pytest.mark.full
@pytest.mark.needs("router_losses_per_token")
def test_losses_beside_padding_depend_on_the_size_in_megatron(runs: Runs) -> None:
    """Why a padding mask is refused: each rank of a stage counts what is no padding among its own tokens."""
    two = mixing("balanced", 1, 1, cp=2, gathered_attention=True, plugin="mapped", **PADDED)
    _assert_differs(runs.run(two), runs.run(two.but(cp=1)))
    two = two.but(padded=False)
    assert_close(runs.run(two), runs.run(two.but(cp=1)))
