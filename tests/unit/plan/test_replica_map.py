"""Replicas of stages with different data-parallel sizes, against the samples that Megatron's sampler gives them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.layout.replica_map import DpMode, ReplicaMap


@st.composite
def maps(draw: st.DrawFn) -> ReplicaMap:
    """Two to four stages; neighbouring sizes divide one another, and in split mode all divide the largest."""
    mode = draw(st.sampled_from([*DpMode]))
    sizes = [draw(st.integers(1, 6))]
    for _ in range(draw(st.integers(1, 3))):
        near = [size for size in range(1, 13) if max(size, sizes[-1]) % min(size, sizes[-1]) == 0]
        sizes.append(draw(st.sampled_from(near)))
    if mode is DpMode.SPLIT:
        sizes = [size for size in sizes if max(sizes) % size == 0]
    return ReplicaMap(dp_sizes=(*sizes, max(sizes)), mode=mode)


def samples(replicas: ReplicaMap, stage: int, dp_rank: int, size: int) -> list[range]:
    """Give the microbatches of a replica in the smallest step, as Megatron's sampler deals them out."""
    dp, micro_batch = replicas.dp_sizes[stage], replicas.micro_batch(stage, size)
    starts = range(dp_rank * micro_batch, replicas.batch_unit(size), dp * micro_batch)
    return [range(start, start + micro_batch) for start in starts]


@given(maps(), st.integers(1, 3))
def test_joined_replicas_have_samples_in_common_and_no_others_have(replicas: ReplicaMap, size: int) -> None:
    for upstream in range(len(replicas.dp_sizes) - 1):
        a, b = replicas.dp_sizes[upstream : upstream + 2]
        if max(a, b) % min(a, b):  # the largest that was added at the end
            continue
        joined = {(i, j) for src, dst in replicas.joined(upstream, upstream + 1) for i in src for j in dst}
        for i in range(a):
            for j in range(b):
                ours, theirs = (
                    {sample for samples_ in samples(replicas, stage, dp_rank, size) for sample in samples_}
                    for stage, dp_rank in ((upstream, i), (upstream + 1, j))
                )
                assert ((i, j) in joined) == bool(ours & theirs)


@given(maps(), st.integers(1, 3))
def test_schedule_deals_a_copys_microbatches_out_in_turn(replicas: ReplicaMap, size: int) -> None:
    """Microbatch h of a copy is run by replica h mod n as its local one h // n: the schedule's rule."""
    if replicas.is_split or replicas.mode is DpMode.SPLIT:
        return
    num_microbatches = replicas.batch_unit(size) // size // replicas.num_teams
    for stage, dp in enumerate(replicas.dp_sizes):
        ranks_by_team = {replicas.team_and_replica(stage, dp_rank): dp_rank for dp_rank in range(dp)}
        assert len(ranks_by_team) == dp
        for team in range(replicas.num_teams):
            for h in range(num_microbatches):
                replica, local = h % replicas.num_replicas(stage), h // replicas.num_replicas(stage)
                number = h * replicas.num_teams + team
                found = samples(replicas, stage, ranks_by_team[team, replica], size)[local]
                assert found == range(number * size, (number + 1) * size)


@given(maps(), st.integers(1, 3))
def test_split_batches_are_intervals_of_one_microbatch(replicas: ReplicaMap, size: int) -> None:
    if not replicas.is_split:
        return
    for stage, dp in enumerate(replicas.dp_sizes):
        parts = [samples(replicas, stage, dp_rank, size) for dp_rank in range(dp)]
        assert [len(part) for part in parts] == [1] * dp
        assert [sample for (part,) in parts for sample in part] == [*range(replicas.batch_unit(size))]


@given(maps(), st.integers(1, 3), st.integers(1, 40))
def test_batches_are_refused_exactly_where_they_do_not_divide(replicas: ReplicaMap, size: int, batch: int) -> None:
    fits = all(batch % (dp * replicas.micro_batch(i, size)) == 0 for i, dp in enumerate(replicas.dp_sizes))
    assert fits == (batch % replicas.batch_unit(size) == 0)
    if fits:
        assert replicas.check_batch("--global-batch-size", batch, size) == ()
        return
    (line,) = replicas.check_batch("--global-batch-size", batch, size)
    assert line.startswith(f"--global-batch-size {batch} cannot be shared") and " such as " in line
    assert replicas.check_batch("--global-batch-size", int(line.split()[-1]), size) == ()


@given(maps())
def test_partner_is_a_replica_that_boundaries_join(replicas: ReplicaMap) -> None:
    for stage, dp in enumerate(replicas.dp_sizes):
        for dp_rank in range(dp):
            assert replicas.partner(stage, dp_rank, stage) == dp_rank
            for other, size in enumerate(replicas.dp_sizes):
                partner = replicas.partner(stage, dp_rank, other)
                assert 0 <= partner < size
                if max(dp, size) % min(dp, size) == 0:
                    assert any(dp_rank in a and partner in b for a, b in replicas.joined(stage, other))


@pytest.mark.parametrize(
    ("sizes", "mode", "boundaries", "match"),
    [
        ((1, 2, 3), DpMode.MULTIPLEX, [(0, 1), (1, 2)], "boundary 1->2 joins data-parallel sizes 2 and 3, and 3 / 2"),
        ((2, 1, 3), DpMode.MULTIPLEX, [(0, 1), (1, 2), (2, 0)], "boundary 2->0 joins data-parallel sizes 3 and 2"),
        ((2, 1, 3), DpMode.SPLIT, [(0, 1), (1, 2)], "split: stage 0 runs microbatches 3 / 2 times as large"),
    ],
)
def test_sizes_that_cannot_be_joined_are_refused(
    sizes: tuple[int, ...], mode: DpMode, boundaries: list[tuple[int, int]], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        ReplicaMap(dp_sizes=sizes, mode=mode).check(boundaries)


def test_sizes_that_divide_at_every_boundary_are_not_refused() -> None:
    ReplicaMap(dp_sizes=(2, 1, 3)).check([(0, 1), (1, 2)])
    assert ReplicaMap(dp_sizes=(2, 1, 3)).num_teams == math.gcd(2, 1, 3)
    ReplicaMap(dp_sizes=(4, 4), mode=DpMode.SPLIT).check([(0, 1)])
