"""Whether ranks get on while they do something together, and who is named if not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from vtp_plugin.runtime.health.monitor import Together
from vtp_plugin.runtime.health.position import COLLECTIVES

LIMIT_S = 10.0


@contextmanager
def rank(
    store: dist.Store, number: int, act: Callable[[threading.Event], None], clock: list[float]
) -> Iterator[Together]:
    """Run a rank's work in a thread of its own, inside a save."""
    made: list[Together] = []
    is_inside, is_over = threading.Event(), threading.Event()

    def work() -> None:
        made.append(Together(store, number, LIMIT_S, lambda: clock[0]))
        with made[0].during("the save of iteration 4"):
            is_inside.set()
            act(is_over)

    thread = threading.Thread(target=work)
    thread.start()
    is_inside.wait()
    yield made[0]
    is_over.set()
    thread.join()


def idle(is_over: threading.Event) -> None:
    is_over.wait()


def busy(is_over: threading.Event) -> None:
    while not is_over.is_set():
        sum(range(1000))


def in_collective(is_over: threading.Event) -> None:
    """Wait in a function that seems to lie in torch.distributed, as it waits for others."""
    code = compile("def all_gather(is_over):\n    is_over.wait()\n", COLLECTIVES, "exec")
    names: dict[str, Callable[[threading.Event], None]] = {}
    exec(code, names)
    names["all_gather"](is_over)


def beats(clock: list[float], *ranks: Together) -> list[str | None]:
    """Let the ranks show their signs of life for longer than the limit."""
    said: list[str | None] = [None] * len(ranks)
    for now_s in range(1, int(LIMIT_S) + 5):
        time.sleep(0.03)
        clock[0] = float(now_s)
        said = [each.beat() for each in ranks]
    return said


def test_a_rank_that_does_nothing_is_named() -> None:
    store, clock = dist.HashStore(), [0.0]
    with rank(store, 0, in_collective, clock) as first, rank(store, 1, idle, clock) as second:
        said = beats(clock, first, second)
        assert said[0] is not None and said[1] is not None
        assert said[0].startswith("the save of iteration 4 stood still for 1")
        assert said[0].endswith(" s: rank 1 does nothing, and the others wait")
        assert "in all_gather (torch/distributed/distributed_c10d.py:2)" in (first.position() or "")
        assert "this rank stood in the save of iteration 4, in wait (" in (second.position() or "")
    assert first.position() is None


def test_ranks_that_all_wait_are_told_so() -> None:
    store, clock = dist.HashStore(), [0.0]
    with rank(store, 0, in_collective, clock) as first, rank(store, 1, in_collective, clock) as second:
        said = beats(clock, first, second)
    assert said[0] is not None and said[0].endswith(": all ranks wait, in collectives that do not match")


def test_who_works_is_waited_for() -> None:
    store, clock = dist.HashStore(), [0.0]
    with rank(store, 0, in_collective, clock) as first, rank(store, 1, busy, clock) as second:
        assert beats(clock, first, second) == [None, None]


def test_who_is_no_longer_still_is_not_named() -> None:
    store, clock = dist.HashStore(), [0.0]
    with rank(store, 0, in_collective, clock) as first:
        with rank(store, 1, idle, clock) as second:
            beats(clock, second)
        with rank(store, 1, busy, clock) as second:
            second._is_named = True
            second.beat()
        with rank(store, 2, idle, clock) as third:
            said = beats(clock, first, third)
    assert said[0] is not None and "rank 2 does nothing" in said[0]


def test_a_process_that_was_started_counts() -> None:
    """Checkpoints are written by such processes, too."""
    store, clock = dist.HashStore(), [0.0]

    def start(is_over: threading.Event) -> None:
        child = os.fork()
        if child == 0:
            os.nice(19)
            while True:
                pass
        is_over.wait()
        os.kill(child, 9)
        os.waitpid(child, 0)

    with rank(store, 0, start, clock) as only:
        time.sleep(0.5)
        assert only._thread.gets_on()
