"""Tensors arrive whole, over every strategy, for all sizes and spreads of the two sides; and so does what is beside."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tests.multiproc.jobs.transport_job import Move
from tests.support.pool import Pool
from vtp_plugin.plan.schedule.order.placement import (
    Placement,
    interleaved_placement,
    num_rings,
    plain_placement,
    u_placement,
)

JOB = "tests.multiproc.jobs.transport_job"
SHARDINGS = list(product((False, True), repeat=2))
# Rows that 1, 2, 3 and 4 divide; and, for copies, rows that none of 2, 3, 4 divides.
EVEN, ODD = (24, 2, 3), (7, 1, 5)


def moves_of(src_tp: int, dst_tp: int) -> list[Move]:
    """All spreads and both strategies between two sizes."""
    moves = [
        Move(src=(1, src_tp), dst=(1, dst_tp), strategy=strategy, src_sharded=src, dst_sharded=dst, shape=EVEN)
        for strategy, (src, dst) in product(("rank0", "sliced"), SHARDINGS)
    ]
    moves += [Move(src=(1, src_tp), dst=(1, dst_tp), strategy=name, shape=ODD) for name in ("rank0", "sliced")]
    # Fewer rows than ranks: some carry nothing.
    moves.append(Move(src=(1, src_tp), dst=(1, dst_tp), shape=(1, 2, 3)))
    # The same as devices complete it, by their own all-gather.
    return moves + [replace(one, gathers_by_messages=False) for one in moves if _gathers(one)]


def _gathers(move: Move) -> bool:
    return move.strategy == "sliced" and move.dst[1] > 1 and not move.dst_sharded


def assert_moves(pool: Pool, moves: list[Move]) -> None:
    world_size = max(len(move.spec().members) for move in moves)
    problems = pool.run(world_size, f"{JOB}:move", {"moves": moves})
    assert [problem for rank in problems for problem in rank] == []


@pytest.mark.parametrize(
    ("src_tp", "dst_tp"),
    [
        (1, 4),
        (4, 1),
        (2, 3),
        (2, 2),
        pytest.param(1, 1, marks=pytest.mark.full),
        pytest.param(3, 2, marks=pytest.mark.full),
        pytest.param(4, 2, marks=pytest.mark.full),
        pytest.param(4, 4, marks=pytest.mark.full),
        pytest.param(4, 6, marks=pytest.mark.full),
        pytest.param(6, 4, marks=pytest.mark.full),
    ],
)
def test_every_spread_and_strategy(pool: Pool, src_tp: int, dst_tp: int) -> None:
    moves = moves_of(src_tp, dst_tp)
    if (src_tp, dst_tp) in ((4, 6), (6, 4)):
        assert 24 % src_tp == 24 % dst_tp == 0
    assert_moves(pool, moves)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_types_and_memory_layouts(pool: Pool, dtype: str) -> None:
    cases = product((1, 3), (2, 4), ("rank0", "sliced"), (False, True))
    moves = [
        Move(src=(1, src), dst=(1, dst), strategy=name, dtype=dtype, is_transposed=True, dst_sharded=sharded)
        for src, dst, name, sharded in cases
    ]
    assert_moves(pool, moves[:: 1 if dtype == "bfloat16" else 5])


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ((2, 1), (1, 2)),
        ((1, 3), (2, 2)),
        pytest.param((2, 2), (4, 1), marks=pytest.mark.full),
        pytest.param((4, 1), (2, 1), marks=pytest.mark.full),
        pytest.param((3, 2), (2, 1), marks=pytest.mark.full),
        pytest.param((1, 4), (4, 1), marks=pytest.mark.full),
    ],
)
def test_context_parallel_sizes_that_differ(pool: Pool, src: tuple[int, int], dst: tuple[int, int]) -> None:
    """Chunks in Megatron's load-balanced order on both sides, several of them in one message."""
    shape = (48, 2, 3)
    assert_moves(pool, [Move(src=src, dst=dst, src_sharded=s, dst_sharded=d, shape=shape) for s, d in SHARDINGS])


@pytest.mark.parametrize("strategy", ["rank0", "sliced"])
def test_every_rank_derives_its_own_shape_from_the_header(pool: Pool, strategy: str) -> None:
    move = Move(src=(1, 2), dst=(1, 3), strategy=strategy, dst_sharded=True)
    shapes = [(12, 2, 3), (6, 1, 3), (30, 2, 3)]
    found = pool.run(5, f"{JOB}:varying", {"one": move, "shapes": shapes})
    assert found == [[], [], *[[(4, 2, 3), (2, 1, 3), (10, 2, 3)]] * 3]


def test_a_tensor_that_does_not_fit_is_refused_before_it_is_received(pool: Pool) -> None:
    """Gloo would end the receiving process, or take the bytes for another type, without a word."""
    sent = [((5, 2, 3), "float32"), ((5, 2, 4), "float32"), ((5, 2, 3), "bfloat16"), ((0, 2, 3), "float32")]
    given = {"sent": [*sent, ((5, 3), "float32")], "width": 3, "most_tokens": 10}
    sender, receiver = pool.run(2, f"{JOB}:wrong_headers", given)
    assert sender[:4] == [""] * 4 and "has the shape (5, 3), not [S, B, H]" in sender[4]
    assert receiver[0] == receiver[4] == ""
    for text, shown in zip(
        receiver[1:4], ("float32 [5, 2, 4]", "bfloat16 [5, 2, 3]", "float32 [0, 2, 3]"), strict=True
    ):
        assert f"rank 0 would send torch.{shown}, expected is torch.float32 [S, B, 3]" in text
        assert "microbatch 0" in text and "give all stages one pipeline_dtype" in text


def test_a_tensor_that_is_too_large_is_refused_before_it_is_received(pool: Pool) -> None:
    """Four numbers of the other site say how much memory this rank gives."""
    sent = [((5, 2, 3), "float32"), ((11, 1, 3), "float32"), ((1 << 40, 1 << 10, 3), "float32")]
    assert pool.run(2, f"{JOB}:wrong_headers", {"sent": sent[1:2], "width": 3, "most_tokens": 11}) == [[""], [""]]
    _, receiver = pool.run(2, f"{JOB}:wrong_headers", {"sent": sent, "width": 3, "most_tokens": 10})
    place = "microbatch 0: rank 0 would send torch.float32"
    assert receiver[0] == ""
    assert receiver[1].endswith(
        f"{place} [11, 1, 3], 33 elements; 30 at most: the lengths and the micro batch size of this rank's arguments; "
        "raise --max-position-embeddings"
    )
    assert f"{place} [{1 << 40}, {1 << 10}, 3], {3 << 50} elements; " in receiver[2]
    assert receiver[2].endswith(
        " at most: what 1 of this rank's devices hold; look for a rank that sends another tensor"
    )


@pytest.mark.parametrize(
    ("shapes", "line"),
    [
        ([(6, 2, 3), (6, 2, 3)], "posted (6, 4, 3)"),
        ([(6, 2, 3), (4, 2, 3)], "one replica would send its part of [6, 4, 3], another of [[4, 4, 3]]"),
        ([(6, 1, 3), (6, 2, 3)], "give all replicas as many samples of one length"),
    ],
)
def test_replicas_whose_samples_do_not_join_are_refused(pool: Pool, shapes: list[tuple[int, ...]], line: str) -> None:
    """Each announces its own share: of one header only, the receiver would wait for what nobody sends."""
    *_, found = pool.run(3, f"{JOB}:headers_of_replicas", {"shapes": shapes})
    assert line in found


COMPANIONS = "tests.multiproc.jobs.planned_job:run_companions"
CASES = [
    pytest.param((1, 2, 1), plain_placement(3), 0, None, None, id="plain"),
    pytest.param((1, 2, 1), plain_placement(3), 0, frozenset({2}), None, id="over a stage that does not ask"),
    pytest.param((2, 1, 1), plain_placement(3), 1, frozenset({2}), None, id="from the middle"),
    pytest.param((1, 2), interleaved_placement(2, 2), 1, frozenset({0}), None, id="interleaved, round the ring"),
    pytest.param((1, 2), u_placement(2, num_rings=2), 0, None, None, id="U of two rings"),
    pytest.param((2, 1), plain_placement(2, num_replicas=(1, 2)), 0, None, (1, 2), id="two replicas"),
    pytest.param((2, 1), u_placement(2, num_replicas=(1, 2)), 0, None, (1, 2), id="U with two replicas in the cloud"),
]


def came_from(placement: Placement, vstage: int, src: int) -> int | None:
    """Return the chunk of `src` that read what a forward is given; None if no forward of `src` came before."""
    before = [v for v in range(vstage) if placement.stages[v] == src]
    return placement.chunk(before[-1]) if before else None


def expected(
    placement: Placement, vstage: int, microbatch: int, src: int, dst: frozenset[int] | None
) -> dict[str, int]:
    """Return the batch that a forward reads: its stage's own, and what has come."""
    stage = placement.stages[vstage]
    batch = {} if num_rings(placement) and stage else {"number": 100 * placement.chunk(vstage) + microbatch + 1}
    for name, sign, reader, wanted in (("came", 1, src, dst), ("second", -1, 0, None)):
        chunk = came_from(placement, vstage, reader)
        if stage != reader and chunk is not None and (wanted is None or stage in wanted):
            batch[name] = sign * (100 * chunk + microbatch + 1)
    return batch


@pytest.mark.parametrize(("sizes", "placement", "src", "dst", "dp"), CASES)
@pytest.mark.parametrize("num_microbatches", [4, 2])
@pytest.mark.parametrize("varies", [False, True], ids=["one length", "lengths of their own"])
def test_every_forward_reads_what_was_sent_with_its_activation(
    pool: Pool,
    sizes: tuple[int, ...],
    placement: Placement,
    src: int,
    dst: frozenset[int] | None,
    dp: tuple[int, ...] | None,
    num_microbatches: int,
    varies: bool,
) -> None:
    """Of two microbatches two replicas have one each: the first forward of a step is then also its last.

    With lengths of their own a header goes before the second companion and before the activation, not the first.
    """
    kwargs = {
        "sizes": sizes,
        "placement": placement,
        "num_microbatches": num_microbatches,
        "src": src,
        "dst": dst,
        "dp": dp,
        "varies": varies,
    }
    world_size = sum(size * num for size, num in zip(sizes, dp or (1,) * len(sizes), strict=True))
    for worker, passes in pool.run(world_size, COMPANIONS, kwargs):
        stage = placement.stage_of(worker)
        forwards = [(v, n) for v in placement.vstages(stage) for n in placement.microbatches(worker, num_microbatches)]
        for noted in passes:
            assert sorted((vstage, microbatch) for vstage, microbatch, _ in noted) == forwards
            for vstage, microbatch, batch in noted:
                assert batch == expected(placement, vstage, microbatch, src, dst), (vstage, microbatch)
