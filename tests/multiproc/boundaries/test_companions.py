"""What crosses beside the activation: every planned pipeline carries it, from the stage that reads it to others."""

from __future__ import annotations

import pytest

from tests.support.pool import Pool
from vtp_plugin.plan.schedule.order.actions import (
    Placement,
    interleaved_placement,
    num_rings,
    plain_placement,
    u_placement,
)

JOB = "tests.multiproc.jobs.planned_job:run_companions"
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
    for worker, passes in pool.run(world_size, JOB, kwargs):
        stage = placement.stage_of(worker)
        forwards = [(v, n) for v in placement.vstages(stage) for n in placement.microbatches(worker, num_microbatches)]
        for noted in passes:
            assert sorted((vstage, microbatch) for vstage, microbatch, _ in noted) == forwards
            for vstage, microbatch, batch in noted:
                assert batch == expected(placement, vstage, microbatch, src, dst), (vstage, microbatch)
