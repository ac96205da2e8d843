"""Lists of sizes and layers that a search tries, and bounds of how fast each can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations_with_replacement
from operator import mul
from typing import NamedTuple

from vtp_plugin.tune.cluster.speed import Speed
from vtp_plugin.tune.search.node_assignment import fits_nodes
from vtp_plugin.tune.search.problem import BatchSplit, SearchSpace, StageType
from vtp_plugin.tune.search.stage_cost import most_held

# Rounding error of numbers of layers, as a share of a layer.
ROUNDING = 1e-9
# Longer than any time.
_LONG_S = 1e9
# Prices of a layer that are tried; any gives a bound.
_NUM_PRICES = 16

Demand = list[tuple[list[float], float]]
"""Sums over the stages of a list, of which at least one must not exceed its limit: what a stage of each type adds, and
the limit."""


def bound_list(space: SearchSpace, chosen: Sequence[tuple[StageType, int]], below_s: float) -> float:
    """Bound the step of a list from below; if even a bound with layers in parts reaches ``below_s``, that one is given.

    Args:
        space: the search space.
        chosen: the stage types of the list, with how many stages of each.
        below_s: seconds that a step must be shorter than.
    """
    if not chosen:
        return math.inf
    problem, num_microbatches, num_layers = space.problem, space.split.num_microbatches, space.problem.num_layers
    speeds, counts = [space.speeds[stage_type] for stage_type, _ in chosen], [count for _, count in chosen]
    if problem.layers == "equal":
        each, left = divmod(num_layers, sum(counts))
        return math.inf if left else num_microbatches * each * max(speed.least_s for speed in speeds)
    if problem.runs_ahead or problem.split_backward:
        share = min(speed.least_forward_share for speed in speeds) if problem.split_backward else 1.0
        any_s = _bound_any_order_s(num_microbatches, num_layers, speeds, counts, share)
        if any_s < below_s:
            any_s = max(any_s, num_microbatches * _busiest_s(num_layers, speeds, counts))
        return any_s
    stages = sorted(((speed.least_s, count) for speed, count in zip(speeds, counts, strict=True)), reverse=True)
    least_s = _bound_1f1b_s(
        num_microbatches, num_layers, stages, num_layers / sum(count / time for time, count in stages)
    )
    if least_s < below_s:
        least_s = _bound_1f1b_s(num_microbatches, num_layers, stages, _busiest_s(num_layers, speeds, counts))
    return least_s


def most_layers(space: SearchSpace, stage_types: Sequence[StageType], below_s: float) -> list[int]:
    """Bound the layers of a stage of each type by its time, and by its memory where that is too small for all layers.

    Args:
        space: the search space.
        stage_types: the stage types.
        below_s: seconds that a step must be shorter than.
    """
    most_s = min(below_s / space.split.num_microbatches, _LONG_S)
    held = (most_held(space, stage_type) for stage_type in stage_types)
    whole = (whole_layers(most_s, space.speeds[stage_type].least_s) for stage_type in stage_types)
    return [
        number if of_memory >= space.problem.num_layers else min(of_memory, number)
        for of_memory, number in zip(held, whole, strict=True)
    ]


def layers_demanded(
    space: SearchSpace, stage_types: Sequence[StageType], most: Sequence[int], below_s: float
) -> Demand:
    """Require that the stages can hold all layers.

    Args:
        space: the search space.
        stage_types: the stage types.
        most: number of layers that a stage of each type can hold, see :func:`most_layers`.
        below_s: seconds that a step must be shorter than.
    """
    speeds = [space.speeds[stage_type] for stage_type in stage_types]
    lost = lost_layers(speeds, most, min(below_s / space.split.num_microbatches, _LONG_S))
    needed = space.problem.num_layers + lost
    return [([-float(number) for number in most], ROUNDING - needed)]


def steps_demanded(space: SearchSpace, stage_types: Sequence[StageType], below_s: float) -> Demand:
    """Require that stages wait little enough, by a bound that is a sum over stages, so part of a list has part of it.

    As in :func:`_least_s` a step takes at least (m - 1) t + sum of (2 t_i - t). All stages compute L layers, of
    c_i each: the sum of t_i / c_i is at least that. So for any price u of a layer a step takes at least

        (m - 1) t + u L + sum of (2 t_i - t - u t_i / c_i)

    where a stage adds least if t_i is t, or one layer. As a function of t all this is concave: it is least for the
    longest t, or for the shortest, and in one of both it must be below the step so far. Of a few prices that one is
    taken with which all cards together add most at best.

    Args:
        space: the search space, whose split has more microbatches than there are stages.
        stage_types: the stage types.
        below_s: seconds that a step must be shorter than.
    """
    split, num_microbatches = space.split, space.split.num_microbatches
    speeds = [space.speeds[stage_type] for stage_type in stage_types]
    layers_s = [speed.least_s for speed in speeds]
    ends = [min((speed.ends_s[end] / speed.least_s for speed in speeds), default=0.0) for end in (1, 2)]
    num_layers = space.problem.num_layers + sum(ends)
    longest = below_s / num_microbatches
    shortest = -space.problem.num_layers / least_of_cards(split, stage_types, [-1 / layer_s for layer_s in layers_s])

    def demand(price: float) -> Demand:
        return [
            (
                [min(time - price * time / layer_s, 2 * layer_s - time - price) for layer_s in layers_s],
                below_s - (num_microbatches - 1) * time - price * num_layers,
            )
            for time in (shortest, longest)
        ]

    def least_s(price: float) -> float:
        return min(least_of_cards(split, stage_types, of_type) - most for of_type, most in demand(price))

    highest = 2 * num_microbatches * longest / space.problem.num_layers
    return demand(max((highest * part / _NUM_PRICES for part in range(_NUM_PRICES)), key=least_s))


def least_of_cards(split: BatchSplit, stage_types: Sequence[StageType], of_type: Sequence[float]) -> float:
    """Give what all cards together add at least to a sum over stages."""
    each = least_of_card(split, stage_types, of_type)
    return sum(sum(pool.cards_per_node) * value for pool, value in zip(split.pools, each, strict=True))


def least_of_card(split: BatchSplit, stage_types: Sequence[StageType], of_type: Sequence[float]) -> list[float]:
    """Give what a card of each pool adds at least to a sum over stages: nothing, or its share of a stage.

    Args:
        split: how the samples of the step are shared out.
        stage_types: the stage types that are possible.
        of_type: what a stage of each type adds.

    >>> from vtp_plugin.tune.search.problem import NodePool
    >>> pools = (NodePool(name="a", cards_per_node=(4,), speeds={}), NodePool(name="b", cards_per_node=(4,), speeds={}))
    >>> split = BatchSplit(num_replicas=1, num_microbatches=1, micro_batch_size=1, pools=pools)
    >>> least_of_card(split, [StageType((0,), 2), StageType((0,), 1)], [-3.0, -1.0])
    [-1.5, 0.0]
    """
    of_card = [
        value / (stage_type.tp * split.num_replicas) for value, stage_type in zip(of_type, stage_types, strict=True)
    ]
    return [
        min(
            [
                0.0,
                *(
                    value
                    for value, stage_type in zip(of_card, stage_types, strict=True)
                    if pool_index in stage_type.replica_pools
                ),
            ]
        )
        for pool_index in range(len(split.pools))
    ]


def whole_layers(time_s: float, layer_s: float) -> int:
    """Count the layers that a stage computes in a time.

    >>> whole_layers(0.3, 0.1), whole_layers(0.29, 0.1), whole_layers(-1.0, 0.1)
    (3, 2, 0)
    """
    return int(time_s / layer_s + ROUNDING) if time_s > 0 else 0


def lost_layers(speeds: Sequence[Speed], most: Sequence[int], time_s: float) -> float:
    """Count the layers that the first and the last stage cannot hold because of the embedding and the head.

    Args:
        speeds: the speed of each stage type; the first and the last stage may be of any type that has time for a layer.
        most: number of layers that a stage of each type can hold between others.
        time_s: seconds of the busiest stage.
    """

    def lost(end: int) -> float:
        fewest = math.inf
        for speed, number in zip(speeds, most, strict=True):
            num_layers = whole_layers(time_s - speed.ends_s[end], speed.least_s)
            if num_layers and number:
                fewest = min(fewest, max(0, number - num_layers))
        return fewest

    # Often there is nothing before the layers.
    first = lost(1) if any(speed.ends_s[1] for speed in speeds) else 0
    last = lost(2)
    return min(first + last, lost(3)) if first else last


def _busiest_s(num_layers: int, speeds: Sequence[Speed], counts: Sequence[int]) -> float:
    """Bound the time of the busiest stage: the shortest in which stages compute all layers, whole, and both ends."""
    layers_s = [speed.least_s for speed in speeds]
    # Asked for each of many lists: no calls inside.
    events = {(more, speed.least_s) for speed in speeds for more in speed.ends_s}
    time = num_layers / sum(count / layer_s for count, layer_s in zip(counts, layers_s, strict=True))
    while True:
        whole = [int(time / layer_s + ROUNDING) for layer_s in layers_s]
        num_placed = sum([count * number for count, number in zip(counts, whole, strict=True)])
        if num_placed >= num_layers and num_placed >= num_layers + lost_layers(speeds, whole, time):
            return time
        time = min(
            [
                more + (int((time - more) / layer_s + ROUNDING) + 1) * layer_s if time > more else more + layer_s
                for more, layer_s in events
            ]
        )


def _bound_1f1b_s(
    num_microbatches: int, num_layers: int, stages: Sequence[tuple[float, int]], busiest_s: float
) -> float:
    """Bound a step from below.

    Let t be the time of the busiest of p stages, at least T, and t_i that of each, at least that of one layer. By the
    bound of :mod:`~vtp_plugin.tune.search.layer_split` a step takes at least (m - 1) t + sum of (2 t_i - t), if m > p:
    that is (m + p - 1) t - 2 D, where D is the sum of t - t_i. In t all stages together could compute more layers than
    L, by as many as are missing on some stages: D is largest where these are the ones with the slowest layers. As a
    function of t it is concave, so the bound is least at T, or where the next quicker stages begin to miss layers:
    those up to them have one each, and the others are full.

    With fewer microbatches half of what fills the pipeline is certain.

    Args:
        num_microbatches: m, the number of microbatches of a replica.
        num_layers: L, the number of layers of the model.
        stages: seconds of a layer, and the number of stages that take so long, the slowest first.
        busiest_s: T, in seconds.
    """
    num_stages = sum(count for _, count in stages)
    rate = sum(count / layer_s for layer_s, count in stages)
    longest = max(busiest_s, stages[0][0])
    half = num_microbatches - 1 - (min(num_stages, num_microbatches) - 1) / 2
    least = max(num_microbatches * longest, num_layers / max(1 / layer_s for layer_s, _ in stages) + half * longest)
    if num_microbatches <= num_stages:
        return least

    def bound(time: float) -> float:
        missing, saved = rate * time - num_layers, 0.0
        for layer_s, count in stages:
            taken = min(missing, count * (time - layer_s) / layer_s)
            saved += taken * layer_s
            missing -= taken
        return (num_microbatches + num_stages - 1) * time - 2 * saved

    found, left, left_rate = bound(longest), num_layers, rate
    for layer_s, count in stages[:-1]:
        left, left_rate = left - count, left_rate - count / layer_s
        if left > longest * left_rate:
            found = min(found, bound(left / left_rate))
    return max(least, found)


def _bound_any_order_s(
    num_microbatches: int, num_layers: int, speeds: Sequence[Speed], counts: Sequence[int], share: float
) -> float:
    """Bound a step from below, with any number of microbatches in flight, as if layers could be cut.

    Let B be the bound of :mod:`~vtp_plugin.tune.search.layer_split`, without links: for each stage i, P_i + m t_i <= B,
    where P_i is at least a share s of the sum of t before it. So B - P_(i+1) >= B - P_i - s t_i >= (1 - s/m) (B - P_i),
    if P is no more than that, and t_i <= B / m (1 - s/m)^(i-1). In that time stages compute most layers where the
    quickest is the first; all together must compute L.

    Args:
        num_microbatches: m, the number of microbatches of a replica.
        num_layers: L, the number of layers of the model.
        speeds: the speed of each stage type.
        counts: number of stages of each type.
        share: s; 1 with whole backwards, with split ones the share of forwards.
    """
    lost = share / num_microbatches
    left, now, layers_s = 1 - lost, 1.0, 0.0
    for layer_s, count in sorted((speed.least_s, count) for speed, count in zip(speeds, counts, strict=True)):
        then = now * left**count
        # The sum of a geometric series, times its first factor.
        layers_s += ((now - then) / lost if lost else count) / layer_s
        now = then
    return num_microbatches * num_layers / layers_s


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
