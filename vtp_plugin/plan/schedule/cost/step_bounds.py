"""How fast a step can be at best, whatever the order, and how many microbatches in flight that takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.cost.microbatch_route import MicrobatchRoute, make_route
from vtp_plugin.plan.schedule.order.placement import Placement

ROUNDING = 1e-9  # relative error of sums of durations, at most


def in_flight_needed(placement: Placement, costs: Costs) -> int:
    """Return how many microbatches must be in flight on each worker of stage 0 to keep the busiest stage busy.

    That is the time of one microbatch through the whole pipeline, divided by the busiest stage's time for one; replicas
    of a stage share the work. For the model U-shape without replicas it is
    `ceil((6 t_f + 4 L + 3 c (P - 1)) / max(6 t_f, 3 c))`, with the forward times t_f of each part of the edge and c of
    a cloud stage, and the one-way latency L.

    >>> from vtp_plugin.plan.schedule.cost.costs import u_costs
    >>> from vtp_plugin.plan.schedule.order.placement import u_placement
    >>> [in_flight_needed(u_placement(3), u_costs(3, cloud=2.0, latency=latency)) for latency in (0, 1, 2, 4)]
    [3, 4, 5, 6]
    """
    return in_flight_needed_on(make_route(placement, costs), 0)


def in_flight_needed_on(route: MicrobatchRoute, stage: int) -> int:
    """Return the same as :func:`in_flight_needed` for any stage, from its first leg to its last.

    It is never less than what replicas that compute jointly need at once.
    """
    busiest = max(
        sum(route.durations[q] for q in route.legs(s)) / num_replicas
        for s, num_replicas in enumerate(route.num_replicas)
    )
    in_flight = _round_trip(route, stage) / busiest if busiest else 0
    joint = math.ceil(math.lcm(*route.joint) / route.num_replicas[stage])
    return max(joint, math.ceil(in_flight / route.num_replicas[stage] - ROUNDING))


def lower_bound(route: MicrobatchRoute, num_microbatches: int, limits: Sequence[int]) -> float:
    """Return a time that no order can beat: the largest of these bounds.

    * One microbatch alone takes its whole route.
    * A worker computes all its microbatches. Before that, the first of them has to reach it; after that, the last has
      to get from it to the end; in between it is idle while nothing can have arrived (fill and drain). Replicas of a
      wide stage cannot all start, nor all end, at once if a narrow stage serves them in turn.
    * A worker with a limit of k microbatches in flight needs `ceil(m / k)` round trips for its m one after the other.
    * A channel carries all its messages one after the other.

    Args:
        route: Legs of a microbatch.
        num_microbatches: Number of microbatches.
        limits: Most microbatches in flight, by worker.

    >>> from vtp_plugin.plan.schedule.cost.costs import u_costs
    >>> from vtp_plugin.plan.schedule.order.placement import u_placement
    >>> route = make_route(u_placement(3), u_costs(3))
    >>> lower_bound(route, 16, (16, 16, 16))  # the last cloud stage works 96, and 9 pass before and after
    105.0
    """
    bounds = [route.span]
    heads, tails = route.heads, route.reversed().heads[::-1]
    firsts = route.first_workers
    for stage, (first, num_replicas) in enumerate(zip(firsts, route.num_replicas, strict=True)):
        share, legs = num_microbatches // num_replicas, route.legs(stage)
        share_limits = [min(limit, share) for limit in limits[first : first + num_replicas]]
        reach = heads[legs[0]] + tails[legs[-1]]
        work = share * sum(route.durations[q] for q in legs)
        idle = min(_idle(route, stage, share, limit) for limit in set(share_limits))
        bounds.append(reach + work + idle + _stagger(route, stage))
        bounds.append(reach + math.ceil(share / min(share_limits)) * _round_trip(route, stage))
    for boundary in set(route.boundaries) - {-1}:
        messages = [q for q, crossed in enumerate(route.boundaries) if crossed == boundary]
        before = min(heads[q] + route.durations[q] for q in messages)
        after = min(route.latency[q] + route.durations[q + 1] + tails[q + 1] for q in messages)
        share = num_microbatches // len(route.channels[messages[0]])
        bounds.append(before + share * sum(route.occupancy[q] for q in messages) + after)
    return max(bounds)


def _round_trip(route: MicrobatchRoute, stage: int) -> float:
    """Return the time from the start of a stage's first leg to the end of its last, for one microbatch alone."""
    legs = route.legs(stage)
    return route.heads[legs[-1]] + route.durations[legs[-1]] - route.heads[legs[0]]


def _stagger(route: MicrobatchRoute, stage: int) -> float:
    """Return how long, at least, some replica of a stage waits at the start and the end of the step together.

    The largest such sum is smallest if the replica that starts first ends first, and so on.
    """
    late, early = _delays(route, stage), _delays(route.reversed(), stage)
    return max(first + last for first, last in zip(late, reversed(early), strict=True))


def _delays(route: MicrobatchRoute, stage: int) -> list[float]:
    """Return, by replica of a stage, how long after the first one it starts, at least.

    Once j of them have started, each earlier leg has run for j microbatches, shared by the replicas of its stage.
    """
    before = range(route.legs(stage)[0])
    return [
        max(
            ((math.ceil(j / route.num_replicas[route.stages[q]]) - 1) * route.durations[q] for q in before), default=0.0
        )
        for j in range(1, route.num_replicas[stage] + 1)
    ]


def _idle(route: MicrobatchRoute, stage: int, num_microbatches: int, limit: int) -> float:
    """Return how long a worker of a stage is idle between its first start and its last end, at least.

    Until its i-th leg runs for the first time, a worker can only run the legs before it, each at most `limit` times
    because no microbatch is done; the same holds at the end with time reversed. The two idle times do not overlap if
    the leg of the first comes no later on the route than the leg of the second, or if the limit forces the last
    microbatch to start after the first is done.
    """
    fill = _fill(route, stage, limit)
    drain = [*reversed(_fill(route.reversed(), stage, limit))]
    pairs = [
        first + last
        for i, first in enumerate(fill)
        for j, last in enumerate(drain)
        if i <= j or num_microbatches > limit
    ]
    return max(*fill, *drain, *pairs)


def _fill(route: MicrobatchRoute, stage: int, limit: int) -> list[float]:
    """Return for each leg of a stage how long a worker is idle before the leg first runs, at least."""
    legs = route.legs(stage)
    start, done, idle = route.heads[legs[0]], 0.0, list[float]()
    for q in legs:
        idle.append(max(0.0, route.heads[q] - start - done))
        done += limit * route.durations[q]
    return idle
