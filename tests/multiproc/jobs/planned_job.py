"""Steps of a U-shaped pipeline without a model: known numbers, chosen durations, real channels."""

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
from vtp_plugin.plan.layout.pipeline_layout import ChannelId, Direction, PipelineLayout
from vtp_plugin.plan.schedule.cost.costs import Costs, format_costs
from vtp_plugin.plan.schedule.order.actions import Action, u_placement
from vtp_plugin.plan.schedule.proof.check_schedule import most_activations, peaks_kept
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.runtime.comm.channel import Channel
from vtp_plugin.runtime.comm.collectives import TensorFormat
from vtp_plugin.runtime.health.startup import Agreement
from vtp_plugin.runtime.step.communicator import open_channels, own_channels
from vtp_plugin.runtime.step.links import LinkForm, bind_links
from vtp_plugin.runtime.step.schedule_runner import ScheduleRunner
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
            link_form = LinkForm(form=form, shape=() if varying else SHAPE)
            links = bind_links(placement, channels, [link_form] * (placement.num_vstages - 1))
            pipeline.run(schedule, links, numbers)
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
