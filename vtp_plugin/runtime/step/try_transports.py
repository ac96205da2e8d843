"""Which strategy crosses a boundary fastest: where the rules leave it open, a run tries them all at its start.

All use the groups that slices need. One replica of each boundary sends zeros back and forth while the others wait, one
boundary after another in the planned order. Rank 0 compares the figures of all ranks, so all take the same strategy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vtp_plugin.plan.boundary.check_boundary import require_valid
from vtp_plugin.plan.boundary.message_kind import MessageKind
from vtp_plugin.plan.boundary.pipeline_boundaries import PipelineBoundary
from vtp_plugin.plan.boundary.strategies.transport_rules import clearly_fastest
from vtp_plugin.plan.layout.channel_id import ChannelId, Direction
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.channel import Channel
from vtp_plugin.runtime.comm.link import ChannelLink
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.health.store import Topic
from vtp_plugin.runtime.health.store_posts import PostError
from vtp_plugin.runtime.step.measure import Report, answer, ask_ms, read_shared

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
    tried: dict[str, list[ChannelLink]] = {}
    for name in strategies:
        channels = [channel.crossed_by(name, unit="probe", kind=MessageKind.PROBE) for channel in (there, back)]
        for channel in channels:
            require_valid(channel.spec.plan(whole, src_sharded=is_sharded, dst_sharded=is_sharded))
        tried[name] = [ChannelLink(channel, form, zeros.shape) for channel in channels]
    for _ in range(_NUM_ROUNDS):
        for name, (outgoing, incoming) in tried.items():
            if is_asking:
                times_ms[name].append(ask_ms(outgoing, incoming, zeros, platform))
            else:
                answer(outgoing, incoming)
    return {name: min(times[1:]) for name, times in times_ms.items()} if is_asking else {}
