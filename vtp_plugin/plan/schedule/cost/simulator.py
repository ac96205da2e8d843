"""How long a step takes: costs of actions, the simulation, and bounds.

What happens in a step, lined up once: then only times are computed, for any costs.

What waits for what follows from the orders alone, not from how long things take. So everything that has a time of its
own is put in a line, each after what it waits for.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from vtp_plugin.errors import PlanError
from vtp_plugin.plan.layout.pipeline_layout import ChannelId
from vtp_plugin.plan.schedule.cost.costs import ROUNDING, Costs
from vtp_plugin.plan.schedule.order.actions import (
    Action,
    Op,
    Schedule,
    advance_orders,
    channel_of,
    crossing_output,
    joint_with,
    peer_of,
    started_by,
)
from vtp_plugin.plan.schedule.order.add_communication import lower
from vtp_plugin.plan.schedule.order.placement import Placement
from vtp_plugin.plan.schedule.proof.check_schedule import (
    Mode,
    is_lowered,
    most_activations,
    peak_in_flight,
    peaks_kept,
    require_valid,
)


class _Event(NamedTuple):
    """The end of a compute, the end of a wait, or the arrival of a message; 0 is the start of the step.

    Attributes:
        first: number of the previous event on the same worker; for a message, of the event at which it is sent.
        second: number of the arrival that is waited for; for a message, of the event at which its receive is posted;
            for a wait before a joint compute, of the event at which the other worker comes to it.
        duration: index of a compute's duration among all forwards, then all whole backwards, then their parts for the
            inputs, then those for the weights, by virtual stage; else -1.
        link: number of a message's link; -1 for other events.
        channel: number of a message's channel; -1 for other events.
    """

    first: int
    second: int
    duration: int = -1
    link: int = -1
    channel: int = -1


_KINDS = (Op.F, Op.B, Op.I, Op.W)


@dataclass(frozen=True, slots=True)
class Times:
    """The times of a simulated step, in the unit of the costs.

    Attributes:
        of: time of every event.
        departures: time at which each message leaves, in the order of `CompiledSchedule.messages`.
        makespan: time at which the last worker reaches the end of its list.
    """

    of: list[float]
    departures: list[float]
    makespan: float


class CompiledSchedule:
    """A proven schedule as a list of events, to be simulated many times.

    Attributes:
        schedule: The lowered schedule.
        events: All events, each after those that it needs.
        ends: Events at which the computes of each worker end, in their order, by worker.
        messages: Send, channel and event of arrival of each message.
        kept: What one worker keeps at its fullest moments, by stage (:func:`peaks_kept`).
    """

    def __init__(self, schedule: Schedule) -> None:
        """Prove a schedule, and list its events.

        Args:
            schedule: A lowered schedule, or compute only: then all receives are posted at the start of the step.

        Raises:
            PlanError: The schedule is not valid.
        """
        require_valid(schedule)
        if not is_lowered(schedule):
            schedule = lower(schedule, lookahead=max(map(len, schedule.orders)))
        line = _Line(schedule)
        line.form()
        self.schedule = schedule
        self.events = tuple(line.events)
        self.ends = tuple(map(tuple, line.ends))
        self.messages = tuple(line.messages)
        self.kept = tuple(peaks_kept(schedule, stage) for stage in range(schedule.placement.num_stages))
        self._lasts = tuple(line.now)
        self._num_channels = len(line.queues)

    @property
    def activations(self) -> tuple[int, ...]:
        """Most activations that one worker keeps for its backwards at a time, by virtual stage."""
        placement, by_stage = self.schedule.placement, [*map(most_activations, self.kept)]
        return tuple(by_stage[stage][placement.chunk(vstage)] for vstage, stage in enumerate(placement.stages))

    def times(self, costs: Costs, *, mode: Mode) -> Times:
        """Return the time of every event.

        Args:
            costs: Costs of the schedule's placement.
            mode: Whether messages leave at once, or only with their receive (rendezvous).

        Raises:
            PlanError: The costs are those of another placement.
        """
        num_vstages = self.schedule.placement.num_vstages
        if len(costs.forward) != num_vstages:
            raise PlanError(f"costs of {len(costs.forward)} virtual stages for a placement of {num_vstages}")
        durations = costs.forward + costs.backward + costs.of_input + costs.of_weights
        links = [(latency, costs.transfer_time(link)) for link, latency in enumerate(costs.latency)]
        is_rendezvous = mode == "rendezvous"
        free_at = [0.0] * self._num_channels
        times, departures = [0.0], list[float]()
        # Without function calls: a search asks it hundreds of thousands of times.
        for first, second, duration, link, channel in self.events[1:]:
            time = times[first]
            if duration >= 0:
                times.append(time + durations[duration])
                continue
            if link < 0:
                arrival = times[second]
                times.append(arrival if arrival > time else time)
                continue
            latency, transfer_time = links[link]
            free = free_at[channel]
            if free > time:
                time = free
            if is_rendezvous:
                answer = times[second] + latency
                if answer > time:
                    time = answer
            departures.append(time)
            free_at[channel] = time = time + transfer_time
            times.append(time + latency)
        return Times(times, departures, max(times[last] for last in self._lasts))


@dataclass(slots=True, kw_only=True)
class _Queue:
    """One channel: the sends and receives on it that have not met yet; the n-th send meets the n-th receive."""

    number: int
    sent: deque[tuple[Action, int]] = field(default_factory=deque)
    posted: deque[int] = field(default_factory=deque)


class _Line:
    """Events so far."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        num_workers = schedule.placement.num_workers
        self.events = [_Event(0, 0)]
        # The last event of every worker.
        self.now = [0] * num_workers
        self.ends: list[list[int]] = [[] for _ in range(num_workers)]
        self.messages: list[tuple[Action, ChannelId, int]] = []
        self.queues: dict[ChannelId, _Queue] = {}
        # The event at which a message arrives, by its send and by its receive.
        self.arrivals: dict[Action, int] = {}
        # The event at which each worker came to a joint compute, by its action there.
        self.comings: dict[Action, int] = {}

    def form(self) -> None:
        """Let every worker advance until all have reached the end of their lists."""
        reached = advance_orders(self.schedule.orders, self.do)
        if reached != [*map(len, self.schedule.orders)]:
            raise PlanError(f"{self.schedule.name}: a checked schedule came to a stop at {reached}")

    def do(self, worker: int, action: Action) -> bool:
        """Do one action; return False if it waits for something that has not happened yet."""
        placement, now = self.schedule.placement, self.now[worker]
        if action.op.is_compute:
            if others := joint_with(placement, action):
                self.comings[action] = now
                if not self.comings.keys() >= set(others):
                    return False
                for other in others:
                    now = self.add(_Event(now, self.comings[other]))
            duration = action.vstage + placement.num_vstages * _KINDS.index(action.op)
            self.now[worker] = self.add(_Event(now, now, duration))
            self.ends[worker].append(self.now[worker])
            return True
        if action.op.startswith("WAIT"):
            arrival = self.arrivals.get(started_by(action))
            if arrival is None:
                return False
            self.now[worker] = self.add(_Event(now, arrival))
            return True
        channel = channel_of(placement, action)
        queue = self.queues.setdefault(channel, _Queue(number=len(self.queues)))
        if action.op in (Op.SEND_F, Op.SEND_B):
            queue.sent.append((action, now))
        else:
            queue.posted.append(now)
        while queue.sent and queue.posted:
            send, sent = queue.sent.popleft()
            link = crossing_output(placement, send)
            arrival = self.add(_Event(sent, queue.posted.popleft(), link=link, channel=queue.number))
            self.messages.append((send, channel, arrival))
            self.arrivals[send] = self.arrivals[peer_of(placement, send)] = arrival
        return True

    def add(self, event: _Event) -> int:
        """Put an event at the end, and return its number."""
        self.events.append(event)
        return len(self.events) - 1


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
    >>> from vtp_plugin.plan.schedule.make.u_shape import one_f_one_b
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
        sizes[flight.channel] += costs.message_bytes[crossing_output(placement, flight.action)]
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
