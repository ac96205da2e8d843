"""Lists of kinds of stages that the cards allow, those that cannot be quick enough left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations_with_replacement, groupby, permutations
from operator import mul
from typing import NamedTuple

from vtp_plugin.search.put import has_rooms
from vtp_plugin.search.question import Kind, Question, Shape
from vtp_plugin.search.stage import Work, Works, most_held

# So many orders of a list are all tried; of more, those in which stages of a kind are neighbours.
_MOST_ORDERS = 60
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


def rows(question: Question, shape: Shape, works: Works, reach: Reach, below_s: Callable[[], float]) -> list[Row]:
    """List what the cards allow, if a step may be short enough.

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
    needed = question.num_layers + (_lost([works[kind] for kind in kinds], most_s) if is_by_time else 0)

    takes = [[kind.tp * kind.places.count(place) for place in pools] for kind in kinds]
    found: list[Row] = []

    def go(first: int, left: list[int], stages: int, layers: int, chosen: list[tuple[Kind, int]]) -> None:
        if first == len(kinds):
            row = _row(question, shape, works, chosen, below_s())
            if stages >= question.least_stages and row.bound_s < below_s():
                found.append(row)
            return
        kind, own, take, share = kinds[first], most_layers[first], takes[first], best[first + 1]
        for count in _counts(kind, reach, chosen, left, most_stages - stages if own else 0):
            rest = [number - count * each for number, each in zip(left, take, strict=True)] if count else left
            now = layers + count * own
            # Without a function call: this is asked millions of times.
            to_come = 0.0
            for place in pools:
                to_come += share[place] * rest[place]
            if now + to_come >= needed:
                go(first + 1, rest, stages + count, now, [*chosen, (kind, count)] if count else chosen)

    go(0, [sum(pool.rooms) for pool in shape.pools], 0, 0, [])
    return [row for row in found if has_rooms(shape, [kind for kind, count in row.counts for _ in range(count)])]


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


def orders(shape: Shape, row: Row) -> Iterator[tuple[Kind, ...]]:
    """Yield the orders of the stages of a list, those of a site together."""
    by_site = {
        site: [*group]
        for site, group in groupby(
            sorted(row.counts, key=lambda one: shape.pools[one[0].places[0]].site),
            key=lambda one: shape.pools[one[0].places[0]].site,
        )
    }
    num_orders = math.prod(
        math.factorial(sum(count for _, count in group)) // math.prod(math.factorial(count) for _, count in group)
        for group in by_site.values()
    )
    for sites in permutations(by_site):
        yield from _joined([by_site[site] for site in sites], is_any=num_orders <= _MOST_ORDERS)


def _joined(groups: Sequence[list[tuple[Kind, int]]], *, is_any: bool) -> Iterator[tuple[Kind, ...]]:
    if not groups:
        yield ()
        return
    own = _mixed(groups[0]) if is_any else _blocks(groups[0])
    for first in own:
        for rest in _joined(groups[1:], is_any=is_any):
            yield (*first, *rest)


def _blocks(group: Sequence[tuple[Kind, int]]) -> Iterator[tuple[Kind, ...]]:
    for order in permutations(group):
        yield tuple(kind for kind, count in order for _ in range(count))


def _mixed(group: Sequence[tuple[Kind, int]]) -> Iterator[tuple[Kind, ...]]:
    if not group:
        yield ()
        return
    for index, (kind, count) in enumerate(group):
        left = [(kind, count - 1)] if count > 1 else []
        for rest in _mixed([*group[:index], *left, *group[index + 1 :]]):
            yield (kind, *rest)
