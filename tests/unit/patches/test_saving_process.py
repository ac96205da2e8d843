"""Processes that save: how older Pythons start them (`fork-to-save`), and that nobody waits for one that was killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.hosts import PYTHON_PATH
from vtp_plugin.errors import PeerError
from vtp_plugin.patches.core.dist_checkpointing.strategies.async_utils import _is_done, _start


@pytest.mark.parametrize("python", [(3, 10), (3, 11)])
def test_a_thread_that_needs_the_interpreter_comes_first(python: tuple[int, int]) -> None:
    """This one needs it a hundred times; one of gloo does once."""
    begin, ended = threading.Event(), threading.Event()

    def free_tensors() -> None:
        begin.wait()
        for _ in range(100):
            time.sleep(1e-4)
        ended.set()

    thread = threading.Thread(target=free_tensors)
    thread.start()
    begin.set()
    assert _start(python, lambda request: (request, ended.is_set()), "a checkpoint") == ("a checkpoint", True)
    thread.join()


@pytest.mark.parametrize("python", [(3, 12), (3, 13)])
def test_newer_pythons_do_not_wait(python: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """They make the lock anew before they take it."""
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    assert _start(python, lambda request: request, "a checkpoint") == "a checkpoint"


WRITERS = """
import multiprocessing, os, signal, sys
from vtp_plugin.runtime.health import failure_hook

fork = multiprocessing.get_context("fork")
count = fork.JoinableQueue()
count.put(0)
failure_hook._POLL_S = 0.1
kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
with failure_hook.ending_with_writers(os.getpid() if sys.argv[1] == "rank" else 0):
    fork.Process(target=lambda: None).start()
    fork.Process(target=kill).start()
    count.join()
"""


@pytest.mark.parametrize("who", ["rank", "writer"])
def test_a_writer_that_is_killed_ends_who_waits_for_it(who: str) -> None:
    """As Megatron up to 0.16 waits: for a queue that nobody empties any more."""
    command = [sys.executable, "-c", WRITERS, who]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": PYTHON_PATH})
    assert done.returncode == 1
    assert "a process that was writing a checkpoint has ended with -9" in done.stdout + done.stderr


class _Caller:
    """A worker that stays, as Megatron's caller knows it."""

    cur_item = None

    def __init__(self, act: Callable[[Any], None]) -> None:
        fork = multiprocessing.get_context("fork")
        self.comp_q = fork.Queue()
        self.process = fork.Process(target=act, args=(self.comp_q,), daemon=True)
        self.process.start()


def test_a_worker_that_is_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    killed = _Caller(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(PeerError, match="for rank 3 has ended with -9"):
        _is_done(lambda *_, **__: True, killed, blocking=True)
    slow = _Caller(lambda answers: (time.sleep(0.3), answers.put(0))[1])
    assert _is_done(lambda *_, **__: False, slow) is False  # it is not patient, and the process lives
    assert _is_done(lambda *_, **__: True, slow, blocking=True) is True and not slow.comp_q.empty()
