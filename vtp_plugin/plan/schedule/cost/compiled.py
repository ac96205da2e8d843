"""What happens in a step, lined up once: then only times are computed, for any costs.

What waits for what follows from the orders alone, not from how long things take. So everything that has a time of its
own is put in a line, each after what it waits for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from vtp_plugin.errors import PlanError
from vtp_plugin.plan.layout.channel_id import ChannelId
from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.order.actions import Action, Op
from vtp_plugin.plan.schedule.order.add_communication import lower
from vtp_plugin.plan.schedule.order.advance import advance_orders
from vtp_plugin.plan.schedule.order.messages import channel_of, joint_with, link_of, peer_of, started_by
from vtp_plugin.plan.schedule.order.schedule import Schedule
from vtp_plugin.plan.schedule.proof.check_schedule import (
    Mode,
    is_lowered,
    most_activations,
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
            link = link_of(placement, send)
            arrival = self.add(_Event(sent, queue.posted.popleft(), link=link, channel=queue.number))
            self.messages.append((send, channel, arrival))
            self.arrivals[send] = self.arrivals[peer_of(placement, send)] = arrival
        return True

    def add(self, event: _Event) -> int:
        """Put an event at the end, and return its number."""
        self.events.append(event)
        return len(self.events) - 1
