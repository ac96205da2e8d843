"""The parts of ``--vtp-trace``: the recorder, clocks, files, and how much of a run is kept."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from vtp_plugin.errors import ConfigError, PeerError
from vtp_plugin.plan.schedule.cost.costs import uniform_costs
from vtp_plugin.plan.schedule.make.u_shape import one_f_one_b
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.runtime.comm import work as recorder_module
from vtp_plugin.runtime.comm.work import Recorder
from vtp_plugin.runtime.health import store as clock
from vtp_plugin.runtime.health.redaction import LineFile
from vtp_plugin.runtime.health.store import ClockOffset, estimate_offset
from vtp_plugin.runtime.step.step_times import Tracing
from vtp_plugin.trace.stretches import MEANINGS, Cause, Owner, Plan, read_files, trace_path


class Clock:
    """A host's clock that runs as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(recorder_module, "time", SimpleNamespace(perf_counter=lambda: self.now_s))


def test_what_is_inside_something_of_its_cause_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = Clock(monkeypatch)
    recorder = Recorder(CpuPlatform("of the test"))
    recorder.begin(Cause.SAVE)  # nobody listens
    with recorder.listening() as noted:
        recorder.end(Cause.SAVE)
        with recorder.span(Cause.FORWARD, "1F0"):
            recorder.begin(Cause.FORWARD)
            now.now_s = 1.0
            recorder.end(Cause.FORWARD)
            recorder.begin(Cause.BATCH)  # an error left it open
            with recorder.listening() as inner, recorder.span(Cause.WAIT, "x"):
                now.now_s = 3.0
        threads = [threading.Thread(target=lambda: recorder.span(Cause.SEND).__enter__())]
        threads[0].start()
        threads[0].join()
    found = [(one.cause, one.name, one.start, one.end) for one in noted]
    assert found == [(Cause.WAIT, "x", 1.0, 3.0), (Cause.FORWARD, "1F0", 0.0, 3.0)]
    assert [one.cause for one in inner] == [Cause.WAIT] and not recorder.is_on


def test_clocks_are_compared_over_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose clocks are seconds apart; the error bounds what is wrong, and the store does not grow."""
    ahead_s = {"0": 0.0, "1": 5.0, "2": -70.0}
    perf_counter = clock.time.perf_counter
    monkeypatch.setattr(
        clock,
        "time",
        SimpleNamespace(perf_counter=lambda: perf_counter() + ahead_s.get(threading.current_thread().name, 0.0)),
    )
    store, num_keys = dist.HashStore(), []
    for _ in range(3):
        found: dict[int, ClockOffset] = {}

        def compare(rank: int, found: dict[int, ClockOffset] = found) -> None:
            found[rank] = estimate_offset(store, rank=rank, world_size=3, timeout_s=60.0)

        ranks = [threading.Thread(target=compare, args=(rank,), name=str(rank)) for rank in range(3)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join(60)
        for rank, offset in found.items():
            assert abs(offset.offset_s + ahead_s[str(rank)]) <= offset.error_s + 1e-6, (rank, offset)
        assert found[0].error_s == 0.0 < found[1].error_s < 1.0
        num_keys.append(store.num_keys())
    assert num_keys == num_keys[:1] * 3, "the store grows with every comparison"
    with pytest.raises(PeerError, match="waited 0.2 s for rank 0: no answer"):
        estimate_offset(dist.HashStore(), rank=1, world_size=2, timeout_s=0.2)


def _owner(rank: int = 0, world_size: int = 1, run: str = "a") -> Owner:
    return Owner(run=run, rank=rank, world_size=world_size, stage=0, worker=0)


def _trace(folder: Path, steps: tuple[int, int] = (2, 3), owner: Owner | None = None, num_steps: int = 5) -> Recorder:
    """Trace steps whose forwards take no time."""
    own = owner or _owner()
    recorder = Recorder(CpuPlatform("of the test"))
    file = LineFile(trace_path(folder, own.rank), option="--vtp-trace", is_continued=False)
    apart = ClockOffset(at_s=0.0, offset_s=1.5, error_s=0.25)
    tracing = Tracing(file, own, recorder, steps=steps, compare_clocks=lambda: apart)
    schedule = one_f_one_b(2, 3)
    plan = Plan(schedule=schedule, costs=uniform_costs(schedule.placement, latency=0.5))
    for number in range(num_steps):
        tracing.begin_step()
        tracing.note_plan(3, lambda: plan)
        assert recorder.is_on == (steps[0] <= number + 1 <= steps[1])
        for action in schedule.orders[0]:
            with recorder.span(Cause.BACKWARD if action.op.is_backward else Cause.FORWARD, action):
                pass
    tracing.close()
    tracing.close()
    assert not recorder.is_on
    return recorder


def test_only_the_steps_that_were_asked_for_are_kept(tmp_path: Path) -> None:
    """A run of any length leaves a file of the same length, and a recorder that nobody listens to."""
    sizes = []
    for num_steps in (5, 50):
        _trace(tmp_path, num_steps=num_steps)
        sizes.append(len(trace_path(tmp_path, 0).read_text().splitlines()))
    assert sizes == [6, 6]  # whose, clock, plan, two steps, clock
    (file,) = read_files(tmp_path)
    assert [step.number for step in file.steps] == [2, 3] and file.clocks == [(0.0, 1.5, 0.25)] * 2
    schedule = one_f_one_b(2, 3)
    (plan,) = file.plans.values()
    assert (plan.schedule, plan.costs) == (schedule, uniform_costs(schedule.placement, latency=0.5))
    assert {step.plan for step in file.steps} == file.plans.keys()
    noted = [one.name for one in file.steps[0].stretches if one.cause is not Cause.TRACE]
    assert noted == [*map(str, schedule.orders[0])]
    # The run ends inside the steps: what there is of the last one is kept.
    _trace(tmp_path, steps=(4, 9))
    (file,) = read_files(tmp_path)
    assert [step.number for step in file.steps] == [4, 5] and len(file.clocks) == 1


def test_a_plan_is_made_once_for_a_reason(tmp_path: Path) -> None:
    """Making it takes longer than all else of a step's record."""
    made: list[int] = []

    def make(num_microbatches: int) -> Plan:
        made.append(num_microbatches)
        return Plan(schedule=one_f_one_b(2, num_microbatches), costs=None)

    file = LineFile(trace_path(tmp_path, 0), option="--vtp-trace", is_continued=False)
    apart = ClockOffset(at_s=0.0, offset_s=0.0, error_s=0.0)
    tracing = Tracing(file, _owner(), Recorder(CpuPlatform("of the test")), steps=(2, 7), compare_clocks=lambda: apart)
    for num_microbatches in (3, 3, 3, 4, 4, 3, 3, 5):
        tracing.begin_step()
        tracing.note_plan(num_microbatches, lambda number=num_microbatches: make(number))
    tracing.close()
    assert made == [3, 4, 3]
    (traced,) = read_files(tmp_path)
    assert [traced.plans[step.plan].schedule.num_microbatches for step in traced.steps] == [3, 3, 4, 4, 3, 3]


def test_a_device_is_read_by_its_own_clock(tmp_path: Path) -> None:
    """Its marks are events of a stream; a step is read when the next one has ended, and none is read twice."""
    clock_ms = 100.0

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_ms = clock_ms

        def synchronize(self) -> None:
            assert self.at_ms <= clock_ms

        def elapsed_time(self, end: Event) -> float:
            return end.at_ms - self.at_ms

    platform: Any = SimpleNamespace(host_blocking_wait=False, module=lambda: SimpleNamespace(Event=Event))
    recorder = Recorder(platform)
    file = LineFile(trace_path(tmp_path, 0), option="--vtp-trace", is_continued=False)
    apart = ClockOffset(at_s=0.0, offset_s=0.0, error_s=0.0)
    tracing = Tracing(file, _owner(), recorder, steps=(1, 2), compare_clocks=lambda: apart)
    for _ in range(3):
        tracing.begin_step()
        with recorder.span(Cause.FORWARD, "0F0"):
            clock_ms += 40.0
        clock_ms += 10.0
    tracing.close()
    (read,) = read_files(tmp_path)
    first, second = read.steps
    assert [round(1e3 * (step.end_s - step.start_s), 3) for step in read.steps] == [50.0, 50.0]
    assert first.end_s == second.start_s
    for step in read.steps:
        (forward,) = [one for one in step.stretches if one.cause is Cause.FORWARD]
        assert round(1e3 * (forward.start_s - step.start_s), 3) == 0.0 and round(1e3 * forward.length_s, 3) == 40.0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "holds no trace .* give the folder of --vtp-trace"),
        (lambda path: path.write_text(""), "rank0.jsonl is empty: the run did not reach the first"),
        (lambda path: path.write_text('{"vtp_trace": 9}\n'), "rank0.jsonl:1: this is no trace of format 1"),
        (lambda path: path.write_text('{"vtp_trace": 1}\n'), "rank0.jsonl:1: .* is no first line of a trace"),
        (lambda path: path.write_text('{"vtp_trace": 1,}\n{}\n'), r"rank0.jsonl:1:17: .*; remove the line"),
        (lambda path: path.write_text("[]\n{}\n"), "rank0.jsonl:1: this line is no JSON object"),
        (lambda path: _append(path, '{"step": 1}\n'), "rank0.jsonl:7: 'plan': this line is no part of a trace"),
        (lambda path: _append(path, '{"clock": ["x", 1, 2]}\n'), "rank0.jsonl:7: could not convert"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "rank0.jsonl cannot be read"),
        (lambda path: _trace(path.parent, owner=_owner(1, 2, "b")), "rank1.jsonl is of another run than rank0.jsonl"),
        (lambda path: _trace(path.parent, owner=_owner(0, 9)), r"lacks the files of rank 1, 2, 3, 4, 5, ... of 9"),
    ],
)
def test_files_that_are_no_trace_are_named(tmp_path: Path, spoil: Any, message: str) -> None:
    _trace(tmp_path)
    spoil(trace_path(tmp_path, 0))
    with pytest.raises(ConfigError, match=message):
        read_files(tmp_path)


def _append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    """The last one, of a run that was killed while it wrote."""
    _trace(tmp_path)
    path = trace_path(tmp_path, 0)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]) + lines[-2][:50])
    (file,) = read_files(tmp_path)
    assert [step.number for step in file.steps] == [2]
    assert json.loads(lines[-2])["step"] == 3


def test_every_cause_has_a_meaning() -> None:
    assert MEANINGS.keys() == {*Cause}
