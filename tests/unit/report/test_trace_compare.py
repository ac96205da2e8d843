"""A run beside its plan: planted delays are found whoever has to wait for them, and no time counts twice."""

from __future__ import annotations

import json
import random
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.support.made_traces import U_COSTS, U, files_of, schedule_of, slowed, write
from vtp_plugin.cli import main
from vtp_plugin.plan.schedule.cost.costs import uniform_costs
from vtp_plugin.plan.schedule.order.placement import plain_placement
from vtp_plugin.runtime.step.step_times import StepSums
from vtp_plugin.trace.compare_steps import (
    TracedStep,
    crossings_of,
    differences,
    explained,
    join_files,
    measured_costs,
    slower_by_itself,
)
from vtp_plugin.trace.explain import TimeShare, arrivals, explain, totals
from vtp_plugin.trace.stretches import Cause, RankFile, Stretch
from vtp_plugin.trace.sums import stage_times
from vtp_plugin.util.typed_json import read_typed


def named(steps: list[TracedStep]) -> list[tuple[int, Cause]]:
    """What took longer by itself."""
    return [(one.rank, one.cause) for one in slower_by_itself(steps, differences(steps))]


def share(rank: int, worker: int, name: str, *noted: tuple[Cause, float, float], end_s: float = 10.0) -> TimeShare:
    """Of a step that ends then, with what was noted of one message."""
    stretches = tuple(Stretch(cause=cause, name=name, start_s=a, end_s=b) for cause, a, b in noted)
    return TimeShare(rank=rank, worker=worker, start_s=0.0, end_s=end_s, stretches=stretches)


def test_a_run_as_planned_differs_nowhere() -> None:
    schedule = schedule_of(U, U_COSTS)
    steps = join_files(files_of(schedule, U_COSTS, U_COSTS))
    assert max(abs(one.more_s) for one in differences(steps)) < 1e-9 and named(steps) == []
    assert explained(steps) == pytest.approx(dict.fromkeys(range(3), 1.0))


def lengthen(files: list[RankFile], number: int, cause: Cause, *, by_s: float = 0.5) -> None:
    """Let something follow one step of all ranks before its end; later steps stay where they are."""
    for file in files:
        step = file.steps[number]
        more = Stretch(cause=cause, name="", start_s=step.end_s, end_s=step.end_s + by_s)
        file.steps[number] = replace(step, end_s=more.end_s, stretches=(*step.stretches, more))


@pytest.mark.parametrize("cause", [Cause.SAVE, Cause.EVALUATE, Cause.LOG])
def test_what_the_flags_ask_for_is_not_slower_than_planned(
    cause: Cause, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint after the only step, an evaluation, a line of the log: one line of the end has their time."""
    files = files_of(schedule_of(U, U_COSTS), U_COSTS, U_COSTS)
    lengthen(files, -1, cause)
    steps = join_files(files)
    assert named(steps) == []
    assert [one.more_s for one in differences(steps) if one.cause is cause] == pytest.approx([0.25] * 3)
    for file in files:
        del file.steps[0]
    write(tmp_path, files)
    main(["trace", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines[1:] if f"{cause} 500" in line or f"  {cause}" in line] == lines[-2:-1]
    assert lines[0].startswith(
        f"all traced steps were disturbed: step 2 ({cause} 500 ms on rank " if cause is not Cause.LOG else "3 ranks, "
    )
    assert lines[-2:] == [
        f"in no plan, since flags ask for it, in a step on average: {cause} 500.0 ms (rank 0)",
        "nothing was slow on its own: all that took longer than planned waited, or is below 2 % of a step",
    ]


def test_a_step_with_a_save_counts_for_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said first, whatever it takes; medians, averages and the picture are those of the other steps."""
    told = []
    for disturbed in (False, True):
        files = files_of(schedule_of(U, U_COSTS), U_COSTS, U_COSTS, num_steps=3)
        if disturbed:
            lengthen(files, 2, Cause.SAVE, by_s=27.329)
            lengthen(files, 2, Cause.EVALUATE)
            lengthen(files, 0, Cause.SAVE, by_s=0.001)  # which nobody would see
        write(tmp_path, files)
        main(["trace", str(tmp_path), "--out", str(tmp_path / "step.svg")])
        told.append(capsys.readouterr().out.splitlines())
        main(["trace", str(tmp_path), "--json"])
        found = json.loads(capsys.readouterr().out)
    step = r"step 3 \(save 27,330 ms on rank \d\), step 3 \(evaluate 500 ms on rank \d\)"
    assert re.fullmatch(f"disturbed: {step}; what follows leaves such steps out", told[1][0])
    medians = [lines[number].split(",")[1:] for number, lines in enumerate(told)]
    assert medians[0] == [" steps 1 to 3: a step takes 675.0 ms (median)", medians[1][-1]]
    assert medians[1][0] == " steps 1 to 2: a step takes 675.5 ms (median)" and "save" not in "".join(told[1][1:-1])
    assert "step 2 on stages" in (tmp_path / "step.svg").read_text()
    assert found["steps"] == [1, 2, 3] and found["step_ms"] < 1e3
    assert [(one["step"], one["cause"], round(one["ms"])) for one in found["disturbed"]] == [
        (3, "save", 27329),
        (3, "evaluate", 500),
    ]


def test_costs_of_a_trace_are_those_of_steps_without_a_save() -> None:
    """Whose forwards may have waited for it."""
    placement = plain_placement(3)
    quick, slow = (uniform_costs(placement, forward=ms, backward=25.0) for ms in (10.0, 40.0))
    schedule = schedule_of(placement, None)
    files = files_of(schedule, None, quick, num_steps=2)
    for file, other in zip(files, files_of(schedule, None, slow, num_steps=5), strict=True):
        file.steps += other.steps[2:]
    for number in (2, 3, 4):
        lengthen(files, number, Cause.SAVE)
    assert join_files(files)[0].costs.forward == pytest.approx(quick.forward)


@pytest.mark.parametrize("apart_s", [(), (0.0, 5.0, -700.0)])
def test_two_planted_delays_are_named(apart_s: tuple[float, ...]) -> None:
    """A stage that computes slower and a link that is slower, in one run, on clocks that are seconds apart."""
    schedule = schedule_of(U, U_COSTS)
    ran = slowed(U_COSTS, forward={1: 15.0}, latency={1: 12.0})
    steps = join_files(files_of(schedule, U_COSTS, ran, apart_s=apart_s))
    found = differences(steps)
    own = slower_by_itself(steps, found)
    got = [(one.rank, one.cause, one.where) for one in own][:2]
    assert got == [(1, Cause.FORWARD, ""), (2, Cause.MESSAGE, "boundary 1->2, forward")]
    assert own[0].more_s == pytest.approx(8 * 0.015) and own[1].more_s == pytest.approx(7 * 0.012)
    # The other direction of the same link, if anybody waited for it, and nothing else.
    assert all(one.where.startswith("boundary 1->2") for one in own[1:])
    # In the table others have larger differences, which follow from these.
    assert {one.cause for one in found if one.more_s > 0.02} == {Cause.FORWARD, Cause.BUBBLE, Cause.MESSAGE}


def test_a_control_without_clocks_is_wrong() -> None:
    """Clocks that are apart, and nobody says so: the waits of a run as planned count for something else."""
    schedule = schedule_of(U, U_COSTS)
    files = files_of(schedule, U_COSTS, U_COSTS, apart_s=(0.0, 0.05, -0.05))
    for file in files:
        file.clocks = [(0.0, 0.0, 0.0)]
    found = [one for one in differences(join_files(files)) if abs(one.more_s) > 0.02]
    assert {one.cause for one in found} == {Cause.BUBBLE, Cause.MESSAGE}


@pytest.mark.parametrize("seed", range(5))
def test_what_all_ranks_do_adds_up(seed: int) -> None:
    """Of stretches inside one another and beside one another: each instant of a step has one cause."""
    drawn = random.Random(seed)
    shares = []
    for rank in range(3):
        stretches = []
        for _ in range(40):
            start_s = drawn.uniform(-0.1, 1.0)
            name = f"boundary 0->1, forward, microbatch {drawn.randrange(4)}"
            end_s = start_s + drawn.choice((0.0, 0.01, 0.3))
            cause = drawn.choice([cause for cause in Cause if cause not in (Cause.BUBBLE, Cause.MESSAGE, Cause.OTHER)])
            stretches.append(Stretch(cause=cause, name=name, start_s=start_s, end_s=end_s))
        shares.append(TimeShare(rank=rank, worker=rank // 2, start_s=0.0, end_s=1.0, stretches=tuple(stretches)))
    for parts in explain(shares).values():
        assert parts[0].start_s == 0.0 and parts[-1].end_s == 1.0
        assert all(a.end_s == b.start_s and a.length_s > 0 for a, b in zip(parts, parts[1:], strict=False))
        assert sum(totals(parts).values()) == pytest.approx(1.0)


def test_a_wait_counts_by_what_the_other_side_did() -> None:
    """One stage of two ranks waits for the other: the leader for the message, then both for each other."""
    name = "boundary 0->1, forward, microbatch 0"
    found = explain(
        [
            share(0, 0, name, (Cause.SEND, 4.0, 4.5), (Cause.WAIT, 8.0, 9.0)),
            share(1, 1, name, (Cause.WAIT, 1.0, 6.0), (Cause.FINISH, 6.0, 7.0)),
            share(2, 1, name, (Cause.FINISH, 2.0, 7.0)),
        ]
    )
    seen = {rank: [(s.cause, s.length_s) for s in parts if s.cause is not Cause.OTHER] for rank, parts in found.items()}
    assert seen == {
        0: [(Cause.SEND, 0.5), (Cause.MESSAGE, 1.0)],
        1: [(Cause.BUBBLE, 3.0), (Cause.MESSAGE, 2.0), (Cause.FINISH, 1.0)],
        2: [(Cause.BUBBLE, 2.0), (Cause.MESSAGE, 2.0), (Cause.FINISH, 1.0)],
    }


def test_parts_of_a_message_come_from_one_rank_after_another() -> None:
    """Those who sent them wait, too, until they have left: to them nothing comes."""
    name = "boundary 0->1, replica dp 0 cp 0, forward, microbatch 0"
    times = {0: (Cause.SEND, 4.0, 4.5), 1: (Cause.SEND, 6.0, 6.5), 2: (Cause.WAIT, 1.0, 5.0)}
    shares = [share(rank, rank // 2, name, one, (Cause.WAIT, 9.0, 9.5)) for rank, one in times.items()]
    found = [(own.rank, wait.start_s, *sent) for own, wait, *sent in arrivals(shares)]
    assert found == [(2, 1.0, 0, 4.0), (2, 9.0, 1, 6.0)]
    assert [*crossings_of(shares)] == [(2, name, 1.0)]
    waits = [(one.cause, one.length_s) for one in explain(shares)[2] if one.cause is not Cause.OTHER]
    assert waits == [(Cause.BUBBLE, 3.0), (Cause.MESSAGE, 1.0), (Cause.MESSAGE, 0.5)]


def test_costs_are_taken_from_the_trace() -> None:
    """Of a run that was planned for none: its own plan is then as long as the run."""
    placement = plain_placement(3)
    ran = replace(uniform_costs(placement, forward=10.0, backward=25.0), forward=(10.0, 30.0, 10.0))
    schedule = schedule_of(placement, None)
    files = files_of(schedule, None, ran)
    for file in files:
        for number, step in enumerate(file.steps):
            # Megatron's own schedules do not say which microbatch they compute.
            nameless = [
                replace(s, name="") if s.cause in (Cause.FORWARD, Cause.BACKWARD) else s for s in step.stretches
            ]
            file.steps[number] = replace(step, stretches=tuple(nameless))
    steps = join_files(files)
    assert all(step.are_measured for step in steps)
    assert steps[0].costs.forward == pytest.approx(ran.forward)
    assert steps[0].costs.backward == pytest.approx(ran.backward)
    assert max(abs(one.more_s) for one in differences(steps)) < 1e-9
    # The names of what crosses in a run say the boundary.
    name, times = "boundary 0->1, forward, microbatch 3", ((0, Cause.SEND, 0.48), (1, Cause.WAIT, 0.1))
    shares = [share(rank, rank, name, (cause, start_s, 0.5), end_s=1.0) for rank, cause, start_s in times]
    (latency,) = measured_costs(plain_placement(2), [shares]).latency
    assert latency == pytest.approx(20.0)


def test_the_command_joins_names_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the same run as text, as JSON, and as a picture in the format of Perfetto and Chrome."""
    schedule = schedule_of(U, U_COSTS)
    files = files_of(schedule, U_COSTS, slowed(U_COSTS, forward={1: 15.0}), apart_s=(0.0, 3.0, -7.0))
    write(tmp_path, files)
    out = tmp_path / "joined.json"
    main(["trace", str(tmp_path), "--out", str(out)])
    text = capsys.readouterr().out
    assert "3 ranks, steps 1 to 2:" in text
    assert "\nslow on its own (not because it waited), more than planned in a step: rank 1 forward" in text
    assert "clocks are compared to within 1.000 ms" in text and "causes explain 100.0 % of the steps" in text
    assert len([line for line in text.splitlines() if line.startswith("   ")]) == 10
    main(["trace", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["out"]) == ([1, 2], None) and len(found["differences"]) == 10
    assert [(row["rank"], row["cause"]) for row in found["slower_by_itself"]] == [(1, "forward")]
    picture = tmp_path / "step.svg"
    main(["trace", str(tmp_path), "--out", str(picture)])
    names = [one.text or "" for one in ET.fromstring(picture.read_text()).iter() if one.tag.endswith("title")]
    assert len([name for name in names if name.startswith("forward 3F7: ")]) == 2  # of the run and of the plan
    assert names[0] == "step 2 on stages of 1,1,1 ranks"
    ticks = [one.text or "" for one in ET.fromstring(picture.read_text()).iter() if one.get("class") == "tick"]
    assert [tick for tick in ticks if tick][:3] in (["0", "50", "100"], ["0", "100", "200"])
    events = json.loads(out.read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    # Behind the numbers of the rows, or Perfetto takes two of them for one.
    assert processes == {3: "run", 4: "plan"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {(pid, rank): f"rank {rank} (stage {rank})" for pid in (3, 4) for rank in range(3)}
    boxes = [e for e in events if e["ph"] == "X"]
    for pid in (3, 4):
        forwards = [e["name"] for e in boxes if e["pid"] == pid and e["cat"] == "forward"]
        assert len(forwards) == 2 * 4 * 8 and {"0F0", "3F7"} <= {*forwards}
    # On one clock: the first step begins at 0 on all ranks, and no arrow flies back in time.
    starts = [e["ts"] for e in boxes if e["name"] == "step 1"]
    assert starts == pytest.approx([0.0] * 3, abs=1.0)
    arrows = {e["id"]: {} for e in events if e["ph"] in "sf"}
    for e in (e for e in events if e["ph"] in "sf"):
        arrows[e["id"]][e["ph"]] = e["ts"]
    assert len(arrows) > 2 * 8 and all(one["s"] <= one["f"] + 1.0 for one in arrows.values())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: lines.__delitem__(2), ["step 2: the file of rank 0 lacks its plan"]),
        (lambda lines: lines.__delitem__(slice(-2, None)), ["no step was traced to its end by all ranks"]),
        (lambda lines: lines[-1].update(done=[["sleep", "", 0, 1]]), ["'sleep' is not a valid Cause"]),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[list[dict[str, object]]], None],
    words: list[str],
) -> None:
    write(tmp_path, files_of(schedule_of(U, U_COSTS), U_COSTS, U_COSTS), change)
    with pytest.raises(SystemExit) as end:
        main(["trace", str(tmp_path)])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and all(word in error for word in words), error
    with pytest.raises(SystemExit):
        main(["trace", str(tmp_path / "none"), "--out", "x.txt"])
    assert "--out" in capsys.readouterr().err


def test_stages_are_summed_up_and_a_slow_rank_is_named() -> None:
    """Of two replicas of a stage one computes twice as long; the sums are the same after they were sent as text."""
    shares = [
        share(0, 0, "x", (Cause.FORWARD, 0.0, 3.0), (Cause.PACK, 3.0, 3.5), (Cause.SEND, 3.5, 4.0)),
        share(1, 1, "x", (Cause.WAIT, 0.0, 4.5), (Cause.FORWARD, 5.0, 6.0), (Cause.BACKWARD, 6.0, 7.0)),
        share(2, 1, "x", (Cause.WAIT, 0.0, 4.0), (Cause.FORWARD, 5.0, 7.0), (Cause.BACKWARD, 7.0, 9.0)),
    ]
    found = stage_times(shares, {0: 0, 1: 1, 2: 1})
    assert read_typed(StepSums, json.dumps(asdict(StepSums(stages=found)))) == StepSums(stages=found)
    first, second = found
    assert first.mean_ms == {"compute": 3000.0, "exposed communication": 1000.0, "bubble": 0.0} == first.slowest_ms
    assert second.mean_ms == {"compute": 3000.0, "exposed communication": 750.0, "bubble": 3500.0}
    assert second.slowest_rank == {"compute": 2, "exposed communication": 1, "bubble": 1}
    assert (first.slow_ranks, second.slow_ranks) == ({}, {"2": 2.0})
