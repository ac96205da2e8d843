"""Start-ups that try how boundaries are crossed, without a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tests.multiproc.jobs.transport_job import part_of
from tests.ordering.recorder import Recorder
from tests.ordering.trace import format_trace
from tests.support.pool import TIMEOUT_S, init_gloo
from vtp_plugin.plan.boundary.channel_spec import pipeline_boundaries
from vtp_plugin.plan.boundary.endpoint import LocalBoxes
from vtp_plugin.plan.boundary.strategies.known_strategies import TransportRules
from vtp_plugin.plan.layout.pipeline_layout import Direction, PipelineLayout
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.runtime.comm.channel import Channel, ChannelLink
from vtp_plugin.runtime.comm.collectives import TensorFormat
from vtp_plugin.runtime.step.communicator import open_channels, own_channels, settle, try_strategies
from vtp_plugin.runtime.step.step_times import Report, share_reports


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What one rank saw.

    Attributes:
        lines: what a run would log.
        strategies: of the own channels, by name.
        problems: tensors that did not arrive as they were sent afterwards.
        trace: everything that was issued, as text.
        shared: figures of this rank and of the others as rank 0 combined them.
    """

    lines: list[str]
    strategies: dict[str, str]
    problems: list[str]
    trace: str
    shared: list[str]


def run(
    sizes: tuple[int, ...],
    tensor_bytes: int,
    dp: int = 1,
    is_sharded: bool = False,
    faster: str | None = None,
    is_ring: bool = False,
) -> Tried:
    """Open channels, try them, and use them.

    Args:
        sizes: of the stages.
        tensor_bytes: of what crosses.
        dp: replicas.
        is_sharded: with sequence parallelism.
        faster: pretend that this strategy is the faster one; None to believe the clock.
        is_ring: the last stage is joined to the first one, too.
    """
    init_gloo()
    platform, rank = CpuPlatform("of the test"), dist.get_rank()
    platform.gathers_by_messages = False  # as on the devices of the models that check the trace
    with Recorder(platform) as recorder:
        layout = PipelineLayout.from_sizes(sizes, world_size=dp * sum(sizes))
        stages = [dist.new_group(list(layout.tp_ranks(i, d))) for d in range(dp) for i in range(len(sizes))]
        own = next(group for group in stages if isinstance(group, dist.ProcessGroup))
        rules = TransportRules(tensor_bytes=tensor_bytes, is_sharded=is_sharded)
        boundaries = pipeline_boundaries(layout, is_ring=is_ring, rules=rules)
        specs = [boundary.channel(direction) for boundary in boundaries for direction in Direction]
        opened = open_channels(specs, stage_group=own, platform=platform, monitor=None, timeout_s=TIMEOUT_S)
        channels = own_channels(boundaries, opened)
        tried = [boundary for boundary in boundaries if boundary.rivals]
        store = dist.PrefixStore("probe", dist.distributed_c10d._get_default_store())
        shared: list[str] = []

        def share(report: Report, combine: Callable[[Sequence[Report]], str]) -> str:
            world_size = dist.get_world_size()
            text = share_reports(store, report, combine, rank=rank, world_size=world_size, timeout_s=TIMEOUT_S)
            shared.append(text)
            if faster is None:
                return text
            return json.dumps(
                {key: {name: 2.0 - (name == faster) for name in value} for key, value in json.loads(text).items()}
            )

        choices = try_strategies(tried, channels, share_reports=share, platform=platform, is_sharded=is_sharded)
        settled = settle(tried, channels, choices)
        problems = [problem for channel in settled.values() for problem in _use(channel, rank, is_sharded=is_sharded)]
    return Tried(
        lines=[*map(str, choices.values())],
        strategies={str(name): channel.spec.strategy for name, channel in settled.items()},
        problems=problems,
        trace=format_trace(recorder.trace()),
        shared=shared,
    )


def _use(channel: Channel, rank: int, *, is_sharded: bool) -> list[str]:
    shape = (12, 2, 3)
    form = TensorFormat(dtype=torch.float32, src_sharded=is_sharded, dst_sharded=is_sharded)
    plan = channel.spec.plan(shape, src_sharded=is_sharded, dst_sharded=is_sharded)
    whole = torch.arange(72.0).reshape(shape)
    if rank in plan.src.ranks:
        part = part_of(whole, LocalBoxes(rank=rank, boxes=plan.src.boxes_of(rank)))
        ChannelLink(channel, form).send(part).wait()
        return []
    tensor = ChannelLink(channel, form, channel.local_shape(shape, form)).post().take()
    wanted = part_of(whole, LocalBoxes(rank=rank, boxes=plan.dst.boxes_of(rank)))
    return [] if torch.equal(tensor.detach(), wanted) else [f"{channel.spec.name}: wrong tensor on rank {rank}"]
