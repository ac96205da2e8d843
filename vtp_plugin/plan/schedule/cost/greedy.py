"""Orders by a greedy rule: the inner loop of the search for an order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from vtp_plugin.errors import PlanError
from vtp_plugin.plan.schedule.cost.microbatch_route import MicrobatchRoute, Orders, first_arrivals


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
