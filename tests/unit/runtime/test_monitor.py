"""The monitor over a real store: every rank is a monitor in this process, and "ending" is an entry in a list."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from tests.support.pace import pace
from vtp_plugin.errors import ConfigError, PeerError
from vtp_plugin.runtime.health.monitor import Monitor
from vtp_plugin.runtime.health.store import Board, Leaver, Notices, connect_again

TIMEOUT_S = 2.0 * pace()
PLACE = "boundary 0->1, forward, microbatch 3"


class World:
    """Monitors of all ranks over one store, and when each would have ended its process."""

    def __init__(self, size: int, store: dist.Store | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.store = store or dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self.ended: dict[int, float] = {}
        self.monitors = [
            Monitor(
                connect_again(self.store),
                rank=rank,
                world_size=size,
                timeout_s=timeout_s,
                exit_process=self._exit_of(rank),
            )
            for rank in range(size)
        ]
        self.begin_s = time.monotonic()
        for monitor in self.monitors:
            monitor.start()

    def _exit_of(self, rank: int) -> Callable[[int], None]:
        def exit_process(status: int) -> None:
            assert status == 1
            self.ended[rank] = time.monotonic() - self.begin_s

        return exit_process

    def silence(self, rank: int) -> None:
        """Stop a rank's threads as SIGSTOP does: nobody is told."""
        self.monitors[rank]._stopping.set()
        self.monitors[rank]._timer_ends.set()
        self.monitors[rank]._helper.end()
        # A thread that is on its way round would answer once more.
        for thread in self.monitors[rank]._threads:
            thread.join(timeout=TIMEOUT_S)

    def wait(self, num_ended: int, *, besides: int | None = None) -> None:
        """Wait until so many ranks have ended, besides one that has failed itself and may end too, or later."""
        deadline_s = time.monotonic() + 60.0
        while len(self.ended.keys() - {besides}) < num_ended and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert len(self.ended.keys() - {besides}) == num_ended, self.ended

    def close(self) -> None:
        for rank in range(len(self.monitors)):
            self.silence(rank)
        for monitor in self.monitors:
            for thread in monitor._threads:
                thread.join(60.0)


@pytest.fixture
def world() -> Iterator[World]:
    whole = World(4)
    yield whole
    whole.close()


def stop_all(whole: World, order: list[int]) -> float:
    """Stop ranks one after another, rank 0 last, as it waits for the others; return what it took."""
    begin_s = time.monotonic()
    for rank in order:
        whole.monitors[rank].stop()
    return time.monotonic() - begin_s


def lines(capfd: pytest.CaptureFixture[str]) -> dict[int, str]:
    found = re.findall(r"^\[vtp rank (\d+)\] error: (.*)$", capfd.readouterr().err, re.MULTILINE)
    assert len({rank for rank, _ in found}) == len(found), found
    return {int(rank): text for rank, text in found}


def test_a_normal_end(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    time.sleep(0.5)
    assert stop_all(world, [2, 1, 3, 0]) < 0.25 * TIMEOUT_S
    assert not world.ended and not lines(capfd)
    assert not any(thread.is_alive() for monitor in world.monitors for thread in monitor._threads)
    world.monitors[1].stop()  # A second call does nothing.


def test_ranks_may_end_far_apart(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    world.monitors[2].stop()
    time.sleep(1.5 * TIMEOUT_S)
    assert not world.ended
    stop_all(world, [1, 3, 0])
    assert not world.ended and not lines(capfd)


@pytest.mark.full
def test_alone() -> None:
    whole = World(1)
    time.sleep(1.2 * TIMEOUT_S)
    assert stop_all(whole, [0]) < 0.25 * TIMEOUT_S
    assert not whole.ended


def test_the_same_store_again() -> None:
    first = World(2)
    stop_all(first, [1, 0])
    second = World(2, first.store)
    second.silence(1)
    second.wait(1)
    second.close()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["hash", "file"])
def test_other_stores(tmp_path: Path, kind: str) -> None:
    store = dist.HashStore() if kind == "hash" else dist.FileStore(str(tmp_path / "store"), 3)
    whole = World(3, store)
    time.sleep(0.3)
    whole.silence(1)
    whole.wait(2)
    whole.close()


@pytest.mark.parametrize("silent", [0, 3])
def test_a_silent_rank_ends_all_others_within_the_timeout(
    world: World, silent: int, capfd: pytest.CaptureFixture[str]
) -> None:
    time.sleep(0.3)
    world.silence(silent)
    begin_s = time.monotonic() - world.begin_s
    world.wait(3)
    assert max(world.ended.values()) - begin_s < TIMEOUT_S
    assert silent not in world.ended
    for text in lines(capfd).values():
        assert re.match(rf"rank {silent} does not answer: no sign of life for [\d.]+ s", text)


def test_ranks_that_wait_for_each_other_are_named_as_a_circle(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    """Not the first peer alone, which may be as healthy as the rank that waits for it."""
    for rank in range(3):
        world.monitors[rank].position.begin(
            f"boundary {rank}->{(rank + 1) % 3}, backward, microbatch 0", f"rank {(rank + 1) % 3}"
        )
    world.wait(4)
    circle = r"ranks \d, \d, \d wait for each other in a circle"
    for text in lines(capfd).values():
        assert re.search(rf"no answer; rank \d waits at boundary .*; rank \d waits at .*; {circle}", text), text
        assert "rank 3" not in text.split("circle")[0]


def test_a_long_wait_ends_all(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    wait = world.monitors[1].position.begin(PLACE, "rank 0")
    assert not wait.is_over()
    world.wait(4)
    assert max(world.ended.values()) < 1.1 * TIMEOUT_S
    texts = lines(capfd)
    assert re.match(
        rf"waited [\d.]+ s at {PLACE} for rank 0: no answer; rank 0 was not waiting at a boundary; look", texts[1]
    )
    chain = rf"rank 1 waited [\d.]+ s at {PLACE} for rank 0: no answer; rank 0 was not waiting at a boundary"
    assert re.match(rf"{chain}$", texts[2])


def test_waits_that_end_in_time_are_no_failure(world: World) -> None:
    end_s = time.monotonic() + 1.5 * TIMEOUT_S
    while time.monotonic() < end_s:
        wait = world.monitors[1].position.begin(PLACE, "rank 0")
        time.sleep(0.2)
        wait.ended = True
    assert not world.ended
    assert len(world.monitors[1].position._waits) == 1


class Event:
    """A device's event: passed, not passed, or of a device that failed."""

    def __init__(self, state: bool | RuntimeError) -> None:
        self.state = state

    def query(self) -> bool:
        if isinstance(self.state, RuntimeError):
            raise self.state
        return self.state


def test_a_wait_on_a_device_ends_with_its_event(world: World) -> None:
    passed = world.monitors[1].position.begin(PLACE, "rank 0")
    passed.event = Event(True)
    time.sleep(1.2 * TIMEOUT_S)
    assert not world.ended


@pytest.mark.parametrize("state", [False, RuntimeError("device-side assert")])
def test_a_stream_that_does_not_come_past_ends_all(world: World, state: bool | RuntimeError) -> None:
    world.monitors[1].position.begin(PLACE, "rank 0").event = Event(state)
    assert "this rank waited" in world.monitors[1].describe_position()
    world.wait(4)


def test_a_failure_reaches_all_at_once(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    world.monitors[2].position.begin(PLACE, "rank 0").ended = True
    world.monitors[1].post_failure(ConfigError("a reason"))
    begin_s = time.monotonic() - world.begin_s
    world.wait(3, besides=1)
    assert max(took for rank, took in world.ended.items() if rank != 1) - begin_s < 0.5 * TIMEOUT_S
    texts = lines(capfd)
    assert sorted(texts.keys() - {1}) == [0, 2, 3]
    assert texts[0] == "rank 1 failed: a reason"
    assert re.match(rf"rank 1 failed: a reason; this rank was not waiting at a boundary \(last: {PLACE}, ", texts[2])
    # The failing rank prints its own error; should it hang, it is ended too.
    world.wait(4)


def test_an_error_of_its_own_says_no_boundary_that_the_rank_has_left(world: World) -> None:
    monitor = world.monitors[1]
    monitor.position.begin(PLACE, "rank 0").ended = True
    assert monitor.describe_position(ConfigError("--a 1")) == monitor.describe_position(KeyError("a")) == ""
    for error in (None, PeerError("no answer"), RuntimeError("Connection closed by peer")):
        assert "was not waiting at a boundary (last: " in monitor.describe_position(error)
    world.monitors[2].post_failure(ConfigError("the cause"))
    monitor.post_failure(KeyError("a"))
    assert "was not waiting at a boundary (last: " in monitor.describe_position(KeyError("a"))


def test_the_first_failure_counts(world: World) -> None:
    world.monitors[1].post_failure(ConfigError("the cause"))
    world.monitors[2].post_failure(RuntimeError("a consequence"))
    assert world.monitors[2].failure == "rank 1 failed: the cause"


class DyingStore:
    """The store of a rank that dies after so many calls."""

    def __init__(self, store: dist.Store, num_calls: int) -> None:
        self._store, self._num_left = store, num_calls

    def __getattr__(self, name: str) -> Any:
        self._num_left -= 1
        if self._num_left < 0:
            raise RuntimeError("the process was killed here")
        return getattr(self._store, name)


@pytest.mark.parametrize("num_calls", [0, 1, 2])
def test_a_failure_is_posted_as_a_whole_or_not_at_all(num_calls: int, capfd: pytest.CaptureFixture[str]) -> None:
    """A rank that dies while it posts leaves nothing that would keep the next one from it."""
    whole = World(3)
    whole.silence(1)
    poster = whole.monitors[1]
    poster._board = Board(cast(dist.Store, DyingStore(poster._store, num_calls)))
    with suppress(RuntimeError):
        poster._post("rank 1 failed: a reason")
    whole.monitors[2].post_failure(ConfigError("another reason"))
    whole.wait(1, besides=2)
    assert whole.ended[0] < 0.5 * TIMEOUT_S
    reason = "rank 1 failed: a reason" if num_calls else "rank 2 failed: another reason"
    assert lines(capfd)[0].startswith(reason)
    whole.close()


def test_of_failures_at_one_time_all_ranks_know_the_same(world: World) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda rank: world.monitors[rank]._post(f"rank {rank} failed"), range(4)))
    known = {monitor._board.read().failure for monitor in world.monitors}
    assert len(known) == 1
    (first,) = known
    assert [m.failure for m in world.monitors].count(None) <= 1 and {m.failure for m in world.monitors} <= {first, None}


def test_the_board_keeps_what_others_write_meanwhile() -> None:
    store = dist.HashStore()
    first, second = Board(store), Board(store)
    assert first.call_all() == 1 and second.call_all() == 2
    leavers = [Leaver(rank=rank, num_passes=3, is_inside=False) for rank in range(2)]
    assert [first.leave(leavers[0]), second.leave(leavers[1])] == [leavers[0]] * 2
    assert [second.post("b"), first.post("a")] == ["b", "b"]
    assert first.read() == Notices(num_calls=2, leaver=leavers[0], failure="b") == second.read()


def test_without_a_new_thread_all_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is out of memory or of threads starts none, and still ends with its line."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    world.monitors[1].post_failure(ConfigError("a reason"))
    world.wait(3, besides=1)


@pytest.mark.parametrize(("num_passes", "is_inside"), [(2, True), (2, False), (1, False)])
def test_who_ends_too_early_is_named(
    world: World, num_passes: int, is_inside: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Inside what all ranks do together, or before it. Who has done as much as the others may end long before them."""
    for rank, monitor in enumerate(world.monitors):
        for number in range(2 if rank != 1 else num_passes):
            with suppress(SystemExit), monitor.early_exits.passing():
                if number == 1 and is_inside:
                    raise SystemExit
    world.monitors[1].stop()
    if num_passes == 2 and not is_inside:
        time.sleep(1.5 * TIMEOUT_S)
        assert not world.ended
        return
    world.wait(3)
    assert all(text.startswith("rank 1 has ended without an error and too early: ") for text in lines(capfd).values())


def test_rank_0_leaves_soon_after_its_own_failure(world: World) -> None:
    world.silence(3)
    world.monitors[0].post_failure(RuntimeError("a reason"))
    begin_s = time.monotonic()
    world.monitors[0].stop()
    assert time.monotonic() - begin_s < 0.5 * TIMEOUT_S
    world.wait(2, besides=0)
    assert sorted(world.ended.keys() - {0}) == [1, 2]


def test_a_clock_that_stood_still_accuses_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes of a machine are suspended for an hour, in the middle of a wait."""
    wait = world.monitors[1].position.begin(PLACE, "rank 0")
    time.sleep(0.3)
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 3600.0)
    time.sleep(0.3)
    wait.ended = True
    time.sleep(0.5)
    assert not world.ended


def test_load_on_the_store_is_bounded() -> None:
    """4,096 ranks ask one server thread; it answers tens of thousands of calls in a second."""
    monitor = Monitor(dist.HashStore(), rank=0, world_size=4096, timeout_s=600.0)
    calls_per_s = 4096 * (1 / monitor._look_interval_s + 2 / monitor._beat_interval_s)
    assert calls_per_s < 3000


@pytest.mark.parametrize("killed", [0, 2, 3])
def test_of_a_rank_that_was_killed_all_name_that_rank(
    world: World, killed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its neighbour finds the connection closed, before anybody misses a sign of life."""
    time.sleep(0.3)
    world.silence(killed)
    error = RuntimeError("[pair.cc:561] Connection closed by peer [127.0.0.1]:36494")
    world.monitors[1].post_failure(error)
    world.wait(2, besides=1)
    named = rf"rank {killed} does not answer: ended, was killed or stopped \(noticed by rank 1\)$"
    found = lines(capfd)
    assert all(re.match(named, text) for rank, text in found.items() if rank != 1), found
    assert (world.monitors[1].failure or "").startswith(f"rank {killed} does not answer")


def test_a_connection_that_breaks_while_all_live(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    begin_s = time.monotonic()
    world.monitors[1].post_failure(RuntimeError("Connection reset by peer"))
    assert time.monotonic() - begin_s < 0.5 * TIMEOUT_S
    world.wait(3, besides=1)
    texts = [text for rank, text in lines(capfd).items() if rank != 1]
    assert all(text.startswith("rank 1 failed: RuntimeError: Connection") for text in texts)
