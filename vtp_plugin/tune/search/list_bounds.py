"""Bounds of a step of a list, whatever the order of its stages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vtp_plugin.tune.search.problem import BatchSplit, SearchProblem, StageType
from vtp_plugin.tune.search.stage_cost import Work, most_held

# So much of a layer is no time.
ROUNDING = 1e-9
# As long as this is any time.
_LONG_S = 1e9
# Steps of a search by thirds: the price is then known to seven digits.
_PRICE_TRIES = 40

Demand = list[tuple[list[float], float]]
"""One of some sums over the stages of a list must not be above its limit: what a stage of each kind adds, the limit."""


def bound_list(
    question: SearchProblem, shape: BatchSplit, works: Sequence[Work], counts: Sequence[int], below_s: float
) -> float:
    """Bound a list; what is no shorter than ``below_s`` even in parts of layers is not bounded any further.

    Args:
        question: what is asked.
        shape: of the step.
        works: of the kinds of stages.
        counts: stages of each.
        below_s: what a step must be shorter than.
    """
    if not works:
        return math.inf
    num_microbatches, num_layers = shape.num_microbatches, question.num_layers
    if question.layers == "equal":
        each, left = divmod(num_layers, sum(counts))
        return math.inf if left else num_microbatches * each * max(work.least_s for work in works)
    if question.runs_ahead:
        any_s = _any_order_s(num_microbatches, num_layers, works, counts)
        if any_s < below_s:
            any_s = max(any_s, num_microbatches * _busiest_s(num_layers, works, counts))
        return any_s
    stages = sorted(((work.least_s, count) for work, count in zip(works, counts, strict=True)), reverse=True)
    least_s = _least_s(num_microbatches, num_layers, stages, num_layers / sum(count / time for time, count in stages))
    if least_s < below_s:
        least_s = _least_s(num_microbatches, num_layers, stages, _busiest_s(num_layers, works, counts))
    return least_s


def most_layers(
    question: SearchProblem, shape: BatchSplit, kinds: Sequence[StageType], works: Sequence[Work], below_s: float
) -> list[int]:
    """Bound the layers of a stage of each kind by its time; with less memory than for all layers by that, too.

    Args:
        question: what is asked.
        shape: of the step.
        kinds: of stages.
        works: what each costs.
        below_s: what a step must be shorter than.
    """
    most_s = min(below_s / shape.num_microbatches, _LONG_S)
    held = (most_held(question, shape, kind, work) for kind, work in zip(kinds, works, strict=True))
    whole = (whole_layers(most_s, work.least_s) for work in works)
    return [
        number if room >= question.num_layers else min(room, number) for room, number in zip(held, whole, strict=True)
    ]


def layers_demanded(
    question: SearchProblem, shape: BatchSplit, works: Sequence[Work], most: Sequence[int], below_s: float
) -> Demand:
    """Demand room for all layers.

    Args:
        question: what is asked.
        shape: of the step.
        works: of every kind of stage.
        most: layers that a stage of each can have, see :func:`most_layers`.
        below_s: what a step must be shorter than.
    """
    needed = question.num_layers + lost_layers(works, most, min(below_s / shape.num_microbatches, _LONG_S))
    return [([-float(number) for number in most], ROUNDING - needed)]


def steps_demanded(
    question: SearchProblem, shape: BatchSplit, kinds: Sequence[StageType], works: Sequence[Work], below_s: float
) -> Demand:
    """Demand that stages wait little enough, by a bound that is a sum over the stages: a few of them have theirs.

    As in :func:`_least_s` a step takes at least (m - 1) t + sum of (2 t_i - t). All stages compute L layers, of
    c_i each: the sum of t_i / c_i is at least that. So for any price u of a layer a step takes at least

        (m - 1) t + u L + sum of (2 t_i - t - u t_i / c_i)

    where a stage adds least if t_i is t, or one layer. As a function of t all this is concave: it is least for the
    longest t, or for the shortest, and in one of both it must be below the step so far. The price is the one with which
    all cards together add most at best.

    Args:
        question: what is asked.
        shape: of the step, with more microbatches than stages.
        kinds: of stages.
        works: what each costs.
        below_s: what a step must be shorter than.
    """
    num_microbatches = shape.num_microbatches
    layers_s = [work.least_s for work in works]
    ends = [min((work.ends_s[end] / work.least_s for work in works), default=0.0) for end in (1, 2)]
    num_layers = question.num_layers + sum(ends)
    longest = below_s / num_microbatches
    shortest = -question.num_layers / least_of_cards(shape, kinds, [-1 / layer_s for layer_s in layers_s])

    def demand(price: float) -> Demand:
        return [
            (
                [min(time - price * time / layer_s, 2 * layer_s - time - price) for layer_s in layers_s],
                below_s - (num_microbatches - 1) * time - price * num_layers,
            )
            for time in (shortest, longest)
        ]

    def least_s(price: float) -> float:
        return min(least_of_cards(shape, kinds, of_kind) - most for of_kind, most in demand(price))

    low, high = 0.0, 2 * num_microbatches * longest / question.num_layers
    for _ in range(_PRICE_TRIES):
        third = (high - low) / 3
        low, high = (low + third, high) if least_s(low + third) < least_s(high - third) else (low, high - third)
    return demand(low)


def least_of_cards(shape: BatchSplit, kinds: Sequence[StageType], of_kind: Sequence[float]) -> float:
    """Add up the least that all cards can add to a sum over stages."""
    each = least_of_card(shape, kinds, of_kind)
    return sum(sum(pool.rooms) * value for pool, value in zip(shape.pools, each, strict=True))


def least_of_card(shape: BatchSplit, kinds: Sequence[StageType], of_kind: Sequence[float]) -> list[float]:
    """Say what a card of each pool adds at least to a sum over stages: nothing, or its share of a stage.

    Args:
        shape: of the step.
        kinds: of stages that may be.
        of_kind: what a stage of each adds.

    >>> from vtp_plugin.tune.search.problem import NodePool
    >>> pools = (NodePool(name="a", rooms=(4,), speeds={}), NodePool(name="b", rooms=(4,), speeds={}))
    >>> shape = BatchSplit(num_replicas=1, num_microbatches=1, micro_batch_size=1, pools=pools)
    >>> least_of_card(shape, [StageType((0,), 2), StageType((0,), 1)], [-3.0, -1.0])
    [-1.5, 0.0]
    """
    of_card = [value / (kind.tp * shape.num_replicas) for value, kind in zip(of_kind, kinds, strict=True)]
    return [
        min([0.0, *(value for value, kind in zip(of_card, kinds, strict=True) if place in kind.places)])
        for place in range(len(shape.pools))
    ]


def whole_layers(time_s: float, layer_s: float) -> int:
    """Count the layers that a stage computes in a time.

    >>> whole_layers(0.3, 0.1), whole_layers(0.29, 0.1), whole_layers(-1.0, 0.1)
    (3, 2, 0)
    """
    return int(time_s / layer_s + ROUNDING) if time_s > 0 else 0


def lost_layers(works: Sequence[Work], most: Sequence[int], time_s: float) -> float:
    """Count the layers that have no room, since the first and the last stage have more to do than layers.

    Args:
        works: of the kinds of stages; the first and the last may be any of them that have time for a layer.
        most: layers that a stage of each can have, between others.
        time_s: of the busiest stage.
    """

    def lost(end: int) -> float:
        found = math.inf
        for work, number in zip(works, most, strict=True):
            own = whole_layers(time_s - work.ends_s[end], work.least_s)
            if own and number:
                found = min(found, max(0, number - own))
        return found

    # Often there is nothing before the layers.
    first = lost(1) if any(work.ends_s[1] for work in works) else 0
    last = lost(2)
    return min(first + last, lost(3)) if first else last


def _busiest_s(num_layers: int, works: Sequence[Work], counts: Sequence[int]) -> float:
    """Bound the time of the busiest stage: the shortest in which whole layers and both ends of the model have room."""
    layers_s = [work.least_s for work in works]
    # Asked for each of many lists: no calls inside.
    events = {(more, work.least_s) for work in works for more in work.ends_s}
    time = num_layers / sum(count / layer_s for count, layer_s in zip(counts, layers_s, strict=True))
    while True:
        whole = [int(time / layer_s + ROUNDING) for layer_s in layers_s]
        room = sum([count * number for count, number in zip(counts, whole, strict=True)])
        if room >= num_layers and room >= num_layers + lost_layers(works, whole, time):
            return time
        time = min(
            [
                more + (int((time - more) / layer_s + ROUNDING) + 1) * layer_s if time > more else more + layer_s
                for more, layer_s in events
            ]
        )


def _least_s(num_microbatches: int, num_layers: int, stages: Sequence[tuple[float, int]], busiest_s: float) -> float:
    """Bound a step from below.

    Let t be the time of the busiest of p stages, at least T, and t_i that of each, at least that of one layer. By the
    bound of :mod:`~vtp_plugin.tune.search.layer_split` a step takes at least (m - 1) t + sum of (2 t_i - t), if m > p:
    that is (m + p - 1) t - 2 D, where D is the sum of t - t_i. In t all stages together could compute more layers than
    L, by as many as are missing on some stages: D is largest where these are the ones with the slowest layers. As a
    function of t it is concave, so the bound is least at T, or where the next quicker stages begin to miss layers:
    those up to them have one each, and the others are full.

    With fewer microbatches half of what fills the pipeline is certain.

    Args:
        num_microbatches: m, of a replica.
        num_layers: L, of the model.
        stages: time of a layer, and how many stages it takes, the slowest first.
        busiest_s: T.
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


def _any_order_s(num_microbatches: int, num_layers: int, works: Sequence[Work], counts: Sequence[int]) -> float:
    """Bound a step from below, with any number of microbatches in flight, as if layers could be cut.

    Let B be the bound of :mod:`~vtp_plugin.tune.search.layer_split`, without links: for each stage i, P_i + m t_i <= B,
    where P_i is the sum of t before it. So B - P_(i+1) = B - P_i - t_i >= (1 - 1/m) (B - P_i), and t_i <= B / m (1 -
    1/m)^(i-1). In that time stages compute most layers where the quickest is the first; all together must compute L.

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
