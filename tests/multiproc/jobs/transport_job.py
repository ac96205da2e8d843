"""Known tensors over channels and links: moved, tried both ways at a start-up, and timed."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ordering.recorder import Recorder
from tests.ordering.trace import format_trace
from tests.support.pool import TIMEOUT_S, init_gloo
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.boundary.channel_spec import ChannelSpec, pipeline_boundaries
from vtp_plugin.plan.boundary.endpoint import Endpoint, LocalBoxes, Shape
from vtp_plugin.plan.boundary.strategies.known_strategies import TransportRules
from vtp_plugin.plan.layout.pipeline_layout import Direction, PipelineLayout
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.platform.detect import detect
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.channel import BoundChannel, Channel
from vtp_plugin.runtime.comm.collectives import settle
from vtp_plugin.runtime.comm.ping import time_links
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.step.communicator import open_channels, own_channels, try_strategies
from vtp_plugin.runtime.step.communicator import settle as settle_choices
from vtp_plugin.runtime.step.step_times import Report, share_reports
from vtp_plugin.tune.cluster.machines import Links, Location


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One way to cross a boundary.

    Attributes:
        src: ``(cp, tp)`` of the sending side.
        dst: the same of the receiving side.
        strategy: how it is crossed.
        src_sharded: the senders hold slices.
        dst_sharded: the receivers want slices.
        shape: of the whole tensor.
        dtype: name of its type.
        is_transposed: the senders' parts are not contiguous.
        num_microbatches: exchanges under way at once.
        gathers_by_messages: slices are completed as gloo does it best; else as devices do it.
    """

    src: tuple[int, int]
    dst: tuple[int, int]
    strategy: str = "sliced"
    src_sharded: bool = False
    dst_sharded: bool = False
    shape: Shape = (24, 2, 3)
    dtype: str = "float32"
    is_transposed: bool = False
    num_microbatches: int = 3
    gathers_by_messages: bool = True

    def spec(self) -> ChannelSpec:
        """Number the ranks from the senders on."""
        src = _endpoint(*self.src, 0)
        return ChannelSpec(name=str(self), src=src, dst=_endpoint(*self.dst, len(src.ranks)), strategy=self.strategy)


def _endpoint(cp: int, tp: int, first: int) -> Endpoint:
    return Endpoint(ranks_by_cp=tuple(tuple(range(first + i * tp, first + (i + 1) * tp)) for i in range(cp)))


def move(moves: Sequence[Move]) -> list[str]:
    """Carry out all moves, one after another; return what went wrong on this rank."""
    init_gloo()
    platform, rank = CpuPlatform("of the test"), dist.get_rank()
    problems: list[str] = []
    groups: dict[tuple[int, ...], object] = {}
    for one in moves:
        spec = one.spec()
        stages = [_group(ranks, groups) for endpoint in (spec.src, spec.dst) for ranks in endpoint.ranks_by_cp]
        mine = next((group for group in stages if isinstance(group, dist.ProcessGroup)), None)
        platform.gathers_by_messages = one.gathers_by_messages
        (channel,) = open_channels([spec], stage_group=mine, platform=platform, monitor=None, timeout_s=TIMEOUT_S)
        if channel is not None:
            problems += [f"{one}: {problem}" for problem in _exchange(channel, one, rank)]
        del channel
    settle(platform)
    return problems


def _group(ranks: tuple[int, ...], groups: dict[tuple[int, ...], object]) -> object:
    """Return the group of some ranks; it is made once, and goes with the job."""
    if ranks not in groups:
        groups[ranks] = dist.new_group(list(ranks))
    return groups[ranks]


def part_of(whole: torch.Tensor, holding: LocalBoxes) -> torch.Tensor:
    """Cut a rank's part out of a tensor: its boxes one behind the other."""
    return torch.cat([whole[tuple(slice(*interval) for interval in box)] for box in holding.boxes])


def _exchange(channel: Channel, move: Move, rank: int) -> list[str]:
    dtype: torch.dtype = getattr(torch, move.dtype)
    form = TensorFormat(dtype=dtype, src_sharded=move.src_sharded, dst_sharded=move.dst_sharded)
    plan = channel.spec.plan(move.shape, src_sharded=move.src_sharded, dst_sharded=move.dst_sharded)
    wholes = [
        (torch.arange(torch.Size(move.shape).numel()).reshape(move.shape) % 251 + microbatch).to(dtype)
        for microbatch in range(move.num_microbatches)
    ]
    if rank in plan.src.ranks:
        parts = [part_of(whole, LocalBoxes(rank=rank, boxes=plan.src.boxes_of(rank))) for whole in wholes]
        if move.is_transposed:
            parts = [part.transpose(0, 2).contiguous().transpose(0, 2) for part in parts]
        for work in [BoundChannel(channel, form).send(part) for part in parts]:
            work.wait()
            work.wait()
        return []
    bound = BoundChannel(channel, form, channel.local_shape(move.shape, form))
    works = [bound.post() for _ in wholes]
    received = [work.tensor for work in works]
    if move.num_microbatches > 1:
        works[-1].wait()  # those before it are waited for first, on all ranks alike
    problems = []
    for whole, tensor, work in zip(wholes, received, works, strict=True):
        work.wait()
        work.wait()
        wanted = part_of(whole, LocalBoxes(rank=rank, boxes=plan.dst.boxes_of(rank)))
        is_leaf = tensor.is_leaf and tensor.requires_grad
        if tensor.dtype != dtype or not is_leaf or not torch.equal(tensor.detach(), wanted):
            problems.append(f"rank {rank} has {tensor.flatten()[:8]}, not {wanted.flatten()[:8]}")
    # Megatron keeps handles longer than tensors: a handle that was waited for must not hold the memory.
    alive = [weakref.ref(tensor) for tensor in received]
    del tensor
    received.clear()
    if any(tensor() is not None for tensor in alive):
        problems.append(f"rank {rank}: handles keep tensors that nobody else has")
    return problems


def varying(one: Move, shapes: Sequence[Shape]) -> list[Shape]:
    """Send tensors of shapes that only the senders know; return on each receiver the shapes of its own parts.

    All receives are posted before the first one is waited for. A wrong value shows as an empty shape.
    """
    init_gloo()
    platform: Platform = detect("cpu")
    spec, rank = one.spec(), dist.get_rank()
    stages = [dist.new_group(list(endpoint.ranks)) for endpoint in (spec.src, spec.dst)]
    mine = next(group for group in stages if isinstance(group, dist.ProcessGroup))
    (channel,) = open_channels([spec], stage_group=mine, platform=platform, monitor=None, timeout_s=TIMEOUT_S)
    assert channel is not None
    form = TensorFormat(
        dtype=torch.float32, src_sharded=one.src_sharded, dst_sharded=one.dst_sharded, has_variable_shapes=True, width=3
    )
    wholes = [torch.arange(float(torch.Size(shape).numel())).reshape(shape) for shape in shapes]
    plans = [spec.plan(shape, src_sharded=one.src_sharded, dst_sharded=one.dst_sharded) for shape in shapes]
    if rank in spec.src.ranks:
        held = [LocalBoxes(rank=rank, boxes=plan.src.boxes_of(rank)) for plan in plans]
        bound = BoundChannel(channel, form)
        works = [bound.send(part_of(whole, holding)) for whole, holding in zip(wholes, held, strict=True)]
        for work in works:
            work.wait()
        return []
    received = [work.take() for work in [BoundChannel(channel, form).post() for _ in shapes]]
    held = [LocalBoxes(rank=rank, boxes=plan.dst.boxes_of(rank)) for plan in plans]
    return [
        tuple(tensor.shape) if torch.equal(tensor.detach(), part_of(whole, holding)) else ()
        for tensor, whole, holding in zip(received, wholes, held, strict=True)
    ]


def wrong_headers(sent: Sequence[tuple[Shape, str]], width: int, most_tokens: int) -> list[str]:
    """Announce tensors to a rank that expects some of float32 and a width; return what either side says of each."""
    init_gloo()
    spec, rank = Move(src=(1, 1), dst=(1, 1)).spec(), dist.get_rank()
    (channel,) = open_channels([spec], stage_group=None, platform=detect("cpu"), monitor=None, timeout_s=TIMEOUT_S)
    assert channel is not None
    said = []
    for shape, dtype in sent:
        try:
            # Of a tensor that is refused only the header is sent: the next receive would meet the tensor.
            is_fit = (shape[-1], dtype) == (width, "float32") and 0 < min(shape) <= math.prod(shape[:-1]) <= most_tokens
            form = TensorFormat(dtype=getattr(torch, dtype), has_variable_shapes=True)
            if rank == 0 and is_fit:
                BoundChannel(channel, form).send(torch.zeros(shape)).wait()
            elif rank == 0:
                channel.headers.announce(shape, form, "").wait()
            elif len(shape) == 3:
                fresh = channel.crossed_by(channel.spec.strategy)
                wanted = TensorFormat(dtype=torch.float32, has_variable_shapes=True, width=width)
                # Of a shape beyond all memory the arguments need not say anything.
                bounded = dataclasses.replace(wanted, most_tokens=most_tokens if max(shape) < 1 << 20 else None)
                BoundChannel(fresh, bounded).post().take()
            said.append("")
        except ConfigError as error:
            said.append(str(error))
    return said


def headers_of_replicas(shapes: Sequence[Shape]) -> str:
    """Announce the parts of two sending replicas, each of a shape of its own; return what the receiver says."""
    init_gloo()
    rank = dist.get_rank()
    src = Endpoint(ranks_by_cp=((0,), (1,)), num_replicas=2)
    spec = ChannelSpec(name="two replicas", src=src, dst=Endpoint(ranks_by_cp=((2,),)), strategy="sliced")
    (channel,) = open_channels([spec], stage_group=None, platform=detect("cpu"), monitor=None, timeout_s=TIMEOUT_S)
    assert channel is not None
    form = TensorFormat(dtype=torch.float32, has_variable_shapes=True)
    if rank < 2:
        whole = channel.whole_shape(shapes[rank], form)
        channel.headers.announce(whole, form, "").wait()
        return ""
    try:
        return f"posted {tuple(BoundChannel(channel, form).post().tensor.shape)}"
    except ConfigError as error:
        return str(error)


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


def try_channels(
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
        settled = settle_choices(tried, channels, choices)
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
        BoundChannel(channel, form).send(part).wait()
        return []
    tensor = BoundChannel(channel, form, channel.local_shape(shape, form)).post().take()
    wanted = part_of(whole, LocalBoxes(rank=rank, boxes=plan.dst.boxes_of(rank)))
    return [] if torch.equal(tensor.detach(), wanted) else [f"{channel.spec.name}: wrong tensor on rank {rank}"]


def time_places(places: Sequence[tuple[str, str]]) -> Links | None:
    """Time the links as the ranks of a launcher do."""
    rank = init_gloo()
    try:
        node, site = places[rank]
        return time_links(CpuPlatform("test"), Location(node=node, site=site, kind="new"))
    finally:
        dist.destroy_process_group()


def time_a_wire(places: Sequence[tuple[str, str]], lock: Path, *, is_shared: bool) -> Links | None:
    """Time the links where a large message between nodes takes long, and where they share a wire its turn, too."""
    send = dist.send

    def slow(tensor: torch.Tensor, peer: int) -> None:
        if places[peer] != places[dist.get_rank()] and tensor.numel() > 1000:
            with lock.open("w") as wire:
                if is_shared:
                    fcntl.flock(wire, fcntl.LOCK_EX)
                time.sleep(0.06)
        send(tensor, peer)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(dist, "send", slow)
        return time_places(places)
