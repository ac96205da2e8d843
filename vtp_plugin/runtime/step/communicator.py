"""Megatron's communicator of a stage, over channels that are tried, timed and chosen at start-up.

Which strategy crosses a boundary fastest: where the rules leave it open, a run tries them all at its start.

All use the groups that slices need. One replica of each boundary sends zeros back and forth while the others wait, one
boundary after another in the planned order. Rank 0 compares the figures of all ranks, so all take the same strategy.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.boundary.channel_spec import ChannelSpec, PipelineBoundary
from vtp_plugin.plan.boundary.check_boundary import require_valid
from vtp_plugin.plan.boundary.message_kind import MessageKind
from vtp_plugin.plan.boundary.strategies.known_strategies import clearly_fastest
from vtp_plugin.plan.layout.pipeline_layout import ChannelId, Direction
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.channel import NUM_PLANS, BoundChannel, Channel, RecvWork
from vtp_plugin.runtime.comm.collectives import open_group
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.comm.transfers import Audit, ChannelGroups
from vtp_plugin.runtime.comm.work import OpenSends, Recorder, SendWork
from vtp_plugin.runtime.health.monitor import Monitor
from vtp_plugin.runtime.health.store import PostError, Topic
from vtp_plugin.runtime.step.step_times import Report, answer, ask_ms, read_shared

Pair = tuple[int, int]
ShareReports = Callable[[Report, Callable[[Sequence[Report]], str]], str]
# The first round trip is a warm-up; the fastest of the others counts.
_NUM_ROUNDS = 4
# On a slow link the first size is enough: a larger tensor would rank the strategies alike. Only where it crosses in a
# few ms, a larger one is tried as well. Both are small enough to take tenths of a second in all.
_FIRST_BYTES, _MOST_BYTES = 1 << 18, 4 << 20
_FAST_MS = 5.0
_WIDTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportChoice:
    """The figures of the boundaries between two stages, and the choice that follows.

    Attributes:
        pair: upstream and downstream stage.
        num_bytes: size of the tensor that was sent.
        times_ms: time of one way in ms, by strategy, the simplest first.
    """

    pair: Pair
    num_bytes: int
    times_ms: Mapping[str, float]

    @property
    def strategy(self) -> str:
        """The simplest strategy, with fewest messages, unless another is clearly faster."""
        return clearly_fastest(self.times_ms)

    def __str__(self) -> str:
        """Return figures and choice as one line.

        >>> print(TransportChoice(pair=(0, 1), num_bytes=1 << 20, times_ms={"rank0": 1.8, "sliced": 3.87}))
        boundary 0->1: rank0 (tried with 1024 KiB: rank0 1.80 ms, sliced 3.87 ms one way)
        """
        figures = ", ".join(f"{name} {time_ms:.2f} ms" for name, time_ms in self.times_ms.items())
        return f"boundary {_key(self.pair)}: {self.strategy} (tried with {self.num_bytes >> 10} KiB: {figures} one way)"


def try_strategies(
    boundaries: Sequence[PipelineBoundary],
    channels: Mapping[ChannelId, Channel],
    *,
    share_reports: ShareReports,
    platform: Platform,
    is_sharded: bool,
) -> dict[Pair, TransportChoice]:
    """Time the strategies of boundaries; a collective call of all ranks, while nothing else is under way.

    Args:
        boundaries: open boundaries with rivals and the size of their tensor; of several between two stages the first is
            tried.
        channels: channels of this rank by their identity.
        share_reports: combines all ranks' reports into one text and returns it on all; a collective call.
        platform: where the tensors are.
        is_sharded: whether ranks hold slices (sequence parallelism).

    Returns:
        The choices by upstream and downstream stage, the same on all ranks.
    """
    first: dict[Pair, PipelineBoundary] = {}
    for boundary in boundaries:
        first.setdefault((boundary.upstream, boundary.downstream), boundary)
    sizes = {pair: min(boundary.tensor_bytes or 0, _FIRST_BYTES) for pair, boundary in first.items()}
    choices: dict[Pair, TransportChoice] = {}
    while sizes:
        report: Report = {}
        for pair, num_bytes in sizes.items():
            there, back = (channels.get(first[pair].id(direction)) for direction in Direction)
            if there is not None and back is not None:
                report[_key(pair)] = _round_trips(there, back, num_bytes, platform, is_sharded=is_sharded)
        found = _read_times(share_reports(report, _slowest), first)
        for pair, num_bytes in sizes.items():
            times_ms = {name: time_ms / 2 for name, time_ms in found[_key(pair)].items()}
            choices[pair] = TransportChoice(pair=pair, num_bytes=num_bytes, times_ms=times_ms)
        larger = {pair: min(boundary.tensor_bytes or 0, _MOST_BYTES) for pair, boundary in first.items()}
        sizes = {
            pair: larger[pair]
            for pair, num_bytes in sizes.items()
            if num_bytes < larger[pair] and max(choices[pair].times_ms.values()) < _FAST_MS
        }
    return choices


def settle(
    boundaries: Sequence[PipelineBoundary],
    channels: Mapping[ChannelId, Channel],
    choices: Mapping[Pair, TransportChoice],
) -> dict[ChannelId, Channel]:
    """Return this rank's channels, with the chosen strategy at the boundaries that were tried."""
    settled = dict(channels)
    for boundary in boundaries:
        strategy = choices[boundary.upstream, boundary.downstream].strategy
        for name in map(boundary.id, Direction):
            if name in settled and strategy != boundary.strategy:
                settled[name] = settled[name].crossed_by(strategy)
    return settled


def _read_times(text: str, boundaries: Mapping[Pair, PipelineBoundary]) -> dict[str, dict[str, float]]:
    """Read the times that rank 0 has collected, and check that they name only strategies that were tried.

    Raises:
        PeerError: the text is something else.
    """
    found = read_shared(dict[str, dict[str, float]], text)
    for pair, boundary in boundaries.items():
        times_ms = found.get(_key(pair), {})
        if not times_ms or not set(times_ms) <= {boundary.strategy, *boundary.rivals}:
            problem = f"has times of {', '.join(times_ms) or 'nothing'} for boundary {_key(pair)}"
            raise PostError(Topic.REPORTS.key, "text", problem)
    return found


def _key(pair: Pair) -> str:
    return f"{pair[0]}->{pair[1]}"


def _slowest(reports: Sequence[Report]) -> str:
    """Take every figure from the slowest rank."""
    merged: dict[str, dict[str, float]] = {}
    for report in reports:
        for pair, times_ms in report.items():
            known = merged.setdefault(pair, {})
            known.update({name: max(time_ms, known.get(name, 0.0)) for name, time_ms in times_ms.items()})
    return json.dumps(merged)


def _round_trips(
    there: Channel, back: Channel, num_bytes: int, platform: Platform, *, is_sharded: bool
) -> dict[str, float]:
    """Send zeros back and forth by each strategy in turn; the asking rank returns the fastest round trips in ms."""
    spec = there.spec
    num_samples = math.lcm(spec.src.num_replicas, spec.dst.num_replicas)
    unit = math.lcm(*(endpoint.num_parts(is_sharded=True) for endpoint in (spec.src, spec.dst)))
    whole = (unit * max(1, round(num_bytes / (4 * unit * num_samples * _WIDTH))), num_samples, _WIDTH)
    form = TensorFormat(dtype=torch.float32, src_sharded=is_sharded, dst_sharded=is_sharded, requires_grad=False)
    zeros = torch.zeros(there.local_shape(whole, form), dtype=form.dtype, device=platform.device())
    is_asking = dist.get_rank() in spec.src.ranks
    strategies = (*spec.rivals, spec.strategy)
    times_ms: dict[str, list[float]] = {name: [] for name in strategies}
    tried: dict[str, list[BoundChannel]] = {}
    for name in strategies:
        channels = [channel.crossed_by(name, unit="probe", kind=MessageKind.PROBE) for channel in (there, back)]
        for channel in channels:
            require_valid(channel.spec.plan(whole, src_sharded=is_sharded, dst_sharded=is_sharded))
        tried[name] = [BoundChannel(channel, form, zeros.shape) for channel in channels]
    for _ in range(_NUM_ROUNDS):
        for name, (outgoing, incoming) in tried.items():
            if is_asking:
                times_ms[name].append(ask_ms(outgoing, incoming, zeros, platform))
            else:
                answer(outgoing, incoming)
    return {name: min(times[1:]) for name, times in times_ms.items()} if is_asking else {}


Work = SendWork | RecvWork
_WAIT_ORDER = ("recv_prev", "recv_next", "send_next", "send_prev")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """Result of one exchange.

    Attributes:
        from_prev: activation from the previous stage, a fresh leaf; None if not asked for.
        from_next: gradient from the next stage; None if not asked for.
        works: handles by Megatron's names (``recv_prev``, ``recv_next``, ``send_next``, ``send_prev``), in the order in
            which they must be waited for; empty if the exchange has waited itself.
    """

    from_prev: torch.Tensor | None
    from_next: torch.Tensor | None
    works: dict[str, Work]


def open_channels(
    specs: Sequence[ChannelSpec],
    *,
    stage_group: dist.ProcessGroup | None,
    platform: Platform,
    monitor: Monitor | None,
    timeout_s: float,
    audit: Audit | None = None,
    recorder: Recorder | None = None,
) -> list[Channel | None]:
    """Open and warm up this rank's channels. All ranks call this with the same specs in the same order.

    Returns:
        A channel for every spec of which this rank is a member, None for the others.
    """
    rank = dist.get_rank()
    channels: list[Channel | None] = []
    for order, spec in enumerate(specs):
        group = open_group(
            spec.participants,
            platform=platform,
            timeout_s=timeout_s,
            description=spec.name,
            buffer_size_bytes=spec.largest_message_bytes,
        )
        pieces = None
        for ranks in spec.gathering_groups if platform.gathers_by_messages else ():
            name = f"{spec.name}, finish"
            pieces = open_group(ranks, platform=platform, timeout_s=timeout_s, description=name) or pieces
        groups = ChannelGroups(messages=group, stage=stage_group, pieces=pieces)
        is_member = rank in spec.members
        channels.append(Channel(spec, order, groups, platform, monitor, audit, recorder) if is_member else None)
    for channel in channels:
        if channel is not None:
            channel.warm_up()
    return channels


def own_channels(boundaries: Sequence[PipelineBoundary], opened: Sequence[Channel | None]) -> dict[ChannelId, Channel]:
    """Return this rank's channels by their identity.

    Args:
        boundaries: boundaries of the run.
        opened: a channel for each direction of each boundary, as :func:`open_channels` returns them; more may follow.
    """
    ids = [boundary.id(direction) for boundary in boundaries for direction in Direction]
    return {name: channel for name, channel in zip(ids, opened, strict=False) if channel is not None}


class PipelineCommunicator:
    """Moves activations and gradients between this rank's stage and its neighbours.

    All receives and sends of an exchange are posted before any wait (docs/development/internals.md, contract 5).
    With variable shapes, a tensor's receive is posted when its header has come. Handles are waited for in one fixed
    order on all ranks of the stage. :meth:`finish_step` waits for sends still under way. For the main thread only.
    """

    def __init__(self, channels: Mapping[str, Channel]) -> None:
        """Take the channels by operation (``recv_prev`` ...); without a neighbour there is no entry."""
        # All ranks post in the order of the run's channels. A device that executes its operations strictly in the order
        # of their issue, over all communicators, then finds its peer at the same one; receives first would deadlock it.
        self._channels = dict(sorted(channels.items(), key=lambda pair: pair[1].order))
        # A function, not a method: a reference cycle would keep groups of closed channels until the next collection.
        self._bound = functools.lru_cache(NUM_PLANS)(
            lambda name, form, shape: BoundChannel(channels[name], form, shape)
        )
        self._open_sends = OpenSends()

    def reaches(self, name: str) -> bool:
        """Tell whether there is a neighbour for ``recv_prev``, ``recv_next``, ``send_next`` or ``send_prev``."""
        return name in self._channels

    def channel(self, name: str) -> Channel:
        """Return the channel of ``recv_prev``, ``recv_next``, ``send_next`` or ``send_prev``, which has a neighbour."""
        return self._channels[name]

    def start_step(self) -> None:
        """Begin a pass over the microbatches: finish the sends of the last one, and count from 0 again."""
        self.finish_step()
        for channel in self._channels.values():
            channel.start_step()

    def finish_step(self) -> None:
        """Wait for the sends that nobody waited for."""
        self._open_sends.wait()

    def exchange(
        self,
        form: TensorFormat,
        *,
        send_next: torch.Tensor | None = None,
        send_prev: torch.Tensor | None = None,
        recv_prev: bool = False,
        recv_next: bool = False,
        shape: Sequence[int] | None = None,
        wait: bool,
    ) -> Exchanged:
        """Send and receive at once.

        Args:
            form: type and layout of all tensors.
            send_next: activation ``[S, B, H]``, this rank's part, for the next stage.
            send_prev: gradient for the previous stage.
            recv_prev: whether to receive an activation from the previous stage.
            recv_next: whether to receive a gradient from the next stage.
            shape: local shape of the tensors to receive; with variable shapes a header brings it.
            wait: whether to return only when the received tensors are there; otherwise the caller waits for the
                handles. Sends are not waited for: the receiver may post only after an exchange with a third rank, which
                may need this one.

        Raises:
            ConfigError: the header of a tensor does not fit what this rank expects, the sequence does not divide, a
                shape is missing, or there is no neighbour.
        """
        tensors = {"send_next": send_next, "send_prev": send_prev}
        wanted = {"recv_prev": recv_prev, "recv_next": recv_next} | {n: t is not None for n, t in tensors.items()}
        for name in wanted:
            if wanted[name] and name not in self._channels:
                raise ConfigError(f"{name}: this stage has no neighbour there; leave it out")
        posted: dict[str, Work] = {}
        received: dict[str, RecvWork] = {}
        for name in self._channels:
            if not wanted[name]:
                continue
            tensor = tensors.get(name)
            local = shape if tensor is None else tensor.shape
            bound = self._bound(name, form, None if form.has_variable_shapes or local is None else tuple(local))
            if tensor is not None:
                posted[name] = self._open_sends.add(bound.send(tensor))
            else:
                posted[name] = received[name] = bound.post()
        # One order on all ranks of a stage: a collective completes each receive, that of a header included.
        names = [name for name in _WAIT_ORDER if name in posted]
        arriving = {name: received[name].tensor for name in names if name in received}
        if wait:
            for name in arriving:
                received[name].wait()
        works = {} if wait else {name: posted[name] for name in names}
        return Exchanged(from_prev=arriving.get("recv_prev"), from_next=arriving.get("recv_next"), works=works)


def join_channels(channels: Mapping[ChannelId, Channel], worker: int) -> tuple[PipelineCommunicator, ...]:
    """Make one communicator for every replica of the pipeline that this rank works in.

    Args:
        channels: channels of this rank by their identity.
        worker: number of this rank's replica in the schedule.
    """
    forward = sorted(
        (name for name in channels if name.direction is Direction.FORWARD), key=lambda n: channels[n].order
    )
    befores = [name for name in forward if name.dst == worker]
    afters = [name for name in forward if name.src == worker]
    communicators: list[PipelineCommunicator] = []
    for index in range(math.lcm(len(befores) or 1, len(afters) or 1)):
        ends: dict[str, Channel] = {}
        if befores:
            before = befores[index % len(befores)]
            ends |= {"recv_prev": channels[before], "send_prev": channels[before.opposite]}
        if afters:
            after = afters[index % len(afters)]
            ends |= {"send_next": channels[after], "recv_next": channels[after.opposite]}
        communicators.append(PipelineCommunicator(ends))
    return tuple(communicators)
