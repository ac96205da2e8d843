"""Real steps of a U-shaped pipeline between two sites: compute is sleep, communication is the plugin's own, over gloo.

The edge is one process at the site "edge", every cloud stage one at the site "cloud". All are forked, so they share a
clock and a start time that do not cross the measured line.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import TIMEOUT_S, Clock
from benchmarks.wan.link import ADDRESSES, INTERFACE, WanLink
from vtp_plugin.boundary.pipeline import Direction, TransportRules, pipeline_boundaries
from vtp_plugin.layout.pipeline import PipelineLayout
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.runtime.communicator import ExchangeOptions, open_channels
from vtp_plugin.runtime.executor import Executor, Link
from vtp_plugin.runtime.measure import measure_links
from vtp_plugin.runtime.transport import Channel
from vtp_plugin.schedule import Action, Costs, Schedule
from vtp_plugin.schedule import Channel as ChannelName

_OPTIONS = ExchangeOptions(
    dtype=torch.float32, is_sharded=False, has_variable_shapes=False, width=None, is_batched=False
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is run over one line.

    Attributes:
        latency_ms: Of the line, one way.
        mbit: Its rate, each way.
        costs: Durations in seconds.
        schedules: Lowered, by name; a step of each is run in turn.
        num_steps: Measured steps of each; one more comes before.
        shape: Of every activation, float32.
    """

    latency_ms: float
    mbit: float
    costs: Costs
    schedules: Mapping[str, Schedule]
    num_steps: int
    shape: tuple[int, int, int]

    @property
    def num_stages(self) -> int:
        """Number of stages, and of processes."""
        return next(iter(self.schedules.values())).placement.num_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was measured over one line.

    Attributes:
        steps_s: By schedule, the time of every step: from the common start until the last stage is through.
        kept: By schedule, the most activations that were alive at a time, by virtual stage.
        links: Latency and transfer time that the run itself would measure, of the way from the edge.
        line: The relay's own figures.
    """

    steps_s: dict[str, list[float]]
    kept: dict[str, list[int]]
    links: dict[str, dict[str, float]]
    line: dict[str, Any]


class Sleeper:
    """Computes nothing, in the time that was asked for, and counts the outputs that are alive.

    Args:
        costs: Durations in seconds.
        shape: Of every activation.
    """

    def __init__(self, costs: Costs, shape: Sequence[int]) -> None:
        self.peaks: Counter[int] = Counter()
        self._costs = costs
        self._shape = shape
        self._live: Counter[int] = Counter()

    def forward(self, action: Action, activation: torch.Tensor | None) -> torch.Tensor:
        """Sleep for a forward; somebody keeps the output until its backward, or not."""
        time.sleep(self._costs.forward[action.vstage])
        output = torch.zeros(*self._shape)
        self._live[action.vstage] += 1
        self.peaks[action.vstage] = max(self.peaks[action.vstage], self._live[action.vstage])
        weakref.finalize(output, self._live.subtract, (action.vstage,))
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
        """Sleep for a backward."""
        time.sleep(self._costs.backward[action.vstage])
        return torch.zeros(*self._shape) if action.vstage else None

    def release(self, output: torch.Tensor) -> None:
        """Keep everything: memory is counted, not saved."""


def run_jobs(jobs: Sequence[Job]) -> list[Outcome]:
    """Run jobs at once, each over a line of its own.

    Raises:
        LinkUnavailableError: This machine cannot make the lines.
        RuntimeError: A process failed; its own message is on the standard error.
    """
    context = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        links = [stack.enter_context(WanLink(job.latency_ms, job.mbit)) for job in jobs]
        pipes = [[context.Pipe(duplex=False) for _ in range(job.num_stages)] for job in jobs]
        processes = [
            context.Process(target=_rank_main, args=(rank, job, link, clock, ends[rank][1]), daemon=True)
            for job, link, ends in zip(jobs, links, pipes, strict=True)
            for clock in [Clock(job.num_stages)]
            for rank in range(job.num_stages)
        ]
        for process in processes:
            process.start()
        try:
            _wait(processes)
            found = [[reader.recv() for reader, _ in ends] for ends in pipes]
        finally:
            # Before the lines are closed: the processes hold the relays' pipes.
            for process in processes:
                process.kill()
                process.join()
        return [_outcome(job, ranks, link) for job, ranks, link in zip(jobs, found, links, strict=True)]


def _wait(processes: Sequence[Any]) -> None:
    """Wait until all processes have ended well.

    Raises:
        RuntimeError: One has not.
    """
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in wait([*running]):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                raise RuntimeError(f"a stage ended with {process.exitcode}")


def _outcome(job: Job, ranks: Sequence[Any], link: WanLink) -> Outcome:
    num_vstages = job.num_stages + 1
    kept: dict[str, list[int]] = {}
    for name in job.schedules:
        peaks = [peaks[name] for _, peaks, _ in ranks]
        kept[name] = [max(peak[vstage] for peak in peaks) for vstage in range(num_vstages)]
    steps_s, _, links = ranks[0]
    return Outcome(steps_s=steps_s, kept=kept, links=links, line=link.stats())


def _rank_main(rank: int, job: Job, link: WanLink, clock: Clock, writer: Connection) -> None:
    link.enter("cloud" if rank else "edge")
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{ADDRESSES['edge']}:29500",
        rank=rank,
        world_size=job.num_stages,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    platform = CpuPlatform("benchmark")
    channels = _open_channels(job, rank, platform)
    placement = next(iter(job.schedules.values())).placement
    outputs = dict.fromkeys(placement.vstages(rank), job.shape)
    # This also warms the connections up: whole tensors, five times each way.
    links = measure_links(placement, channels, _OPTIONS, job.shape, outputs, platform)
    steps_s: dict[str, list[float]] = {name: [] for name in job.schedules}
    peaks = dict.fromkeys(job.schedules, Counter[int]())
    for _ in range(1 + job.num_steps):
        for name, schedule in job.schedules.items():
            sleeper = Sleeper(job.costs, job.shape)
            ends = {channel: Link(channels[channel], _OPTIONS, job.shape) for channel in channels}
            steps_s[name].append(clock.time(rank, Executor(schedule, rank, ends, sleeper).run))
            peaks[name] = sleeper.peaks
    writer.send(({name: times[1:] for name, times in steps_s.items()}, peaks, links))
    dist.barrier()
    dist.destroy_process_group()


def _open_channels(job: Job, rank: int, platform: CpuPlatform) -> dict[ChannelName, Channel]:
    """Open the channels that a run of so many stages of one rank each has."""
    num_stages = job.num_stages
    layout = PipelineLayout.from_sizes((1,) * num_stages, world_size=num_stages)
    num_bytes = torch.Size(job.shape).numel() * _OPTIONS.dtype.itemsize
    rules = TransportRules(sites=("edge", *["cloud"] * (num_stages - 1)), tensor_bytes=num_bytes)
    boundaries = pipeline_boundaries(layout, is_ring=True, rules=rules)
    crossings = [boundary.crossing(direction) for boundary in boundaries for direction in Direction]
    opened = open_channels(crossings, stage_group=None, platform=platform, monitor=None, timeout_s=TIMEOUT_S)
    return {
        ChannelName(
            upstream=boundary.upstream,
            downstream=boundary.downstream,
            is_backward=direction is Direction.BACKWARD,
        ): opened[boundary.name(direction)]
        for boundary in boundaries
        for direction in Direction
        if rank in (boundary.upstream, boundary.downstream)
    }
