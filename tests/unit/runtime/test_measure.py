"""Durations of compute: by the host's clock, or on a device by events in its stream."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.pace import pace
from vtp_plugin.errors import PeerError
from vtp_plugin.plan.schedule.cost.costs import Costs, uniform_costs
from vtp_plugin.plan.schedule.cost.simulator import simulate
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
from vtp_plugin.plan.schedule.make.u_shape import one_f_one_b
from vtp_plugin.plan.schedule.order.actions import Action, Schedule, parse_action
from vtp_plugin.plan.schedule.order.placement import plain_placement, u_placement
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.runtime.comm.work import Noted, Recorder, Stopwatch
from vtp_plugin.runtime.step.executor import Executor, Inputs
from vtp_plugin.runtime.step.stage_channels import CrossingId
from vtp_plugin.runtime.step.step_times import Report, StepTimes, report_computes, share_reports
from vtp_plugin.trace.stretches import Cause


class Work:
    """Takes as long as it is told, by whatever clock."""

    def __init__(self, spend: Any) -> None:
        self._spend = spend

    def forward(self, action: Action, activation: Inputs, *, is_split: bool) -> torch.Tensor:
        self._spend(10 * (action.vstage + 1) + action.microbatch**2)
        return torch.zeros(3, 1, 2)

    def backward(
        self, action: Action, activation: Inputs, output: torch.Tensor, gradient: torch.Tensor | None, *, is_last: bool
    ) -> torch.Tensor:
        self._spend(2 * (10 * (action.vstage + 1) + action.microbatch**2))
        return torch.zeros(3, 1, 2)

    def release(self, output: torch.Tensor) -> None:
        output.data = torch.empty(1)


class Neighbour:
    """A link whose other end sends at once, and takes at once what it gets."""

    def start_step(self) -> None:
        pass

    def post(self) -> Neighbour:
        return self

    def take(self) -> torch.Tensor:
        return torch.zeros(3, 1, 2)

    def send(self, tensor: torch.Tensor) -> Neighbour:
        return self

    def wait(self) -> None:
        pass


def compute_all(platform: Any, work: Work) -> Report:
    """Three microbatches on the two virtual stages of an edge: the median is the one in the middle."""
    recorder, links = Recorder(platform), defaultdict[CrossingId, Neighbour](Neighbour)

    def execute(*, forward_only: bool) -> Executor:
        request = ScheduleRequest(placement=u_placement(3), num_microbatches=3, forward_only=forward_only)
        executor = Executor(make_schedule(request)[0], 0, links, work, recorder=recorder)
        executor.run()
        return executor

    execute(forward_only=False)  # nobody listens
    with recorder.listening() as noted:
        assert not execute(forward_only=True).shapes and not noted  # an evaluation is not measured
        executor = execute(forward_only=False)
    assert executor.shapes == {0: (3, 1, 2), 3: (3, 1, 2)}
    assert len(noted) == 12 and not recorder.is_on
    return report_computes(noted, recorder.watch)


def test_the_host_is_timed_by_its_clock() -> None:
    report = compute_all(CpuPlatform("of the test"), Work(lambda ms: time.sleep(ms / 1e3)))
    for name, vstage, least in (("forward_ms", "0", 11), ("forward_ms", "3", 41), ("backward_ms", "3", 82)):
        assert least <= report[name][vstage] <= least + 50 * pace()
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
    found = compute_all(platform, Work(spend))
    assert found == {"forward_ms": {"0": 11, "3": 41}, "backward_ms": {"0": 22, "3": 82}}


def test_a_backward_counts_whole_and_its_gradients_of_weights_where_they_are_apart() -> None:
    """A stage may split some of its backwards, or none."""
    durations = {"0F0": 3, "0B0": 50, "0I1": 4, "0W1": 2, "0I2": 8, "0W2": 3, "0I3": 5, "0W3": 7, "1F0": 2, "1B0": 6}
    noted = [
        Noted(cause=Cause.BACKWARD, name=parse_action(name), start=100, end=100 + took, num_bytes=0)
        for name, took in durations.items()
    ]
    watch: Any = SimpleNamespace(between_ms=lambda start, end: end - start)
    found = report_computes(noted, watch)
    assert found == {"forward_ms": {"0": 3, "1": 2}, "backward_ms": {"0": 5 + 3, "1": 6}, "weights_ms": {"0": 3}}


class Clock:
    """A host whose clock runs as the test says, and that shares reports with ranks as slow as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, others_ms: list[float]) -> None:
        self.now_s = 0.0
        self.num_shared = 0
        self._others_ms = others_ms
        monkeypatch.setattr("vtp_plugin.runtime.comm.work.time.perf_counter", lambda: self.now_s)

    def share(self, own: Report, combine: Callable[[Sequence[Report]], str]) -> str:
        self.num_shared += 1
        return combine([own, *({"step_ms": {"0": ms}} for ms in self._others_ms)])

    def steps(self, times: StepTimes, steps_ms: list[float], schedule: Schedule, costs: Costs | None) -> list[str]:
        texts = []
        for step_ms in steps_ms:
            start = times.begin()
            self.now_s += 1e-3 * step_ms
            texts.append(str(times.end(start, schedule, costs) or ""))
        return texts


def test_steps_are_compared_with_their_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of the run is left out; the median of the others counts, of the slowest rank."""
    schedule, costs = one_f_one_b(2, 4), uniform_costs(plain_placement(2), forward=10.0, backward=20.0)
    predicted_ms = simulate(schedule, costs).makespan
    clock = Clock(monkeypatch, others_ms=[20.0])
    times = StepTimes(Stopwatch(CpuPlatform("of the test")), clock.share, interval=4, share=0.25)
    texts = clock.steps(times, [9000, 100, 110, 900, 100, 1000, 100, 100], schedule, costs)
    assert [*map(bool, texts)] == [False, False, False, True] * 2 and clock.num_shared == 2
    assert texts[3] == (
        f"step of 4 microbatches: predicted {predicted_ms:.1f} ms, real 110.0 ms "
        f"({100 * (110 / predicted_ms - 1):+.0f} %), median of 3 steps"
    )
    assert "real 100.0 ms" in texts[7] and "median of 4 steps" in texts[7]
    # Another rank is slower; another plan begins anew; without costs there is nothing to compare.
    clock = Clock(monkeypatch, others_ms=[120.0])
    times = StepTimes(Stopwatch(CpuPlatform("of the test")), clock.share, interval=2, share=0.25)
    texts = clock.steps(times, [100, 100, 100, 100], schedule, costs)
    assert "real 120.0 ms" in texts[1] and "one step" in texts[1] and "median of 3 steps" in texts[3]
    assert clock.steps(times, [100, 100], schedule, None) == ["", ""]
    assert "median of 2 steps" in clock.steps(times, [100, 100], schedule, replace(costs))[1]


def share(store: dist.Store, rank: int, texts: dict[int, str], world_size: int, timeout_s: float = 60.0) -> None:
    own: Report = {"forward_ms": {str(rank): 1.0 + rank}}
    texts[rank] = share_reports(
        store, own, lambda reports: str(reports), rank=rank, world_size=world_size, timeout_s=timeout_s
    )


def test_all_ranks_get_the_text_of_all_reports() -> None:
    store = dist.HashStore()
    num_keys = []
    for _ in range(3):  # again on the same store
        texts: dict[int, str] = {}
        ranks = [threading.Thread(target=share, args=(store, rank, texts, 3)) for rank in range(3)]
        for thread in ranks[::-1]:
            thread.start()
        for thread in ranks:
            thread.join(60)
        assert texts == dict.fromkeys(range(3), str([{"forward_ms": {str(i): 1.0 + i}} for i in range(3)]))
        num_keys.append(store.num_keys())
    assert num_keys == num_keys[:1] * 3, "the store grows with every exchange"


@pytest.mark.parametrize(("rank", "whom"), [(0, "another rank"), (1, "rank 0")])
def test_a_missing_rank_is_an_error(rank: int, whom: str) -> None:
    with pytest.raises(PeerError, match=f"waited 0.2 s for {whom}: no answer"):
        share(dist.HashStore(), rank, {}, 2, timeout_s=0.2)
