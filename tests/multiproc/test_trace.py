"""``--vtp-trace``: what ranks note of their steps."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.multiproc.script_cases import arguments, assert_refused, launch, losses, num_ranks, train
from tests.pool import Pool
from vtp_plugin.schedule.order.actions import parse_action
from vtp_plugin.trace.causes import Cause
from vtp_plugin.trace.files import RankFile, read_files

# The global batch of 8 is 4 microbatches of 2 samples.
_NUM_MICROBATCHES = 4
_NOTED = {Cause.FORWARD, Cause.BACKWARD, Cause.PACK, Cause.SEND, Cause.WAIT, Cause.GRADIENTS, Cause.OPTIMIZER}


def _check(files: list[RankFile], *, num_chunks: tuple[int, ...], has_actions: bool) -> None:
    """Every rank has noted two whole steps, one right after the other, and what it did in them."""
    for file in files:
        assert [step.number for step in file.steps] == [2, 3]
        assert all(before.end_s == after.start_s for before, after in pairwise(file.steps))
        assert len(file.clocks) == 2 and all(0 <= error_s < 1 for _, _, error_s in file.clocks)
        for step in file.steps:
            assert all(step.start_s <= one.start_s <= one.end_s <= step.end_s for one in step.stretches)
            counts = Counter(one.cause for one in step.stretches)
            num_computes = num_chunks[file.owner.stage] * _NUM_MICROBATCHES
            assert counts[Cause.FORWARD] == counts[Cause.BACKWARD] == num_computes
            assert counts.keys() >= _NOTED and counts[Cause.OPTIMIZER] == 1, counts
            names = [one.name for one in step.stretches if one.cause in (Cause.FORWARD, Cause.BACKWARD)]
            if has_actions:
                order = files[0].plans[step.plan].schedule.orders[file.owner.worker]
                assert names == [str(action) for action in order if action.op.is_compute]
                assert {parse_action(name).microbatch for name in names} == set(range(_NUM_MICROBATCHES))
            else:
                assert set(names) == {""}
    # What one side sends, the other side waits for, under one name.
    for number in (0, 1):
        of_step = [step.stretches for step in (file.steps[number] for file in files)]
        sent = {one.name for stretches in of_step for one in stretches if one.cause is Cause.SEND}
        waited = {one.name for stretches in of_step for one in stretches if one.cause is Cause.WAIT}
        assert waited == sent and len(sent) >= 2 * _NUM_MICROBATCHES


@pytest.mark.parametrize("schedule", ["stock", pytest.param("planned", marks=pytest.mark.full)])
def test_what_each_rank_did_is_written(script_pool: Pool, tmp_path: Path, schedule: str) -> None:
    """With Megatron's schedules and with planned ones; the run computes what it computes without a trace."""
    extra = ["--vtp-schedule", schedule]
    runs = train(script_pool, "1,2", [*extra, "--vtp-trace", str(tmp_path / "a"), "--vtp-trace-steps", "2-3"])
    _check(read_files(tmp_path / "a"), num_chunks=(1, 1), has_actions=schedule == "planned")
    assert losses(runs) == losses(train(script_pool, "1,2", extra))


def test_a_u_is_traced_to_its_end(script_pool: Pool, tmp_path: Path) -> None:
    """Its last step is the run's last, whose end nobody tells."""
    extra = ["--layerwise-disaggregated-training", "--num-layer-list", "1,2,1", "--train-iters", "3"]
    train(script_pool, "1,1", [*extra, "--vtp-trace", str(tmp_path)])
    files = read_files(tmp_path)
    assert [len(file.clocks) for file in files] == [1, 1]
    for file in files:
        file.clocks *= 2
    _check(files, num_chunks=(2, 1), has_actions=True)


@pytest.mark.parametrize(
    ("sizes", "folder", "words"),
    [
        ("1,1", "trace", ["--vtp-trace", "nothing crosses over the plugin's channels", "give --vtp-force"]),
        pytest.param("1,2", "file/trace", ["--vtp-trace", "Not a directory"], marks=pytest.mark.full),
    ],
)
def test_refused(script_pool: Pool, tmp_path: Path, sizes: str, folder: str, words: list[str]) -> None:
    (tmp_path / "file").write_text("")
    extra = ["--vtp-trace", str(tmp_path / folder)]
    assert_refused(launch(script_pool, num_ranks(sizes), {"arguments": arguments(sizes, extra=extra)}), *words)
