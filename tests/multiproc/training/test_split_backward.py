"""Split backwards: to the last bit what whole ones give, and what the uniform run gives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.multiproc.cases.core_cases import (
    DISTRIBUTED,
    OVERLAPPED,
    PER_TOKEN,
    Case,
    Run,
    Runs,
    assemble,
    assert_close,
    assert_identical,
    oracle_of,
)
from tests.multiproc.cases.u_shape_cases import Saved, check_u_shape, u_shaped
from tests.multiproc.jobs.split_job import SPLIT, WHOLE, Heard, SplitResult
from tests.multiproc.training.test_parity import BF16_REL
from tests.support.hosts import fitted, host_name
from tests.support.pool import PoolError

LISTS: dict[str, Any] = {"num_microbatches": 6, "schedule": "planned", "wants_weights": True}
CASES = [
    Case.of(sizes=(1, 2), **LISTS),
    Case.of(sizes=(2, 1, 3), sequence_parallel=True, seq=12, **LISTS, **PER_TOKEN),
    Case.of(sizes=(1, 2, 1), vpp=2, **LISTS),
    Case.of(sizes=(1, 2), dp=2, bucket_size=500, **LISTS, **OVERLAPPED),
    # The first stage splits all backwards but the last two.
    Case.of(sizes=(1, 2), dp=2, bucket_size=500, in_flight=(3, 1), **LISTS, **OVERLAPPED),
    Case.of(sizes=(1, 1), dp_list=(1, 2), **LISTS, **DISTRIBUTED),
]
FAMILIES = [
    Case.of(sizes=(1, 2), tied=True, **LISTS),
    Case.of(sizes=(1, 2), recompute=True, **LISTS),
    Case.of(sizes=(1, 2), attention="latent", gathered_attention=True, **LISTS),
    Case.of(sizes=(1, 2), dtype="bf16", dp=2, **LISTS, **OVERLAPPED),
    Case.of(sizes=(1, 2), mtp=1, attention="rotary", layout="Et|tmL", **LISTS),
    Case.of(
        sizes=(1, 2), experts="gathered", has_bias=False, seq=12, sequence_parallel=True, ep_list=(1, 2), etp=1, **LISTS
    ),
]


def split(runs: Runs, case: Case, fault: str = "") -> tuple[Run, list[SplitResult]]:
    """Train a case with split backwards."""
    case = fitted(case.but(split_backward=True), host_name())
    found = runs._pool.run(case.world_size, "tests.multiproc.jobs.split_job:train", {"case": case, "fault": fault})
    return assemble(case, [one.result for one in found]), found


@pytest.mark.needs("latent_attention", cases=("1,2 schedule=planned num-microbatches=6 gathered",))
@pytest.mark.needs("layouts", cases=("1,2 schedule=planned num-microbatches=6 attention=rotary mtp=1 layout",))
@pytest.mark.parametrize("case", [*CASES, *FAMILIES], ids=str)
def test_it_is_the_run_with_whole_backwards_to_the_last_bit(runs: Runs, case: Case) -> None:
    ours, ranks = split(runs, case)
    assert_identical(ours, runs.run(case))
    assert_close(ours, runs.oracle(case), rel=1e-5 if case.numerics.dtype == "fp32" else 1e-3)
    assert any(rank.num_apart for rank in ranks)
    # For the gradients of inputs of the first layers nobody waits.
    num_first = case.stages.sizes[0] * case.stages.dp_sizes[0]
    first_splits = case.model.vpp > 1 or case.execution.in_flight != ()
    assert all((rank.num_split > 0) is first_splits for rank in ranks[:num_first])
    assert all(rank.num_split for rank in ranks[num_first:])


US = [
    u_shaped(1, 2, **LISTS),
    u_shaped(2, 1, 3, sequence_parallel=True, seq=12, recompute=True, **LISTS, **PER_TOKEN),
    u_shaped(1, 1, dp=2, tied=True, **LISTS, **OVERLAPPED),
]


@pytest.mark.parametrize("case", US, ids=str)
def test_a_u_is_the_sequential_run(runs: Runs, saved: Saved, case: Case) -> None:
    """And to the last bit the U with whole backwards, in its own order."""
    found: list[SplitResult] = []

    def train(case: Case) -> Run:
        run, ranks = split(runs, case)
        found.extend(ranks)
        return run

    ours = check_u_shape(runs, saved, case, train)
    whole = check_u_shape(runs, saved, case)
    assert_identical(ours, whole)
    assert all(rank.num_split for rank in found) and any(rank.num_apart for rank in found)


@pytest.mark.needs("grouped_without_engine", cases=("grouped-",))
@pytest.mark.parametrize(("experts", "dtype", "num_weights"), [("plain", "fp32", 12), ("grouped", "bf16", 2)])
def test_megatron_is_told_when_a_gradient_is_complete(runs: Runs, experts: str, dtype: Any, num_weights: int) -> None:
    """Once a step: of linear layers with the last gradient of weights, of all others with the last one of inputs.

    The first stage splits nothing. On the second one, in every microbatch, at most four of a rank's six experts have
    tokens. Grouped experts are no linear layers, and know bf16 only.
    """
    few: dict[str, Any] = {"seq": 2, "sequence_parallel": True, "etp": 1, "has_bias": False}
    case = Case.of(sizes=(1, 2), experts=experts, dtype=dtype, align_grad_reduce=False, **few, **LISTS, **OVERLAPPED)
    ours, ranks = split(runs, case)
    assert_identical(ours, runs.run(case))
    assert_close(ours, runs.oracle(case), rel=1e-5 if dtype == "fp32" else BF16_REL)
    for rank in ranks:
        assert sum(".experts." in name for name in rank.complete) == num_weights
        of_others, of_linear = "IW" if rank.num_split else "BB"
        for name, parts in rank.complete.items():
            assert parts == (of_linear if ".linear_" in name else of_others) * case.data.num_steps, name


FAULTS = {"left out": CASES[0], "doubled": CASES[0], "of other rows": CASES[0], "after its bucket left": CASES[3]}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_gradient_that_is_wrong_on_purpose_shows(runs: Runs, fault: str) -> None:
    """The control: of one microbatch, on one rank."""
    ours, _ = split(runs, FAULTS[fault], fault)
    with pytest.raises(AssertionError):
        assert_close(ours, runs.oracle(FAULTS[fault]))


def test_a_gradient_of_weights_before_that_of_its_input_ends_the_run(runs: Runs) -> None:
    """The proof refuses such an order; here it comes after the proof."""
    with pytest.raises(PoolError, match="PlanError: 1W0 comes before 1I0, or twice"):
        split(runs, CASES[0], "before its input's")


LISTENED = [Case.of(sizes=(1, 2), in_flight=(3, 1), recompute=True, **LISTS), FAMILIES[-1].but(in_flight=(3, 1))]


@pytest.mark.parametrize("case", LISTENED, ids=str)
def test_who_listens_to_a_layer_sees_and_changes_what_a_whole_backward_has(runs: Runs, case: Case) -> None:
    """To the last bit, as often and in the same order; only layers whose weight is listened to stay whole."""

    def listen(case: Case, names: Iterable[str]) -> list[dict[str, Heard]]:
        arguments = {"case": fitted(case, host_name()), "names": [*names]}
        return runs._pool.run(arguments["case"].world_size, "tests.multiproc.jobs.split_job:listen", arguments)

    whole, split = listen(case, [*SPLIT, *WHOLE]), listen(case.but(split_backward=True), [*SPLIT, *WHOLE])
    for rank, (ours, theirs) in enumerate(zip(split, whole, strict=True)):
        assert ours["nobody"].left and not theirs["nobody"].left
        for name in ours:
            assert ours[name].result == theirs[name].result, name
            assert ours[name].seen == theirs[name].seen, name
            stays = "nothing" if rank == 0 and name == "weights_of_one_rank" else WHOLE.get(name, "nothing")
            assert ours[name].left == {k: n for k, n in ours["nobody"].left.items() if stays not in k}, name
            said = "".join(ours[name].said)
            assert (WHOLE.get(name, "nothing") in said) is (rank == 0 and name in WHOLE), said
            assert len(ours[name].said) == said.count("--vtp-split-backward: whole backwards of stage "), said
    if case.model.experts:
        return
    alike = [name for name in SPLIT if name != "saved"]  # how often something is saved depends on the size
    for name, heard in listen(oracle_of(fitted(case, host_name())), alike)[-1].items():
        assert split[-1][name].result[:2] == (pytest.approx(heard.result[0]), pytest.approx(heard.result[1])), name
