"""Interleaved pipelines: equally many layers on every stage, each with equally many virtual stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from vtp_plugin.tune.search.enumerate_lists import StageCounts, stage_types_of
from vtp_plugin.tune.search.node_assignment import fits_nodes
from vtp_plugin.tune.search.problem import StageType
from vtp_plugin.tune.search.search_space import SearchSpace
from vtp_plugin.tune.search.stage_orders import orders

# More stages than this are not interleaved here: a simulated step of theirs takes seconds.
_MOST_STAGES = 16


class Interleaved(NamedTuple):
    """The stages of an interleaved pipeline, with a lower bound on its step."""

    bound_s: float
    num_chunks: int
    order: tuple[StageType, ...]
    layers: tuple[int, ...]


def interleaved_lists(space: SearchSpace, below_s: Callable[[], float]) -> Iterator[Interleaved]:
    """Yield the interleaved pipelines whose step may be short enough.

    Args:
        space: the search space.
        below_s: called for the seconds that a step must be shorter than.
    """
    problem, num_microbatches = space.problem, space.split.num_microbatches
    most = min(problem.most_stages, problem.num_layers // 2, _MOST_STAGES)
    for num_stages in range(max(2, problem.least_stages), most + 1):
        number = problem.num_layers // num_stages
        chunks = [count for count in problem.chunks if count > 1 and not number % count]
        # Megatron runs microbatches in groups of as many as there are stages.
        if problem.num_layers % num_stages or num_microbatches % num_stages or not chunks:
            continue
        layers = (number,) * num_stages
        for row in _rows(space, num_stages, num_microbatches * number, below_s()):
            for order in orders(space, row):
                bound_s = _busiest_s(space, order, layers)
                yield from (Interleaved(bound_s, count, order, layers) for count in chunks if bound_s < below_s())


def _busiest_s(space: SearchSpace, order: Sequence[StageType], layers: Sequence[int]) -> float:
    """Bound a step from below by what its busiest stage computes, whatever the order."""
    last = len(order) - 1
    parts = pairwise(accumulate(layers, initial=0))
    times = (
        space.speeds[stage_type].times_s(*part, is_first=stage == 0, is_last=stage == last)
        for stage, (stage_type, part) in enumerate(zip(order, parts, strict=True))
    )
    return space.split.num_microbatches * max(map(sum, times))


def _rows(space: SearchSpace, num_stages: int, num_layers: int, below_s: float) -> Iterator[StageCounts]:
    """Yield how many stages of each type there may be, where every stage computes ``num_layers`` layers in a step."""
    split, speeds = space.split, space.speeds
    stage_types = [
        stage_type
        for stage_type in stage_types_of(split, is_mixing=False)
        if num_layers * speeds[stage_type].least_s < below_s
    ]

    def go(first: int, left: int, cards: list[int], chosen: tuple[tuple[StageType, int], ...]) -> Iterator[StageCounts]:
        if left == 0:
            if fits_nodes(split, [stage_type for stage_type, count in chosen for _ in range(count)]):
                yield StageCounts(chosen, num_layers * max(speeds[stage_type].least_s for stage_type, _ in chosen))
            return
        if first == len(stage_types):
            return
        stage_type = stage_types[first]
        most = min(
            left,
            *(
                cards[pool_index] // (stage_type.tp * stage_type.replica_pools.count(pool_index))
                for pool_index in stage_type.pools
            ),
        )
        for count in range(most, -1, -1):
            rest = [
                number - count * stage_type.tp * stage_type.replica_pools.count(pool_index)
                for pool_index, number in enumerate(cards)
            ]
            yield from go(first + 1, left - count, rest, chosen + ((stage_type, count),) * (count > 0))

    yield from go(0, num_stages, [sum(pool.cards_per_node) for pool in split.pools], ())
