"""One rank's part of a pipeline whose steps the executor runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vtp_plugin.config.resolve import ScheduleOptions
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.schedule.cost.costs import combine_reports, format_costs, parse_costs
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule, summarise
from vtp_plugin.plan.schedule.order.actions import Schedule
from vtp_plugin.plan.schedule.order.placement import Placement, num_rings
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.channel import BoundChannel
from vtp_plugin.runtime.comm.work import Noted, Recorder
from vtp_plugin.runtime.health.store import PostError, Topic
from vtp_plugin.runtime.step.companion_tensors import Companions
from vtp_plugin.runtime.step.executor import Compute, Executor
from vtp_plugin.runtime.step.stage_channels import CrossingId, StageChannel
from vtp_plugin.runtime.step.step_times import (
    MOST_REPLANS,
    Report,
    StepTime,
    StepTimes,
    measure_channels,
    report_computes,
)
from vtp_plugin.runtime.step.weight_gradients import WeightGradients
from vtp_plugin.trace.stretches import Cause
from vtp_plugin.util import log
from vtp_plugin.util.text import one_line

# Training steps that are measured together, without the first step of a run, which also loads, allocates, compiles.
NUM_MEASURED_STEPS = 3


class Ranks(Protocol):
    """Interface of what all ranks do together outside the pipeline; every call but one is collective."""

    def agree(self, name: str, prepare: Callable[[], Mapping[str, object]]) -> None:
        """Run a function on all ranks; return only if it returns the same on all."""
        ...

    def share_reports(self, own: Report, combine: Callable[[Sequence[Report]], str]) -> str:
        """Combine the reports of all ranks into one text, and return it on all."""
        ...

    def computing(self, name_compute: Callable[[], str]) -> AbstractContextManager[None]:
        """Keep the time of collectives inside the computes of a ``with`` block; not collective."""
        ...


class ScheduleRunner:
    """Makes the schedule of each kind of step once, and runs steps over this rank's channels.

    The order of a U-shape depends on durations and transfers, and so does any order with split backwards. If the user
    does not state these costs, the run measures them. The first steps run in an order made for assumed costs. Training
    steps 2 to 4 are timed, and transfers are tried after them. All ranks then combine their figures (medians over the
    steps) into one set of costs, and later steps are planned for these, once for each number of microbatches. A new
    order does not change what is computed: every chunk keeps the order of its backwards.

    From then on the time of the steps is compared with the time that the schedule promises. If they are too far apart,
    measured costs are measured again and the order is replanned, a few times at most; for stated costs there is a
    warning.

    Args:
        placement: which stage holds which virtual stage.
        worker: number of this rank's replica, see :class:`~vtp_plugin.plan.schedule.order.placement.Placement`; without
            replicas its stage.
        ranks: all ranks of the run.
        platform: where this rank computes.
        options: kind of schedule, costs and limits for which orders are planned.
        companions: tensors that cross with activations.
        recorder: notes what this rank does; None makes one.

    Attributes:
        weight_gradients: what split backwards have left for later on this rank.
    """

    def __init__(
        self,
        placement: Placement,
        worker: int,
        ranks: Ranks,
        platform: Platform,
        options: ScheduleOptions,
        companions: Companions | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.placement = placement
        self._companions = companions or Companions()
        self.costs = options.costs
        self._in_flight = options.in_flight
        self._split_backward = options.split_backward
        self.weight_gradients = WeightGradients()
        self._worker = worker
        self._stage = placement.stage_of(worker)
        self._ranks = ranks
        self._platform = platform
        self._recorder = recorder or Recorder(platform)
        self._schedules: dict[ScheduleRequest, Schedule] = {}
        self._num_trained = 0
        self._report: Report | None = None
        self._noted: list[Noted] = []
        depends_on_costs = self._split_backward or num_rings(placement) > 0
        self._num_left = NUM_MEASURED_STEPS if self.costs is None and depends_on_costs else 0
        self._num_replans = 0
        self._has_stated_costs = options.costs is not None
        self._has_warned = False
        self._times = StepTimes(
            self._recorder.watch,
            ranks.share_reports,
            interval=options.report_interval_steps,
            share=options.replan_share,
        )

    @property
    def num_chunks(self) -> int:
        """Number of model chunks on this rank's stage."""
        return len(self.placement.vstages(self._stage))

    @property
    def is_first_stage(self) -> bool:
        """Whether the first chunk of this rank's stage takes only samples."""
        return not self.placement.predecessors(self.placement.vstages(self._stage)[0])

    @property
    def take_turns(self) -> bool:
        """Whether several replicas of this rank's stage share the microbatches of a step."""
        return self.placement.num_replicas[self._stage] > 1

    def settle_whole(self, find: Callable[[], Mapping[str, tuple[torch.Tensor | None, bool]]]) -> None:
        """Find, in the first training step with split backwards, which layers leave nothing for later; collective then.

        A hook on a weight wants its gradient in the order of a whole backward. It may be on one rank of a layer alone,
        but all ranks of a layer compute and sum its gradients in one order. So what one rank finds holds for all.

        Args:
            find: gives the linear layers of this rank by name: the weight, if it is a parameter, and whether the layer
                leaves nothing for later.
        """
        if not self._split_backward or self.weight_gradients.always_whole is not None:
            return
        layers = {f"stage {self._stage}: {name}": layer for name, layer in find().items()}
        own = {"whole": {name: 1.0 for name, (_, is_whole) in layers.items() if is_whole}}
        named = self._ranks.share_reports(own, _all_whole).splitlines()
        self.weight_gradients.always_whole = [
            weight for name, (weight, _) in layers.items() if name in named and weight is not None
        ]
        if named and dist.get_rank() == 0:
            more = f" and {len(named) - 1} more" if len(named) > 1 else ""
            log.warning(
                f"--vtp-split-backward: whole backwards of {named[0]}{more}, for hooks on weights or parametrizations"
            )

    def schedule(
        self, num_microbatches: int, *, forward_only: bool, group_size: int | None, batch: int | None = None
    ) -> Schedule:
        """Return the schedule of a step; planned, compared between all ranks and printed at its first use.

        Args:
            num_microbatches: microbatches of the step on this rank; the schedule has those of all replicas that share
                them.
            forward_only: whether there is no backward pass.
            group_size: Megatron's ``microbatch_group_size_per_vp_stage``; used by interleaved orders only.
            batch: samples of the step on all replicas of this rank's stage; None leaves them unchecked.

        Raises:
            ConfigError: no such order exists, or ranks planned different ones, or for different batches.
        """
        if self._report is not None:
            with self._recorder.span(Cause.PLAN):
                self._combine(self._report)
        request = ScheduleRequest(
            placement=self.placement,
            num_microbatches=num_microbatches * self.placement.num_replicas[self._stage],
            forward_only=forward_only,
            group_size=group_size,
            costs=self.costs,
            in_flight=self._in_flight,
            split_backward=self._split_backward and not forward_only,
        )
        if request not in self._schedules:
            with self._recorder.span(Cause.PLAN):
                self._schedules[request] = self._make(request, batch)
        return self._schedules[request]

    def _combine(self, report: Report) -> None:
        """Combine what all ranks have measured into one set of costs, and plan for it from now on."""

        def combine(reports: Sequence[Report]) -> str:
            return format_costs(combine_reports(reports, self.placement))

        text = self._ranks.share_reports(report, combine)
        # Parse the text instead of using the figures: the same costs, given by flag later, must give the same order.
        try:
            self.costs = parse_costs(text.split(), self.placement)
        except ConfigError as error:
            problem = f"is {one_line(text, 80)!r}, which are no costs ({one_line(str(error), 80)})"
            raise PostError(Topic.REPORTS.key, "text", problem) from None
        self._report = None
        first = self._num_trained - NUM_MEASURED_STEPS + 1
        command = log.wrap_command(["--vtp-costs", *text.split()])
        log.info(f"measured in training steps {first} to {self._num_trained}:\n{command}")

    def _make(self, request: ScheduleRequest, batch: int | None) -> Schedule:
        made: list[tuple[Schedule, str]] = []

        def prepare() -> dict[str, object]:
            made.append(make_schedule(request))
            return {"samples of a step": batch, "schedule": made[0][0].digest}

        self._ranks.agree("planning of a step", prepare)
        ((schedule, reason),) = made
        log.info(summarise(request, schedule))
        log.debug(reason)
        return schedule

    def iterators(self, given: Any) -> list[Any]:
        """Return what the chunks of this stage read: Megatron's iterators, where a companion comes with its entries.

        Args:
            given: Megatron's iterator, or a list with one for each chunk; None where nothing is read.
        """
        return self._companions.iterators(given if isinstance(given, list) else [given])

    def run(self, schedule: Schedule, channels: Mapping[CrossingId, StageChannel], compute: Compute) -> None:
        """Run one step; the arguments are those of :class:`~vtp_plugin.runtime.step.executor.Executor`."""
        for channel in channels.values():
            channel.start_step()
        known = {name: channel for name, channel in channels.items() if isinstance(channel, BoundChannel)}
        self._companions.start_step(is_batched=any(channel.form.is_batched for channel in known.values()))
        executor = Executor(schedule, self._worker, channels, compute, self._companions, self._recorder)
        if schedule.forward_only:
            with self._ranks.computing(executor.name_compute):
                executor.run()
            return
        self._num_trained += 1
        is_measured = self._num_left > 0 and self._num_trained > 1
        start = self._times.begin()
        listening = self._recorder.listening() if is_measured else contextlib.nullcontext(list[Noted]())
        with self._ranks.computing(executor.name_compute), listening as noted:
            executor.run()
        with self._recorder.span(Cause.PLAN):
            time = self._times.end(start, schedule, self.costs)
        if is_measured:
            self._num_left -= 1
            self._noted += noted
            if self._num_left == 0:
                computes = report_computes(self._noted, self._recorder.watch)
                with self._recorder.span(Cause.PLAN):
                    self._report = {**computes, **measure_channels(known, executor.shapes, self._platform)}
                self._noted = []
        if time is not None:
            self._compare(time)

    def _compare(self, time: StepTime) -> None:
        """Print predicted and real time; if they are too far apart, measure again, or warn of stated costs."""
        note = ""
        if time.differs and not self._has_stated_costs and self._num_left == 0 and self._report is None:
            if self._num_replans < MOST_REPLANS:
                self._num_replans += 1
                self._num_left = NUM_MEASURED_STEPS
                note = f"; too far apart: measuring again, {self._num_replans} of at most {MOST_REPLANS} times"
            else:
                note = f"; too far apart, but measured again {MOST_REPLANS} times already: the order stays"
        log.info(f"{time}{note}")
        if time.differs and self._has_stated_costs and not self._has_warned and dist.get_rank() == 0:
            self._has_warned = True
            log.warning(
                f"--vtp-costs says {time.predicted_ms:.1f} ms for a step that takes {time.real_ms:.1f} ms: the order "
                "may be a poor one; correct the costs, or leave them out to let the run measure them"
            )


def _all_whole(reports: Sequence[Report]) -> str:
    return "\n".join(sorted({name for report in reports for name in report["whole"]}))
