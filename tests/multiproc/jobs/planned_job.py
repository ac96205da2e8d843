"""Steps of planned pipelines without a model: known numbers, chosen durations, and what comes with them."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tests.multiproc.cases.core_cases import Case, RankResult
from tests.multiproc.jobs.core_job import train
from tests.support.pool import TIMEOUT_S, init_gloo
from vtp_plugin.config.resolve import ScheduleOptions
from vtp_plugin.plan.boundary.channel_spec import pipeline_boundaries
from vtp_plugin.plan.boundary.message_kind import MessageKind
from vtp_plugin.plan.layout.pipeline_layout import ChannelId, Direction, PipelineLayout
from vtp_plugin.plan.schedule.cost.costs import Costs, format_costs
from vtp_plugin.plan.schedule.order.actions import Action
from vtp_plugin.plan.schedule.order.placement import Placement, u_placement
from vtp_plugin.plan.schedule.proof.check_schedule import most_activations, peaks_kept
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.runtime.comm.channel import Channel
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.health.startup import Agreement
from vtp_plugin.runtime.step.communicator import open_channels, own_channels
from vtp_plugin.runtime.step.companion_tensors import Companion, join_companions
from vtp_plugin.runtime.step.schedule_runner import ScheduleRunner
from vtp_plugin.runtime.step.stage_channels import OutputForm, bind_channels
from vtp_plugin.runtime.step.step_times import Report, share_reports

SHAPE = (6, 1, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One training step or evaluation.

    Attributes:
        factor: durations of the compute are so many times as long.
    """

    num_microbatches: int
    forward_only: bool = False
    factor: float = 1.0


@dataclass(slots=True, kw_only=True)
class Seen:
    """What one rank saw.

    Attributes:
        digests: of the schedule, by pass.
        printed: by pass.
        wrong: values that are not what they must be.
        planned: most activations kept at a time, by pass and virtual stage of this rank.
        kept: as counted.
        costs: what is planned for at the end; None if that is not known.
    """

    digests: list[str]
    printed: list[str]
    wrong: list[str]
    planned: list[dict[int, int]]
    kept: list[dict[int, int]]
    costs: str | None


class Numbers:
    """Adds the number of the virtual stage on the way there, and doubles gradients on the way back.

    Args:
        num_vstages: of the pipeline.
        forward_ms: by virtual stage; a backward takes twice as long.
    """

    def __init__(self, num_vstages: int, forward_ms: Sequence[float]) -> None:
        self.wrong: list[str] = []
        self.peaks: Counter[int] = Counter()
        self._live: Counter[int] = Counter()
        self._last = num_vstages - 1
        self._forward_ms = forward_ms

    def forward(self, action: Action, activation: torch.Tensor | None, *, is_split: bool) -> torch.Tensor:
        v, n = action.vstage, action.microbatch
        time.sleep(1e-3 * self._forward_ms[v])
        self._check(action, activation, None if v == 0 else 100 * n + sum(range(v)))
        output = torch.full(SHAPE, float(100 * n + sum(range(v + 1))))
        self._live[v] += 1
        self.peaks[v] = max(self.peaks[v], self._live[v])
        weakref.finalize(output, self._live.subtract, (v,))
        return output

    def backward(
        self,
        action: Action,
        activation: torch.Tensor | None,
        output: torch.Tensor,
        gradient: torch.Tensor | None,
        *,
        is_last: bool,
    ) -> torch.Tensor | None:
        v, n = action.vstage, action.microbatch
        time.sleep(2e-3 * self._forward_ms[v])
        self._check(action, output, 100 * n + sum(range(v + 1)))
        self._check(action, gradient, None if v == self._last else (n + 1) * 2 ** (self._last - v))
        return torch.full(SHAPE, float((n + 1) * 2 ** (self._last - v + 1))) if v else None

    def release(self, output: torch.Tensor) -> None:
        """Keep the data, to check it."""

    def _check(self, action: Action, tensor: torch.Tensor | None, value: float | None) -> None:
        found = None if tensor is None else tensor.unique().tolist()
        if found != (None if value is None else [value]):
            self.wrong.append(f"{action}: {found}, not {value}")


class World:
    """All ranks of the job, over a store."""

    def __init__(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore("planned", store)

    def agree(self, name: str, prepare: Callable[[], Mapping[str, object]]) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        Agreement(self._store, rank=rank, world_size=world_size, timeout_s=lambda: TIMEOUT_S).settle(name, prepare)

    def computing(self, name_compute: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def share_reports(self, own: Report, combine: Callable[[Sequence[Report]], str]) -> str:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return share_reports(self._store, own, combine, rank=rank, world_size=world_size, timeout_s=TIMEOUT_S)


def run(
    sizes: tuple[int, ...],
    forward_ms: Sequence[float],
    passes: Sequence[Pass],
    costs: Costs | None = None,
    in_flight: tuple[int, ...] | None = None,
    varying: bool = False,
    replan_share: float = math.inf,
    interval: int = 100,
) -> Seen:
    """Run passes one after another on this rank."""
    init_gloo()
    layout = PipelineLayout.from_sizes(sizes, world_size=sum(sizes))
    placement, stage = u_placement(len(sizes)), layout.stage_of(dist.get_rank())
    platform = CpuPlatform("of the test")
    channels = _open(layout, stage, platform)
    planning = ScheduleOptions(
        costs=costs, in_flight=in_flight, replan_share=replan_share, report_interval_steps=interval
    )
    pipeline = ScheduleRunner(placement, stage, World(), platform, planning)
    form = TensorFormat(dtype=torch.float32, has_variable_shapes=varying)
    seen = Seen(digests=[], printed=[], wrong=[], planned=[], kept=[], costs=None)
    for one in passes:
        numbers = Numbers(placement.num_vstages, [one.factor * duration for duration in forward_ms])
        with _logged() as printed:
            schedule = pipeline.schedule(one.num_microbatches, forward_only=one.forward_only, group_size=None)
            output_form = OutputForm(form=form, shape=() if varying else SHAPE)
            bound = bind_channels(placement, channels, [output_form] * (placement.num_vstages - 1))
            pipeline.run(schedule, bound, numbers)
        own = placement.vstages(stage)
        seen.digests.append(schedule.digest)
        seen.printed.append(printed.getvalue())
        seen.wrong += numbers.wrong
        seen.planned.append(dict(zip(own, most_activations(peaks_kept(schedule, stage)), strict=True)))
        seen.kept.append({v: numbers.peaks[v] for v in own})
    seen.costs = None if pipeline.costs is None else format_costs(pipeline.costs)
    return seen


def _open(layout: PipelineLayout, stage: int, platform: CpuPlatform) -> dict[ChannelId, Channel]:
    groups: list[Any] = [dist.new_group(list(layout.tp_ranks(i, 0, 0))) for i in range(layout.num_stages)]
    boundaries = pipeline_boundaries(layout, is_ring=True)
    specs = [boundary.channel(direction) for boundary in boundaries for direction in Direction]
    opened = open_channels(specs, stage_group=groups[stage], platform=platform, monitor=None, timeout_s=TIMEOUT_S)
    return own_channels(boundaries, opened)


def train_and_print(case: Case) -> tuple[RankResult, str]:
    """Train a model; return also what this rank logged."""
    with _logged() as printed:
        result = train(case)
    return result, printed.getvalue()


@contextlib.contextmanager
def _logged() -> Iterator[io.StringIO]:
    """Catch what the plugin logs on this rank; who sets the logger up before keeps it."""
    logger, text = logging.getLogger("vtp_plugin"), io.StringIO()
    handler = logging.StreamHandler(text)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield text
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


Noted = tuple[int, int, dict[str, int]]
"""Virtual stage, microbatch, and the batch that its forward read."""


class Reading:
    """Reads a batch in every forward, and notes it; its outputs may have lengths of their own."""

    def __init__(self, placement: Placement, iterators: Sequence[Any], *, varies: bool) -> None:
        self.noted: list[Noted] = []
        self._placement = placement
        self._iterators = iterators
        self._varies = varies

    def forward(self, action: Action, activation: torch.Tensor | None, *, is_split: bool) -> torch.Tensor:
        iterator = self._iterators[self._placement.chunk(action.vstage)]
        self.noted.append((action.vstage, action.microbatch, dict(next(iterator)) if iterator else {}))
        return torch.ones(SHAPE[0] + (action.microbatch % 3 if self._varies else 0), *SHAPE[1:])

    def backward(
        self, action: Action, activation: torch.Tensor | None, *tensors: torch.Tensor | None, is_last: bool
    ) -> torch.Tensor | None:
        return None if activation is None else torch.ones_like(activation)

    def release(self, output: torch.Tensor) -> None:
        """Keep the data."""


def length_of(number: int, *, varies: bool) -> int:
    """Give the length of what belongs to a batch."""
    return 1 + number % 3 if varies else 2


def companions(src: int, dst: frozenset[int] | None, *, varies: bool) -> tuple[Companion, ...]:
    """Declare two: the number of a batch from `src` to `dst`, and minus that number from stage 0 to all others.

    Args:
        src: stage that reads the first one.
        dst: stages that want it.
        varies: the second one has a length that follows from its number.
    """
    words = {"unit": "batch", "says": "its number", "way_out": "read one"}

    def second(made: torch.Tensor) -> dict[str, int]:
        assert made.shape == (length_of(-int(made[0, 0, 0]), varies=varies), 1, 4), made.shape
        return {"second": int(made[0, 0, 0])}

    return (
        Companion(
            kind=MessageKind.LENGTHS,
            shape=(3, 1, 1),
            read=lambda batch: torch.full((3,), batch["number"], dtype=torch.int32),
            give=lambda made: {"came": int(made[0])},
            src=src,
            dst=dst,
            **words,
        ),
        Companion(
            kind=MessageKind.POSITIONS,
            shape=(None, None, 4) if varies else (2, 1, 4),
            read=lambda batch: torch.full(
                (length_of(batch["number"], varies=varies), 1, 4), -batch["number"], dtype=torch.int32
            ),
            give=second,
            **words,
        ),
    )


def run_companions(
    sizes: tuple[int, ...],
    placement: Placement,
    num_microbatches: int,
    src: int,
    dst: frozenset[int] | None,
    dp: tuple[int, ...] | None = None,
    *,
    varies: bool = False,
) -> tuple[int, list[list[Noted]]]:
    """Run a training step and an evaluation; return the rank's worker, and what it noted in each."""
    init_gloo()
    dp_sizes = dp or (1,) * len(sizes)
    world_size = sum(tp * num for tp, num in zip(sizes, dp_sizes, strict=True))
    layout = PipelineLayout.from_sizes(sizes, world_size=world_size, dp=dp)
    own = layout.coord(dist.get_rank())
    groups: dict[tuple[int, int], Any] = {
        (stage, replica): dist.new_group(list(layout.tp_ranks(stage, replica, 0)))
        for stage in range(layout.num_stages)
        for replica in range(dp_sizes[stage])
    }
    boundaries = pipeline_boundaries(layout, is_ring=placement.num_vstages > layout.num_stages)
    platform = CpuPlatform("of the test")
    opened = open_channels(
        [boundary.channel(direction) for boundary in boundaries for direction in Direction],
        stage_group=groups[own.stage, own.dp_rank],
        platform=platform,
        monitor=None,
        timeout_s=TIMEOUT_S,
    )
    channels = own_channels(boundaries, opened)
    worker = placement.worker(own.stage, own.dp_rank)
    joined = join_companions(placement, worker, channels, companions(src, dst, varies=varies), platform)
    runner = ScheduleRunner(placement, worker, World(), platform, ScheduleOptions(), joined)
    form = OutputForm(form=TensorFormat(dtype=torch.float32, has_variable_shapes=varies), shape=SHAPE)
    seen: list[list[Noted]] = []
    for forward_only in (False, True):
        own_microbatches = placement.microbatches(worker, num_microbatches)
        given: list[Iterator[dict[str, int]]] = [
            iter([{"number": 100 * chunk + microbatch + 1} for microbatch in own_microbatches])
            for chunk in range(runner.num_chunks)
        ]
        schedule = runner.schedule(
            num_microbatches // dp_sizes[own.stage], forward_only=forward_only, group_size=layout.num_stages
        )
        reading = Reading(placement, runner.iterators(given), varies=varies)
        runner.run(schedule, bind_channels(placement, channels, [form] * (placement.num_vstages - 1)), reading)
        seen.append(reading.noted)
    return worker, seen
