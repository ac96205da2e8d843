"""Steps of a planned pipeline without a model, in which each forward notes what it reads and what has come with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.multiproc.jobs.planned_job import SHAPE, World
from tests.support.pool import TIMEOUT_S, init_gloo
from vtp_plugin.config.resolve import ScheduleOptions
from vtp_plugin.plan.boundary.channel_spec import pipeline_boundaries
from vtp_plugin.plan.boundary.message_kind import MessageKind
from vtp_plugin.plan.layout.pipeline_layout import Direction, PipelineLayout
from vtp_plugin.plan.schedule.order.actions import Action, Placement
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.runtime.comm.collectives import TensorFormat
from vtp_plugin.runtime.step.communicator import open_channels, own_channels
from vtp_plugin.runtime.step.companion_tensors import Companion, join_companions
from vtp_plugin.runtime.step.links import LinkForm, bind_links
from vtp_plugin.runtime.step.schedule_runner import ScheduleRunner

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


def run(
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
    form = LinkForm(form=TensorFormat(dtype=torch.float32, has_variable_shapes=varies), shape=SHAPE)
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
        runner.run(schedule, bind_links(placement, channels, [form] * (placement.num_vstages - 1)), reading)
        seen.append(reading.noted)
    return worker, seen
