"""Bridges between modules: every rank gets its part, forward and backward, bitwise."""

from __future__ import annotations

from tests.bridges import Sizes
from tests.multiproc.bridge_job import BridgeCase
from tests.pool import Pool

JOB = "tests.multiproc.bridge_job"


def assert_crossed(pool: Pool, *cases: BridgeCase) -> None:
    world_size = max(one.world_size for one in cases)
    assert {one.world_size for one in cases} == {world_size}
    problems = pool.run(world_size, f"{JOB}:cross", {"cases": cases})
    assert [problem for rank in problems for problem in rank] == []


def test_fan_in_fan_out_and_sizes_that_do_not_divide(pool: Pool) -> None:
    pairs = [
        (Sizes(tp=2, cp=1, dp=2), Sizes(tp=4, cp=1, dp=1)),
        (Sizes(tp=4, cp=1, dp=1), Sizes(tp=1, cp=1, dp=4)),
        (Sizes(tp=4, cp=1, dp=1), Sizes(tp=4, cp=1, dp=1)),
        (Sizes(tp=1, cp=2, dp=2), Sizes(tp=2, cp=2, dp=1)),
    ]
    two = [BridgeCase(src=src, dst=dst, num_dims=2, widths=(3, 0, 1)) for src, dst in pairs]
    assert_crossed(pool, *(BridgeCase(src=src, dst=dst) for src, dst in pairs), *two)
