"""Orders of legs: how the planner of a U builds them by a greedy rule, and its own quick clock for them.

It tries thousands of orders. Only the best one becomes a schedule, which is proved and timed as any other
(:class:`~vtp_plugin.plan.schedule.cost.simulator.CompiledSchedule`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count

from vtp_plugin.errors import PlanError
from vtp_plugin.plan.schedule.cost.costs import MicrobatchRoute
from vtp_plugin.plan.schedule.order.actions import Action, Actions, Op, advance
from vtp_plugin.plan.schedule.order.placement import Placement

Orders = tuple[tuple[int, ...], ...]
"""The legs of each worker, one after another."""


def in_ticks(route: MicrobatchRoute) -> MicrobatchRoute:
    """Round all times to whole numbers, seven digits for the longest: sums are exact, and equal times compare equal.

    >>> from vtp_plugin.plan.schedule.cost.costs import u_costs
    >>> from vtp_plugin.plan.schedule.cost.costs import make_route
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


def dispatch(
    route: MicrobatchRoute,
    num_microbatches: int,
    ranking: Sequence[Sequence[int]],
    limits: Sequence[int],
    detours: Iterator[Sequence[int] | None] | None = None,
) -> Orders:
    """Build orders greedily: a free worker starts the highest-ranked leg whose next microbatch has arrived.

    Replicas start a joint leg together, once all of them are free and have their microbatches.

    Args:
        route: Legs of a microbatch, with their costs.
        num_microbatches: Number of microbatches.
        ranking: `ranking[stage]` lists the legs of a stage, most urgent first.
        limits: Most microbatches in flight, by worker: past the start of the stage's first leg, not yet through its
            last.
        detours: Gives a ranking, or None, for each decision of stage 0; a ranking replaces `ranking[0]` that once.
    """
    durations, latency, occupancy, queues = route.durations, route.latency, route.occupancy, route.queues
    channels, takers = route.channels, route.takers
    last_leg = route.num_legs - 1
    arrived, upcoming = first_arrivals(route, num_microbatches)
    bounds = [(route.legs(stage)[0], route.legs(stage)[-1]) for stage in range(route.num_stages)]
    workers, num_replicas = route.workers, route.num_replicas
    groups = route.groups
    free_at = [0.0] * len(workers)
    channel_free_at = [0.0] * route.num_channels
    orders: list[list[int]] = [[] for _ in workers]
    # A worker looks for work when it becomes free and when something arrives for it.
    events = [(0.0, worker) for worker, (stage, _) in enumerate(workers) if stage == route.stages[0]]
    while events:
        now, worker = heappop(events)
        if free_at[worker] > now:
            continue
        stage, replica = workers[worker]
        first, last = bounds[stage]
        width, first_worker = num_replicas[stage], worker - replica
        ranked = ranking[stage]
        if detours is not None and stage == 0:
            ranked = next(detours) or ranked
        for q in ranked:
            group = groups[q][replica]
            for r in group:
                h = upcoming[q][r]
                if arrived[q][h] > now or free_at[first_worker + r] > now:
                    break
                if q == first and h - upcoming[last][r] >= limits[first_worker + r] * width:
                    break
            else:
                for r in group:
                    h = upcoming[q][r]
                    upcoming[q][r] = h + width
                    orders[first_worker + r].append(q)
                    end = free_at[first_worker + r] = now + durations[q]
                    heappush(events, (end, first_worker + r))
                    if q < last_leg:
                        if queues[q]:
                            channel = channels[q][h % len(channels[q])]
                            end = channel_free_at[channel] = max(end, channel_free_at[channel]) + occupancy[q]
                        end += latency[q]
                        arrived[q + 1][h] = end
                        heappush(events, (end, takers[q][h % len(takers[q])]))
                break
    if sum(map(len, orders)) != num_microbatches * route.num_legs:
        raise PlanError(f"limits {limits} let no microbatch start")
    return tuple(tuple(order) for order in orders)


def makespan(route: MicrobatchRoute, num_microbatches: int, orders: Orders) -> float | None:
    """Return when the last leg ends if every worker keeps its order, or None if the orders wait for each other.

    >>> from vtp_plugin.plan.schedule.cost.costs import u_costs
    >>> from vtp_plugin.plan.schedule.cost.costs import make_route
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
    >>> from vtp_plugin.plan.schedule.cost.costs import make_route
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
    legs = [*((Op.F, v) for v in vstages), *((Op.B, v) for v in reversed(vstages) if placement.is_trained(v))]
    result: list[Actions] = []
    for worker, order in enumerate(orders):
        stage, replica = placement.stage_and_replica(worker)
        upcoming = [count(replica, placement.num_replicas[stage]) for _ in legs]
        passes = ((*legs[q], next(upcoming[q])) for q in order)
        result.append(tuple(Action(op=op, vstage=vstage, microbatch=h) for op, vstage, h in passes))
    return tuple(result)
