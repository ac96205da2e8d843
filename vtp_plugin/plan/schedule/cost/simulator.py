"""When everything happens in a step, for given durations of the computes and given latency and bandwidth of links."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from vtp_plugin.plan.layout.channel_id import ChannelId
from vtp_plugin.plan.schedule.cost.compiled import CompiledSchedule
from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.cost.step_bounds import ROUNDING
from vtp_plugin.plan.schedule.order.actions import Action
from vtp_plugin.plan.schedule.order.add_communication import lower
from vtp_plugin.plan.schedule.order.messages import link_of
from vtp_plugin.plan.schedule.order.placement import Placement
from vtp_plugin.plan.schedule.order.schedule import Schedule
from vtp_plugin.plan.schedule.proof.check_schedule import Mode, peak_in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A compute that runs on a worker from `start` to `end`."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A message on its channel.

    Attributes:
        channel: Which channel carries it.
        action: Its send.
        sent: When the send was posted.
        start: When its first byte leaves: the channel is free and, in rendezvous mode, the receiver has answered that
            it is ready.
        end: When its last byte has arrived.
    """

    channel: ChannelId
    action: Action
    sent: float
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated step. Times are in the unit of the costs, from the start of the step.

    Attributes:
        placement: Which stage holds which virtual stage, and its replicas.
        spans: Computes of each worker in their order, by worker.
        flights: All messages in the order in which they were sent.
        makespan: When the last worker reaches the end of its list.
        in_flight: Most microbatches in flight at a time, by worker.
        activations: Most activations that one worker keeps for its backwards at a time, by virtual stage.
        bytes_by_channel: Channels with the bytes that each carries in the step, in order.
    """

    placement: Placement
    spans: tuple[tuple[Span, ...], ...]
    flights: tuple[Flight, ...]
    makespan: float
    in_flight: tuple[int, ...]
    activations: tuple[int, ...]
    bytes_by_channel: tuple[tuple[ChannelId, int], ...]

    @property
    def busy(self) -> tuple[float, ...]:
        """Time that each worker computes."""
        return tuple(math.fsum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def utilization(self) -> tuple[float, ...]:
        """Share of the step in which each worker computes, from 0 to 1."""
        return tuple(busy / self.makespan if self.makespan else 0.0 for busy in self.busy)


def simulate(schedule: Schedule, costs: Costs, *, mode: Mode = "buffered") -> Timeline:
    """Find out when each action of each worker happens.

    A compute takes its duration; other actions take no time, except that waits wait. A message leaves once it is sent
    and the messages before it have left its channel; it keeps the channel busy for `message_bytes / bandwidth` and
    arrives one latency later. In rendezvous mode (gloo, NCCL) the receiver must also have answered that its receive is
    posted; the answer takes one latency. A wait for a send lasts until the message has arrived.

    Args:
        schedule: Lowered, or compute only: then all receives are posted at the start of the step.
        costs: Costs of the schedule's placement.
        mode: When messages leave.

    >>> from vtp_plugin.plan.schedule.cost.costs import uniform_costs
    >>> from vtp_plugin.plan.schedule.make.generate import one_f_one_b
    >>> schedule = one_f_one_b(2, 4)
    >>> timeline = simulate(schedule, uniform_costs(schedule.placement, latency=0.5))
    >>> timeline.makespan, round(1 - max(timeline.utilization), 3), timeline.in_flight
    (17.0, 0.294, (2, 1))
    """
    return timeline_of(CompiledSchedule(schedule), costs, mode=mode)


def timeline_of(compiled: CompiledSchedule, costs: Costs, *, mode: Mode) -> Timeline:
    """Find out the same of a schedule that was lined up before."""
    schedule, times = compiled.schedule, compiled.times(costs, mode=mode)
    placement = schedule.placement
    spans = []
    for order, ends in zip(schedule.orders, compiled.ends, strict=True):
        computes = (action for action in order if action.op.is_compute)
        begins = (compiled.events[end].first for end in ends)
        spans.append(
            tuple(
                Span(action=action, start=times.of[begin], end=times.of[end])
                for action, begin, end in zip(computes, begins, ends, strict=True)
            )
        )
    flights = []
    for (action, channel, arrival), start in zip(compiled.messages, times.departures, strict=True):
        sent = times.of[compiled.events[arrival].first]
        flights.append(Flight(channel=channel, action=action, sent=sent, start=start, end=times.of[arrival]))
    flights.sort(key=lambda flight: (flight.sent, flight.channel))
    sizes: dict[ChannelId, int] = defaultdict(int)
    for flight in flights:
        sizes[flight.channel] += costs.message_bytes[link_of(placement, flight.action)]
    return Timeline(
        placement=placement,
        spans=tuple(spans),
        flights=tuple(flights),
        makespan=times.makespan,
        in_flight=tuple(peak_in_flight(schedule, worker) for worker in range(placement.num_workers)),
        activations=compiled.activations,
        bytes_by_channel=tuple(sorted(sizes.items())),
    )


def choose_lookahead(schedule: Schedule, costs: Costs) -> int:
    """Return the smallest lookahead that costs no time in rendezvous mode.

    Lowered with this lookahead (:func:`~vtp_plugin.plan.schedule.order.add_communication.lower`), the step is as fast
    as with all receives posted at its start.

    Args:
        schedule: Compute only.
        costs: Costs of its placement.

    >>> from vtp_plugin.plan.schedule.cost.costs import u_costs
    >>> from vtp_plugin.plan.schedule.make.u_shape import plan_u_shape
    >>> [choose_lookahead(plan_u_shape(3, 8, u_costs(3, latency=x)).schedule, u_costs(3, latency=x)) for x in (0, 1, 2)]
    [1, 2, 3]
    """
    most = max(map(len, schedule.orders))

    def makespan(lookahead: int) -> float:
        return simulate(lower(schedule, lookahead=lookahead), costs, mode="rendezvous").makespan

    enough = makespan(most) * (1 + ROUNDING)
    return next(lookahead for lookahead in range(1, most + 1) if makespan(lookahead) <= enough)
