"""Lists of kinds of stages that the cards allow, those that cannot be quick enough left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations_with_replacement
from operator import mul
from typing import NamedTuple

from vtp_plugin.search.put import has_rooms
from vtp_plugin.search.question import Kind, Question, Shape
from vtp_plugin.search.stage import Work, Works, most_held

# So much of a layer is no time.
_ROUNDING = 1e-9
# Replicas of a stage are in several pools only if there are at most so many of them.
_MOST_MIXED = 8


class Row(NamedTuple):
    """How many stages of each kind, and a bound on the step."""

    counts: tuple[tuple[Kind, int], ...]
    bound_s: float


class Reach(NamedTuple):
    """Which lists a round looks at.

    Attributes:
        most_sizes: different tensor-parallel sizes in one pool.
        takes_all: of every kind as many as there are cards for.
        is_mixing: a stage of each size may have replicas in several pools.
    """

    most_sizes: int
    takes_all: bool = False
    is_mixing: bool = False


def kinds_of(shape: Shape, *, is_mixing: bool) -> tuple[Kind, ...]:
    """List the kinds of stages of a shape, those of one pool together, the largest first.

    >>> from vtp_plugin.search.question import Pool, Speed
    >>> pool = Pool(name="a", rooms=(2,), speeds={1: Speed(forward_s=(1.0,), backward_s=(1.0,))})
    >>> shape = Shape(num_replicas=2, num_microbatches=1, micro_batch_size=1, pools=(pool, pool))
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
                kinds.append(Kind(places, size))
    return tuple(sorted(kinds, key=lambda kind: (len(kind.pools) > 1, kind.places, -kind.tp)))


def rows(question: Question, shape: Shape, works: Works, reach: Reach, below_s: Callable[[], float]) -> Iterator[Row]:
    """Yield what the cards allow, if a step may be short enough; where cards count, in the order of that objective.

    Args:
        question: what is asked.
        shape: of the step.
        works: what every kind costs.
        reach: which lists are looked at.
        below_s: gives what a step must be shorter than; it ends a walk that takes too long by an error of its own.
    """
    kinds = kinds_of(shape, is_mixing=reach.is_mixing)
    most_stages = min(question.most_stages, question.num_layers)
    most_s = min(below_s() / shape.num_microbatches, 1e9)
    # Layers that a stage can have at most, and what a card adds to that at best, of each pool, from each kind on.
    most_layers = [_most_layers(question, shape, kind, works[kind], most_s) for kind in kinds]
    pools = range(len(shape.pools))
    best = [
        [
            max(
                (n / one.tp for n, one in zip(most_layers[i:], kinds[i:], strict=True) if place in one.places),
                default=0,
            )
            / shape.num_replicas
            for place in pools
        ]
        for i in range(len(kinds) + 1)
    ]
    # Where memory is the limit, both ends of the model may have time enough.
    is_by_time = all(
        number == _whole(most_s, works[kind].least_s) for number, kind in zip(most_layers, kinds, strict=True)
    )
    needed = question.num_layers + (_lost([works[kind] for kind in kinds], most_s) if is_by_time else 0) - _ROUNDING

    rooms = [sum(pool.rooms) for pool in shape.pools]
    if sum(map(mul, best[0], rooms)) < needed:
        return
    takes = [[kind.tp * kind.places.count(place) for place in pools] for kind in kinds]
    limits = [_most_of(shape, kind) for kind in kinds]

    def go(
        goal: _Goal | None, first: int, left: list[int], stages: int, layers: int, chosen: list[tuple[Kind, int]]
    ) -> Iterator[Row]:
        if first == len(kinds):
            row = Row(tuple(chosen), 0.0) if goal is not None else _row(question, shape, works, chosen, below_s())
            if stages >= question.least_stages and row.bound_s < below_s() and _goes_in(question, shape, row):
                yield row
            return
        kind, own, take, share = kinds[first], most_layers[first], takes[first], best[first + 1]
        most = min(most_stages - stages, limits[first]) if own else 0
        for count in _counts(kind, reach, chosen, left, most):
            rest = [number - count * each for number, each in zip(left, take, strict=True)] if count else left
            now = layers + count * own
            # Without a function call: this is asked millions of times.
            to_come = 0.0
            for place in pools:
                to_come += share[place] * rest[place]
            if now + to_come >= needed:
                more = [*chosen, (kind, count)] if count else chosen
                if goal is None or goal.is_near(kinds[first + 1 :], more):
                    yield from go(goal, first + 1, rest, stages + count, now, more)

    for goal in _goals(question, shape, kinds) if question.objective == "cards" else (None,):
        yield from go(goal, 0, rooms, 0, 0, [])


class _Goal(NamedTuple):
    """How many ranks, and stages, a replica shall have."""

    ranks: int
    stages: int

    def is_near(self, kinds: Sequence[Kind], chosen: Sequence[tuple[Kind, int]]) -> bool:
        """Whether stages of the kinds that are still to come may make up what is missing."""
        stages = self.stages - sum(count for _, count in chosen)
        ranks = self.ranks - sum(kind.tp * count for kind, count in chosen)
        sizes = [kind.tp for kind in kinds]
        return stages * min(sizes, default=0) <= ranks <= stages * max(sizes, default=0) and stages >= 0


def _goals(question: Question, shape: Shape, kinds: Sequence[Kind]) -> Iterator[_Goal]:
    """Yield what may be had, the most ranks first, of these the fewest stages."""
    if not kinds:
        return
    smallest, largest = min(kind.tp for kind in kinds), max(kind.tp for kind in kinds)
    cards = sum(sum(shape.pools[place].rooms) for place in {place for kind in kinds for place in kind.places})
    most = min(question.most_stages, question.num_layers)
    for ranks in range(min(cards // shape.num_replicas, most * largest), 0, -1):
        fewest = max(question.least_stages, -(-ranks // largest))
        yield from (_Goal(ranks, stages) for stages in range(fewest, min(most, ranks // smallest) + 1))


def _goes_in(question: Question, shape: Shape, row: Row) -> bool:
    """Whether there is room for a list; where cards count, also whether every site has a stage."""
    if question.objective == "cards":
        used = {shape.pools[kind.places[0]].site for kind, _ in row.counts}
        if used < {pool.site for pool in shape.pools} - {question.edge}:
            return False
    return has_rooms(shape, [kind for kind, count in row.counts for _ in range(count)])


def _most_of(shape: Shape, kind: Kind) -> int:
    """Count the stages of a kind that there is room for."""
    return min(
        sum(room // kind.tp for room in shape.pools[place].rooms) // kind.places.count(place) for place in kind.pools
    )


def _most_layers(question: Question, shape: Shape, kind: Kind, work: Work, most_s: float) -> int:
    """Bound the layers of a stage by its time; with less memory than for all layers by that, too."""
    held = most_held(question, shape, kind, work)
    whole = _whole(most_s, work.least_s)
    return whole if held >= question.num_layers else min(held, whole)


def _counts(
    kind: Kind, reach: Reach, chosen: Sequence[tuple[Kind, int]], left: Sequence[int], most: int
) -> Sequence[int]:
    """List how many stages of a kind there may be, the most first."""
    most = min(most, *(left[place] // (kind.tp * kind.places.count(place)) for place in kind.pools))
    if len(kind.pools) > 1:
        # Sorted by their pools, replicas of one stage of a size at most are in two of them.
        is_other = any(one.tp == kind.tp and len(one.pools) > 1 for one, _ in chosen)
        return (0,) if is_other or most < 1 else (1, 0)
    sizes = {one.tp for one, _ in chosen if one.places == kind.places} | {kind.tp}
    if len(sizes) > reach.most_sizes or most < 1:
        return (0,)
    return (most, 0) if reach.takes_all else range(most, -1, -1)


def _row(question: Question, shape: Shape, works: Works, chosen: Sequence[tuple[Kind, int]], below_s: float) -> Row:
    """Bound a list; what is no shorter than ``below_s`` even in parts of layers is not bounded any further."""
    if not chosen:
        return Row((), math.inf)
    own, counts = [works[kind] for kind, _ in chosen], [count for _, count in chosen]
    rates = [1 / work.least_s for work in own]
    rate = sum(map(mul, counts, rates))
    if question.runs_ahead:
        any_s = _any_order_s(shape.num_microbatches, question.num_layers, own, counts)
        if any_s < below_s:
            any_s = max(any_s, shape.num_microbatches * _busiest(question.num_layers, counts, own))
        return Row(tuple(chosen), any_s)
    bound = partial(_least_s, question, shape, sum(counts), rate, slowest=min(rates), quickest=max(rates))
    least_s = bound(question.num_layers / rate)
    if least_s < below_s:
        least_s = bound(_busiest(question.num_layers, counts, own))
    return Row(tuple(chosen), least_s)


def _busiest(num_layers: int, counts: Sequence[int], works: Sequence[Work]) -> float:
    """Bound the time of the busiest stage: the shortest in which whole layers and both ends of the model have room."""
    layers_s = [work.least_s for work in works]
    # Asked for each of many lists: no calls inside.
    events = {(more, work.least_s) for work in works for more in work.ends_s}
    time = num_layers / sum(count / layer_s for count, layer_s in zip(counts, layers_s, strict=True))
    while True:
        room = sum([count * int(time / layer_s + _ROUNDING) for count, layer_s in zip(counts, layers_s, strict=True)])
        if room >= num_layers and room >= num_layers + _lost(works, time):
            return time
        time = min(
            [
                more + (int((time - more) / layer_s + _ROUNDING) + 1) * layer_s if time > more else more + layer_s
                for more, layer_s in events
            ]
        )


def _whole(time: float, layer_s: float) -> int:
    """Count the layers that a stage computes in a time."""
    return int(time / layer_s + _ROUNDING) if time > 0 else 0


def _lost(works: Sequence[Work], time: float) -> int:
    """Count the layers that have no room, since the first and the last stage have more to do than layers."""
    if not works:
        return 0

    def lost(end: int) -> int:
        return min(_whole(time, work.least_s) - _whole(time - work.ends_s[end], work.least_s) for work in works)

    # Often there is nothing before the layers.
    first = lost(1) if any(work.ends_s[1] for work in works) else 0
    last = lost(2)
    return min(first + last, lost(3)) if first else last


def _least_s(
    question: Question, shape: Shape, stages: int, rate: float, busiest: float, *, slowest: float, quickest: float
) -> float:
    """Bound a step from below.

    Let t be the time of the busiest stage, at least T. In it all stages together could compute rate t layers, and
    compute L, so the sum of their times is at least p t - D with D = (rate t - L) / slowest. Then the bound of
    :mod:`~vtp_plugin.search.split` is at least (m + p - 1) t - 2 D. That grows with t if m + p - 1 >= 2 rate / slowest.
    Without that, half of what fills the pipeline is certain.

    Args:
        question: what is asked.
        shape: of the step.
        stages: of the pipeline, at least.
        rate: layers in a second, of all stages, at most.
        busiest: T, L / rate or more.
        slowest: layers in a second of the slowest stage, at least.
        quickest: of the quickest stage, at most; 0 if it is not known.
    """
    microbatches, layers = shape.num_microbatches, question.num_layers
    if microbatches > stages and microbatches + stages - 1 >= 2 * rate / slowest:
        missing = max(0.0, rate * busiest - layers) / slowest
        return max(microbatches * busiest, (microbatches + stages - 1) * busiest - 2 * missing)
    if not quickest:
        return microbatches * busiest
    half = microbatches - 1 - (min(stages, microbatches) - 1) / 2
    return max(microbatches * busiest, layers / quickest + half * busiest)


def _any_order_s(num_microbatches: int, num_layers: int, works: Sequence[Work], counts: Sequence[int]) -> float:
    """Bound a step from below, with any number of microbatches in flight, as if layers could be cut.

    Let B be the bound of :mod:`~vtp_plugin.search.split`, without links: for each stage i, P_i + m t_i <= B, where P_i
    is the sum of t before it. So B - P_(i+1) = B - P_i - t_i >= (1 - 1/m) (B - P_i), and
    t_i <= B / m (1 - 1/m)^(i-1). In that time stages compute most layers where the quickest is the first; all together
    must compute L.

    Args:
        num_microbatches: m, of a replica.
        num_layers: L, of the model.
        works: of the kinds of stages.
        counts: stages of each.
    """
    left = 1 - 1 / num_microbatches
    share, layers_s = 1.0, 0.0
    for layer_s, count in sorted((work.least_s, count) for work, count in zip(works, counts, strict=True)):
        rest = share * left**count
        # The sum of a geometric series, times 1 - left.
        layers_s += (share - rest) / layer_s
        share = rest
    return num_layers / layers_s
