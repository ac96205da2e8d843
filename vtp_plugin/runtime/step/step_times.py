"""How long computes, messages and steps take: measured, traced, and shared by all ranks."""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import json
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vtp_plugin.errors import PeerError
from vtp_plugin.plan.layout.pipeline_layout import Direction
from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.cost.simulator import simulate
from vtp_plugin.plan.schedule.order.actions import Action, Op, Schedule
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.channel import BoundChannel
from vtp_plugin.runtime.comm.work import Noted, Recorder, Stopwatch, num_resent
from vtp_plugin.runtime.health.redaction import LineFile
from vtp_plugin.runtime.health.startup_waiting import STORE_KEEPER, until_store_ends
from vtp_plugin.runtime.health.store import ClockOffset, PostError, Topic, open_round, parse_post, part_of, read_post
from vtp_plugin.runtime.step.stage_channels import CrossingId
from vtp_plugin.trace.explain import on_one_clock
from vtp_plugin.trace.stretches import (
    Cause,
    Owner,
    Plan,
    RankStep,
    Stretch,
    clock_line,
    owner_line,
    plan_line,
    read_step,
    step_line,
)
from vtp_plugin.trace.sums import RankPlace, SiteTraffic, StageTimes, stage_times, traffic_between
from vtp_plugin.util.text import one_line
from vtp_plugin.util.typed_json import MOST_BYTES

Line = dict[str, Any]
ShareLines = Callable[[Line, Callable[[Sequence[Line]], str]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """A step of all ranks, summed up.

    Attributes:
        stages: what the time of every stage went to; empty if no step has run.
        sites: what crossed between sites; empty where all ranks are at one.
    """

    stages: tuple[StageTimes, ...] = ()
    sites: tuple[SiteTraffic, ...] = ()


class Timing:
    """Keeps what this rank does in the step under way, and sums up the last step of all ranks when the log is due.

    Args:
        owner: this rank, as the lines name it.
        recorder: notes what this rank does.
        share_lines: combines the lines of all ranks into one text, and returns it on all; a collective call.
        compare_clocks: measures how far this rank's clock is behind that of rank 0; a collective call.
    """

    def __init__(
        self,
        owner: Owner,
        recorder: Recorder,
        *,
        share_lines: ShareLines,
        compare_clocks: Callable[[], ClockOffset],
    ) -> None:
        self._owner = owner
        self._recorder = recorder
        self._share_lines = share_lines
        self._compare_clocks = compare_clocks
        self._step: RecordedStep | None = None
        self._times: HostTimes | None = None

    def begin_step(self) -> None:
        """Note that a training step begins; the one before is forgotten."""
        self.close()
        self._times = self._times or HostTimes(self._recorder.watch)
        self._step = begin_step(0, self._recorder)

    def report(self) -> StepSums:
        """End the step, and sum it up for all stages and sites; a collective call.

        Returns:
            The sums, the same on all ranks.
        """
        step, self._step = self._step, None
        if step is None or self._times is None:
            return StepSums()
        step.finish(self._recorder)
        offset = self._compare_clocks()
        owner = {name: getattr(self._owner, name) for name in ("rank", "stage", "worker", "site", "network")}
        line = {**owner, "offset_s": offset.offset_s, **step_line(step.read(self._times))}
        sums = read_shared(StepSums, self._share_lines(line, _sum_up))
        try:
            [str(each) for each in (*sums.stages, *sums.sites)]
        except KeyError as error:
            raise PostError(Topic.REPORTS.key, "text", f"lacks {one_line(str(error), 80)}, a part of a step") from None
        return sums

    def close(self) -> None:
        """Forget the step under way; idempotent."""
        if self._step is not None:
            self._recorder.stop_listening(self._step.noted)
            self._step = None


def _sum_up(lines: Sequence[Line]) -> str:
    shares = [
        on_one_clock(
            read_step(line), rank=line["rank"], worker=line["worker"], offset_s=lambda _, line=line: line["offset_s"]
        )
        for line in lines
    ]
    places = {
        line["rank"]: RankPlace(stage=line["stage"], site=line["site"], network=line["network"]) for line in lines
    }
    sums = StepSums(
        stages=stage_times(shares, {rank: place.stage for rank, place in places.items()}),
        sites=traffic_between([shares], places),
    )
    return json.dumps(asdict(sums))


class Tracing:
    """Writes what this rank does in some consecutive training steps; before and after them nothing is recorded.

    A step is kept in memory until the one after it has ended, since a device may still work on it, and is then written.
    So the memory that this takes does not grow with the number of steps, and the file holds those steps only.

    Args:
        file: trace file of this rank.
        owner: this rank, as the file names it.
        recorder: notes what this rank does.
        steps: numbers of the first and the last step to trace, from 1 on.
        compare_clocks: measures how far this rank's clock is behind that of rank 0; a collective call.
    """

    def __init__(
        self,
        file: LineFile,
        owner: Owner,
        recorder: Recorder,
        *,
        steps: tuple[int, int],
        compare_clocks: Callable[[], ClockOffset],
    ) -> None:
        self._file = file
        self._owner = owner
        self._recorder = recorder
        self._first, self._last = steps
        self._compare_clocks = compare_clocks
        self._num_steps = 0
        self._current: RecordedStep | None = None
        self._ended: list[RecordedStep] = []
        self._times: HostTimes | None = None
        self._plans: set[str] = set()
        self._reason: object = None
        self._plan = ""
        atexit.register(self.close)

    def begin_step(self) -> None:
        """Note that a training step begins, and so that the one before ends; all ranks call this for each step."""
        self._num_steps += 1
        if self._num_steps == self._first:
            # Before the step, so that the step itself does not wait for the clocks of all ranks.
            self._file.write(owner_line(self._owner))
            self._note_clock()
            self._times = HostTimes(self._recorder.watch)
        self._end_step()
        if self._first <= self._num_steps <= self._last:
            start = self._ended[-1].end if self._ended else None
            self._current = begin_step(self._num_steps, self._recorder, start=start)
            with self._recorder.span(Cause.TRACE):
                self._write(keep=1)
        elif self._num_steps == self._last + 1:
            self._write(keep=0)
            self._note_clock()
            self._file.close()

    def note_plan(self, reason: object, make: Callable[[], Plan]) -> None:
        """Note what the step that has begun is to do.

        Args:
            reason: what the plan follows from: an equal reason means the plan of the step before.
            make: makes the plan; called only if the step is traced and its plan is a new one.
        """
        if self._current is None:
            return
        with self._recorder.span(Cause.TRACE):
            if reason != self._reason:
                self._plan, self._reason = self._digest(make()), reason
            self._current.plan = self._plan

    def _digest(self, plan: Plan) -> str:
        digest = hashlib.sha256(f"{plan.schedule.digest} {plan.costs}".encode()).hexdigest()[:16]
        if self._owner.rank == 0 and digest not in self._plans:
            self._file.write(plan_line(digest, plan))
        # A run replans a few times at most.
        self._plans.add(digest)
        return digest

    def close(self) -> None:
        """Write what has been recorded, and end; idempotent."""
        atexit.unregister(self.close)
        self._end_step()
        if not self._file.is_closed:
            self._write(keep=0)
            self._file.close()

    def _end_step(self) -> None:
        if self._current is not None:
            self._current.finish(self._recorder)
            self._ended.append(self._current)
            self._current = None

    def _note_clock(self) -> None:
        offset = self._compare_clocks()
        self._file.write(clock_line(offset.at_s, offset.offset_s, offset.error_s))

    def _write(self, *, keep: int) -> None:
        """Write the steps that have ended, except for the last `keep`."""
        while len(self._ended) > keep and self._times is not None:
            self._file.write(step_line(self._ended.pop(0).read(self._times)))


class HostTimes:
    """Reads marks as times of the host's clock; on a device the host waits for the stream once, at the start."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._mark = watch.mark()
        watch.between_ms(self._mark, self._mark)
        self._at_s: float = self._mark if watch.platform.host_blocking_wait else time.perf_counter()

    def read(self, mark: Any) -> float:
        """Return the time of a mark, in seconds; waits until the work has reached it."""
        return self._at_s + 1e-3 * self._watch.between_ms(self._mark, mark)

    def count_from(self, mark: Any) -> None:
        """Measure from a later mark on: a device's differences lose digits as they grow."""
        self._at_s, self._mark = self.read(mark), mark


@dataclass(kw_only=True)
class RecordedStep:
    """A step that is being recorded, or waits to be read.

    Attributes:
        number: number of the step, from 1 on.
        start: mark of the step's start.
        noted: spans that were noted in the step.
        plan: digest of the step's plan.
        end: mark of the step's end; None before it ends.
        resent_before: TCP segments that were sent again up to the step's start; None where nobody counts.
        num_resent: those that were sent again in the step; None before it ends, and where nobody counts.
    """

    number: int
    start: Any
    noted: list[Noted]
    plan: str = ""
    end: Any = None
    resent_before: int | None = None
    num_resent: int | None = None

    def finish(self, recorder: Recorder) -> None:
        """Mark the end of the step."""
        # This span begins after the gradients, and ends with a line of the log, which not every step has.
        recorder.end(Cause.OPTIMIZER)
        self.end = recorder.watch.mark()
        recorder.stop_listening(self.noted)
        if self.resent_before is not None and (resent := num_resent()) is not None:
            self.num_resent = resent - self.resent_before

    def read(self, times: HostTimes) -> RankStep:
        """Return the step with times in seconds; waits until the work has reached its end."""
        times.count_from(self.start)
        return RankStep(
            number=self.number,
            plan=self.plan,
            start_s=times.read(self.start),
            end_s=times.read(self.end),
            stretches=tuple(
                Stretch(
                    cause=one.cause,
                    name=str(one.name),
                    start_s=times.read(one.start),
                    end_s=times.read(one.end),
                    num_bytes=one.num_bytes,
                )
                for one in self.noted
            ),
            num_resent=self.num_resent,
        )


def begin_step(number: int, recorder: Recorder, *, start: Any = None) -> RecordedStep:
    """Begin to record a step.

    Args:
        number: number of the step.
        recorder: notes what this rank does.
        start: mark of the step's start, the end of the previous step; None marks it now.
    """
    noted = recorder.start_listening()
    return RecordedStep(
        number=number,
        start=recorder.watch.mark() if start is None else start,
        noted=noted,
        resent_before=num_resent() if recorder.counts_resent else None,
    )


Report = dict[str, dict[str, float]]
Posted = TypeVar("Posted")
"""What a rank posts: JSON, of a shape that all ranks know."""
_Kind = TypeVar("_Kind")
_NUM_PINGS = 5


@until_store_ends(STORE_KEEPER, "exchange of reports")
def share_reports(
    store: dist.Store,
    own: Posted,
    combine: Callable[[Sequence[Posted]], str],
    *,
    rank: int,
    world_size: int,
    timeout_s: float,
    kind: Any = Report,
) -> str:
    """Combine the reports of all ranks into one text on rank 0, and return it on all: two keys of the store per rank.

    Args:
        store: reaches all ranks.
        own: report of this rank.
        combine: makes the text of the reports, which are in rank order.
        rank: this rank.
        world_size: number of ranks.
        timeout_s: how long to wait for the others.
        kind: shape of a report, see :func:`~vtp_plugin.util.typed_json.read_typed`.

    Raises:
        PeerError: a rank posted no report, or rank 0 no text, within the timeout; or one has another shape.
    """
    exchange = open_round(part_of(store, Topic.REPORTS), rank)
    posts = exchange.posts
    posts.set(str(rank), json.dumps(own))
    limit = timedelta(seconds=timeout_s)
    try:
        if rank == 0:
            keys = [str(i) for i in range(world_size)]
            posts.wait(keys, limit)
            posts.set("text", _combined(combine, [read_post(kind, posts, key, Topic.REPORTS.key) for key in keys]))
            exchange.clear_last([*keys, "text"])
        posts.wait(["text"], limit)
    except dist.DistStoreError as error:
        raise PeerError(
            f"exchange of reports: waited {timeout_s:g} s for {'another rank' if rank == 0 else 'rank 0'}: no answer"
        ) from error
    return posts.get("text")[:MOST_BYTES].decode(errors="backslashreplace")


def read_shared(kind: type[_Kind], text: str) -> _Kind:
    """Read a text of :func:`share_reports` that is JSON.

    Raises:
        PeerError: the text has another shape.
    """
    return parse_post(kind, text, Topic.REPORTS.key, "text")


def _combined(combine: Callable[[Sequence[Posted]], str], reports: Sequence[Posted]) -> str:
    """Combine reports of the right shape; one may still lack figures that the others have."""
    try:
        return combine(reports)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        problem = f"of a rank lacks what ranks report ({type(error).__name__}: {error})"
        raise PostError(Topic.REPORTS.key, "RANK", one_line(problem)) from error


def report_computes(noted: Sequence[Noted], watch: Stopwatch) -> Report:
    """Return the median duration of forwards, whole backwards and, where they are apart, gradients of weights.

    Each by virtual stage. A backward in two parts counts with the sum of theirs, also beside some that are whole.

    Args:
        noted: spans that the recorder has noted in one or more steps.
        watch: stopwatch that made their marks.
    """
    durations: defaultdict[int, defaultdict[Op, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in noted:
        if isinstance(one.name, Action) and one.name.op.is_compute:
            durations[one.name.vstage][one.name.op].append(watch.between_ms(one.start, one.end))
    report: Report = {"forward_ms": {}, "backward_ms": {}}
    for vstage, each in durations.items():
        medians = {op: statistics.median(times) for op, times in each.items()}
        if Op.I in medians:
            medians[Op.B] = medians[Op.I] + medians[Op.W]
        for name, op in (("forward_ms", Op.F), ("backward_ms", Op.B), ("weights_ms", Op.W)):
            if op in medians:
                report.setdefault(name, {})[str(vstage)] = medians[op]
    return report


def measure_channels(
    channels: Mapping[CrossingId, BoundChannel], outputs: Mapping[int, tuple[int, ...]], platform: Platform
) -> Report:
    """Send messages back and forth on every channel of this rank; a collective call, while nothing else is under way.

    They take turns, in one order on all ranks. The upstream rank sends a small tensor and gets one back, a few
    times; then it does the same with a tensor of the run's size (in a U with two rings, of each ring's). Each crosses
    as in the run, with the collectives inside the stages. The fastest small round trip is twice the latency. The
    additional time of a large one is twice the transfer time: both directions are assumed to be equally fast.

    Args:
        channels: channels of this rank.
        outputs: local shape of an output, by virtual stage of this rank.
        platform: where the tensors are.

    Returns:
        Latency, transfer time and message size of each channel on which this rank is upstream.
    """
    report: Report = {"latency_ms": {}, "transfer_ms": {}, "message_bytes": {}}
    for name in sorted({name for name, _ in channels if name.direction is Direction.FORWARD}):
        vstages = sorted(vstage for one, vstage in channels if one == name)
        # No headers: they would add the same time to both sizes.
        small = [_small(channels[one, vstages[0]]) for one in (name, name.opposite)]
        if dist.get_rank() not in small[0].channel.spec.src.ranks:
            for there, back in (small, *((channels[name, v], channels[name.opposite, v]) for v in vstages)):
                for _ in range(_NUM_PINGS):
                    answer(there, back)
            continue
        device = platform.device()
        small_tensor = torch.zeros(small[0].shape or (), dtype=small[0].form.dtype, device=device)
        small_ms = min(ask_ms(small[0], small[1], small_tensor, platform) for _ in range(_NUM_PINGS))
        for vstage in vstages:
            there, back = channels[name, vstage], channels[name.opposite, vstage]
            tensor = torch.zeros(outputs[vstage], dtype=there.form.dtype, device=device)
            tensor_ms = min(ask_ms(there, back, tensor, platform) for _ in range(_NUM_PINGS))
            whole = there.channel.whole_shape(tensor.shape, there.form)
            report["latency_ms"][str(vstage)] = small_ms / 2
            report["transfer_ms"][str(vstage)] = max(0.0, tensor_ms - small_ms) / 2
            report["message_bytes"][str(vstage)] = torch.Size(whole).numel() * there.form.dtype.itemsize
    return report


def _small(bound: BoundChannel) -> BoundChannel:
    """Bind a channel to a small tensor that divides evenly."""
    channel, form = bound.channel, dataclasses.replace(bound.form, has_variable_shapes=False)
    return BoundChannel(channel, form, channel.local_shape(channel.spec.probe.src.shape, form))


def ask_ms(there: BoundChannel, back: BoundChannel, tensor: torch.Tensor, platform: Platform) -> float:
    """Send a tensor, get one back, and return the round trip in ms; the other stage calls :func:`answer`."""
    start = time.perf_counter()
    sent = there.send(tensor)
    back.post().take()
    sent.wait()
    if not platform.host_blocking_wait:
        platform.module().synchronize()
    return 1e3 * (time.perf_counter() - start)


def answer(there: BoundChannel, back: BoundChannel) -> None:
    """Send back the tensor that the asking stage sends."""
    back.send(there.post().take()).wait()


# A median over fewer steps says too little to act on.
_LEAST_STEPS = 3
# If the figures are still wrong after that, measuring again would only cost time.
MOST_REPLANS = 3


class StepTimes:
    """Times training steps and compares them with what the schedule promises.

    A step costs two marks in the rank's work. The ranks exchange figures only at the end of every interval.

    Args:
        watch: marks the steps.
        share_reports: combines all ranks' reports into one text and returns it on all; a collective call.
        interval: number of training steps from one comparison to the next.
        share: largest difference of real and predicted time, as a share of the predicted one, that counts as equal.
    """

    def __init__(
        self,
        watch: Stopwatch,
        share_reports: Callable[[Report, Callable[[Sequence[Report]], str]], str],
        *,
        interval: int,
        share: float,
    ) -> None:
        self._watch = watch
        self._share_reports = share_reports
        self._interval = interval
        self._share = share
        self._steps: deque[tuple[Any, Any]] = deque(maxlen=max(interval, _LEAST_STEPS))
        self._schedule: Schedule | None = None
        self._costs: Costs | None = None
        self._num_steps = 0

    def begin(self) -> Any:
        """Mark the start of a step, and return the mark for :meth:`end`."""
        return self._watch.mark()

    def end(self, start: Any, schedule: Schedule, costs: Costs | None) -> StepTime | None:
        """Count a training step; at the end of an interval, compare.

        Args:
            start: mark that :meth:`begin` has returned.
            schedule: schedule that the step ran.
            costs: costs that it was planned for, in ms; None if there are none yet: then nothing is compared.

        Returns:
            The comparison, the same on all ranks; None within an interval.
        """
        self._num_steps += 1
        if schedule is not self._schedule or costs is not self._costs:
            self._steps.clear()
            self._schedule, self._costs = schedule, costs
        # The first step of a run also loads, allocates and compiles.
        if self._num_steps > 1:
            self._steps.append((start, self._watch.mark()))
        if costs is None or self._num_steps % self._interval or not self._steps:
            return None
        own_ms = statistics.median(self._watch.between_ms(*marks) for marks in self._steps)

        def combine(reports: Sequence[Report]) -> str:
            slowest_ms = max(report["step_ms"]["0"] for report in reports)
            return json.dumps([simulate(schedule, costs).makespan, slowest_ms])

        predicted_ms, real_ms = read_shared(
            tuple[float, float], self._share_reports({"step_ms": {"0": own_ms}}, combine)
        )
        return StepTime(
            predicted_ms=predicted_ms,
            real_ms=real_ms,
            num_steps=len(self._steps),
            num_microbatches=schedule.num_microbatches,
            share=self._share,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Predicted and real duration of a step.

    Attributes:
        predicted_ms: duration by simulation of the plan with its costs.
        real_ms: median duration over several steps, of the slowest rank.
        num_steps: number of these steps.
        num_microbatches: microbatches of each step.
        share: largest difference that counts as equal, as a share of the predicted time.

    >>> print(StepTime(predicted_ms=40.0, real_ms=52.0, num_steps=3, num_microbatches=8, share=0.25))
    step of 8 microbatches: predicted 40.0 ms, real 52.0 ms (+30 %), median of 3 steps
    """

    predicted_ms: float
    real_ms: float
    num_steps: int
    num_microbatches: int
    share: float

    @property
    def differs(self) -> bool:
        """Whether the two durations are further apart than the share, over enough steps to tell.

        >>> StepTime(predicted_ms=40.0, real_ms=49.0, num_steps=3, num_microbatches=8, share=0.25).differs
        False
        >>> StepTime(predicted_ms=40.0, real_ms=29.0, num_steps=3, num_microbatches=8, share=0.25).differs
        True
        >>> StepTime(predicted_ms=40.0, real_ms=29.0, num_steps=1, num_microbatches=8, share=0.25).differs
        False
        """
        apart_ms = abs(self.real_ms - self.predicted_ms)
        return self.num_steps >= _LEAST_STEPS and apart_ms > self.share * self.predicted_ms

    def __str__(self) -> str:
        """Return the comparison as one line."""
        more = f" ({100 * (self.real_ms / self.predicted_ms - 1):+.0f} %)" if self.predicted_ms else ""
        steps = f"median of {self.num_steps} steps" if self.num_steps > 1 else "one step"
        return (
            f"step of {self.num_microbatches} microbatches: predicted {self.predicted_ms:.1f} ms, real "
            f"{self.real_ms:.1f} ms{more}, {steps}"
        )


_NUM_KEPT = 1000
_LEAST_S = 1e-9  # a clock may stand still


class StepSummary:
    """Counts the training steps of this process, and keeps the durations of the latest ones.

    >>> steps = StepSummary()
    >>> steps.begin(1.0), steps.end(3.0), steps.end(9.0), steps.describe()
    (None, None, None, '1 step, median 2.00 s')
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._begin_s: float | None = None
        self._durations_s: deque[float] = deque(maxlen=_NUM_KEPT)

    def begin(self, now_s: float | None = None) -> None:
        """Note that a step begins, or is run again; the time is for tests."""
        self._begin_s = time.monotonic() if now_s is None else now_s

    def end(self, now_s: float | None = None) -> None:
        """Note that the optimizer has made the step; do nothing if none has begun."""
        if self._begin_s is not None:
            self._num_steps += 1
            self._durations_s.append((time.monotonic() if now_s is None else now_s) - self._begin_s)
            self._begin_s = None

    def describe(self) -> str:
        """Return the number of steps and the median of the latest thousand; empty before the first."""
        if not self._durations_s:
            return ""
        shown = _duration(statistics.median(self._durations_s))
        return f"{self._num_steps} step{'s'[: self._num_steps != 1]}, median {shown}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSteps:
    """What a run with ``--brief`` shows where Megatron logs: the steps since the line before.

    Attributes:
        iteration: number of the latest step.
        last: number of the run's last step.
        losses: mean of each loss over the steps that were not skipped, by its name; empty if all were.
        num_skipped: steps that fp16 has skipped.
        step_s: time of a step.
        tokens: of the latest step, in its whole batch.

    >>> print(LoggedSteps(iteration=2, last=10, losses={"lm loss": 5.557638}, num_skipped=0, step_s=0.265, tokens=512))
    iteration 2/10 | lm loss 5.557638 | 265 ms a step | 1,932 tokens/s | 0:00:02 left
    >>> print(LoggedSteps(iteration=9, last=10, losses={}, num_skipped=1, step_s=90.0, tokens=512))
    iteration 9/10 | 1 step skipped | 90.00 s a step | 6 tokens/s | 0:01:30 left
    """

    iteration: int
    last: int
    losses: Mapping[str, float]
    num_skipped: int
    step_s: float
    tokens: int

    def __str__(self) -> str:
        """Return the line; a loss has the digits that Megatron prints."""
        skipped = f"{self.num_skipped} step{'s'[: self.num_skipped != 1]} skipped"
        parts = (
            f"iteration {self.iteration}/{self.last}",
            *(f"{name} {value:#.7g}" for name, value in self.losses.items()),
            *([skipped] if self.num_skipped else []),
            f"{_duration(self.step_s)} a step",
            f"{self.tokens / max(self.step_s, _LEAST_S):,.0f} tokens/s",
            f"{timedelta(seconds=round((self.last - self.iteration) * self.step_s))} left",
        )
        return " | ".join(parts)


def _duration(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1.0 else f"{seconds:.2f} s"
