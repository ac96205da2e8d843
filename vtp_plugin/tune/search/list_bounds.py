"""Lower bounds on the step of a list, whatever the order of its stages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vtp_plugin.tune.cluster.speed import Speed
from vtp_plugin.tune.search.problem import BatchSplit, StageType
from vtp_plugin.tune.search.search_space import SearchSpace
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
