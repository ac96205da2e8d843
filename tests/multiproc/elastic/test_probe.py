"""Where a strategy is open, a run tries all, takes one for all ranks and says the figures."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.multiproc.cases.script_cases import Scripts, losses
from tests.multiproc.jobs.transport_job import Tried
from tests.ordering.check import check
from tests.ordering.trace import parse_trace
from tests.support.pool import Pool

pytestmark = pytest.mark.needs("scripts_here")

JOB = "tests.multiproc.jobs.transport_job:try_channels"
FORWARD = "boundary 0->1, forward"


def run(pool: Pool, sizes: tuple[int, ...], *, dp: int = 1, **options: Any) -> list[Tried]:
    ranks = pool.run(dp * sum(sizes), JOB, {"sizes": sizes, "dp": dp, "tensor_bytes": 1 << 20, **options})
    assert all(rank.lines == ranks[0].lines for rank in ranks)
    assert [rank.problems for rank in ranks] == [[]] * len(ranks)
    by_name: dict[str, set[str]] = {}
    for rank in ranks:
        for name, strategy in rank.strategies.items():
            by_name.setdefault(name, set()).add(strategy)
    assert all(len(strategies) == 1 for strategies in by_name.values()), by_name
    # Nothing that the probe issues could deadlock, on gloo or on devices.
    assert check([parse_trace(rank.trace) for rank in ranks]) == ()
    return ranks


def test_all_ranks_take_what_was_faster(pool: Pool) -> None:
    ranks = run(pool, (2, 3))
    (line,) = ranks[0].lines
    found = re.fullmatch(
        r"boundary 0->1: (\w+) \(tried with (?:256|1024) KiB: rank0 ([\d.]+) ms, sliced ([\d.]+) ms one way\)", line
    )
    assert found is not None, line
    figures = json.loads(ranks[0].shared[-1])["0->1"]
    assert found[1] == ("sliced" if figures["sliced"] < 0.9 * figures["rank0"] else "rank0")
    assert [float(found[i + 2]) for i in range(2)] == [round(figures[name] / 2, 2) for name in ("rank0", "sliced")]
    assert min(figures.values()) > 0


@pytest.mark.parametrize("faster", ["rank0", "sliced"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_both_outcomes_carry_tensors(pool: Pool, faster: str, is_sharded: bool) -> None:
    """Leaders talk over the group that the slices use; nobody opens another one."""
    ranks = run(pool, (2, 3), faster=faster, is_sharded=is_sharded)
    assert {*ranks[0].strategies.values()} == {faster}


@pytest.mark.parametrize("faster", ["sliced", "divided"])
def test_equal_stages_try_to_cut(pool: Pool, faster: str) -> None:
    """Both ways bring the same, whatever the number of rows; only one of them sends the whole on every link."""
    ranks = run(pool, (2, 2), faster=faster)
    assert re.fullmatch(
        rf"boundary 0->1: {faster} \(tried with 1024 KiB: sliced [\d.]+ ms, divided [\d.]+ ms one way\)",
        ranks[0].lines[0],
    )
    assert {*ranks[0].strategies.values()} == {faster}
    assert run(pool, (2, 2), is_sharded=True)[0].lines == []


@pytest.mark.parametrize(("sizes", "dp", "is_ring"), [((1, 2, 1), 1, True), ((1, 2), 2, False)])
def test_several_boundaries_and_replicas(pool: Pool, sizes: tuple[int, ...], dp: int, is_ring: bool) -> None:
    """One after another; the replicas that are not tried take the same."""
    ranks = run(pool, sizes, dp=dp, is_ring=is_ring, faster="rank0")
    assert len(ranks[0].lines) == len(sizes) - 1
    assert all(rank.strategies[name] == "rank0" for rank in ranks for name in rank.strategies if "2->0" not in name)


def test_small_and_large_tensors(pool: Pool) -> None:
    """A larger tensor is tried as well where the first size crosses fast; a small one is not tried at all."""
    large = run(pool, (1, 2), tensor_bytes=3 << 20, faster="sliced")
    assert "tried with 3072 KiB" in large[0].lines[0] and len(large[0].shared) == 2
    small = run(pool, (1, 2), tensor_bytes=1000)
    assert small[0].lines == [] and small[0].strategies == dict.fromkeys(small[0].strategies, "rank0")


WIDE = ["--seq-length", "600", "--max-position-embeddings", "600", "--train-iters", "2"]


@pytest.mark.full
def test_a_script_tries_and_says_so(scripts: Scripts) -> None:
    """300 KiB cross between the stages; whatever was faster, the losses are those of a run with a strategy by hand."""
    runs = scripts.train("1,2", WIDE)
    pattern = (
        r"boundary 0->1: (?:rank0|sliced) \(tried with (?:256|300) KiB: rank0 [\d.]+ ms, sliced [\d.]+ ms one way\)"
    )
    assert len(re.findall(pattern, runs[0].output)) == 1, runs[0].output
    by_hand = scripts.train("1,2", [*WIDE, "--vtp-transport-threshold", "1MiB"])
    assert "are fewer than 1048576, as --vtp-transport-threshold says" in " ".join(by_hand[0].output.split())
    assert "tried with" not in by_hand[0].output
    assert losses(runs) == losses(by_hand)


@pytest.mark.full
def test_a_script_tries_to_cut_between_equal_stages(scripts: Scripts) -> None:
    """Whatever was faster, the losses are those of ranks that send all they have to their partners."""
    extra = [*WIDE, "--vtp-force"]
    runs = scripts.train("2,2", extra)
    pattern = (
        r"boundary 0->1: (?:sliced|divided) \(tried with (?:256|300) KiB: sliced [\d.]+ ms, divided [\d.]+ ms one way\)"
    )
    assert len(re.findall(pattern, runs[0].output)) == 1, runs[0].output
    whole = scripts.train("2,2", [*extra, "--vtp-transport", "sliced"])
    assert "tried with" not in whole[0].output
    assert losses(runs) == losses(whole)
