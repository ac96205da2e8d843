"""Enumerates the lists of stage types that the cards allow, without those that cannot be quick enough."""

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
from vtp_plugin.tune.search.node_assignment import fits_nodes
from vtp_plugin.tune.search.problem import BatchSplit, StageType
from vtp_plugin.tune.search.search_space import SearchSpace

# Replicas of a stage are in several pools only if there are at most so many of them.
_MOST_MIXED = 8


class StageCounts(NamedTuple):
    """How many stages a list has of each type, and a lower bound on its step."""

    counts: tuple[tuple[StageType, int], ...]
    bound_s: float


def stage_types_of(split: BatchSplit, *, is_mixing: bool) -> tuple[StageType, ...]:
    """List the stage types that a split allows, those of one pool together, the largest first.

    >>> from vtp_plugin.tune.search.problem import NodePool
    >>> from vtp_plugin.tune.cluster.speed import Speed
    >>> pool = NodePool(name="a", cards_per_node=(2,), speeds={1: Speed(forward_s=(1.0,), backward_s=(1.0,))})
    >>> split = BatchSplit(num_replicas=2, num_microbatches=1, micro_batch_size=1, pools=(pool, pool))
    >>> [stage_type.replica_pools for stage_type in stage_types_of(split, is_mixing=True)]
    [(0, 0), (1, 1), (0, 1)]
    """
    stage_types = []
    for size in {size for pool in split.pools for size in pool.speeds}:
        usable = {
            pool_index: sum(num_cards // size for num_cards in pool.cards_per_node)
            for pool_index, pool in enumerate(split.pools)
            if size in pool.speeds
        }
        ways: Iterable[tuple[int, ...]] = ((pool_index,) * split.num_replicas for pool_index in usable)
        if is_mixing and split.num_replicas <= _MOST_MIXED:
            ways = combinations_with_replacement(sorted(usable), split.num_replicas)
        for replica_pools in ways:
            is_near = len({split.pools[pool_index].site for pool_index in replica_pools}) == 1
            if is_near and all(
                replica_pools.count(pool_index) <= usable[pool_index] for pool_index in set(replica_pools)
            ):
                stage_types.append(StageType(replica_pools, size))
    return tuple(
        sorted(
            stage_types, key=lambda stage_type: (len(stage_type.pools) > 1, stage_type.replica_pools, -stage_type.tp)
        )
    )


def enumerate_lists(
    space: SearchSpace, below_s: Callable[[], float], *, is_quick: bool = False
) -> Iterator[StageCounts]:
    """Yield the lists that the cards allow and whose step may be short enough.

    Stages of each size may have replicas in several pools, all in the same way. With the objective ``cards`` the lists
    come in the order of that objective.

    Args:
        space: the search space.
        below_s: called for the seconds that a step must be shorter than; when the search takes too long, it raises an
            error of its own, which ends the enumeration.
        is_quick: whether only lists count that have one size in each pool, and there as many stages as possible.
    """
    enumeration = _Enumeration(space, below_s, is_quick=is_quick)
    for goal in _goals(space, enumeration.stage_types) if space.problem.objective == "cards" else (None,):
        yield from enumeration.extend(goal, 0, enumeration.num_cards, 0, enumeration.start, ())


class _Enumeration:
    """Enumerates how many stages of each type there may be; the arguments are those of :func:`enumerate_lists`."""

    def __init__(self, space: SearchSpace, below_s: Callable[[], float], *, is_quick: bool) -> None:
        self.space, self.below_s, self.is_quick = space, below_s, is_quick
        self.problem, self.split = problem, split = space.problem, space.split
        self.stage_types = stage_types_of(split, is_mixing=not is_quick)
        self.most_layers = most_layers(space, self.stage_types, below_s())
        self.most_stages = min(problem.most_stages, problem.num_layers)
        self.num_cards = [sum(pool.cards_per_node) for pool in split.pools]
        self.takes = [
            [stage_type.tp * stage_type.replica_pools.count(pool_index) for pool_index in range(len(self.num_cards))]
            for stage_type in self.stage_types
        ]
        self.is_mixed = [len(stage_type.pools) > 1 for stage_type in self.stage_types]
        self.limits = [_most_stages(split, stage_type) for stage_type in self.stage_types]
        self.demands = [[self._budget(*one) for one in demand] for demand in self._requirements()]
        self.start = [[0.0] * len(demand) for demand in self.demands]

    def _requirements(self) -> Iterator[Demand]:
        """Yield what a list must satisfy: its stages can hold all layers, and they wait little enough."""
        problem, split, below_s = self.problem, self.split, self.below_s()
        yield layers_demanded(self.space, self.stage_types, self.most_layers, below_s)
        fewest = min((stage_type.tp for stage_type in self.stage_types), default=1) * split.num_replicas
        num_stages = min(self.most_stages, sum(self.num_cards) // fewest)
        is_1f1b = not problem.runs_ahead and not problem.split_backward
        if self.stage_types and is_1f1b and below_s < math.inf and num_stages < split.num_microbatches:
            yield steps_demanded(self.space, self.stage_types, below_s)

    def _budget(self, of_type: Sequence[float], most: float) -> _Budget:
        """Make a budget: also what an unused card adds at least if only the types from each index on are left."""
        starts = range(len(self.stage_types) + 1)
        of_card = [least_of_card(self.split, self.stage_types[i:], of_type[i:]) for i in starts]
        return _Budget(of_type, of_card, most)

    def extend(
        self,
        goal: _Goal | None,
        first: int,
        left: Sequence[int],
        stages: int,
        sums: Sequence[Sequence[float]],
        chosen: tuple[tuple[StageType, int], ...],
    ) -> Iterator[StageCounts]:
        """Yield the lists that extend what was chosen so far, type by type.

        Args:
            goal: with the objective ``cards``, how many ranks and stages the list must have; else None.
            first: index of the next stage type.
            left: number of cards that are left in each pool.
            stages: number of stages chosen so far.
            sums: for each requirement, its sums over the chosen stages.
            chosen: the chosen stage types, with how many stages of each.
        """
        if first == len(self.stage_types):
            bound_s = 0.0 if goal is not None else bound_list(self.space, chosen, self.below_s())
            row = StageCounts(chosen, bound_s)
            if stages >= self.problem.least_stages and row.bound_s < self.below_s() and self._fits(row):
                yield row
            return
        stage_type, take = self.stage_types[first], self.takes[first]
        for count in self._stage_numbers(first, left, stages, chosen):
            rest = [number - count * each for number, each in zip(left, take, strict=True)] if count else left
            more = [
                [now + count * budget.of_type[first] for now, budget in zip(row, demand, strict=True)]
                for row, demand in zip(sums, self.demands, strict=True)
            ]
            if self._may_do(first + 1, rest, more):
                longer = (*chosen, (stage_type, count)) if count else chosen
                if goal is None or goal.is_near(self.stage_types[first + 1 :], longer):
                    yield from self.extend(goal, first + 1, rest, stages + count, more, longer)

    def _stage_numbers(
        self, first: int, left: Sequence[int], stages: int, chosen: Sequence[tuple[StageType, int]]
    ) -> Sequence[int]:
        """List how many stages of a type there may be, the most first."""
        if not self.most_layers[first]:
            return (0,)
        most = min(self.most_stages - stages, self.limits[first])
        for number, each in zip(left, self.takes[first], strict=True):
            if each and number < each * most:
                most = number // each
        if most < 1:
            return (0,)
        own = self.stage_types[first]
        if self.is_quick:
            return (0,) if any(other.replica_pools == own.replica_pools for other, _ in chosen) else (most, 0)
        # Sorted by their pools, stages of a size have replicas in several of them in one way at most.
        if self.is_mixed[first] and any(other.tp == own.tp and len(other.pools) > 1 for other, _ in chosen):
            return (0,)
        return range(most, -1, -1)

    def _may_do(self, first: int, rest: Sequence[int], sums: Sequence[Sequence[float]]) -> bool:
        """Whether the cards that are left may be enough for all requirements."""
        for row, demand in zip(sums, self.demands, strict=True):
            for now, budget in zip(row, demand, strict=True):
                if now + sum(map(mul, budget.of_card[first], rest)) <= budget.most:
                    break
            else:
                return False
        return True

    def _fits(self, row: StageCounts) -> bool:
        """Whether a list fits the nodes; with the objective ``cards``, also whether every site has a stage."""
        problem, split = self.problem, self.split
        if problem.objective == "cards":
            used = {self.space.site(stage_type) for stage_type, _ in row.counts}
            if used < {pool.site for pool in split.pools} - {problem.edge}:
                return False
        return fits_nodes(split, [stage_type for stage_type, count in row.counts for _ in range(count)])


class _Budget(NamedTuple):
    """A sum over the stages of a list that must not exceed a limit.

    Attributes:
        of_type: what a stage of each type adds.
        of_card: what a card of each pool adds at least, if only the types from each index on are left.
        most: the limit.
    """

    of_type: Sequence[float]
    of_card: Sequence[Sequence[float]]
    most: float


class _Goal(NamedTuple):
    """How many ranks and stages a replica must have."""

    ranks: int
    stages: int

    def is_near(self, stage_types: Sequence[StageType], chosen: Sequence[tuple[StageType, int]]) -> bool:
        """Whether stages of the remaining types can make up for what is missing."""
        stages = self.stages - sum(count for _, count in chosen)
        ranks = self.ranks - sum(stage_type.tp * count for stage_type, count in chosen)
        sizes = [stage_type.tp for stage_type in stage_types]
        return stages * min(sizes, default=0) <= ranks <= stages * max(sizes, default=0) and stages >= 0


def _goals(space: SearchSpace, stage_types: Sequence[StageType]) -> Iterator[_Goal]:
    """Yield the goals that may be reached, the most ranks first, of these the fewest stages."""
    if not stage_types:
        return
    problem, split = space.problem, space.split
    sizes = [stage_type.tp for stage_type in stage_types]
    smallest, largest = min(sizes), max(sizes)
    cards = sum(
        sum(split.pools[pool_index].cards_per_node)
        for pool_index in {pool_index for stage_type in stage_types for pool_index in stage_type.replica_pools}
    )
    most = min(problem.most_stages, problem.num_layers)
    for ranks in range(min(cards // split.num_replicas, most * largest), 0, -1):
        fewest = max(problem.least_stages, -(-ranks // largest))
        yield from (_Goal(ranks, stages) for stages in range(fewest, min(most, ranks // smallest) + 1))


def _most_stages(split: BatchSplit, stage_type: StageType) -> int:
    """Count the stages of a type that fit the nodes."""
    return min(
        sum(num_cards // stage_type.tp for num_cards in split.pools[pool_index].cards_per_node)
        // stage_type.replica_pools.count(pool_index)
        for pool_index in stage_type.pools
    )
