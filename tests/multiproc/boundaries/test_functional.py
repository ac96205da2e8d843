"""Steps written by hand over the exchange functions equal the sequential model; returns and refusals of these."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiproc.cases.core_cases import PER_TOKEN, Case, Runs, assemble, assert_close, assert_weights_close
from tests.multiproc.cases.u_shape_cases import Saved, check_u_shape, u_shaped
from tests.support.pool import Pool


def by_hand(pool: Pool, case: Case, style: str, is_async: bool, keyword: str = "") -> Any:
    kwargs = {"case": case, "style": style, "is_async": is_async, "keyword": keyword}
    return assemble(case, pool.run(case.world_size, "tests.multiproc.jobs.functional_job:train_by_hand", kwargs))


CASES: list[tuple[str, bool, Case]] = [
    ("vtp", True, u_shaped(1, 2, num_microbatches=3, num_evaluations=1, tied=True)),
    ("reqs", False, u_shaped(1, 2, num_microbatches=3, **PER_TOKEN)),
]
FULL_CASES: list[tuple[str, bool, Case]] = [
    (style, is_async, u_shaped(*sizes, num_microbatches=1, rampup=True, num_steps=6, transport=transport))
    for style in ("vtp", "reqs")
    for is_async, sizes, transport in ((True, (1, 2, 2), "rank0"), (False, (2, 1, 3), "sliced"), (True, (1, 1), "auto"))
] + [
    ("reqs", True, u_shaped(1, 2, 2, seq=6, sequence_parallel=True, deallocate=True, num_microbatches=4)),
    ("reqs", False, u_shaped(1, 2, dp=2, varying_lengths=True, deallocate=True, recompute=True)),
    ("vtp", False, u_shaped(1, 2, 2, transport="rank0", tied=True, num_microbatches=2)),
    # An edge that works in turn for both replicas of the cloud.
    ("reqs", True, u_shaped(1, 2, dp_list=(1, 2), num_microbatches=6)),
    ("vtp", True, u_shaped(1, 2, 2, dp_list=(1, 2, 2), num_microbatches=4, tied=True)),
]


@pytest.mark.parametrize(
    ("style", "is_async", "case"),
    [pytest.param(*values, id=f"{values[0]} {'async' if values[1] else 'blocking'} {values[2]}") for values in CASES]
    + [
        pytest.param(
            *values, id=f"{values[0]} {'async' if values[1] else 'blocking'} {values[2]}", marks=pytest.mark.full
        )
        for values in FULL_CASES
    ],
)
def test_a_u_by_hand_equals_the_sequential_model(
    runs: Runs, pool: Pool, saved: Saved, style: str, is_async: bool, case: Case
) -> None:
    run = check_u_shape(runs, saved, case, train=lambda case: by_hand(pool, case, style, is_async))
    for losses, evaluations in zip(run.losses, run.evaluations, strict=True):
        assert evaluations == [step for step in losses for _ in range(case.checks.num_evaluations)]


@pytest.mark.full
@pytest.mark.parametrize("style", ["vtp", "reqs"])
def test_1f1b_by_hand_equals_megatrons(runs: Runs, pool: Pool, style: str) -> None:
    case = Case.of(sizes=(2, 1), num_microbatches=3, wants_weights=True)
    run, oracle = by_hand(pool, case, style, True), runs.oracle(case)
    assert_close(run, oracle)
    assert_weights_close(run, oracle)


PLAIN = Case.of(sizes=(2, 1, 3), num_microbatches=3)
U = u_shaped(1, 2, 2, num_microbatches=3)
EDGE = u_shaped(1, 2, dp_list=(1, 2), num_microbatches=2)
# Without waiting Megatron's default coalesces receives, which only the functions of the leaders ignore.
KEYWORDS = [
    (case, style, is_async, keyword)
    for case in (PLAIN, U, EDGE)
    for style in ("vtp", "reqs", "impl")
    for is_async in (True, False)
    for keyword in ("group", "next_rank", "prev_rank")
]
CHEAP = {(PLAIN, "vtp", True, "next_rank"), (U, "impl", True, "prev_rank"), (EDGE, "reqs", False, "next_rank")}


@pytest.mark.parametrize(
    ("case", "style", "is_async", "keyword"),
    [
        pytest.param(*values, id=" ".join(map(str, values)), marks=() if values in CHEAP else pytest.mark.full)
        for values in KEYWORDS
    ],
)
def test_a_step_with_each_keyword_equals_the_schedule(
    runs: Runs, pool: Pool, case: Case, style: str, is_async: bool, keyword: str
) -> None:
    case = case.but(batch_p2p=style == "vtp" or not is_async)
    expected = runs.run(case.but(batch_p2p=False))
    run = by_hand(pool, case, style, is_async, keyword)
    assert_close(run, expected)


@pytest.mark.parametrize("transport", ["rank0", "sliced"])
def test_returns(pool: Pool, transport: str) -> None:
    edge, leader, other = pool.run(3, "tests.multiproc.jobs.functional_job:returns", {"transport": transport})
    none = str((None, None))
    assert edge == [*("1", none, "['recv_prev']", "True", none, "None", "None"), *("1", "(None, True)", "(None, True)")]
    assert leader == ["['recv_prev']", "True", "True", "1", "True", "None"]
    # With slices every rank sends a part; through the leaders this one sends nothing.
    assert other == [*leader[:3], "None" if transport == "rank0" else "1", *leader[4:]]


def test_several_replicas_get_one_tensor_and_give_their_mean(pool: Pool) -> None:
    edge, *cloud = pool.run(3, "tests.multiproc.jobs.functional_job:lists_of_groups")
    num_sends, after, before, without, swapped, lengths, no_leader, *equal = edge
    assert num_sends == "2" and after == before == "[1, 2]"
    assert equal == ["True"] * 7 and cloud == [["True", "0"]] * 2
    assert without.startswith("no group was given: this rank's pipeline groups are those of the ranks [[0, 1], [0, 2]]")
    assert swapped.startswith("{'group': [0, 2], 'prev_rank': 1} name different replicas of the pipeline")
    assert lengths.startswith("lists of the lengths {'group': 2, 'prev_rank': 1}; each names the same replicas")
    assert no_leader.startswith("prev_rank=0 does not lead the previous stage; give a leader of [1, 2]")


def test_refusals(pool: Pool) -> None:
    for rank, lines in enumerate(pool.run(4, "tests.multiproc.jobs.functional_job:refusals")):
        closed, past_the_end, before, twice, replicas, unwaited, untyped, shapeless, own, empty = lines
        assert "channels are not open; call vtp_plugin.apply()" in closed
        stage, neighbour = divmod(rank, 2)[0], ("prev", "next")[rank // 2]
        assert f"stage {stage} cannot send to the {neighbour} stage: there is none" in past_the_end
        assert f"stage {stage} cannot receive from the {neighbour} stage: there is none" in before
        assert "the groups name the replicas [0, 0]; name each that is meant once" in twice
        assert "are not such a group: this rank's pipeline groups are those of the ranks [[" in replicas
        assert "batch_p2p_comm cannot receive without waiting" in unwaited
        other = ("next", "prev")[rank // 2]
        assert f"recv_{other} with pipeline_dtype=None, tensor_shape=(4, 1, 2); a receive needs both" in untyped
        assert "with pipeline_dtype=torch.float32, tensor_shape=None; a receive needs both" in shapeless
        assert f"next_rank={rank} does not lead the next stage; give a leader of [{(rank + 2) % 4}]" in own
        assert "the groups name the replicas []" in empty
