"""Options that the table calls supported, and that no other test turns on: unequal lists train as the uniform ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiproc.script_cases import assert_same_training, train, uniform
from tests.pool import Pool


@pytest.fixture(scope="module")
def pool(script_pool: Pool) -> Pool:
    """Workers for scripts."""
    return script_pool


INTERLEAVED_3 = ["--num-virtual-stages-per-pipeline-rank", "2", "--num-layers", "6", "--global-batch-size", "12"]
OVERLAPPED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
INTERLEAVED_2 = ["--num-virtual-stages-per-pipeline-rank", "2"]


def _case(name: str, sizes: str, *extra: str, dp: int = 1, full: bool = True) -> Any:
    return pytest.param(sizes, list(extra), dp, id=f"{name}-{sizes}", marks=[pytest.mark.full] if full else [])


@pytest.mark.parametrize(
    ("sizes", "extra", "dp"),
    [
        _case(
            "observed",
            "1,2",
            *("--log-params-norm", "--timing-log-level", "2", "--rerun-mode", "validate_results", "--eod-mask-loss"),
            *("--check-weight-hash-across-dp-replicas-interval", "2"),
            full=False,
        ),
        _case(
            "uneven-layers",
            "1,2,1",
            "--decoder-first-pipeline-num-layers",
            "1",
            "--decoder-last-pipeline-num-layers",
            "2",
        ),
        _case("layout", "2,1", "--pipeline-model-parallel-layout", "Et|tttL"),
        _case(
            "accounted-ends",
            "1,2,1",
            *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
        ),
        _case("group-size", "2,1,1", *INTERLEAVED_3, "--microbatch-group-size-per-virtual-pipeline-stage", "3"),
        _case("warmup-flush", "2,1,1", *INTERLEAVED_3, "--overlap-p2p-communication-warmup-flush"),
        _case(
            "unaligned", "1,2", *INTERLEAVED_2, *OVERLAPPED, "--no-align-grad-reduce", "--no-align-param-gather", dp=2
        ),
        _case("selective-recompute", "1,2", "--recompute-granularity", "selective"),
        _case("ramp-up", "1,2", "--rampup-batch-size", "4", "4", "16", "--global-batch-size", "8"),
    ],
)
def test_supported_option(pool: Pool, sizes: str, extra: list[str], dp: int) -> None:
    assert_same_training(train(pool, sizes, extra, dp=dp), train(pool, uniform(sizes), extra, dp=dp))


@pytest.mark.full
def test_dropout_repeats_itself(pool: Pool) -> None:
    """Masks depend on the sizes, so a run with dropout is compared with itself."""
    extra = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
    first, second = (train(pool, "1,2", extra) for _ in range(2))
    assert_same_training(first, second, tolerance=0.0)
    with pytest.raises(AssertionError):
        assert_same_training(first, train(pool, "1,2"))


@pytest.mark.parametrize("transport", ["auto", "rank0"])
def test_uniform_list_forced_on(pool: Pool, transport: str) -> None:
    extra = ["--vtp-force", "--vtp-transport", transport]
    assert_same_training(train(pool, "2,2", extra), train(pool, "2,2"), tolerance=0.0)


def test_sequence_parallel_with_equal_stages(pool: Pool) -> None:
    """Transfers carry every rank's own rows; sequence parallelism only changes the order of sums."""
    extra = ["--sequence-parallel"]
    forced = train(pool, "2,2", [*extra, "--vtp-force"])
    assert_same_training(forced, train(pool, "2,2", extra), tolerance=0.0)
    assert_same_training(forced, train(pool, "2,2"))


@pytest.mark.parametrize(
    ("sizes", "extra"),
    [
        pytest.param("1,2", ["--use-distributed-optimizer"], id="1,2"),
        pytest.param("2,3", ["--vtp-transport", "rank0"], id="2,3", marks=pytest.mark.full),
        pytest.param("2,4", [], id="2,4", marks=pytest.mark.full),
        pytest.param("1,2,1,2", ["--num-virtual-stages-per-pipeline-rank", "1"], id="1,2,1,2", marks=pytest.mark.full),
    ],
)
def test_sequence_parallel_with_unequal_stages(pool: Pool, sizes: str, extra: list[str]) -> None:
    assert_same_training(train(pool, sizes, [*extra, "--sequence-parallel"]), train(pool, uniform(sizes), extra))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--vtp-sites", "edge,cloud"], "boundary 0->1: rank0 (crosses from site edge to site cloud)"),
        (["--vtp-transport", "sliced"], "boundary 0->1: sliced (asked for)"),
    ],
)
def test_the_way_across_is_printed_with_its_reason(pool: Pool, flags: list[str], line: str) -> None:
    runs = train(pool, "1,2", [*flags, "--train-iters", "1"])
    assert line in runs[0].output
