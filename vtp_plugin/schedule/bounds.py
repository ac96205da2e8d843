"""How fast a step can be at best, and how many microbatches in flight that takes. No order is looked at here."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vtp_plugin.schedule.chain import Chain, make_chain
from vtp_plugin.schedule.costs import Costs
from vtp_plugin.schedule.placement import Placement

ROUNDING = 1e-9  # relative error that sums of durations may have


def need(placement: Placement, costs: Costs) -> int:
    """Return how many microbatches must be in flight to keep the busiest stage busy all the time.

    That is the time of one microbatch through the whole pipeline, divided by the busiest stage's time for one: for the
    model U-shape `ceil((6 t_f + 4 L + 3 c (P - 1)) / max(6 t_f, 3 c))` with the forward times t_f of each part of the
    edge and c of a cloud stage, and the one-way latency L.

    >>> from vtp_plugin.schedule.costs import u_costs
    >>> from vtp_plugin.schedule.placement import u_placement
    >>> [need(u_placement(3), u_costs(3, cloud=2.0, latency=latency)) for latency in (0, 1, 2, 4)]
    [3, 4, 5, 6]
    """
    return need_by_stage(make_chain(placement, costs), 0)


def need_by_stage(chain: Chain, stage: int) -> int:
    """Return :func:`need` for the part of a microbatch's way that starts and ends on a stage."""
    busiest = max(sum(chain.durations[q] for q in chain.steps(s)) for s in range(chain.num_stages))
    return max(1, math.ceil(_round_trip(chain, stage) / busiest - ROUNDING)) if busiest else 1


def lower_bound(chain: Chain, num_microbatches: int, limits: Sequence[int]) -> float:
    """Return a time that no order can beat: the largest of what is known of the single resources.

    * One microbatch alone takes its whole way.
    * A stage works for all microbatches. Before, the first of them has to reach it, and after, the last has to get
      from it to the end; in between it stands still while nothing can be there (fill and drain).
    * A stage with a limit of k microbatches in flight needs `ceil(m / k)` round trips one after the other.
    * A channel carries all its messages one after the other.

    Args:
        chain: Steps of a microbatch.
        num_microbatches: Number of microbatches, m.
        limits: Most microbatches in flight, by stage.

    >>> from vtp_plugin.schedule.costs import u_costs
    >>> from vtp_plugin.schedule.placement import u_placement
    >>> chain = make_chain(u_placement(3), u_costs(3))
    >>> lower_bound(chain, 16, (16, 16, 16))  # the last cloud stage works 96, and 9 pass before and after
    105.0
    """
    bounds = [chain.span]
    heads, tails = chain.heads, chain.reversed().heads[::-1]
    for stage in range(chain.num_stages):
        steps, limit = chain.steps(stage), min(limits[stage], num_microbatches)
        reach = heads[steps[0]] + tails[steps[-1]]
        work = num_microbatches * sum(chain.durations[q] for q in steps)
        bounds.append(reach + work + _idle(chain, stage, num_microbatches, limit))
        bounds.append(reach + math.ceil(num_microbatches / limit) * _round_trip(chain, stage))
    for channel in set(chain.channels) - {-1}:
        messages = [q for q, used in enumerate(chain.channels) if used == channel]
        before = min(heads[q] + chain.durations[q] for q in messages)
        after = min(chain.latency[q] + chain.durations[q + 1] + tails[q + 1] for q in messages)
        bounds.append(before + num_microbatches * sum(chain.occupancy[q] for q in messages) + after)
    return max(bounds)


def _round_trip(chain: Chain, stage: int) -> float:
    """Return the time from the start of a stage's first step to the end of its last, for one microbatch alone."""
    steps = chain.steps(stage)
    return chain.heads[steps[-1]] + chain.durations[steps[-1]] - chain.heads[steps[0]]


def _idle(chain: Chain, stage: int, num_microbatches: int, limit: int) -> float:
    """Return how long a stage stands still between its first start and its last end, at least.

    Until its i-th step runs for the first time, a stage can only do the steps before it, each at most `limit` times
    because no microbatch is through; the same holds at the end with time reversed. The two times do not overlap where
    the step of the one comes no later on the way than the step of the other, or where the limit forces the last
    microbatch to begin after the first is through.
    """
    fill = _fill(chain, stage, limit)
    drain = [*reversed(_fill(chain.reversed(), stage, limit))]
    pairs = [
        first + last
        for i, first in enumerate(fill)
        for j, last in enumerate(drain)
        if i <= j or num_microbatches > limit
    ]
    return max(*fill, *drain, *pairs)


def _fill(chain: Chain, stage: int, limit: int) -> list[float]:
    """Return for each step of a stage how long the stage stands still until the step first runs, at least."""
    steps = chain.steps(stage)
    start, done, idle = chain.heads[steps[0]], 0.0, list[float]()
    for q in steps:
        idle.append(max(0.0, chain.heads[q] - start - done))
        done += limit * chain.durations[q]
    return idle
