"""Bad input through megatron.training: before any group exists, every rank ends by itself with the same line."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiproc.cases.script_cases import MODEL, arguments, assert_refused, launch, num_ranks, train
from tests.support.lines import error_line
from tests.support.pool import Pool

pytestmark = pytest.mark.needs("scripts_here")


@pytest.fixture(scope="module")
def pool(script_pool: Pool) -> Pool:
    """Workers for scripts."""
    return script_pool


def _refuse(
    pool: Pool, sizes: str, extra: list[str], *words: str, world_size: int | None = None, **kwargs: Any
) -> None:
    command = [*arguments(sizes), *extra]
    runs = launch(pool, world_size or num_ranks(sizes), {"arguments": command, **kwargs})
    assert_refused(runs, *words)
    assert not any("initializing torch distributed" in run.output for run in runs), "refused too late"


@pytest.mark.needs("padded_vocabulary", cases=("vocabulary",))
@pytest.mark.needs("loaded_logits", cases=("logits",))
@pytest.mark.parametrize(
    ("sizes", "extra", "words"),
    [
        pytest.param(
            "1,2",
            ["--num-attention-heads", "7", "--kv-channels", "8"],
            ["--num-attention-heads 7: stage 1 has TP 2, which does not divide it", "that divide this model: 1"],
            id="heads",
        ),
        pytest.param(
            # Stock trains one of the four layers, without a word.
            "1",
            ["--decoder-first-pipeline-num-layers", "1", "--decoder-last-pipeline-num-layers", "1"],
            ["--decoder-last-pipeline-num-layers 1; the only stage has all layers"],
            id="layers-of-one-stage",
        ),
        pytest.param(
            # Stock trains five layers.
            "1,2",
            ["--decoder-first-pipeline-num-layers", "5"],
            ["--decoder-first-pipeline-num-layers 5; -1 layers are left for the 1 other stages"],
            id="layers",
        ),
        pytest.param("1,2", ["--ffn-hidden-size", "77"], ["--ffn-hidden-size 77: stage 1", "model: 1"], id="ffn"),
        pytest.param(
            "2,3",
            ["--group-query-attention", "--num-query-groups", "4"],
            ["--num-query-groups 4: stage 1 has TP 3", "neither a divisor nor a multiple of it", "model: 1, 2, 4, 12"],
            id="query-groups",
        ),
        pytest.param(
            "1,2", ["--padded-vocab-size", "61"], ["--padded-vocab-size 61: stage 1", "model: 1"], id="vocabulary"
        ),
        pytest.param(
            "1,2",
            ["--pipeline-model-parallel-size", "3"],
            ["--pipeline-model-parallel-size 3 contradicts --vtp-size-list 1,2", "leave it out"],
            id="stages",
        ),
        pytest.param(
            "2,1",
            ["--tensor-model-parallel-size", "4"],
            ["--tensor-model-parallel-size 4 contradicts --vtp-size-list 2,1", "the largest size of the list, 2"],
            id="tensor-size",
        ),
        pytest.param(
            "2,1",
            ["--tensor-model-parallel-size", "1"],
            ["--tensor-model-parallel-size 1 contradicts --vtp-size-list 2,1"],
            id="tensor-size-of-a-small-stage",
        ),
        pytest.param(
            "1,5",
            ["--sequence-parallel", "--num-attention-heads", "10", "--ffn-hidden-size", "190"],
            ["--seq-length 12 with --sequence-parallel: stage 1 has TP 5", "divide this model: 1, 2"],
            id="sequence",
        ),
        pytest.param("1,2", ["--vtp-sites", "edge"], ["'edge' names 1 sites", "2 stages"], id="sites"),
        pytest.param("1,2", ["--vtp-transport", "tcp"], ["transport 'tcp' is unknown"], id="transport"),
        pytest.param("1,2", ["--tp-comm-overlap"], ["--tp-comm-overlap with --vtp-size-list 1,2"], id="refused-option"),
        pytest.param("1,2", ["--logits-load-dir", "x"], ["--logits-load-dir x with --vtp-size-list 1,2"], id="logits"),
        pytest.param(
            "1,2",
            ["--num-attention-heads", "7", "--kv-channels", "8", "--tp-comm-overlap"],
            ["--tp-comm-overlap", " | --num-attention-heads 7"],
            id="two-at-once",
        ),
        pytest.param(
            "1,2",
            ["--vtp-data-parallel-size", "2"],
            ["--vtp-data-parallel-size 2; this run has"],
            id="replicas",
        ),
        pytest.param("1,2", ["--vtp-device", "cuda"], ["platform cuda: no such device here"], id="device"),
        pytest.param("1,2", ["--vtp-size-list", "1,two"], ["'two', which is not a positive whole number"], id="list"),
    ],
)
def test_sizes_and_options_are_refused(pool: Pool, sizes: str, extra: list[str], words: list[str]) -> None:
    _refuse(pool, sizes, extra, *words)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        pytest.param(
            ["--seq-length", "14"],
            ["--seq-length 14: stage 1 has CP 2", "use 12 or 16"],
            id="sequence",
        ),
        pytest.param(
            ["--context-parallel-size", "3"],
            ["--context-parallel-size 3 contradicts --vtp-cp-list 1,2", "the largest size of the list, 2"],
            id="size",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["--vtp-transport", "rank0"],
            ["boundary 0->1 joins context-parallel sizes 1 and 2", "use --vtp-transport sliced"],
            id="rank0",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["--vtp-sites", "edge,cloud"],
            ["it crosses sites", "--vtp-transport sliced"],
            id="sites",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["--use-tp-pp-dp-mapping"],
            ["rank order tp-cp-pp-dp needs equal cp and dp sizes on all stages, got cp 1,2"],
            id="order",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["--vtp-cp-list", "1,2,1"],
            ["vtp_cp_list 1,2,1 has 3 entries, the size list has 2 stages"],
            id="length",
            marks=pytest.mark.full,
        ),
    ],
)
def test_context_parallel_lists_are_refused(pool: Pool, extra: list[str], words: list[str]) -> None:
    _refuse(pool, "1,1", ["--vtp-cp-list", "1,2", *extra], *words, world_size=3)


@pytest.mark.full
def test_context_parallel_list_without_stages_is_refused(pool: Pool) -> None:
    command = [*MODEL, "--train-iters", "1", "--vtp-device", "cpu", "--vtp-cp-list", "1,2"]
    runs = launch(pool, 2, {"arguments": command})
    assert_refused(runs, "--vtp-cp-list 1,2 needs stages: give --vtp-size-list, such as 1,1")


def test_world_that_the_list_does_not_divide_is_refused(pool: Pool) -> None:
    _refuse(pool, "1,2", [], "4", "1,2", world_size=4)


@pytest.mark.parametrize(
    ("by_rank", "words"),
    [
        pytest.param(
            {2: ["--vtp-size-list", "2,1"]}, ["vtp_size_list is 1,2 on rank 0, 1 and 2,1 on rank 2"], id="list"
        ),
        pytest.param(
            {1: ["--vtp-size-list", "1,2,3"]},
            ["vtp_size_list is 1,2 on rank 0, 2 and 1,2,3 on rank 1"],
            id="list-that-fails-alone",
        ),
        pytest.param({1: ["--lr", "0.5"]}, ["--lr is 0.003 on rank 0, 2 and 0.5 on rank 1"], id="other-argument"),
        pytest.param({0: ["--tp-comm-overlap"]}, ["rank 0: --tp-comm-overlap"], id="rank-0-alone"),
    ],
)
def test_ranks_that_were_started_differently_are_refused(
    pool: Pool, by_rank: dict[int, list[str]], words: list[str]
) -> None:
    # With `run` a rank whose own flags are certainly wrong leaves before it could meet the others.
    _refuse(pool, "1,2", [], *words, by_rank=by_rank, how="apply" if "1,2,3" in str(by_rank) else "run")


def test_megatron_check_that_fails_on_some_ranks_only(pool: Pool) -> None:
    """Tensor parallelism needs an environment variable on old devices: only the ranks of the wide stage complain."""
    train(pool, "1,1", hooks=["old_device"])
    _refuse(pool, "1,2", [], "AssertionError", "CUDA_DEVICE_MAX_CONNECTIONS", hooks=["old_device"])


def test_bare_assertion_of_megatron_is_named(pool: Pool) -> None:
    """Saving without an interval meets an assertion without a text."""
    _refuse(pool, "1,2", ["--save", "nowhere"], "AssertionError at ", "assert ", "save_interval")


def test_list_without_a_stage_size_that_megatron_refuses_by_leaving(pool: Pool) -> None:
    """An argument that does not exist ends argparse on every rank; it prints its own line."""
    runs = launch(pool, 3, {"arguments": [*arguments("1,2"), "--no-such-option"]})
    assert [run.exit_code for run in runs] == [2, 2, 2]
    assert all("unrecognized arguments: --no-such-option" in run.output for run in runs)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"vtp_size_list": [2, 1]}, ["apply() was given size_list=2,1, the command line says 1,2"]),
        ({"timeout_s": 44.0}, ["apply() was given timeout_s=44.0, the command line says 33.0"]),
    ],
)
def test_apply_and_flags_that_disagree_are_refused(pool: Pool, kwargs: dict[str, Any], words: list[str]) -> None:
    _refuse(pool, "1,2", ["--vtp-timeout-s", "33"], *words, how="apply", apply_kwargs={"device": "cpu", **kwargs})


@pytest.mark.parametrize("world", ["1,2", pytest.param("2,3", marks=pytest.mark.full)])
def test_rank_that_fails_in_a_step_ends_all(pool: Pool, world: str) -> None:
    """The rank with the error shows its traceback; the others name it."""
    runs = launch(pool, num_ranks(world), {"arguments": arguments(world), "hooks": ["fail_on_rank_1"]})
    assert all(run.exit_code not in (0, None) for run in runs), [(r.exit_code, r.output[-2000:]) for r in runs]
    assert "RuntimeError: the disk is on fire" in runs[1].output
    for rank, run in enumerate(runs):
        line = error_line(run.output)
        assert f"[vtp rank {rank}] error: " in line
        assert rank == 1 or "rank 1 failed: RuntimeError: the disk is on fire" in line, line
