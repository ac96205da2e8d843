"""The route of a microbatch through the pipeline as numbers, for the inner loops of search and simulation.

The route has *legs*: leg q < V is the forward of virtual stage q, leg q >= V the backward of virtual stage 2V - 1 - q.
Microbatches pass each leg one after another (channels are first-in-first-out), so the order of a worker is a list of
legs: the n-th occurrence of a leg is the n-th microbatch of the worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import count

from vtp_plugin.errors import PlanError
from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.order.actions import Action, Op
from vtp_plugin.plan.schedule.order.advance import advance
from vtp_plugin.plan.schedule.order.placement import Placement
from vtp_plugin.plan.schedule.order.schedule import Actions

Orders = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchRoute:
    """The legs of a microbatch with their costs.

    Attributes:
        stages: Stage that runs a leg.
        durations: Duration of a leg.
        latency: Time from the end of a leg to the start of the next, without `occupancy`; the last entry is 0.
        occupancy: How long the message to the next leg keeps its channel busy; the last entry is 0.
        boundaries: Number of the boundary that the message to the next leg crosses, a different one in each direction;
            -1 if there is no message.
        num_replicas: Replicas of every pipeline stage; replica `h mod num_replicas` runs microbatch h.
        joint: How many neighbouring replicas run a leg jointly (see :attr:`Placement.joint`).
    """

    stages: tuple[int, ...]
    durations: tuple[float, ...]
    latency: tuple[float, ...]
    occupancy: tuple[float, ...]
    boundaries: tuple[int, ...]
    num_replicas: tuple[int, ...]
    joint: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.num_replicas)

    @property
    def workers(self) -> tuple[tuple[int, int], ...]:
        """Stage and replica of every worker."""
        return tuple((stage, replica) for stage, num in enumerate(self.num_replicas) for replica in range(num))

    @property
    def first_workers(self) -> tuple[int, ...]:
        """First worker of every stage."""
        return tuple(sum(self.num_replicas[:stage]) for stage in range(self.num_stages))

    @property
    def mirrors(self) -> tuple[int, ...]:
        """For each worker, the one that does its work when time is reversed and the last microbatch is the first."""
        firsts, last = self.first_workers, [num - 1 for num in self.num_replicas]
        return tuple(firsts[stage] + last[stage] - replica for stage, replica in self.workers)

    @property
    def takers(self) -> tuple[range, ...]:
        """Workers that run the next leg, by leg: entry `h mod length` takes microbatch h; empty at the last leg."""
        firsts = self.first_workers
        takers = [range(firsts[stage], firsts[stage] + self.num_replicas[stage]) for stage in self.stages[1:]]
        return (*takers, range(0))

    @property
    def channels(self) -> tuple[range, ...]:
        """Channels of the messages to the next leg, by leg: microbatch h takes entry `h mod length`."""
        width, replicas = max(self.num_replicas), [self.num_replicas[stage] for stage in self.stages]
        sizes = (*map(max, replicas[:-1], replicas[1:]), 0)
        return tuple(range(c * width, c * width + size) for c, size in zip(self.boundaries, sizes, strict=True))

    @property
    def queues(self) -> tuple[bool, ...]:
        """Whether the message to the next leg waits for the messages before it on its channel, by leg.

        Of two rings an instant message waits for those of the other ring, too.
        """
        slow = {boundary for boundary, time in zip(self.boundaries, self.occupancy, strict=True) if time}
        return tuple(boundary in slow for boundary in self.boundaries)

    @property
    def num_channels(self) -> int:
        """Number of channels, unused ones included."""
        return (max(self.boundaries) + 1) * max(self.num_replicas)

    @property
    def groups(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """By leg and replica, the replicas of its stage that run the leg jointly: for most legs that one alone."""
        return tuple(
            tuple(
                tuple(range(replica - replica % size, replica - replica % size + size))
                for replica in range(self.num_replicas[stage])
            )
            for stage, size in zip(self.stages, self.joint, strict=True)
        )

    @property
    def num_legs(self) -> int:
        """Number of legs."""
        return len(self.stages)

    def legs(self, stage: int) -> tuple[int, ...]:
        """List the legs of a stage in the order of the route."""
        return tuple(q for q, holder in enumerate(self.stages) if holder == stage)

    @property
    def heads(self) -> tuple[float, ...]:
        """Earliest start of each leg after the start of its microbatch."""
        heads = [0.0]
        for q in range(self.num_legs - 1):
            heads.append(heads[-1] + self.durations[q] + self.occupancy[q] + self.latency[q])
        return tuple(heads)

    @property
    def span(self) -> float:
        """Time that one microbatch alone takes."""
        return self.heads[-1] + self.durations[-1]

    def reversed(self) -> MicrobatchRoute:
        """Let time run backwards: a good order for the result, reversed, is a good order for this route."""
        return MicrobatchRoute(
            stages=self.stages[::-1],
            durations=self.durations[::-1],
            latency=(*self.latency[-2::-1], 0.0),
            occupancy=(*self.occupancy[-2::-1], 0.0),
            boundaries=(*self.boundaries[-2::-1], -1),
            num_replicas=self.num_replicas,
            joint=self.joint[::-1],
        )


def in_ticks(route: MicrobatchRoute) -> MicrobatchRoute:
    """Round all times to whole numbers, seven digits for the longest: sums are exact, and equal times compare equal.

    >>> from vtp_plugin.plan.schedule.cost.costs import u_costs
    >>> from vtp_plugin.plan.schedule.order.placement import u_placement
    >>> in_ticks(make_route(u_placement(2), u_costs(2, cloud=0.2, latency=0.3, edge=0.1))).durations
    (1000000, 2000000, 1000000, 2000000, 4000000, 2000000)
    """
    times = (*route.durations, *route.latency, *route.occupancy)
    exponent = int(f"{max(times):e}".partition("e")[2])
    scaled = [round(time * 10.0 ** (6 - exponent)) for time in times]
    num_legs = route.num_legs
    return replace(
        route,
        durations=tuple(scaled[:num_legs]),
        latency=tuple(scaled[num_legs : 2 * num_legs]),
        occupancy=tuple(scaled[2 * num_legs :]),
    )


def make_route(placement: Placement, costs: Costs, *, forward_only: bool = False) -> MicrobatchRoute:
    """Line up the legs of a microbatch.

    >>> from vtp_plugin.plan.schedule.cost.costs import u_costs
    >>> from vtp_plugin.plan.schedule.order.placement import u_placement
    >>> route = make_route(u_placement(2), u_costs(2, latency=4.0))
    >>> route.stages, route.durations, route.latency, route.span
    ((0, 1, 0, 0, 1, 0), (1.0, 2.0, 1.0, 2.0, 4.0, 2.0), (4.0, 4.0, 0.0, 4.0, 4.0, 0.0), 28.0)
    """
    num_vstages = placement.num_vstages
    if len(costs.forward) != num_vstages:
        raise PlanError(f"costs of {len(costs.forward)} virtual stages for a placement of {num_vstages}")
    if not placement.is_chain:
        raise PlanError(f"virtual stages with the successors {placement.successors} are no chain")
    vstages, durations = [*range(num_vstages)], costs.forward
    joint = [forward for forward, _ in placement.joint]
    # By leg, the link v between v and v + 1 on which its message goes; -1 if nothing follows.
    links = [*range(num_vstages - 1), -1]
    if not forward_only:
        vstages, durations = vstages + vstages[::-1], durations + costs.backward[::-1]
        joint += [backward for _, backward in reversed(placement.joint)]
        links += [*reversed(range(num_vstages - 1)), -1]
    is_used = [*map(placement.crosses, links)]
    latency = [costs.latency[link] if used else 0.0 for link, used in zip(links, is_used, strict=True)]
    occupancy = [costs.transfer_time(link) if used else 0.0 for link, used in zip(links, is_used, strict=True)]
    number_of = {pair: number for number, pair in enumerate(placement.boundaries)}
    boundaries = [
        2 * number_of[placement.stages[link], placement.stages[link + 1]] + (q >= num_vstages) if is_used[q] else -1
        for q, link in enumerate(links)
    ]
    return MicrobatchRoute(
        stages=tuple(placement.stages[v] for v in vstages),
        durations=tuple(durations),
        latency=tuple(latency),
        occupancy=tuple(occupancy),
        boundaries=tuple(boundaries),
        num_replicas=placement.num_replicas,
        joint=tuple(joint),
    )


def makespan(route: MicrobatchRoute, num_microbatches: int, orders: Orders) -> float | None:
    """Return when the last leg ends if every worker keeps its order, or None if the orders wait for each other.

    >>> from vtp_plugin.plan.schedule.cost.costs import u_costs
    >>> from vtp_plugin.plan.schedule.order.placement import u_placement
    >>> makespan(make_route(u_placement(2), u_costs(2)), 1, ((0, 2, 3, 5), (1, 4)))
    12.0
    """
    durations, latency, occupancy, queues = route.durations, route.latency, route.occupancy, route.queues
    channels, takers = route.channels, route.takers
    last_leg = route.num_legs - 1
    arrived, upcoming = first_arrivals(route, num_microbatches)
    workers, num_replicas = route.workers, route.num_replicas
    groups = route.groups
    free_at = [0.0] * len(workers)
    channel_free_at = [0.0] * route.num_channels
    reached = [0] * len(workers)
    # When each worker comes to a joint leg, by leg and microbatch.
    comes = [[math.inf] * len(times) for times in arrived]

    def go(worker: int) -> set[int]:
        order, index, now = orders[worker], reached[worker], free_at[worker]
        stage, replica = workers[worker]
        woken: set[int] = set()
        while index < len(order):
            q = order[index]
            h = upcoming[q][replica]
            there = arrived[q][h]
            if there == math.inf:
                break
            start = there if there > now else now
            if len(group := groups[q][replica]) > 1:
                comes[q][h] = start
                start = max(comes[q][h - replica + r] for r in group)
                if start == math.inf:
                    break
                woken.update(worker - replica + r for r in group)
            upcoming[q][replica] = h + num_replicas[stage]
            index += 1
            now = end = start + durations[q]
            if q < last_leg:
                if queues[q]:
                    channel = channels[q][h % len(channels[q])]
                    end = channel_free_at[channel] = max(end, channel_free_at[channel]) + occupancy[q]
                arrived[q + 1][h] = end + latency[q]
                woken.add(takers[q][h % len(takers[q])])
        reached[worker], free_at[worker] = index, now
        return woken

    advance(len(workers), go)
    return max(free_at) if reached == [len(order) for order in orders] else None


def first_arrivals(route: MicrobatchRoute, num_microbatches: int) -> tuple[list[list[float]], list[list[int]]]:
    """Return, by leg and microbatch, when it arrives, and, by leg and replica, which microbatch is the next."""
    # The loops look beyond the last microbatch: those entries never arrive, so no check of the index is needed.
    size = num_microbatches + max(route.num_replicas)
    arrived = [[math.inf] * size for _ in route.stages]
    arrived[0][:num_microbatches] = [0.0] * num_microbatches
    return arrived, [list(range(route.num_replicas[stage])) for stage in route.stages]


def in_flight(route: MicrobatchRoute, orders: Orders) -> tuple[int, ...]:
    """Return the most microbatches in flight on each worker; durations do not matter."""
    peaks: list[int] = []
    for (stage, _), order in zip(route.workers, orders, strict=True):
        first, last = route.legs(stage)[0], route.legs(stage)[-1]
        live = peak = 0
        for q in order:
            live += q == first
            peak = max(peak, live)
            live -= q == last
        peaks.append(peak)
    return tuple(peaks)


def mirrored(route: MicrobatchRoute, orders: Orders) -> Orders:
    """Let time run backwards: turn orders for a route into orders for :meth:`MicrobatchRoute.reversed`, or back.

    >>> from vtp_plugin.plan.schedule.cost.costs import uniform_costs
    >>> from vtp_plugin.plan.schedule.order.placement import plain_placement
    >>> placement = plain_placement(2, num_replicas=(1, 2))
    >>> mirrored(make_route(placement, uniform_costs(placement)), ((0, 0, 3, 3), (1, 2), (2, 1)))
    ((0, 0, 3, 3), (2, 1), (1, 2))
    """
    last_leg = route.num_legs - 1
    return tuple(tuple(last_leg - q for q in reversed(orders[mirror])) for mirror in route.mirrors)


def to_actions(placement: Placement, orders: Orders) -> tuple[Actions, ...]:
    """Write orders of legs as actions.

    >>> from vtp_plugin.plan.schedule.order.placement import plain_placement
    >>> [str(a) for a in to_actions(plain_placement(1), ((0, 1, 0, 1),))[0]]
    ['0F0', '0B0', '0F1', '0B1']
    """
    vstages = range(placement.num_vstages)
    legs = [*((Op.F, v) for v in vstages), *((Op.B, v) for v in reversed(vstages))]
    result: list[Actions] = []
    for worker, order in enumerate(orders):
        stage, replica = placement.stage_and_replica(worker)
        upcoming = [count(replica, placement.num_replicas[stage]) for _ in legs]
        passes = ((*legs[q], next(upcoming[q])) for q in order)
        result.append(tuple(Action(op=op, vstage=vstage, microbatch=h) for op, vstage, h in passes))
    return tuple(result)
