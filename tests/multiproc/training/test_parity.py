"""Runs with unequal stages compute what the uniform run computes: losses, grad norms and weights, step after step."""

from __future__ import annotations

import math
from itertools import combinations, product
from typing import Any

import pytest

from tests.multiproc.cases.core_cases import (
    DISTRIBUTED,
    LR,
    PER_TOKEN,
    Case,
    Run,
    Runs,
    assert_close,
    assert_identical,
    assert_weights_close,
    defaults_first,
    pairwise,
)

LISTS = [(1, 2), (2, 1), (1, 4), (2, 3), (3, 1, 2), (1, 2, 1, 2)]
# By default: sizes that divide and that do not, wider and narrower stages, two stages and three.
DEFAULT_LISTS = [(1, 2), (2, 1), (2, 3), (3, 1, 2)]
MAX_DEFAULT_WORLD = 8
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "interleaved": {"vpp": 2},
    "interleaved-batched": {"vpp": 2, "batch_p2p": True},
    "interleaved-overlapped": {"vpp": 2, "overlap_p2p": True},
}
SYNCS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped": {"overlap_grad_reduce": True},
    "distributed": {"distributed_optimizer": True},
    "distributed-overlapped": {
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
}
NUMERICS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adam": {"optimizer": "adam"},
    "adam-bf16": {"optimizer": "adam", "dtype": "bf16"},
}
# bf16 has 8 bits: another order of summation moves a loss by some 0.1 % and a grad norm by some 1 %.
BF16_REL = 0.02


def grid(max_world: int) -> list[dict[str, object]]:
    layouts = [(sizes, dp) for sizes, dp in product(LISTS, (1, 2)) if sum(sizes) * dp <= max_world]
    axes = {
        "layout": layouts,
        "schedule": list(SCHEDULES),
        "tied": [False, True],
        "sync": list(SYNCS),
        "numerics": list(NUMERICS),
    }
    rows = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    # Megatron's distributed optimizer refuses SGD.
    return [row for row in rows if row["numerics"] != "sgd" or "distributed" not in str(row["sync"])]


def case_of(row: Any) -> Case:
    sizes, dp = row["layout"]
    schedule = SCHEDULES[row["schedule"]]
    # The interleaved schedule takes multiples of the number of stages.
    num_microbatches = {2: 4, 3: 3, 4: 4}[len(sizes)] if "vpp" in schedule else 5
    return Case.of(
        sizes=sizes,
        dp=dp,
        tied=row["tied"],
        num_microbatches=num_microbatches,
        **schedule,
        **SYNCS[row["sync"]],
        **NUMERICS[row["numerics"]],
    )


def default_grid() -> list[dict[str, object]]:
    """Give the rows for every change: two replicas show more than one, so one remains where two are too many ranks."""
    rows = [row for row in grid(MAX_DEFAULT_WORLD) if row["layout"][0] in DEFAULT_LISTS]
    layouts = {row["layout"] for row in rows}
    return [row for row in rows if row["layout"][1] == 2 or (row["layout"][0], 2) not in layouts]


DEFAULT_ROWS = pairwise(default_grid())
DEFAULT_CASES = [case_of(row) for row in DEFAULT_ROWS]
FULL_CASES = [case for case in (case_of(row) for row in [*grid(12), *pairwise(grid(12))]) if case not in DEFAULT_CASES]


def test_default_rows_cover_every_pair_of_values() -> None:
    rows = default_grid()
    for first, second in combinations(rows[0], 2):
        pairs = {(str(row[first]), str(row[second])) for row in rows}
        assert {(str(row[first]), str(row[second])) for row in DEFAULT_ROWS} == pairs
        values = {str(row[first]) for row in rows}, {str(row[second]) for row in rows}
        num_refused = 2 if (first, second) == ("sync", "numerics") else 0
        assert len(pairs) == len(values[0]) * len(values[1]) - num_refused, (first, second)


def check_parity(runs: Runs, case: Case) -> Run:
    """Train the case and its oracle, and compare all that can be compared at their precision."""
    case = case.but(wants_weights=True)
    run, oracle = runs.run(case), runs.oracle(case)
    if case.numerics.dtype != "fp32":
        assert_close(run, oracle, rel=BF16_REL)
        return run
    assert_close(run, oracle)
    if case.numerics.optimizer == "sgd":
        assert_weights_close(run, oracle)
    else:
        # The key bias has no true gradient: Adam turns its rounding errors into steps of up to lr.
        unit = LR["adam"] * case.data.num_steps
        assert_weights_close(run, oracle, atol=unit, rtol=0.0)
        assert_weights_close(run, oracle, atol=0.01 * unit, rtol=0.0, without="linear_qkv.bias")
    return run


@pytest.mark.parametrize("case", DEFAULT_CASES, ids=str)
def test_parity(runs: Runs, case: Case) -> None:
    check_parity(runs, case)


@pytest.mark.full
@pytest.mark.parametrize("case", FULL_CASES, ids=str)
def test_parity_full(runs: Runs, case: Case) -> None:
    check_parity(runs, case)


TRANSPORT_CASES = [
    Case.of(sizes=(2, 2, 1)),
    Case.of(sizes=(2, 2, 1), transport="rank0"),
    Case.of(sizes=(2, 2, 1), transport="rank0", vpp=2, overlap_p2p=True, num_microbatches=3),
    Case.of(sizes=(2, 3), batch_p2p=True),
    Case.of(sizes=(1, 2, 1, 2), batch_p2p=True, varying_lengths=True),
    Case.of(sizes=(2, 3), varying_lengths=True),
    Case.of(sizes=(3, 1, 2), vpp=2, varying_lengths=True, num_microbatches=3),
    Case.of(sizes=(1, 2), dp=2, varying_lengths=True, masked=True),
    Case.of(sizes=(2, 3), recompute=True, layers_per_chunk=2),
    Case.of(sizes=(1, 2), vpp=2, recompute=True, num_microbatches=4),
    Case.of(sizes=(3, 1, 2), deallocate=True),
    Case.of(sizes=(2, 3), vpp=2, overlap_p2p=True, deallocate=True, num_microbatches=4),
    Case.of(sizes=(2, 1), vpp=2, vpp_group_size=5),
    Case.of(sizes=(1, 2), vpp=2, vpp_group_size=3, num_microbatches=5, overlap_p2p=True),
    Case.of(sizes=(1, 2), vpp=3, num_microbatches=4),
    Case.of(sizes=(1, 2), dp=2, order="tp-cp-ep-pp-dp", tied=True),
    Case.of(sizes=(2, 1), dp=2, order="tp-cp-ep-pp-dp", vpp=2, num_microbatches=4, **DISTRIBUTED),
    Case.of(sizes=(1, 2, 1, 2), num_microbatches=1),
    Case.of(sizes=(1, 2, 1, 2), num_microbatches=2),
    Case.of(sizes=(3, 1, 2), num_microbatches=2, deallocate=True),
    Case.of(sizes=(2,)),
    Case.of(sizes=(3,), tied=True, **DISTRIBUTED, dp=2),
    Case.of(sizes=(1, 2), vpp=2, varying_lengths=True, num_microbatches=4),
    Case.of(sizes=(2, 1), vpp=2, varying_lengths=True, num_microbatches=4, batch_p2p=True),
    # Where Megatron mistakes shapes for each other: what the warning says to set, without the plugin and with it.
    Case.of(sizes=(1, 1), vpp=2, varying_lengths=True, num_microbatches=4, overlap_p2p=True, plugin="stock"),
    Case.of(sizes=(1, 1), vpp=2, varying_lengths=True, num_microbatches=4, overlap_p2p=True),
]


@pytest.mark.parametrize(
    "case",
    # Every seventh one by default: the machine that tests every change has two cores.
    [
        pytest.param(case, id=str(case), marks=pytest.mark.full if i % 7 else [])
        for i, case in enumerate(TRANSPORT_CASES)
    ],
)
def test_ways_to_cross_a_boundary(runs: Runs, case: Case) -> None:
    check_parity(runs, case)


def sharded(*sizes: int, **fields: Any) -> Case:
    """Give a case with sequence parallelism, whose lengths every size divides."""
    step = math.lcm(*sizes)
    return Case.of(sizes=sizes, sequence_parallel=True, seq=3 * step, length_step=step, **fields)


SHARDED_CASES = [
    sharded(1, 2),
    sharded(2, 4, transport="rank0"),
    sharded(2, 3, vpp=2, num_microbatches=4, overlap_p2p=True),
    sharded(1, 2, 1, 2, transport="rank0", vpp=2, num_microbatches=4),
    sharded(4, 2, **DISTRIBUTED, overlap_grad_reduce=True, tied=True),
    sharded(2, 3, varying_lengths=True, transport="rank0", batch_p2p=True),
    sharded(2, 2, 1, varying_lengths=True),
    sharded(2, 4),
    sharded(4, 2, transport="rank0", vpp=2, num_microbatches=4, batch_p2p=True),
    sharded(2, 3, transport="rank0"),
    sharded(1, 2, 1, 2, varying_lengths=True, vpp=2, num_microbatches=4),
    sharded(1, 2, transport="rank0", dp=2, **PER_TOKEN),
    sharded(1, 2, dtype="bf16", **DISTRIBUTED, dp=2, overlap_param_gather=True, overlap_grad_reduce=True),
    sharded(2, 3, recompute=True, layers_per_chunk=2, deallocate=True),
]


@pytest.mark.parametrize("case", defaults_first(SHARDED_CASES, 2))
def test_sequence_parallelism(runs: Runs, case: Case) -> None:
    """Replicated and sharded boundaries, with a stage of one rank between sharded ones, and the ring's wrap-around."""
    check_parity(runs, case)


def contextual(*sizes: int, **fields: Any) -> Case:
    """Give a case with context parallelism 2, whose lengths all sizes divide, with the tests' own attention."""
    step = 4 * math.lcm(*sizes)
    return Case.of(sizes=sizes, cp=2, gathered_attention=True, seq=step, length_step=step, **fields)


CONTEXT_CASES = [
    contextual(1, 2),
    contextual(2, 1, sequence_parallel=True, vpp=2, num_microbatches=4, tied=True),
    contextual(1, 2, transport="rank0", **PER_TOKEN),
    contextual(2, 3, sequence_parallel=True, **DISTRIBUTED),
    contextual(1, 2, dp=2, overlap_grad_reduce=True, **DISTRIBUTED),
    contextual(2, 2, plugin="forced", sequence_parallel=True, masked=True),
]


@pytest.mark.parametrize("case", defaults_first(CONTEXT_CASES, 1))
def test_context_parallelism(runs: Runs, case: Case) -> None:
    """The oracle sees whole sequences; with the attention of the tests it is Megatron's own, as the next test shows."""
    check_parity(runs, case)


def mixed(sizes: tuple[int, ...], cp_list: tuple[int, ...], **fields: Any) -> Case:
    """Give a case with a context-parallel size per stage, whose lengths all sizes divide."""
    step = 2 * math.lcm(*(tp * cp for tp, cp in zip(sizes, cp_list, strict=True)))
    seq = 3 * step if fields.get("varying_lengths") else step
    return Case.of(sizes=sizes, cp_list=cp_list, gathered_attention=True, seq=seq, length_step=step, **fields)


MIXED_CASES = [
    # A wrong scale of a stage's gradients shows in the weights after SGD.
    mixed((1, 1), (1, 2)),
    mixed((1, 2), (2, 1), tied=True),
    mixed((2, 1), (1, 2), sequence_parallel=True, **DISTRIBUTED, tied=True),
    mixed((1, 1, 1), (1, 2, 1), **PER_TOKEN, num_microbatches=3),
    mixed((1, 1), (2, 1), **PER_TOKEN),
    mixed((1, 1), (1, 2), count_zeros=True, has_bias=False, num_microbatches=1, clip=0.05),
    mixed((1, 1), (1, 2), dp=2, **DISTRIBUTED, overlap_grad_reduce=True, clip=0.05),
    mixed((1, 1), (2, 1), dp=2, overlap_grad_reduce=True, tied=True, masked=True),
    mixed((2, 1), (1, 3), vpp=2, num_microbatches=4, sequence_parallel=True),
    mixed((1, 1), (4, 2), varying_lengths=True),
    mixed((1, 2, 1), (1, 2, 1), sequence_parallel=True, vpp=2, num_microbatches=3, overlap_p2p=True, tied=True),
    mixed((1, 1), (1, 2), schedule="planned"),
    mixed((1, 1), (2, 2), plugin="forced"),
    mixed((1, 1), (2, 2)),
]


@pytest.mark.parametrize("case", defaults_first(MIXED_CASES, 1))
def test_context_parallel_size_per_stage(runs: Runs, case: Case) -> None:
    run = check_parity(runs, case)
    assert run.num_zeros == runs.oracle(case.but(wants_weights=True)).num_zeros


@pytest.mark.full
def test_evaluation_with_a_context_parallel_size_per_stage(runs: Runs) -> None:
    case = mixed((1, 1), (1, 2), wants_weights=True)
    plain, evaluated = runs.kept(case), runs.run(case.but(num_evaluations=2))
    assert_identical(evaluated, plain)
    for losses, evaluations in zip(evaluated.losses, evaluated.evaluations, strict=True):
        assert evaluations == [one for one in losses for _ in range(2)]


def test_attention_of_the_tests_is_megatrons(runs: Runs) -> None:
    case = Case.of(sizes=(1, 2), gathered_attention=True, wants_weights=True)
    run, own = runs.run(case), runs.oracle(case.but(gathered_attention=False))
    assert_close(run, own)
    assert_weights_close(run, own)


@pytest.mark.parametrize("transport", ["sliced", pytest.param("rank0", marks=pytest.mark.full)])
def test_receives_need_no_fresh_memory_after_the_first_step(runs: Runs, transport: Any) -> None:
    run = runs.run(Case.of(sizes=(2, 3), transport=transport, vpp=2, num_microbatches=4, overlap_p2p=True))
    for rank in run.ranks:
        first, *later = rank.allocations
        assert first > 0 and later == [first] * 3


@pytest.mark.parametrize("vpp", [1, 2])
def test_only_leaders_of_first_and_last_stage_read_data(runs: Runs, vpp: int) -> None:
    case = Case.of(sizes=(2, 1, 3), vpp=vpp, num_microbatches=3)
    run = check_parity(runs, case)
    passes = case.data.num_steps * case.data.num_microbatches
    assert {(r.stage, r.tp_rank): r.read for r in run.ranks} == {
        (0, 0): passes,
        (0, 1): 0,
        (1, 0): 0,
        (2, 0): passes,
        (2, 1): 0,
        (2, 2): 0,
    }
