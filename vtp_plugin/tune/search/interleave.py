"""Lists of stages with equally many layers, each of which may be cut into as many virtual stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from vtp_plugin.tune.search.enumerate_lists import StageCounts, kinds_of
from vtp_plugin.tune.search.node_assignment import has_rooms
from vtp_plugin.tune.search.problem import BatchSplit, SearchProblem, StageType
from vtp_plugin.tune.search.stage_cost import Works
from vtp_plugin.tune.search.stage_orders import orders

# More stages than this are not interleaved here: a simulated step of theirs takes seconds.
_MOST_STAGES = 16


class Interleaved(NamedTuple):
    """Stages, and a bound on the step."""

    bound_s: float
    num_chunks: int
    order: tuple[StageType, ...]
    layers: tuple[int, ...]


def interleaved_lists(
    question: SearchProblem, shape: BatchSplit, works: Works, below_s: Callable[[], float]
) -> Iterator[Interleaved]:
    """Yield interleaved pipelines, if a step may be short enough.

    Args:
        question: what is asked.
        shape: of the step.
        works: what every kind costs.
        below_s: gives what a step must be shorter than.
    """
    most = min(question.most_stages, question.num_layers // 2, _MOST_STAGES)
    for num_stages in range(max(2, question.least_stages), most + 1):
        number = question.num_layers // num_stages
        chunks = [count for count in question.chunks if count > 1 and not number % count]
        # Megatron runs microbatches in groups of as many as there are stages.
        if question.num_layers % num_stages or shape.num_microbatches % num_stages or not chunks:
            continue
        layers = (number,) * num_stages
        for row in _rows(shape, works, num_stages, shape.num_microbatches * number, below_s()):
            for order in orders(question, shape, row):
                bound_s = _busiest_s(shape, works, order, layers)
                yield from (Interleaved(bound_s, count, order, layers) for count in chunks if bound_s < below_s())


def _busiest_s(shape: BatchSplit, works: Works, order: Sequence[StageType], layers: Sequence[int]) -> float:
    """Bound a step from below by what its busiest stage computes, whatever the order."""
    last = len(order) - 1
    parts = pairwise(accumulate(layers, initial=0))
    times = (
        works[kind].times_s(*part, is_first=stage == 0, is_last=stage == last)
        for stage, (kind, part) in enumerate(zip(order, parts, strict=True))
    )
    return shape.num_microbatches * max(map(sum, times))


def _rows(shape: BatchSplit, works: Works, num_stages: int, num_layers: int, below_s: float) -> Iterator[StageCounts]:
    """Yield how many stages of each kind there may be; a stage computes so many layers in a step."""
    kinds = [kind for kind in kinds_of(shape, is_mixing=False) if num_layers * works[kind].least_s < below_s]

    def go(first: int, left: int, cards: list[int], chosen: tuple[tuple[StageType, int], ...]) -> Iterator[StageCounts]:
        if left == 0:
            if has_rooms(shape, [kind for kind, count in chosen for _ in range(count)]):
                yield StageCounts(chosen, num_layers * max(works[kind].least_s for kind, _ in chosen))
            return
        if first == len(kinds):
            return
        kind = kinds[first]
        most = min(left, *(cards[place] // (kind.tp * kind.places.count(place)) for place in kind.pools))
        for count in range(most, -1, -1):
            rest = [number - count * kind.tp * kind.places.count(place) for place, number in enumerate(cards)]
            yield from go(first + 1, left - count, rest, chosen + ((kind, count),) * (count > 0))

    yield from go(0, num_stages, [sum(pool.rooms) for pool in shape.pools], ())
