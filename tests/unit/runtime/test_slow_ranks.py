"""Whoever says that it is done is done: rank 0, which keeps the store, leaves as soon as the others let it.

Each exchange over the store is played by three ranks, whose first one ends with the store's server. One of the others
is slow, at each of its steps in turn: the steps are found by playing the exchange once. No rank may end with an error
of torch's.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.pace import pace
from vtp_plugin.elastic.cards import Outcome, RankCard, settle_seats
from vtp_plugin.elastic.join import SpareRank
from vtp_plugin.errors import ConfigError, VtpError
from vtp_plugin.runtime.health import startup_waiting
from vtp_plugin.runtime.health.meeting_store import agree_on_attempt, open_own_store
from vtp_plugin.runtime.health.monitor import Monitor
from vtp_plugin.runtime.health.redaction import Redaction
from vtp_plugin.runtime.health.startup import Agreement
from vtp_plugin.runtime.health.store import connect_again, estimate_offset, gather_node_sizes, name_run
from vtp_plugin.runtime.step.step_times import share_reports
from vtp_plugin.tune.fit.fit_layout import Chosen

HOST, SIZE, SLOW = "127.0.0.1", 3, 1
CALLS = ("set", "get", "add", "check", "wait", "compare_set", "delete_key")
CHOSEN = Chosen(sizes=(2,), layers=(4,), num_replicas=1)
Step = tuple[str, str]
Exchange = Callable[[dist.Store, int, float], object]


def seats(store: dist.Store, rank: int, timeout_s: float, error: Exception | None = None) -> object:
    def decide(cards: object) -> Outcome:
        if error is not None:
            raise error
        return Outcome(seats={0: 0, 1: 1, 2: 2}, chosen=CHOSEN)

    own = RankCard(node="a", local_rank=rank, site="", kind="cpu", why="", versions="1")
    place: Any = {"rank": rank, "world_size": SIZE, "timeout_s": timeout_s, "redaction": Redaction(is_one_site=True)}
    return settle_seats(store, own, decide, **place)


def no_seats(store: dist.Store, rank: int, timeout_s: float) -> object:
    return seats(store, rank, timeout_s, ConfigError("nothing fits"))


def agree(store: dist.Store, rank: int, timeout_s: float, value: object = 1) -> object:
    agreement = Agreement(store, rank=rank, world_size=SIZE, timeout_s=lambda: timeout_s)
    agreement.settle("check", lambda: {"value": value})
    return "agreed"


def disagree(store: dist.Store, rank: int, timeout_s: float) -> object:
    return agree(store, rank, timeout_s, value=min(rank, 1))


def attempt(store: dist.Store, rank: int, timeout_s: float) -> object:
    return agree_on_attempt(store, rank=rank, world_size=SIZE, timeout_s=timeout_s)


def own_store(store: dist.Store, rank: int, timeout_s: float) -> object:
    found = open_own_store(store, rank, {"MASTER_ADDR": HOST}, timeout_s)
    with startup_waiting.until_store_ends("rank 0"):  # the run goes on there, each time with a line of its own
        found.add("here", 1)
    return "opened"


def own_name(store: dist.Store, rank: int, timeout_s: float) -> object:
    return len(name_run(connect_again(store)))


def reports(store: dist.Store, rank: int, timeout_s: float) -> object:
    own = {"a": {"b": float(rank)}}
    return share_reports(store, own, str, rank=rank, world_size=SIZE, timeout_s=timeout_s)


def clocks(store: dist.Store, rank: int, timeout_s: float) -> object:
    return estimate_offset(store, rank=rank, world_size=SIZE, timeout_s=timeout_s).error_s >= 0


def nodes(store: dist.Store, rank: int, timeout_s: float) -> object:
    environment = {"GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": str(SIZE), "LOCAL_WORLD_SIZE": "2"}
    return gather_node_sizes(store, environment, divisor=1, timeout_s=timeout_s)


def end_of_run(store: dist.Store, rank: int, timeout_s: float) -> object:
    """Rank 0 is spare and keeps the store; what the others say last is that they have left."""
    spare_rank = SpareRank(store, num_ranks=SIZE - 1, timeout_s=timeout_s)
    failure = spare_rank.wait() if rank == 0 else spare_rank.leave()
    spare_rank.let_go(keeps_store=rank == 0, num_others=SIZE - 1, limit_s=timeout_s)
    return failure


def watched_end(store: dist.Store, rank: int, timeout_s: float, error: Exception | None = None) -> object:
    """All ranks end, one after the other; rank 0 waits for the last."""
    ended: list[int] = []
    monitor = Monitor(store, rank=rank, world_size=SIZE, timeout_s=timeout_s, exit_process=ended.append)
    monitor.start()
    if rank == 0 and error is not None:
        monitor.post_failure(error)
    if rank != 0 and error is not None:
        startup_waiting.poll(lambda: bool(ended), timeout_s)
    monitor.stop()
    monitor._timer_ends.set()  # a process that has failed ends; here its threads do
    monitor._helper.end()
    for thread in monitor._threads:
        thread.join(60)
    return None if rank == 0 else monitor.failure


def watched_failure(store: dist.Store, rank: int, timeout_s: float) -> object:
    """Rank 0 fails: the others know why before it takes the store with it."""
    return watched_end(store, rank, timeout_s, ValueError("boom"))


# Those after which rank 0 may not leave before the others know; after the others the run goes on.
ENDS: tuple[Exchange, ...] = (no_seats, disagree, end_of_run, watched_end, watched_failure)
GOES_ON: tuple[Exchange, ...] = (seats, agree, attempt, own_store, own_name, reports, clocks, nodes)


class Steps:
    """What one rank does with the store; it can be made slow at one of its steps.

    Attributes:
        found: the steps, each once: the call and its key.
        slow_at: the step that takes long.
        delay_s: how long.
    """

    def __init__(self, slow_at: Step | None, delay_s: float) -> None:
        self.found: list[Step] = []
        self.slow_at, self.delay_s = slow_at, delay_s

    def take(self, step: Step) -> None:
        if step not in self.found:
            self.found.append(step)
            if step == self.slow_at:
                time.sleep(self.delay_s)


@pytest.fixture
def steps_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Steps]]:
    """Steps by the thread that does them, or by the connection over which a rank's monitor talks."""
    known: dict[int, Steps] = {}

    def watched(call: str) -> Any:
        original = getattr(dist.Store, call)

        def do(self: Any, *args: Any) -> Any:
            below = self
            while isinstance(below, dist.PrefixStore):
                below = below.underlying_store
            steps = known.get(threading.get_ident()) or known.get(id(below))
            if steps is not None:
                steps.take((call, str(args[0])))
            return original(self, *args)

        return do

    for call in CALLS:
        monkeypatch.setattr(dist.Store, call, watched(call))
    monkeypatch.setattr(os, "environ", {**os.environ, "LOCAL_WORLD_SIZE": str(SIZE), "WORLD_SIZE": str(SIZE)})
    gc.freeze()  # so that collecting costs little
    yield known
    gc.unfreeze()


def play(
    exchange: Exchange, known: dict[int, Steps], slow_at: Step | None, delay_s: float, timeout_s: float
) -> tuple[list[object], list[Step]]:
    """Return what each rank returned or ended with, and the steps of the slow one."""
    found: list[object] = [None] * SIZE
    steps, opened, connected = Steps(slow_at, delay_s), threading.Event(), threading.Barrier(SIZE)
    port: list[int] = []

    def connect(rank: int) -> dist.TCPStore:
        limit = timedelta(seconds=timeout_s)
        if rank == 0:
            store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=limit)
            port.append(store.port)
            opened.set()
            return store
        opened.wait(60)
        return dist.TCPStore(HOST, port[0], is_master=False, wait_for_workers=False, timeout=limit)

    def run(rank: int) -> None:
        own = connect(rank)
        connected.wait(60)
        if rank == SLOW:
            known[threading.get_ident()] = known[id(own)] = steps
        try:
            found[rank] = exchange(dist.PrefixStore("vtp/0", own), rank, timeout_s)
        except Exception as error:
            # With its traceback the store would live on.
            found[rank] = type(error)(*error.args)
        if rank == SLOW:
            del known[threading.get_ident()], known[id(own)]
        del own
        gc.collect()  # frames of errors hold the store, too

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    with pytest.raises(OSError):  # rank 0 has really taken the store with it
        socket.create_connection((HOST, port[0]), timeout=60.0).close()
    return found, steps.found


@pytest.mark.parametrize("exchange", [*ENDS, *GOES_ON], ids=lambda exchange: exchange.__name__)
def test_no_rank_is_left_behind(exchange: Exchange, steps_of: dict[int, Steps]) -> None:
    # Of the timeout rank 0 waits a share for those that must know; a new connection to a store that is gone takes all.
    delay_s, timeout_s = 0.4 * pace(), (60.0 if exchange in ENDS else 4.0) * pace()
    usual, steps = play(exchange, steps_of, None, 0.0, timeout_s)
    assert steps
    with ThreadPoolExecutor(len(steps)) as threads:
        plays = threads.map(lambda step: play(exchange, steps_of, step, delay_s, timeout_s)[0], steps)
        for step, found in zip(steps, plays, strict=True):
            for rank, (one, other) in enumerate(zip(found, usual, strict=True)):
                is_fine = (type(one), str(one)) == (type(other), str(other))
                if exchange in GOES_ON:
                    is_fine = not isinstance(one, Exception) or (isinstance(one, VtpError) and "\n" not in str(one))
                assert is_fine, f"rank {rank} ends with {one!r} where rank {SLOW} is slow at {step}"


@pytest.mark.parametrize("exchange", [no_seats, disagree], ids=lambda exchange: exchange.__name__)
def test_one_that_is_slower_than_rank_0_waits_ends_with_a_line(
    exchange: Exchange, steps_of: dict[int, Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had not read why, or had not told so yet."""
    (_, usual, _), steps = play(exchange, steps_of, None, 0.0, 60.0 * pace())
    monkeypatch.setattr(startup_waiting, "_FAREWELL_S", 0.0)
    for step in steps:
        (_, found, _), _ = play(exchange, steps_of, step, 0.3 * pace(), 60.0 * pace())
        assert isinstance(found, VtpError), (step, found)
        assert str(found) == str(usual) or "which keeps the store" in str(found), (step, found)
