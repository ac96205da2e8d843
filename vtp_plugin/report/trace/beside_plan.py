"""The simulated step as a trace, and costs from the trace of a run that was planned without any."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from vtp_plugin.plan.layout.channel_id import ChannelId, Direction
from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.cost.simulator import Timeline, simulate
from vtp_plugin.plan.schedule.order.actions import Action, Op, parse_action
from vtp_plugin.plan.schedule.order.messages import peer_of, receives_for
from vtp_plugin.plan.schedule.order.placement import Placement
from vtp_plugin.plan.schedule.order.schedule import Schedule
from vtp_plugin.report.trace.causes import COMPUTES, Cause, Stretch
from vtp_plugin.report.trace.explain import TimeShare, arrivals

_COMPUTES = {Op.F: Cause.FORWARD, Op.B: Cause.BACKWARD, Op.I: Cause.BACKWARD, Op.W: Cause.WEIGHTS}
Boundary = tuple[int, int, Direction]
"""Upstream stage, downstream stage, and what crosses."""
_BOUNDARY = re.compile(r"boundary (\d+)->(\d+)\b.*?, (forward|backward)(?:,|$)")


def plan_shares(schedule: Schedule, costs: Costs) -> list[TimeShare]:
    """Simulate a step, and give what every worker does in it; times begin at 0.

    From its last compute to the end of the step a worker waits for the others, in the optimizer: that is ``OPTIMIZER``.

    Args:
        schedule: schedule of the step.
        costs: durations and links, in ms.

    >>> from vtp_plugin.plan.schedule.cost.costs import uniform_costs
    >>> from vtp_plugin.plan.schedule.make.generate import one_f_one_b
    >>> schedule = one_f_one_b(2, 1)
    >>> first, _ = plan_shares(schedule, uniform_costs(schedule.placement, latency=1.0))
    >>> for one in first.stretches:
    ...     print(one.cause, one.name, round(1e3 * one.length_s))
    forward 0F0 1
    send boundary 0->1, forward, microbatch 0 0
    wait boundary 0->1, backward, microbatch 0 5
    backward 0B0 2
    """
    # Gloo, NCCL and HCCL behave so: a message leaves when its receiver is ready.
    timeline = simulate(schedule, costs, mode="rendezvous")
    names = _message_names(timeline)
    end_s = 1e-3 * timeline.makespan
    return [
        TimeShare(
            rank=worker, worker=worker, start_s=0.0, end_s=end_s, stretches=tuple(_stretches(timeline, worker, names))
        )
        for worker in range(timeline.placement.num_workers)
    ]


def _stretches(timeline: Timeline, worker: int, names: Mapping[Action, str]) -> Iterator[Stretch]:
    """Yield what a worker does in a simulated step, in the order of their starts."""
    placement, spans = timeline.placement, timeline.spans[worker]
    flights = {flight.action: flight for flight in timeline.flights}
    found = [_stretch(_COMPUTES[span.action.op], str(span.action), span.start, span.end) for span in spans]
    found += [
        _stretch(Cause.SEND, names[flight.action], flight.sent, flight.sent)
        for flight in timeline.flights
        if flight.channel.src == worker
    ]
    ends = [0.0, *(span.end for span in spans)]
    for free, span in zip(ends, spans, strict=False):
        if span.start > free:
            sends = [flights[peer_of(placement, receive)] for receive in receives_for(placement, span.action)]
            last = max(sends, key=lambda flight: flight.end, default=None)
            found.append(_stretch(Cause.WAIT, "" if last is None else names[last.action], free, span.start))
    if ends[-1] < timeline.makespan:
        found.append(_stretch(Cause.OPTIMIZER, "", ends[-1], timeline.makespan))
    yield from sorted(found, key=lambda stretch: (stretch.start_s, stretch.end_s))


def _message_names(timeline: Timeline) -> dict[Action, str]:
    """Name every message as a run does, which counts what goes over a channel."""
    placement = timeline.placement
    counts: Counter[ChannelId] = Counter()
    names: dict[Action, str] = {}
    for flight in sorted(timeline.flights, key=lambda flight: (flight.channel, flight.start, flight.sent)):
        channel = flight.channel
        stages = "->".join(str(placement.stage_of(end)) for end in (channel.upstream, channel.downstream))
        shared = "" if placement.num_workers == placement.num_stages else f", workers {channel.src} to {channel.dst}"
        names[flight.action] = f"boundary {stages}{shared}, {channel.direction}, microbatch {counts[channel]}"
        counts[channel] += 1
    return names


def _stretch(cause: Cause, name: str, start_ms: float, end_ms: float) -> Stretch:
    return Stretch(cause=cause, name=name, start_s=1e-3 * start_ms, end_s=1e-3 * end_ms)


def name_computes(stretches: Sequence[Stretch], order: Iterable[Action]) -> Iterator[Stretch]:
    """Name the forwards and backwards of a rank by its order, where it did not know them itself.

    Args:
        stretches: stretches of one step, in the order of their ends.
        order: order of the rank's worker.
    """
    computes = iter([action for action in order if action.op.is_compute])
    for one in stretches:
        if one.cause in COMPUTES and not one.name:
            action = next(computes, None)
            if action is not None and _COMPUTES[action.op] is one.cause:
                yield Stretch(cause=one.cause, name=str(action), start_s=one.start_s, end_s=one.end_s)
                continue
        yield one


def boundary_of(name: str) -> Boundary | None:
    """Read the stages and the direction from the name of what crosses; None where it crosses no boundary.

    >>> boundary_of("boundary 0->1, replica dp 0->1 cp 0, backward, microbatch 3")
    (0, 1, <Direction.BACKWARD: 'backward'>)
    >>> boundary_of("tied embedding, first->last, replica dp 0 cp 0, step 2")
    """
    found = _BOUNDARY.match(name)
    return None if found is None else (int(found[1]), int(found[2]), Direction(found[3]))


def measured_costs(placement: Placement, steps: Sequence[Sequence[TimeShare]]) -> Costs:
    """Take the costs of a run from its trace: medians of computes and of messages that somebody waited for.

    The slowest rank of a stage counts. A message's whole time is taken for latency.

    Args:
        placement: placement of the run's schedules.
        steps: for each step the time shares of all ranks, on one clock, with the names of computes.
    """
    computes: defaultdict[tuple[Cause, int, int], list[float]] = defaultdict(list)
    crossings: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for shares in steps:
        for share in shares:
            for one in share.stretches:
                if one.cause in COMPUTES and one.name:
                    computes[one.cause, parse_action(one.name).vstage, share.rank].append(1e3 * one.length_s)
        for _, name, took_s in crossings_of(shares):
            boundary = boundary_of(name)
            if boundary is not None:
                crossings[boundary[:2]].append(1e3 * took_s)
    vstages = range(placement.num_vstages)

    def slowest(cause: Cause, vstage: int) -> float:
        own = [each for (kind, v, _), each in computes.items() if (kind, v) == (cause, vstage)]
        return max(map(statistics.median, own), default=0.0)

    links = [*pairwise(placement.stages)]
    weights = tuple(slowest(Cause.WEIGHTS, v) for v in vstages)
    return Costs(
        forward=tuple(slowest(Cause.FORWARD, v) for v in vstages),
        backward=tuple(slowest(Cause.BACKWARD, v) + weights[v] for v in vstages),
        latency=tuple(statistics.median(crossings[link]) if crossings[link] else 0.0 for link in links),
        bandwidth=(math.inf,) * len(links),
        message_bytes=(0,) * len(links),
        weights=weights if any(weights) else (),
    )


def crossings_of(shares: Sequence[TimeShare]) -> Iterator[tuple[int, str, float]]:
    """Yield how long messages took whose receiver waited before they were sent: its rank, their name, seconds."""
    for share, wait, _, sent_s in arrivals(shares):
        if wait.start_s < sent_s:
            yield share.rank, wait.name, max(0.0, wait.end_s - sent_s)


def crossing_s(costs: Costs, placement: Placement, boundary: tuple[int, int]) -> float:
    """Return how long a message is planned to take from a stage to another."""
    links = [v for v, link in enumerate(pairwise(placement.stages)) if link == boundary]
    return max((1e-3 * (costs.latency[v] + costs.transfer_time(v)) for v in links), default=0.0)
