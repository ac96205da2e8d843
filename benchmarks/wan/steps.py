"""Real steps of a pipeline between two sites: compute is sleep, communication is the plugin's own, over gloo.

Every replica of a stage is one process, those of stage 0 at the site "edge", all others at the site "cloud". All are
forked, so they share a clock and a start time that do not cross the measured line.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import TIMEOUT_S, Clock, free_port
from benchmarks.wan.link import ADDRESSES, INTERFACE, WanLink
from vtp_plugin.plan.boundary.channel_spec import pipeline_boundaries
from vtp_plugin.plan.boundary.strategies.known_strategies import TransportRules
from vtp_plugin.plan.layout.pipeline_layout import ChannelId, Direction, PipelineLayout
from vtp_plugin.plan.layout.replica_map import DpMode, ReplicaMap
from vtp_plugin.plan.schedule.cost.costs import Costs, split_costs
from vtp_plugin.plan.schedule.order.actions import Action, Op, Schedule
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.runtime.comm.channel import BoundChannel, Channel
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.step.communicator import open_channels, own_channels
from vtp_plugin.runtime.step.executor import Executor
from vtp_plugin.runtime.step.stage_channels import CrossingId, OutputForm, bind_channels
from vtp_plugin.runtime.step.step_times import measure_channels

_FORM = TensorFormat(dtype=torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is run over one line.

    Attributes:
        latency_ms: latency of the line, one way; None for no line: all over loopback, without root.
        mbit: rate of the line in Mbit/s, each way.
        costs: Durations in seconds, of one microbatch on one replica.
        schedules: Lowered, by name; a step of each is run in turn.
        num_steps: Measured steps of each; one more comes before.
        shape: `[S, B, H]` of an activation on the widest stage, float32.
        shapes: Those of the outputs, by virtual stage, where they differ; empty if they do not.
        dp_sizes: Replicas of every stage; empty for one each.
        split: Names of the schedules whose narrow stages run larger microbatches, cut at the boundaries.
    """

    latency_ms: float | None
    mbit: float
    costs: Costs
    schedules: Mapping[str, Schedule]
    num_steps: int
    shape: tuple[int, int, int]
    shapes: tuple[tuple[int, int, int], ...] = ()
    dp_sizes: tuple[int, ...] = ()
    split: tuple[str, ...] = ()

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return next(iter(self.schedules.values())).placement.num_stages

    @property
    def layout(self) -> PipelineLayout:
        """Processes of every stage."""
        dp_sizes = self.dp_sizes or (1,) * self.num_stages
        return PipelineLayout.from_sizes((1,) * self.num_stages, world_size=sum(dp_sizes), dp=dp_sizes)

    def replicas(self, name: str) -> ReplicaMap:
        """Say which replicas work together in a schedule."""
        mode = DpMode.SPLIT if name in self.split else DpMode.MULTIPLEX
        return ReplicaMap(dp_sizes=self.layout.dp_sizes, mode=mode)

    def costs_of(self, name: str) -> Costs:
        """Give the costs of a schedule's microbatches."""
        if name not in self.split:
            return self.costs
        return split_costs(replace(self.schedules[name].placement, num_replicas=self.dp_sizes), self.costs)

    def local_shapes(self, name: str, stage: int) -> list[tuple[int, int, int]]:
        """Give the shapes of the outputs on one replica of a stage, by virtual stage."""
        replicas = self.replicas(name)
        shapes = self.shapes or (self.shape,) * self.schedules[name].placement.num_vstages
        return [(length, replicas.micro_batch(stage, batch), width) for length, batch, width in shapes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was measured over one line.

    Attributes:
        steps_s: seconds of every step, by schedule: from the common start until the last stage is through.
        busy_s: seconds that the edge computed in every step, by schedule.
        kept: most activations that were alive at a time on one replica, by schedule and virtual stage.
        links: Latency and transfer time that the run itself would measure, of the way from the edge.
        line: The relay's own figures.
    """

    steps_s: dict[str, list[float]]
    busy_s: dict[str, list[float]]
    kept: dict[str, list[int]]
    links: dict[str, dict[str, float]]
    line: dict[str, Any]


class Sleeper:
    """Computes nothing, in the time that was asked for, and counts the outputs that are alive.

    Args:
        costs: Durations in seconds.
        shapes: shape of every virtual stage's output.
    """

    def __init__(self, costs: Costs, shapes: Sequence[Sequence[int]]) -> None:
        self.peaks: Counter[int] = Counter()
        self.busy_s = 0.0
        self._costs = costs
        self._shapes = shapes
        self._live: Counter[int] = Counter()

    def forward(self, action: Action, activation: torch.Tensor | None, *, is_split: bool) -> torch.Tensor:
        """Sleep for a forward; somebody keeps the output until its backward, or not."""
        self._sleep(self._costs.forward[action.vstage])
        output = torch.zeros(*self._shapes[action.vstage])
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
        """Sleep for a backward, or for its part for the input."""
        times = self._costs.of_input if action.op is Op.I else self._costs.backward
        self._sleep(times[action.vstage])
        return torch.zeros(*self._shapes[action.vstage - 1]) if action.vstage else None

    def weights(self, action: Action, *, is_last: bool) -> None:
        """Sleep for the gradients of weights."""
        self._sleep(self._costs.of_weights[action.vstage])

    def release(self, output: torch.Tensor) -> None:
        """Keep everything: memory is counted, not saved."""

    def _sleep(self, duration_s: float) -> None:
        start_s = time.monotonic()
        time.sleep(duration_s)
        self.busy_s += time.monotonic() - start_s


def run_jobs(jobs: Sequence[Job]) -> list[Outcome]:
    """Run jobs at once, each over a line of its own, or over loopback.

    Raises:
        LinkUnavailableError: This machine cannot make the lines.
        RuntimeError: A process failed; its own message is on the standard error.
    """
    context = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        links = [
            None if job.latency_ms is None else stack.enter_context(WanLink(job.latency_ms, job.mbit)) for job in jobs
        ]
        pipes = [[context.Pipe(duplex=False) for _ in range(job.layout.world_size)] for job in jobs]
        processes = [
            context.Process(target=_rank_main, args=(rank, job, link, address, clock, ends[rank][1]), daemon=True)
            for job, link, ends in zip(jobs, links, pipes, strict=True)
            for clock in [Clock(job.layout.world_size)]
            for address in [f"127.0.0.1:{free_port()}" if link is None else f"{ADDRESSES['edge']}:29500"]
            for rank in range(job.layout.world_size)
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


def _outcome(job: Job, ranks: Sequence[Any], link: WanLink | None) -> Outcome:
    kept: dict[str, list[int]] = {}
    for name, schedule in job.schedules.items():
        peaks = [found[name] for _, _, found, _ in ranks]
        kept[name] = [max(peak[vstage] for peak in peaks) for vstage in range(schedule.placement.num_vstages)]
    steps_s, busy_s, _, links = ranks[0]
    return Outcome(steps_s=steps_s, busy_s=busy_s, kept=kept, links=links, line={} if link is None else link.stats())


def _rank_main(rank: int, job: Job, link: WanLink | None, address: str, clock: Clock, writer: Connection) -> None:
    if link is not None:
        link.enter("cloud" if job.layout.stage_of(rank) else "edge")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if link is None else INTERFACE
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}",
        rank=rank,
        world_size=job.layout.world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    platform = CpuPlatform("benchmark")
    channels: dict[DpMode, dict[ChannelId, Channel]] = {}
    links: dict[str, dict[str, float]] = {}
    for name, schedule in job.schedules.items():
        mode = job.replicas(name).mode
        if mode not in channels:
            channels[mode] = _open_channels(job, name, platform)
            stage = job.layout.stage_of(rank)
            shapes = job.local_shapes(name, stage)
            outputs = {vstage: shapes[vstage] for vstage in schedule.placement.vstages(stage)}
            # This also warms the connections up: whole tensors, five times each way.
            links = measure_channels(_bound(schedule, channels[mode], shapes), outputs, platform)
    writer.send((*_run_steps(job, rank, channels, clock), links))
    dist.barrier()
    dist.destroy_process_group()


def _run_steps(
    job: Job, rank: int, channels: Mapping[DpMode, Mapping[ChannelId, Channel]], clock: Clock
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, Counter[int]]]:
    """Run all steps on this rank; return by schedule their times, those of its own compute, and what it kept."""
    coord = job.layout.coord(rank)
    steps_s: dict[str, list[float]] = {name: [] for name in job.schedules}
    busy_s: dict[str, list[float]] = {name: [] for name in job.schedules}
    peaks: dict[str, Counter[int]] = {}
    for num_step in range(1 + job.num_steps):
        for name, schedule in job.schedules.items():
            replicas, shapes = job.replicas(name), job.local_shapes(name, coord.stage)
            worker = replicas.worker(coord.stage, coord.dp_rank)
            sleeper = Sleeper(job.costs_of(name), shapes)
            own_links = _bound(schedule, channels[replicas.mode], shapes)
            executor = Executor(schedule, worker, own_links, sleeper)
            step_s = clock.time(rank, executor.run)
            peaks[name] = sleeper.peaks
            if num_step:
                steps_s[name].append(step_s)
                busy_s[name].append(sleeper.busy_s)
    return steps_s, busy_s, peaks


def _bound(
    schedule: Schedule, channels: Mapping[ChannelId, Channel], shapes: Sequence[tuple[int, ...]]
) -> dict[CrossingId, BoundChannel]:
    output_forms = [OutputForm(form=_FORM, shape=shape) for shape in shapes[: schedule.placement.num_vstages - 1]]
    return bind_channels(schedule.placement, channels, output_forms)


def _open_channels(job: Job, name: str, platform: CpuPlatform) -> dict[ChannelId, Channel]:
    """Open the channels that a run of such stages has in the mode of a schedule."""
    placement, replicas = job.schedules[name].placement, job.replicas(name)
    num_bytes = torch.Size(job.shape).numel() * _FORM.dtype.itemsize
    rules = TransportRules(sites=("edge", *["cloud"] * (job.num_stages - 1)), tensor_bytes=num_bytes)
    is_ring = placement.num_vstages > placement.num_stages
    boundaries = pipeline_boundaries(job.layout, is_ring=is_ring, rules=rules, dp_mode=replicas.mode)
    specs = [boundary.channel(direction) for boundary in boundaries for direction in Direction]
    opened = open_channels(specs, stage_group=None, platform=platform, monitor=None, timeout_s=TIMEOUT_S)
    return own_channels(boundaries, opened)
