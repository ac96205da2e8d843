"""Steps written by hand over the exchange functions equal the sequential model; returns and refusals of these."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiproc.core_cases import PER_TOKEN, Case, Runs, assemble, assert_close, assert_weights_close
from tests.multiproc.u_shape_cases import Saved, check_u_shape, u_shaped
from tests.pool import Pool


def by_hand(pool: Pool, case: Case, style: str, is_async: bool) -> Any:
    kwargs = {"case": case, "style": style, "is_async": is_async}
    return assemble(case, pool.run(case.world_size, "tests.multiproc.functional_job:train_by_hand", kwargs))


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
        assert evaluations == [step for step in losses for _ in range(case.num_evaluations)]


@pytest.mark.full
@pytest.mark.parametrize("style", ["vtp", "reqs"])
def test_1f1b_by_hand_equals_megatrons(runs: Runs, pool: Pool, style: str) -> None:
    case = Case(sizes=(2, 1), num_microbatches=3, wants_weights=True)
    run, oracle = by_hand(pool, case, style, True), runs.oracle(case)
    assert_close(run, oracle)
    assert_weights_close(run, oracle)


@pytest.mark.parametrize("transport", ["rank0", "sliced"])
def test_returns(pool: Pool, transport: str) -> None:
    edge, leader, other = pool.run(3, "tests.multiproc.functional_job:returns", {"transport": transport})
    none = str((None, None))
    assert edge == [
        *("1", none, "['recv_prev']", "True", none, "None", "None"),
        *("1", "(None, True)", "(None, True)"),
    ]
    assert leader == ["['recv_prev']", "True", "True", "1", "True", "None"]
    # With slices every rank sends a part; through the leaders this one sends nothing.
    assert other == [*leader[:3], "None" if transport == "rank0" else "1", *leader[4:]]


def test_a_list_of_groups_reaches_every_replica(pool: Pool) -> None:
    edge, *cloud = pool.run(3, "tests.multiproc.functional_job:lists_of_groups")
    num_sends, without, several, *equal = edge
    assert num_sends == "2" and equal == ["True", "True"] and cloud == [["True"]] * 2
    assert without.startswith("no group was given: this rank's pipeline groups are those of the ranks [[0, 1], [0, 2]]")
    assert several.startswith("a receive from 2 replicas at once; give the group of one")


def test_refusals(pool: Pool) -> None:
    for rank, lines in enumerate(pool.run(4, "tests.multiproc.functional_job:refusals")):
        closed, past_the_end, before, twice, replicas, unwaited = lines
        assert "channels are not open; call vtp_plugin.apply()" in closed
        stage, neighbour = divmod(rank, 2)[0], ("prev", "next")[rank // 2]
        assert f"stage {stage} cannot send to the {neighbour} stage: there is none" in past_the_end
        assert f"stage {stage} cannot receive from the {neighbour} stage: there is none" in before
        assert "the groups name the replicas [0, 0]; name each that is meant once" in twice
        assert "are not such a group: this rank's pipeline groups are those of the ranks [[" in replicas
        assert "batch_p2p_comm cannot receive without waiting" in unwaited
