"""Each start in one process has its own layout, leaves no more than Megatron, and finds names taken before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.multiproc.cases.core_cases import Case, Runs, assemble, assert_close
from tests.multiproc.cases.script_cases import Scripts, assert_same_training
from tests.multiproc.cases.u_shape_cases import Saved, sequential
from tests.multiproc.jobs.variants import Left
from tests.support.hosts import fitted, host_name
from tests.support.pool import Pool

REPLICA_MAJOR = "tp-cp-ep-pp-dp"
TWO = Case.of(sizes=(1, 2), dp=2, num_microbatches=4)
# Other ranks in every group, another number of chunks, another format of what crosses.
LAYOUTS = (
    TWO,
    TWO.but(order=REPLICA_MAJOR),
    TWO.but(dp=1, cp=2, gathered_attention=True, seq=8),
    TWO.but(vpp=2),
    TWO.but(varying_lengths=True, tied=True),
)
FOUR: dict[str, Any] = {"num_microbatches": 4}
UNEQUAL = Case.of(sizes=(1, 2), dp_list=(2, 1), **FOUR)
WIDE = Case.of(sizes=(1, 3), **FOUR)
U_SHAPED = Case.of(sizes=(1, 2, 1), layers=(1, 1, 1, 1), **FOUR)
PLANNED = Case.of(sizes=(1, 2), schedule="planned", **FOUR)
# Uniform pipelines of as many ranks, with tensor parallelism where that divides them.
STOCK = {3: (1, 1, 1), 4: (2, 2), 6: (2, 2, 2)}
EXPERTS = Case.of(sizes=(1, 2), dp=2, experts="balanced", has_bias=False, sequence_parallel=True, seq=12)


def _growth(counts: Sequence[Left], num_starts: int) -> Left:
    """Give what the last starts have added, the largest of all ranks."""
    return Left(*(last - first for first, last in zip(counts[-num_starts - 1], counts[-1], strict=True)))


def _check(pool: Pool, runs: Runs, saved: Saved, parts: Sequence[Sequence[Case]]) -> list[list[list[Left]]]:
    """Train all in one set of processes, compare each with its uniform or sequential run; give the counts by rank."""
    parts = [[fitted(case, host_name()) for case in part] for part in parts]
    parts = [[case.but(load=saved(case)) if case.model.layers else case for case in part] for part in parts]
    kwargs = {"parts": parts}
    ranks = pool.run(parts[0][0].world_size, "tests.multiproc.jobs.variants:train_in_turn", kwargs)
    for number, part in enumerate(parts):
        for place, case in enumerate(part):
            if case.execution.plugin != "stock":
                run = assemble(case, [results[number][place] for results, _ in ranks])
                assert_close(run, runs.kept(sequential(case)) if case.model.layers else runs.oracle(case))
    return [counts for _, counts in ranks]


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(LAYOUTS[:2], id="replicas"),
        pytest.param(LAYOUTS, id="replicas, order, context, chunks, lengths", marks=pytest.mark.full),
        pytest.param((UNEQUAL, UNEQUAL.but(tied=True)), id="unequal replicas", marks=pytest.mark.full),
        pytest.param((WIDE, WIDE.but(tied=True, vpp=2)), id="a narrow stage beside a wide one", marks=pytest.mark.full),
        pytest.param((U_SHAPED, U_SHAPED.but(tied=True)), id="U", marks=pytest.mark.full),
        pytest.param((PLANNED, PLANNED.but(vpp=2)), id="planned", marks=pytest.mark.full),
        pytest.param((EXPERTS, EXPERTS.but(ep=2)), id="experts", marks=pytest.mark.full),
    ],
)
def test_starts_in_one_process_train_right_and_leave_what_megatrons_leave(
    pool: Pool, runs: Runs, saved: Saved, layouts: tuple[Case, ...]
) -> None:
    ours = [*layouts, *layouts]
    num_ranks = fitted(layouts[0], host_name()).world_size
    stock = [Case.of(sizes=STOCK[num_ranks], plugin="stock", **FOUR)] * len(layouts)
    counts = _check(pool, runs, saved, [ours, stock])
    most = Left(*map(max, zip(*(_growth(of_stock, len(layouts)) for _, of_stock in counts), strict=True)))
    for rank, (mine, theirs) in enumerate(counts):
        added = _growth(mine, len(layouts))
        assert all(a <= b for a, b in zip(added, most, strict=True)), (rank, added, most, mine, theirs)
    # A rank of a narrow stage was in more groups than Megatron keeps; those are gone, too.
    assert len({_growth(mine, len(layouts)).num_groups for mine, _ in counts}) == 1, counts


@pytest.mark.full
def test_other_lists_one_after_another_train_right(pool: Pool, runs: Runs, saved: Saved) -> None:
    """Each with an ``apply()`` of its own, after which nothing is left."""
    num_ranks = 4
    lists = (
        Case.of(sizes=(1, 2, 1), **FOUR),
        U_SHAPED,
        Case.of(sizes=(2, 1, 1), schedule="planned", **FOUR),
        Case.of(sizes=(3, 1), **FOUR),
        Case.of(sizes=(2, 2), plugin="forced", **FOUR),
        Case.of(sizes=(1, 1), dp_list=(1, 3), num_microbatches=3),
        Case.of(sizes=(1, 3), transport="rank0", **FOUR),
    )
    assert {case.world_size for case in lists} == {num_ranks}
    _check(pool, runs, saved, [[case] for case in lists])


WRONG = (
    {"pipeline_model_parallel_size": 5},
    {"tensor_model_parallel_size": 3},
    {"pipeline_model_parallel_size": 2, "context_parallel_size": 4},
    {"pipeline_model_parallel_size": 2, "order": "pp-dp-cp-tp"},
    {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 5},
)


def test_a_later_start_refuses_what_the_first_refuses(pool: Pool, runs: Runs) -> None:
    case = LAYOUTS[0].but(dp=1)
    said: list[list[str]] = []
    for has_started in (False, True):
        kwargs = {"case": case, "calls": WRONG, "has_started": has_started}
        ranks = pool.run(case.world_size, "tests.multiproc.jobs.variants:refusals", kwargs)
        said += [lines for lines, _, _ in ranks]
        for _, _, (before, after) in ranks:
            # The first check of a process starts what watches the other ranks; the clocks of checks end a moment later.
            assert after.num_groups == before.num_groups
            assert after.num_descriptors == before.num_descriptors or not has_started
        assert_close(assemble(case, [result for _, result, _ in ranks]), runs.oracle(case))
    assert all(lines == said[0] for lines in said), said
    *refused, again = said[0]
    words = ("5 contradicts --vtp-size-list 1,2", "3 contradicts", "this run has 3; start", "'pp-dp-cp-tp'", "expert")
    assert all(word in line for word, line in zip(words, refused, strict=True)), refused
    assert "call destroy_model_parallel() before" in again


@pytest.mark.needs("scripts_here")
def test_a_script_that_starts_again_keeps_to_its_arguments(scripts: Scripts) -> None:
    runs = scripts.train("1,2", hooks=["start_again"])
    assert_same_training(runs, scripts.train("1,1"))
    for run in runs:
        values = ("context_parallel_size=2", "pipeline_model_parallel_size=5", "order=tp-cp-ep-pp-dp")
        assert all(
            f"({value}); Megatron's validated arguments say" in line
            for value, line in zip(values, run.facts["said"], strict=True)
        )


@pytest.mark.parametrize("schedule", ["stock", "planned"])
def test_names_taken_before_applying_give_the_right_gradients(pool: Pool, runs: Runs, schedule: str) -> None:
    case = Case.of(sizes=(1, 2), tied=True, schedule=schedule)  # pyright: ignore[reportArgumentType]
    run = assemble(case, pool.run(case.world_size, "tests.multiproc.jobs.variants:train_late", {"case": case}))
    oracle = runs.oracle(case)
    assert_close(run, oracle, rel=1e-5)
    assert run.grad_norms == pytest.approx(oracle.grad_norms, rel=1e-5) and len(run.grad_norms) == 4


def test_apply_does_not_search_all_that_is_loaded() -> None:
    """A function of Megatron that a module of the tests holds under another name costs each rank of each job 0.2 s."""
    with Pool(max_workers=1) as fresh:
        searched = fresh.run(1, "tests.multiproc.jobs.variants:searched_for_names")[0]
    assert searched and not any(searched)
