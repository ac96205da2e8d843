"""``--vtp-trace``: what ranks note of their steps."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.multiproc.cases.script_cases import Scripts, arguments, assert_refused, losses, num_ranks
from vtp_plugin.plan.schedule.order.actions import parse_action
from vtp_plugin.trace.compare_steps import differences, explained, join_files, slower_by_itself
from vtp_plugin.trace.stretches import COMPUTES, Cause, RankFile, read_files

pytestmark = pytest.mark.needs("scripts_here")

# The global batch of 8 is 4 microbatches of 2 samples.
_NUM_MICROBATCHES = 4
FORWARD_S, FORWARD_DELAY_S, PACK_DELAY_S = (0.04, 0.03, 0.02)  # of multiproc/hooks/delays.py, which imports Megatron
_NOTED = {Cause.FORWARD, Cause.BACKWARD, Cause.PACK, Cause.SEND, Cause.WAIT, Cause.GRADIENTS, Cause.OPTIMIZER}


def _check(
    files: list[RankFile], *, num_chunks: tuple[int, ...], has_actions: bool, loss_stage: int, is_split: bool = False
) -> None:
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
            # The first stage has nothing to do between the parts of a backward.
            assert (counts[Cause.WEIGHTS] > 0) is (is_split and file.owner.stage > 0)
            assert counts[Cause.LOSS] == (_NUM_MICROBATCHES if file.owner.stage == loss_stage else 0)
            assert counts.keys() >= _NOTED and counts[Cause.OPTIMIZER] == 1, counts
            names = [one.name for one in step.stretches if one.cause in COMPUTES]
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


@pytest.mark.parametrize("schedule", ["stock", pytest.param("planned", marks=pytest.mark.full), "split"])
def test_what_each_rank_did_is_written(scripts: Scripts, tmp_path: Path, schedule: str) -> None:
    """With Megatron's schedules and with planned ones; the run computes what it computes without a trace."""
    is_split = schedule == "split"
    extra = ["--vtp-schedule", "planned", "--vtp-split-backward"] if is_split else ["--vtp-schedule", schedule]
    runs = scripts.train("1,2", [*extra, "--vtp-trace", str(tmp_path / "a"), "--vtp-trace-steps", "2-3"])
    files = read_files(tmp_path / "a")
    _check(files, num_chunks=(1, 1), has_actions=schedule != "stock", loss_stage=1, is_split=is_split)
    assert losses(runs) == losses(scripts.train("1,2", extra))


def test_a_u_is_traced_to_its_end(scripts: Scripts, tmp_path: Path) -> None:
    """Its last step is the run's last, whose end nobody tells."""
    extra = ["--layerwise-disaggregated-training", "--num-layer-list", "1,2,1", "--train-iters", "3"]
    scripts.train("1,1", [*extra, "--vtp-trace", str(tmp_path)])
    files = read_files(tmp_path)
    assert [len(file.clocks) for file in files] == [1, 1]
    for file in files:
        file.clocks *= 2
    _check(files, num_chunks=(2, 1), has_actions=True, loss_stage=0)


def test_two_planted_delays_are_named(scripts: Scripts, tmp_path: Path) -> None:
    """In a U that has measured its costs before: forwards of the cloud, and what the edge packs, take longer."""
    extra = ["--layerwise-disaggregated-training", "--num-layer-list", "1,2,1", "--vtp-replan-share", "inf"]
    extra += ["--log-interval", "100", "--train-iters", "12", "--vtp-trace", str(tmp_path), "--vtp-trace-steps", "8-11"]
    scripts.train("1,1", extra, hooks=["plant_delays"])
    steps = join_files(read_files(tmp_path))
    assert [step.number for step in steps] == [8, 9, 10, 11] and not steps[0].are_measured
    assert min(explained(steps).values()) > 0.95, explained(steps)
    named = slower_by_itself(steps, differences(steps))
    first, second = named[:2]
    assert {(one.rank, one.cause) for one in (first, second)} == {(1, Cause.FORWARD), (0, Cause.PACK)}, named
    # Four forwards of the cloud; four activations and four gradients that the edge sends.
    for cause, least_s in ((Cause.FORWARD, 4 * FORWARD_DELAY_S), (Cause.PACK, 8 * PACK_DELAY_S)):
        (one,) = [one for one in (first, second) if one.cause is cause]
        assert 0.8 * least_s < one.more_s < 2.0 * least_s, named


@pytest.mark.full
@pytest.mark.parametrize("slow", [1, 3])
def test_timing_names_the_slow_rank(scripts: Scripts, tmp_path: Path, slow: int) -> None:
    """To the log, TensorBoard and W&B; the run computes what it computes without it.

    Its peer is not named for its wait where the loss is summed over replicas in each microbatch, as on 0.12.
    """
    extra = ["--vtp-force", "--log-interval", "2"]
    told = ["--vtp-timing", "--tensorboard-dir", str(tmp_path)]
    runs = scripts.train("1,1", [*extra, *told], dp=2, hooks=[f"slow_rank_{slow}"])
    output = runs[0].output
    lines = re.findall(r"stage (\d): compute ([\d.]+) ms \(most: ([\d.]+), rank (\d)\), exposed communication", output)
    assert [line[0] for line in lines] == ["0", "1"] * 2
    computes_ms = [(float(mean), float(most)) for _, mean, most, _ in lines]
    assert all(4e3 * 0.9 * FORWARD_S < mean <= most for mean, most in computes_ms)
    stage = slow // 2
    assert [line[3] for line in lines[stage::2]] == [str(slow)] * 2, output
    named = re.findall(r"rank (\d) computes [\d.]+ times as long as the other ranks of stage (\d)", output)
    assert named == [(str(slow), str(stage))] * 2
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("vtp timing/")]
    assert len(tags) == 2 * 3 * 2
    bubble = events.Scalars("vtp timing/stage 0 bubble, most (ms)")
    assert [one.step for one in bubble] == [2, 4] and all(one.value > 0 for one in bubble)
    logged = [(iteration, values) for iteration, values in runs[3].facts["wandb"] if tags[0] in values]
    assert [iteration for iteration, _ in logged] == [2, 4] and logged[0][1].keys() == {*tags}
    assert losses(runs) == losses(scripts.train("1,1", extra, dp=2))


@pytest.mark.parametrize(
    ("sizes", "folder", "words"),
    [
        ("1,1", "trace", ["--vtp-trace", "nothing crosses over the plugin's channels", "give --vtp-force"]),
        pytest.param("1,2", "file/trace", ["--vtp-trace", "Not a directory"], marks=pytest.mark.full),
    ],
)
def test_refused(scripts: Scripts, tmp_path: Path, sizes: str, folder: str, words: list[str]) -> None:
    (tmp_path / "file").write_text("")
    extra = ["--vtp-trace", str(tmp_path / folder)]
    assert_refused(scripts.launch(num_ranks(sizes), {"arguments": arguments(sizes, extra=extra)}), *words)
