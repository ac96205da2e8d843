"""No rank hangs silently (docs/development/internals.md, contract 7): plain processes, no launcher that ends them."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.hang.ranks import Run, Server, run, wait_until

WORLD = 3
TIMEOUT_S = 8.0
SLACK_S = 4.0  # a line is printed within the timeout; a machine needs some time to end a process
SETTLE_S = 1.0
STARTING_S = 15.0  # between the start of a process and its first wait
BOUNDARY = r"boundary 0->1, (?:forward|backward), microbatch \d+"
WAITED = rf"waited [\d.]+ s at {BOUNDARY} for (?:ranks?|the members ranks) \d"
SAVING = r"this rank stood in the save of a checkpoint, in \w+ \("
# Where a rank was; one that has not come to its first boundary says nothing of it.
POSITION = rf"{SAVING}|{WAITED}|not waiting at a boundary \(last: {BOUNDARY}, [\d.]+ s ago\)"
STORE = "the store that it keeps"

EVENTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
GRID = list(itertools.product(EVENTS, ("start", "forward", "backward", "save"), (0, 2), (False, True)))
# Every value of every column, and most pairs.
CHOSEN = [
    ("kill", "forward", 0, False),
    ("stop", "start", 2, True),
    ("kill", "save", 2, True),
    ("stop", "backward", 0, False),
]
CHOSEN_LEFT = [("start", 2), ("forward", 0), ("optimizer", 0)]
CASES = [pytest.param(*case, marks=() if case in CHOSEN else pytest.mark.full) for case in GRID]


def start_all(whole: Run, *arguments: str, ranks: Sequence[int] = range(WORLD), timeout_s: float = TIMEOUT_S) -> None:
    for rank in ranks:
        whole.start(rank, f"--timeout-s={timeout_s * whole.pace}", *arguments)


def assert_ends(whole: Run, ranks: Sequence[int], timeout_s: float = TIMEOUT_S, status: int = 1) -> list[str]:
    """Wait for ranks to end by themselves, in time, each with a line of ours; return these lines."""
    whole.ended(ranks, (timeout_s + SLACK_S) * whole.pace)
    lines = [whole.ranks[rank].error_line() for rank in ranks]
    for rank, line in zip(ranks, lines, strict=True):
        assert whole.ranks[rank].status() == status, whole.ranks[rank].text()
        assert line.startswith(f"[vtp rank {rank}] error: "), whole.ranks[rank].text()[-3000:]
    return lines


@pytest.mark.parametrize(("event", "moment", "victim", "agent_store"), CASES)
def test_a_rank_that_is_killed_or_stopped_ends_all_others(
    rank_server: Server, tmp_path: Path, event: str, moment: str, victim: int, agent_store: bool
) -> None:
    others = [rank for rank in range(WORLD) if rank != victim]
    with run(tmp_path, rank_server, world_size=WORLD, agent_store=agent_store) as whole:
        start_all(whole, "--moment", moment, "--victim", str(victim))
        whole.reached(victim)
        # The others come to wait for it; a rank whose peer dies before that fails in what it does then.
        time.sleep(SETTLE_S * whole.pace)
        whole.ranks[victim].send(EVENTS[event])
        lines = assert_ends(whole, others)
        for line in lines:
            assert moment == "start" or re.search(POSITION, line), line
        if moment == "start":
            whom = rf"waited [\d.]+ s for rank {victim}|rank {victim} does not answer.* [\d.]+ s|[\d.]+ s with {STORE}"
            assert all(re.search(whom, line) for line in lines), lines
        if moment in ("forward", "backward"):
            assert any(re.search(WAITED, line) for line in lines), lines


@pytest.mark.parametrize(
    ("victim", "agent_store"),
    [
        (0, False),
        pytest.param(1, False, marks=pytest.mark.full),
        pytest.param(0, True, marks=pytest.mark.full),
        pytest.param(3, True, marks=pytest.mark.full),
    ],
)
def test_all_survivors_name_the_rank_that_was_killed(
    rank_server: Server, tmp_path: Path, victim: int, agent_store: bool
) -> None:
    """Not the one that noticed first: it ends too, and breaks connections of its own."""
    others = [rank for rank in range(4) if rank != victim]
    with run(tmp_path, rank_server, world_size=4, agent_store=agent_store) as whole:
        start_all(
            whole, "--vtp-size-list=1,2,1", "--moment=forward", f"--victim={victim}", ranks=range(4), timeout_s=20.0
        )
        whole.reached(victim)
        time.sleep(SETTLE_S * whole.pace)
        whole.ranks[victim].send(signal.SIGKILL)
        for line in assert_ends(whole, others, 20.0):
            named = re.findall(r"rank ([\d, ]+) (?:does not answer|do not answer|ended|failed)", line)
            assert named == [str(victim)], line


@pytest.mark.parametrize(
    ("event", "victim"),
    [("kill", 2), pytest.param("stop", 0, marks=pytest.mark.full), pytest.param("stop", 2, marks=pytest.mark.full)],
)
def test_a_rank_that_is_lost_in_a_split_backward_ends_all_others(
    rank_server: Server, tmp_path: Path, event: str, victim: int
) -> None:
    """The others compute the gradients of weights that they have left, and then wait as ever."""
    with run(tmp_path, rank_server, world_size=WORLD) as whole:
        start_all(
            whole, "--schedule=planned", "--split-backward", "--moment=backward", f"--victim={victim}", "--num-steps=3"
        )
        whole.reached(victim)
        time.sleep(SETTLE_S * whole.pace)
        whole.ranks[victim].send(EVENTS[event])
        lines = assert_ends(whole, [rank for rank in range(WORLD) if rank != victim])
    assert any(re.search(WAITED, line) for line in lines), lines


@pytest.mark.full
@pytest.mark.parametrize(("event", "moment", "victim"), [("kill", "forward", 2), ("stop", "save", 0)])
def test_ranks_that_are_scripts_of_their_own(tmp_path: Path, event: str, moment: str, victim: int) -> None:
    """The same without the server that forks."""
    with run(tmp_path, None, world_size=WORLD) as whole:
        for rank in range(WORLD):
            whole.start(rank, f"--timeout-s={12 * whole.pace}", "--moment", moment, "--victim", str(victim))
        whole.reached(victim)
        whole.ranks[victim].send(EVENTS[event])
        for line in assert_ends(whole, [rank for rank in range(WORLD) if rank != victim], 12.0):
            assert re.search(POSITION, line), line


@pytest.mark.needs("bridges")
@pytest.mark.parametrize(
    ("event", "moment", "victim"),
    [
        ("kill", "forward", 0),
        pytest.param("stop", "forward", 1, marks=pytest.mark.full),
        pytest.param("stop", "backward", 2, marks=pytest.mark.full),
        pytest.param("kill", "backward", 2, marks=pytest.mark.full),
    ],
)
def test_a_rank_that_is_lost_inside_a_bridge_ends_all_others(
    rank_server: Server, tmp_path: Path, event: str, moment: str, victim: int
) -> None:
    """Without a list of sizes: the ranks watch each other from the first bridge on."""
    others = [rank for rank in range(WORLD) if rank != victim]
    with run(tmp_path, rank_server, world_size=WORLD) as whole:
        start_all(whole, "--bridge", "--moment", moment, "--victim", str(victim))
        whole.reached(victim)
        time.sleep(SETTLE_S * whole.pace)
        whole.ranks[victim].send(EVENTS[event])
        lines = assert_ends(whole, others)
    assert any(
        re.search(r"at bridge vision -> language, (?:forward|backward), microbatch 1", line) for line in lines
    ), lines


def test_a_rank_that_lives_but_never_sends(rank_server: Server, tmp_path: Path) -> None:
    """Its monitor beats; only those that wait for it can tell."""
    with run(tmp_path, rank_server, world_size=WORLD) as whole:
        start_all(whole, "--moment=forward", "--victim=0", timeout_s=5.0)
        whole.reached(0)
        lines = assert_ends(whole, range(WORLD), 5.0)
    assert re.search(r"waited [\d.]+ s at boundary 0->1, forward, microbatch 1 for rank 0: no answer", lines[1]), lines
    assert re.search(r"rank [12] waited [\d.]+ s at .*; this rank was not waiting", lines[0]), lines


@pytest.mark.parametrize(
    ("late", "agent_store"),
    [pytest.param(2, False, marks=pytest.mark.full), (0, False), pytest.param(2, True, marks=pytest.mark.full)],
)
def test_a_rank_that_starts_too_late(rank_server: Server, tmp_path: Path, late: int, agent_store: bool) -> None:
    others = [rank for rank in range(WORLD) if rank != late]
    timeout_s = 3.0
    with run(tmp_path, rank_server, world_size=WORLD, agent_store=agent_store) as whole:
        start_all(whole, ranks=others, timeout_s=timeout_s)
        for line in assert_ends(whole, others, timeout_s + STARTING_S):
            found = re.search(rf"start-up: waited ([\d.]+) s for (rank {late} at|the store that rank 0)", line)
            assert found is not None, line
            assert float(found[1]) < (timeout_s + 1.0) * whole.pace
        # The late one finds nobody, and ends too.
        start_all(whole, ranks=[late], timeout_s=timeout_s)
        (line,) = assert_ends(whole, [late], timeout_s + STARTING_S)
        assert "start-up: waited" in line, line


@pytest.mark.parametrize("late", [pytest.param(2, marks=pytest.mark.full), 0])
def test_a_rank_that_starts_late_within_the_timeout(rank_server: Server, tmp_path: Path, late: int) -> None:
    """Meanwhile each machine says who is waited for, where, and for how much longer."""
    others = [rank for rank in range(WORLD) if rank != late]
    with run(tmp_path, rank_server, world_size=WORLD) as whole:
        env = {"VTP_FIRST_WAITING_LINE_S": str(1.5 * whole.pace), "LOCAL_RANK": "0"}
        for rank in others:
            whole.start(rank, "--timeout-s=600", "--num-steps=1", env=env)
        line = r"start-up: waiting for ([^;]*); they meet at 127\.0\.0\.1:\d+; waited \d+ s, \d+ s left"
        wait_until(
            lambda: all(re.search(line, whole.ranks[rank].text()) for rank in others),
            300.0 * whole.pace,
            "the lines of all that wait",
        )
        whole.start(late, "--timeout-s=600", "--num-steps=1", env=env)
        whole.ended(range(WORLD), 300.0 * whole.pace)
        assert [whole.ranks[rank].status() for rank in range(WORLD)] == [0] * WORLD, whole.ranks[0].text()
        whom = [re.findall(line, whole.ranks[rank].text())[0] for rank in others]
    wanted = "rank 2 at start" if late == 2 else "rank 0 or the launcher to open the store"
    assert whom == [wanted] * len(others)


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        (0, "forward"),
        pytest.param(1, "start", marks=pytest.mark.full),
        pytest.param(2, "forward", marks=pytest.mark.full),
    ],
)
def test_an_error_of_one_rank_reaches_all(rank_server: Server, tmp_path: Path, victim: int, moment: str) -> None:
    """With its text: these ranks are at one site, which they know once they have met."""
    others = [rank for rank in range(WORLD) if rank != victim]
    with run(tmp_path, rank_server, world_size=WORLD) as whole:
        start_all(whole, f"--moment={moment}", f"--victim={victim}", "--act=raise", timeout_s=60.0)
        whole.reached(victim)
        for line in assert_ends(whole, others, 6.0):
            assert f"rank {victim} failed: ValueError: the victim's own error" in line, line
            assert moment == "start" or re.search(POSITION, line), line
        assert_ends(whole, [victim], 6.0)
        assert "ValueError: the victim's own error" in whole.ranks[victim].text()
        assert "Traceback" in whole.ranks[victim].text()


def test_rank_0_fails_while_another_rank_is_stopped(rank_server: Server, tmp_path: Path) -> None:
    """Rank 0 leaves last, but not later than the others can need."""
    with run(tmp_path, rank_server, world_size=WORLD) as whole:
        start_all(whole, "--moment=forward", "--victim=0", "--act=raise", "--delay-s=1")
        whole.reached(0)
        whole.ranks[2].send(signal.SIGSTOP)
        assert_ends(whole, [0, 1])


LEFT = [
    pytest.param(moment, victim, marks=() if (moment, victim) in CHOSEN_LEFT else pytest.mark.full)
    for moment, victim in itertools.product(("start", "step", "forward", "backward", "optimizer", "save"), (0, 2))
]


@pytest.mark.parametrize(("moment", "victim"), LEFT)
def test_a_rank_that_exits_early_is_named(rank_server: Server, tmp_path: Path, moment: str, victim: int) -> None:
    """``sys.exit(0)`` is a normal end for Python, and rank 0 waits for the others. They end long before the timeout."""
    others = [rank for rank in range(WORLD) if rank != victim]
    with run(tmp_path, rank_server, world_size=WORLD) as whole:
        start_all(whole, f"--moment={moment}", f"--victim={victim}", "--act=exit", "--status=0", timeout_s=120.0)
        whole.reached(victim)
        for line in assert_ends(whole, others, 20.0):
            assert f"rank {victim} has ended without an error and too early: rank " in line, line
            assert ("; this rank " in line) == (moment != "start"), line  # where it stood says nothing there
        whole.ended([victim], 20.0 * whole.pace)


def test_a_store_host_that_was_stopped_does_not_blame_itself(rank_server: Server, tmp_path: Path) -> None:
    """The others have gone meanwhile; what they asked of the store is answered when it goes on."""
    with run(tmp_path, rank_server, world_size=WORLD) as whole:
        start_all(whole, "--moment=forward", "--victim=0")
        whole.reached(0)
        time.sleep(SETTLE_S * whole.pace)
        whole.ranks[0].send(signal.SIGSTOP)
        for line in assert_ends(whole, [1, 2]):
            assert re.search("rank 0 ended or stopped|for rank 0: no answer", line), line
        whole.ranks[0].send(signal.SIGCONT)
        (line,) = assert_ends(whole, [0])
        assert re.search(r"it stood still for [\d.]+ s before \(stopped or suspended\)", line), line
        assert not re.search("rank 0 ended|rank 0 does not answer", line), line


def test_a_rank_that_can_start_no_thread_ends_with_its_line(rank_server: Server, tmp_path: Path) -> None:
    """Out of address space, as after a leak: what it needs to end is there before."""
    with run(tmp_path, rank_server, world_size=WORLD) as whole:
        start_all(whole, "--moment=forward", "--victim=1", "--act=starve")
        whole.reached(1)
        for line in assert_ends(whole, [0, 1, 2]):
            assert re.search(r"waited [\d.]+ s at .* for ranks? [012, ]+: no answer", line), line


def test_ranks_that_end_seconds_apart(rank_server: Server, tmp_path: Path) -> None:
    """Rank 0 is done long before the others, which need more than the timeout."""
    with run(tmp_path, rank_server, world_size=WORLD) as whole:
        start_all(whole, "--num-steps=1", f"--linger-s={8 * whole.pace}", timeout_s=6.0)
        whole.ended(range(WORLD), 300.0 * whole.pace)
        assert [whole.ranks[rank].status() for rank in range(WORLD)] == [0] * WORLD, whole.ranks[0].text()


@pytest.mark.full
def test_stopping_the_monitor_takes_no_time(rank_server: Server, tmp_path: Path) -> None:
    with run(tmp_path, rank_server, world_size=WORLD) as whole:
        start_all(whole, "--num-steps=1", "--timed-end", timeout_s=600.0)
        whole.ended(range(WORLD), 300.0 * whole.pace)
        times_s = [
            float(re.findall(r"stopped within ([\d.]+) s", whole.ranks[rank].text())[0]) for rank in range(WORLD)
        ]
        # Measured: 0.001 s on an idle machine; a poll interval, here 1 s, would show.
        assert max(times_s) < 0.5 * whole.pace, times_s


@pytest.mark.full
def test_a_busy_machine_accuses_nobody(rank_server: Server, tmp_path: Path) -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        with run(tmp_path, rank_server, world_size=WORLD) as whole:
            start_all(whole, "--num-steps=4")
            whole.ended(range(WORLD), 300.0 * whole.pace)
            assert [whole.ranks[rank].status() for rank in range(WORLD)] == [0] * WORLD, whole.ranks[0].text()
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_the_line_follows_the_waits_to_the_rank_that_hangs(rank_server: Server, tmp_path: Path) -> None:
    """Rank 2 stays in a forward; rank 1 waits for it inside the same forward, and rank 0 for rank 1's gradient."""
    with run(tmp_path, rank_server, world_size=WORLD) as whole:
        start_all(whole, "--moment=forward", "--victim=2", "--schedule=planned", timeout_s=6.0)
        whole.reached(2)
        lines = assert_ends(whole, range(WORLD), 6.0)
    compute = r"1F1, a forward of microbatch 1 on stage 1"
    stands = rf"all_reduce( of ranks 1, 2,)? inside {compute}"
    for line in lines:
        assert re.search(rf"{stands}.*rank 2 computes {compute}", line), lines


@pytest.mark.parametrize("post", ["escapes", "nothing"])
def test_a_stranger_at_the_store_writes_one_plain_line(rank_server: Server, tmp_path: Path, post: str) -> None:
    """He can end a run of a store that anyone reaches, but not write into its terminals or hold up its ranks."""
    text = f"\x1b]0;owned\x07\x1b[2J\nforged {'y' * 5000}"
    with run(tmp_path, rank_server, world_size=WORLD) as whole:
        start_all(whole, "--moment=forward", "--victim=1")
        whole.reached(1)
        whole.stranger().set("board", json.dumps({"failure": text}) if post == "escapes" else "[" * 9999)
        lines = assert_ends(whole, range(WORLD))
        # At the line's end where a neighbour that had read it ended first, and this rank's own error comes before it.
        said = (
            r"\\x1b\]0;owned\\x07\\x1b\[2J forged y+ \.\.\. \(cut\)(; |$)"
            if post == "escapes"
            else "the post monitor/board in"
        )
        assert all(re.search(said, line) and len(line) < 2500 for line in lines), lines
        assert not any("\x1b" in whole.ranks[rank].text() for rank in range(WORLD))
