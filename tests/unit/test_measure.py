"""Durations of compute: by the host's clock, or on a device by events in its stream."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vtp_plugin.errors import PeerError
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.runtime.measure import Report, TimedCompute, share_reports
from vtp_plugin.schedule import Action, Op


class Work:
    """Takes as long as it is told, by whatever clock."""

    def __init__(self, spend: Any) -> None:
        self._spend = spend

    def forward(self, action: Action, activation: torch.Tensor | None) -> torch.Tensor:
        self._spend(10 * (action.vstage + 1) + action.microbatch)
        return torch.zeros(3, 1, 2)

    def backward(self, action: Action, *tensors: torch.Tensor | None, is_last: bool) -> torch.Tensor | None:
        self._spend(2 * (10 * (action.vstage + 1) + action.microbatch))
        return None

    def release(self, output: torch.Tensor) -> None:
        output.data = torch.empty(1)


def compute_all(timed: TimedCompute) -> Report:
    """Three microbatches on two virtual stages: the median is the one in the middle."""
    for op in (Op.F, Op.B):
        for vstage in (0, 3):
            for microbatch in (4, 0, 1):
                action = Action(op=op, vstage=vstage, microbatch=microbatch)
                if op is Op.F:
                    timed.release(timed.forward(action, None))
                else:
                    timed.backward(action, None, torch.zeros(1), None, is_last=False)
    assert timed.shapes == {0: (3, 1, 2), 3: (3, 1, 2)}
    return timed.report()


def test_the_host_is_timed_by_its_clock() -> None:
    report = compute_all(TimedCompute(Work(lambda ms: time.sleep(ms / 1e3)), CpuPlatform("of the test")))
    for name, vstage, least in (("forward_ms", "0", 11), ("forward_ms", "3", 41), ("backward_ms", "3", 82)):
        assert least <= report[name][vstage] <= least + 50
    assert report.keys() == {"forward_ms", "backward_ms"}


def test_a_device_is_timed_by_events_in_its_stream() -> None:
    """The host issues and goes on; the device's clock runs with what is issued."""
    clock_ms = 0

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.is_reached = False

        def record(self) -> None:
            self.at_ms = clock_ms

        def synchronize(self) -> None:
            self.is_reached = True

        def elapsed_time(self, end: Event) -> float:
            assert end.is_reached, "read before it is reached"
            return end.at_ms - self.at_ms

    def spend(ms: int) -> None:
        nonlocal clock_ms
        clock_ms += ms

    platform: Any = SimpleNamespace(host_blocking_wait=False, module=lambda: SimpleNamespace(Event=Event))
    assert compute_all(TimedCompute(Work(spend), platform)) == {
        "forward_ms": {"0": 11, "3": 41},
        "backward_ms": {"0": 22, "3": 82},
    }


def share(store: dist.Store, rank: int, texts: dict[int, str], world_size: int, timeout_s: float = 20.0) -> None:
    own: Report = {"forward_ms": {str(rank): 1.0 + rank}}
    texts[rank] = share_reports(
        store, own, lambda reports: str(reports), rank=rank, world_size=world_size, timeout_s=timeout_s
    )


def test_all_ranks_get_the_text_of_all_reports() -> None:
    store = dist.HashStore()
    for _ in range(2):  # again on the same store
        texts: dict[int, str] = {}
        ranks = [threading.Thread(target=share, args=(store, rank, texts, 3)) for rank in range(3)]
        for thread in ranks[::-1]:
            thread.start()
        for thread in ranks:
            thread.join(30)
        assert texts == dict.fromkeys(range(3), str([{"forward_ms": {str(i): 1.0 + i}} for i in range(3)]))


@pytest.mark.parametrize(("rank", "whom"), [(0, "another rank"), (1, "rank 0")])
def test_a_missing_rank_is_an_error(rank: int, whom: str) -> None:
    with pytest.raises(PeerError, match=f"waited 0.2 s for {whom}: no answer"):
        share(dist.HashStore(), rank, {}, 2, timeout_s=0.2)
