"""When everything happens in a step, for given durations of the computes and given latency and bandwidth of links."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field

from vtp_plugin.errors import PlanError
from vtp_plugin.layout.channel import ChannelId
from vtp_plugin.schedule.cost.bounds import ROUNDING
from vtp_plugin.schedule.cost.costs import Costs
from vtp_plugin.schedule.order.actions import Action, Op
from vtp_plugin.schedule.order.advance import advance_orders
from vtp_plugin.schedule.order.lower import lower
from vtp_plugin.schedule.order.messages import channel_of, link_of, peer_of, started_by
from vtp_plugin.schedule.order.placement import Placement
from vtp_plugin.schedule.order.schedule import Schedule
from vtp_plugin.schedule.proof.check import Mode, is_lowered, peak_activations, peak_in_flight, require_valid


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
        spans: By worker, its computes in their order.
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
        costs: Of the schedule's placement.
        mode: When messages leave.

    >>> from vtp_plugin.schedule.cost.costs import uniform_costs
    >>> from vtp_plugin.schedule.make.generate import one_f_one_b
    >>> schedule = one_f_one_b(2, 4)
    >>> timeline = simulate(schedule, uniform_costs(schedule.placement, latency=0.5))
    >>> timeline.makespan, round(1 - max(timeline.utilization), 3), timeline.in_flight
    (17.0, 0.294, (2, 1))
    """
    require_valid(schedule)
    num_vstages = schedule.placement.num_vstages
    if len(costs.forward) != num_vstages:
        raise PlanError(f"costs of {len(costs.forward)} virtual stages for a placement of {num_vstages}")
    if not is_lowered(schedule):
        schedule = lower(schedule, lookahead=max(map(len, schedule.orders)))
    walk = _Walk(schedule=schedule, costs=costs, mode=mode)
    walk.run()
    flights = sorted(walk.flights, key=lambda flight: (flight.sent, flight.channel))
    sizes: dict[ChannelId, int] = defaultdict(int)
    for flight in flights:
        sizes[flight.channel] += costs.message_bytes[link_of(schedule.placement, flight.action)]
    placement = schedule.placement
    return Timeline(
        placement=placement,
        spans=tuple(map(tuple, walk.spans)),
        flights=tuple(flights),
        makespan=max(walk.now),
        in_flight=tuple(peak_in_flight(schedule, worker) for worker in range(placement.num_workers)),
        activations=tuple(peak_activations(schedule, vstage) for vstage in range(placement.num_vstages)),
        bytes_by_channel=tuple(sorted(sizes.items())),
    )


@dataclass(slots=True, kw_only=True)
class _Queue:
    """One channel: the sends and receives on it that have not met yet; the n-th send meets the n-th receive."""

    free_at: float = 0.0
    sent: deque[tuple[Action, float]] = field(default_factory=deque)
    posted: deque[float] = field(default_factory=deque)


class _Walk:
    """State of the simulation."""

    def __init__(self, *, schedule: Schedule, costs: Costs, mode: Mode) -> None:
        self.schedule = schedule
        self.costs = costs
        self.mode = mode
        num_workers = schedule.placement.num_workers
        self.now = [0.0] * num_workers
        self.spans: list[list[Span]] = [[] for _ in range(num_workers)]
        self.flights: list[Flight] = []
        self.queues: dict[ChannelId, _Queue] = defaultdict(_Queue)
        # When a message has arrived, by its send and by its receive.
        self.arrivals: dict[Action, float] = {}

    def run(self) -> None:
        """Let every worker advance until all have reached the end of their lists."""
        reached = advance_orders(self.schedule.orders, self.do)
        if reached != [*map(len, self.schedule.orders)]:
            raise PlanError(f"{self.schedule.name}: a checked schedule came to a stop at {reached}")

    def do(self, worker: int, action: Action) -> bool:
        """Do one action; return False if it waits for something whose time is not known yet."""
        now = self.now[worker]
        if action.op.is_compute:
            durations = self.costs.backward if action.op is Op.B else self.costs.forward
            self.now[worker] = now + durations[action.vstage]
            self.spans[worker].append(Span(action=action, start=now, end=self.now[worker]))
            return True
        if action.op.startswith("WAIT"):
            arrival = self.arrivals.get(started_by(action))
            if arrival is None:
                return False
            self.now[worker] = max(now, arrival)
            return True
        channel = channel_of(self.schedule.placement, action)
        queue = self.queues[channel]
        if action.op in (Op.SEND_F, Op.SEND_B):
            queue.sent.append((action, now))
        else:
            queue.posted.append(now)
        self.move(channel, queue)
        return True

    def move(self, channel: ChannelId, queue: _Queue) -> None:
        """Let every message of a channel leave whose time of departure is known."""
        while queue.sent and (queue.posted or self.mode == "buffered"):
            action, sent = queue.sent.popleft()
            link = link_of(self.schedule.placement, action)
            latency, transfer_time = self.costs.latency[link], self.costs.transfer_time(link)
            start = max(sent, queue.free_at)
            if self.mode == "rendezvous":
                start = max(start, queue.posted.popleft() + latency)
            queue.free_at = start + transfer_time
            end = queue.free_at + latency
            self.flights.append(Flight(channel=channel, action=action, sent=sent, start=start, end=end))
            self.arrivals[action] = self.arrivals[peer_of(self.schedule.placement, action)] = end


def choose_lookahead(schedule: Schedule, costs: Costs) -> int:
    """Return the smallest lookahead that costs no time in rendezvous mode.

    Lowered with this lookahead (:func:`~vtp_plugin.schedule.order.lower.lower`), the step is as fast as with all
    receives posted at its start.

    Args:
        schedule: Compute only.
        costs: Of its placement.

    >>> from vtp_plugin.schedule.cost.costs import u_costs
    >>> from vtp_plugin.schedule.make.u_shape import plan_u_shape
    >>> [choose_lookahead(plan_u_shape(3, 8, u_costs(3, latency=x)).schedule, u_costs(3, latency=x)) for x in (0, 1, 2)]
    [1, 2, 3]
    """
    most = max(map(len, schedule.orders))

    def makespan(lookahead: int) -> float:
        return simulate(lower(schedule, lookahead=lookahead), costs, mode="rendezvous").makespan

    enough = makespan(most) * (1 + ROUNDING)
    return next(lookahead for lookahead in range(1, most + 1) if makespan(lookahead) <= enough)
