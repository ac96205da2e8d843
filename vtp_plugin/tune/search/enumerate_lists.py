"""Lists of kinds of stages that the cards allow, those that cannot be quick enough left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations_with_replacement
from operator import mul
from typing import NamedTuple

from vtp_plugin.tune.search.list_bounds import (
    Demand,
    bound_list,
    layers_demanded,
    least_of_card,
    most_layers,
    steps_demanded,
)
from vtp_plugin.tune.search.node_assignment import has_rooms
from vtp_plugin.tune.search.problem import BatchSplit, SearchProblem, StageType
from vtp_plugin.tune.search.stage_cost import Work, Works

# Replicas of a stage are in several pools only if there are at most so many of them.
_MOST_MIXED = 8


class StageCounts(NamedTuple):
    """How many stages of each kind, and a bound on the step."""

    counts: tuple[tuple[StageType, int], ...]
    bound_s: float


class SearchRound(NamedTuple):
    """Which lists a round looks at.

    Attributes:
        most_sizes: different tensor-parallel sizes in one pool.
        takes_all: of every kind as many as there are cards for.
        is_mixing: stages of each size may have replicas in several pools, all in the same way.
    """

    most_sizes: int
    takes_all: bool = False
    is_mixing: bool = False


def kinds_of(shape: BatchSplit, *, is_mixing: bool) -> tuple[StageType, ...]:
    """List the kinds of stages of a shape, those of one pool together, the largest first.

    >>> from vtp_plugin.tune.search.problem import NodePool
    >>> from vtp_plugin.tune.cluster.speed import Speed
    >>> pool = NodePool(name="a", rooms=(2,), speeds={1: Speed(forward_s=(1.0,), backward_s=(1.0,))})
    >>> shape = BatchSplit(num_replicas=2, num_microbatches=1, micro_batch_size=1, pools=(pool, pool))
    >>> [kind.places for kind in kinds_of(shape, is_mixing=True)]
    [(0, 0), (1, 1), (0, 1)]
    """
    kinds = []
    for size in {size for pool in shape.pools for size in pool.speeds}:
        usable = {
            place: sum(room // size for room in pool.rooms)
            for place, pool in enumerate(shape.pools)
            if size in pool.speeds
        }
        ways: Iterable[tuple[int, ...]] = ((place,) * shape.num_replicas for place in usable)
        if is_mixing and shape.num_replicas <= _MOST_MIXED:
            ways = combinations_with_replacement(sorted(usable), shape.num_replicas)
        for places in ways:
            is_near = len({shape.pools[place].site for place in places}) == 1
            if is_near and all(places.count(place) <= usable[place] for place in set(places)):
                kinds.append(StageType(places, size))
    return tuple(sorted(kinds, key=lambda kind: (len(kind.pools) > 1, kind.places, -kind.tp)))


def rows(
    question: SearchProblem, shape: BatchSplit, works: Works, reach: SearchRound, below_s: Callable[[], float]
) -> Iterator[StageCounts]:
    """Yield what the cards allow, if a step may be short enough; where cards count, in the order of that objective.

    Args:
        question: what is asked.
        shape: of the step.
        works: what every kind costs.
        reach: which lists are looked at.
        below_s: gives what a step must be shorter than; it ends a walk that takes too long by an error of its own.
    """
    walk = _Walk(question, shape, works, reach, below_s)
    for goal in _goals(question, shape, walk.kinds) if question.objective == "cards" else (None,):
        yield from walk.go(goal, 0, walk.rooms, 0, walk.start, ())


class _Walk:
    """Goes through how many stages of each kind there may be; the arguments are those of :func:`rows`."""

    def __init__(
        self, question: SearchProblem, shape: BatchSplit, works: Works, reach: SearchRound, below_s: Callable[[], float]
    ) -> None:
        self.question, self.shape, self.works, self.reach, self.below_s = question, shape, works, reach, below_s
        self.kinds = kinds_of(shape, is_mixing=reach.is_mixing)
        own = [works[kind] for kind in self.kinds]
        self.most_layers = most_layers(question, shape, self.kinds, own, below_s())
        self.most_stages = min(question.most_stages, question.num_layers)
        self.rooms = [sum(pool.rooms) for pool in shape.pools]
        self.takes = [[kind.tp * kind.places.count(place) for place in range(len(self.rooms))] for kind in self.kinds]
        self.is_mixed = [len(kind.pools) > 1 for kind in self.kinds]
        self.limits = [_most_of(shape, kind) for kind in self.kinds]
        self.demands = [[self._sum(*one) for one in demand] for demand in self._demands(own)]
        self.start = [[0.0] * len(demand) for demand in self.demands]

    def _demands(self, works: Sequence[Work]) -> Iterator[Demand]:
        """Yield what a list must have: room for all layers, and little enough time in which stages wait."""
        question, shape, below_s = self.question, self.shape, self.below_s()
        yield layers_demanded(question, shape, works, self.most_layers, below_s)
        fewest = min((kind.tp for kind in self.kinds), default=1) * shape.num_replicas
        num_stages = min(self.most_stages, sum(self.rooms) // fewest)
        if self.kinds and not question.runs_ahead and below_s < math.inf and num_stages < shape.num_microbatches:
            yield steps_demanded(question, shape, self.kinds, works, below_s)

    def _sum(self, of_kind: Sequence[float], most: float) -> _Sum:
        """Add the least that a card may still add: unused, or in a stage of one of the kinds from each on."""
        starts = range(len(self.kinds) + 1)
        of_room = [least_of_card(self.shape, self.kinds[i:], of_kind[i:]) for i in starts]
        return _Sum(of_kind, of_room, most)

    def go(
        self,
        goal: _Goal | None,
        first: int,
        left: Sequence[int],
        stages: int,
        sums: Sequence[Sequence[float]],
        chosen: tuple[tuple[StageType, int], ...],
    ) -> Iterator[StageCounts]:
        """Yield the lists that begin with what is chosen.

        Args:
            goal: where cards count, what a list must have.
            first: the next kind.
            left: cards of every pool.
            stages: that are chosen.
            sums: of what is demanded, over them.
            chosen: kinds, and how many stages of each.
        """
        if first == len(self.kinds):
            row = StageCounts(chosen, 0.0 if goal is not None else self._bound_s(chosen))
            if stages >= self.question.least_stages and row.bound_s < self.below_s() and self._goes_in(row):
                yield row
            return
        kind, take = self.kinds[first], self.takes[first]
        for count in self._counts(first, left, stages, chosen):
            rest = [number - count * each for number, each in zip(left, take, strict=True)] if count else left
            more = [
                [now + count * one.of_kind[first] for now, one in zip(row, demand, strict=True)]
                for row, demand in zip(sums, self.demands, strict=True)
            ]
            if self._may_do(first + 1, rest, more):
                longer = (*chosen, (kind, count)) if count else chosen
                if goal is None or goal.is_near(self.kinds[first + 1 :], longer):
                    yield from self.go(goal, first + 1, rest, stages + count, more, longer)

    def _counts(
        self, first: int, left: Sequence[int], stages: int, chosen: Sequence[tuple[StageType, int]]
    ) -> Sequence[int]:
        """List how many stages of a kind there may be, the most first."""
        if not self.most_layers[first]:
            return (0,)
        most = min(self.most_stages - stages, self.limits[first])
        for number, each in zip(left, self.takes[first], strict=True):
            if each and number < each * most:
                most = number // each
        if most < 1:
            return (0,)
        kind = self.kinds[first]
        if self.is_mixed[first]:
            # Sorted by their pools, stages of a size have replicas in several of them in one way at most.
            if any(one.tp == kind.tp and len(set(one.places)) > 1 for one, _ in chosen):
                return (0,)
        elif len({one.tp for one, _ in chosen if one.places == kind.places} | {kind.tp}) > self.reach.most_sizes:
            return (0,)
        return (most, 0) if self.reach.takes_all else range(most, -1, -1)

    def _may_do(self, first: int, rest: Sequence[int], sums: Sequence[Sequence[float]]) -> bool:
        """Whether the cards that are left may be enough for all that is demanded."""
        for row, demand in zip(sums, self.demands, strict=True):
            for now, one in zip(row, demand, strict=True):
                if now + sum(map(mul, one.of_room[first], rest)) <= one.most:
                    break
            else:
                return False
        return True

    def _bound_s(self, chosen: Sequence[tuple[StageType, int]]) -> float:
        own, counts = [self.works[kind] for kind, _ in chosen], [count for _, count in chosen]
        return bound_list(self.question, self.shape, own, counts, self.below_s())

    def _goes_in(self, row: StageCounts) -> bool:
        """Whether there is room for a list; where cards count, also whether every site has a stage."""
        question, shape = self.question, self.shape
        if question.objective == "cards":
            used = {shape.pools[kind.places[0]].site for kind, _ in row.counts}
            if used < {pool.site for pool in shape.pools} - {question.edge}:
                return False
        return has_rooms(shape, [kind for kind, count in row.counts for _ in range(count)])


class _Sum(NamedTuple):
    """What the stages of a list add up to, and must not be above a limit.

    Attributes:
        of_kind: what a stage of each kind adds.
        of_room: the least that a card of each pool may still add, from each kind on.
        most: the limit.
    """

    of_kind: Sequence[float]
    of_room: Sequence[Sequence[float]]
    most: float


class _Goal(NamedTuple):
    """How many ranks, and stages, a replica shall have."""

    ranks: int
    stages: int

    def is_near(self, kinds: Sequence[StageType], chosen: Sequence[tuple[StageType, int]]) -> bool:
        """Whether stages of the kinds that are still to come may make up what is missing."""
        stages = self.stages - sum(count for _, count in chosen)
        ranks = self.ranks - sum(kind.tp * count for kind, count in chosen)
        sizes = [kind.tp for kind in kinds]
        return stages * min(sizes, default=0) <= ranks <= stages * max(sizes, default=0) and stages >= 0


def _goals(question: SearchProblem, shape: BatchSplit, kinds: Sequence[StageType]) -> Iterator[_Goal]:
    """Yield what may be had, the most ranks first, of these the fewest stages."""
    if not kinds:
        return
    smallest, largest = min(kind.tp for kind in kinds), max(kind.tp for kind in kinds)
    cards = sum(sum(shape.pools[place].rooms) for place in {place for kind in kinds for place in kind.places})
    most = min(question.most_stages, question.num_layers)
    for ranks in range(min(cards // shape.num_replicas, most * largest), 0, -1):
        fewest = max(question.least_stages, -(-ranks // largest))
        yield from (_Goal(ranks, stages) for stages in range(fewest, min(most, ranks // smallest) + 1))


def _most_of(shape: BatchSplit, kind: StageType) -> int:
    """Count the stages of a kind that there is room for."""
    return min(
        sum(room // kind.tp for room in shape.pools[place].rooms) // kind.places.count(place) for place in kind.pools
    )
