"""How many microbatches more than in 1F1B stages may have in flight, so that they wait less for slow links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.cost.microbatch_route import make_route
from vtp_plugin.plan.schedule.cost.step_bounds import in_flight_needed_on
from vtp_plugin.plan.schedule.order.placement import Placement
from vtp_plugin.tune.search.memory_check import held_by
from vtp_plugin.tune.search.problem import StageType
from vtp_plugin.tune.search.search_space import SearchSpace

# Microbatches more than the links need, which even out the start and the end of a step.
_SLACKS = (0, 1, 2)
# In a pipeline of at most so many stages, the stages up to any one of them may have more in flight.
_SHORT = 6


def most_in_flight(
    space: SearchSpace, stage_types: Sequence[StageType], layers: Sequence[int], *, is_split: bool = False
) -> tuple[int, ...]:
    """Give how many microbatches in flight the cards of every stage have memory for, at least those of 1F1B.

    Args:
        space: the search space.
        stage_types: the type of every stage, in order.
        layers: number of layers of every stage, for which the memory suffices in 1F1B.
        is_split: whether backwards are split: then the last stage, too, may have more than one, and what waits may be
            more than an activation.
    """
    split, num_stages, found = space.split, len(stage_types), []
    starts = accumulate(layers[:-1], initial=0)
    for stage, (stage_type, start) in enumerate(zip(stage_types, starts, strict=True)):
        usual = num_stages - stage
        spare = max(0, split.num_microbatches - usual) if usual > 1 or is_split else 0
        if spare and split.held_bytes is not None and (limit := space.memory_bytes(stage_type)) is not None:
            part = (start, start + layers[stage])
            ends = {"is_first": stage == 0, "is_last": usual == 1}
            held, more = (
                max(
                    held_by(split, stage_type, part, *kept, **ends)
                    for kept in ((number, 0), (0, number))[: 1 + is_split]
                )
                for number in (usual, usual + 1)
            )
            spare = max(0, min(spare, (limit - held) // (more - held))) if more > held else spare
        found.append(usual + spare)
    return tuple(found)


def more_in_flight(
    placement: Placement, costs: Costs, num_microbatches: int, most: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Yield numbers of microbatches in flight per stage, each with more than 1F1B has, the fewest first.

    All stages up to a certain one get more. In a short pipeline that may be any stage; in a long one it is the first,
    the last but one, or one before a slow link. They get what the links need, or some more than in 1F1B.

    Args:
        placement: placement of a plain pipeline.
        costs: durations and links of a microbatch.
        num_microbatches: number of microbatches of a replica.
        most: number of microbatches in flight that every stage has memory for.

    >>> from vtp_plugin.plan.schedule.cost.costs import uniform_costs
    >>> from vtp_plugin.plan.schedule.order.placement import plain_placement
    >>> costs = uniform_costs(plain_placement(2), latency=3.0)
    >>> [*more_in_flight(plain_placement(2), costs, 8, (8, 1))]
    [(3, 1), (4, 1), (5, 1), (6, 1)]
    """
    num_stages = placement.num_stages
    usual = [num_stages - stage for stage in range(num_stages)]
    route = make_route(placement, costs)
    needed = [in_flight_needed_on(route, stage) for stage in range(num_stages)]
    wanted = [[number + slack for number in needed] for slack in _SLACKS]
    wanted += [[number + more for number in usual] for more in (1, 2, 4)]
    links = [latency + costs.transfer_time(number) for number, latency in enumerate(costs.latency)]
    last = num_stages - 2
    slow = {number for number, time in enumerate(links) if time >= max(links) / 2 or num_stages <= _SHORT}
    found = set()
    for numbers in wanted:
        for end in {0, last, *slow}:
            row: list[int] = []
            for stage, (limit, least, number) in enumerate(zip(most, usual, numbers, strict=True)):
                number = min(limit, max(least, min(number, num_microbatches))) if stage <= end else least
                # A stage that may hold more than the one before it would wait for that.
                row.append(max(least, min(number, row[-1])) if row else number)
            found.add(tuple(row))
    yield from sorted((row for row in found if row != tuple(usual)), key=lambda row: (sum(row), row))
