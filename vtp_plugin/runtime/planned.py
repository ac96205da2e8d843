"""One rank's side of a pipeline whose steps the executor runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from vtp_plugin.runtime.communicator import ExchangeOptions
from vtp_plugin.runtime.executor import Compute, Executor, Link
from vtp_plugin.runtime.transport import Channel
from vtp_plugin.schedule import Channel as ChannelName
from vtp_plugin.schedule import Placement, Schedule
from vtp_plugin.schedule.step import Step, plan_step

Agree = Callable[[Callable[[], Mapping[str, object]]], None]


class PlannedPipeline:
    """Plans every kind of step once and runs steps over the own channels.

    Args:
        placement: which stage holds which virtual stage.
        stage: own pipeline stage.
        channels: of the own replica, by the schedule's names.
        agree: runs a function on all ranks and goes on only if it returns the same everywhere.
    """

    def __init__(self, placement: Placement, stage: int, channels: Mapping[ChannelName, Channel], agree: Agree) -> None:
        self.placement = placement
        self._stage = stage
        self._channels = channels
        self._agree = agree
        self._schedules: dict[Step, Schedule] = {}

    @property
    def num_chunks(self) -> int:
        """Number of model chunks on the own stage."""
        return len(self.placement.vstages(self._stage))

    def schedule(self, num_microbatches: int, *, forward_only: bool, group_size: int | None) -> Schedule:
        """Return the schedule of a step; planned, compared between all ranks and printed at its first use.

        Args:
            num_microbatches: of the step, per replica.
            forward_only: no backward pass.
            group_size: Megatron's ``microbatch_group_size_per_vp_stage``; used by interleaved orders only.

        Raises:
            ConfigError: no such order exists, or ranks planned different ones.
        """
        step = Step(
            placement=self.placement,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            group_size=group_size,
        )
        if step not in self._schedules:
            self._schedules[step] = self._plan(step)
        return self._schedules[step]

    def _plan(self, step: Step) -> Schedule:
        plans: list[tuple[Schedule, str]] = []

        def prepare() -> dict[str, object]:
            plans.append(plan_step(step))
            return {"schedule": plans[0][0].digest}

        self._agree(prepare)
        ((schedule, reason),) = plans
        if dist.get_rank() == 0:
            print(reason, flush=True)
        return schedule

    def run(self, schedule: Schedule, options: ExchangeOptions, shape: Sequence[int], compute: Compute) -> None:
        """Run one step; arguments as for :class:`~vtp_plugin.runtime.executor.Link` and ``Executor``."""
        links = {name: Link(channel, options, shape) for name, channel in self._channels.items()}
        Executor(schedule, self._stage, links, compute).run()
