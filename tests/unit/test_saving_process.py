"""H17: older Pythons fork only once threads that free tensors of finished collectives are through."""

from __future__ import annotations

import threading
import time

import pytest

from vtp_plugin.patches.core.dist_checkpointing.strategies.async_utils import _start


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
