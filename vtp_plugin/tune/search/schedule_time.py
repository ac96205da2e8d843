"""How long orders take, stock Megatron's, too."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, permutations
from typing import NamedTuple

from vtp_plugin.plan.layout.layer_lists import Kept
from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.cost.simulator import CompiledSchedule, Times
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, compile_schedule
from vtp_plugin.plan.schedule.make.u_shape import choose_limits, one_f_one_b
from vtp_plugin.plan.schedule.order.actions import Op
from vtp_plugin.plan.schedule.order.add_communication import lower
from vtp_plugin.plan.schedule.order.placement import Placement, num_rings
from vtp_plugin.tune.search.enumerate_lists import StageCounts
from vtp_plugin.tune.search.node_assignment import along_nodes
from vtp_plugin.tune.search.problem import BatchSplit, LayerRule, SearchProblem, SearchSpace, StageType
from vtp_plugin.tune.search.stage_cost import more_in_flight

# Up to so many orders of a list are all tried; of more, only those in which stages of one type are neighbours.
_MOST_ORDERS = 60


def orders(space: SearchSpace, row: StageCounts) -> Iterator[tuple[StageType, ...]]:
    """Yield orders of a list's stages, those of a site together; with the objective ``cards``, that of the nodes."""
    if space.problem.objective == "cards":
        yield along_nodes(space.split, [stage_type for stage_type, count in row.counts for _ in range(count)])
        return

    def site_of(one: tuple[StageType, int]) -> str:
        return space.site(one[0])

    by_site = {site: [*group] for site, group in groupby(sorted(row.counts, key=site_of), key=site_of)}
    num_orders = math.prod(
        math.factorial(sum(count for _, count in group)) // math.prod(math.factorial(count) for _, count in group)
        for group in by_site.values()
    )
    for sites in permutations(by_site):
        yield from _joined([by_site[site] for site in sites], is_any=num_orders <= _MOST_ORDERS)


def _joined(groups: Sequence[list[tuple[StageType, int]]], *, is_any: bool) -> Iterator[tuple[StageType, ...]]:
    if not groups:
        yield ()
        return
    first_orders = _mixed(groups[0]) if is_any else _blocks(groups[0])
    for first in first_orders:
        for rest in _joined(groups[1:], is_any=is_any):
            yield (*first, *rest)


def _blocks(group: Sequence[tuple[StageType, int]]) -> Iterator[tuple[StageType, ...]]:
    for order in permutations(group):
        yield tuple(stage_type for stage_type, count in order for _ in range(count))


def _mixed(group: Sequence[tuple[StageType, int]]) -> Iterator[tuple[StageType, ...]]:
    if not group:
        yield ()
        return
    for index, (stage_type, count) in enumerate(group):
        left = [(stage_type, count - 1)] if count > 1 else []
        for rest in _mixed([*group[:index], *left, *group[index + 1 :]]):
            yield (stage_type, *rest)


def in_megatron(problem: SearchProblem, layers: LayerRule) -> SearchProblem:
    """Give the same problem for stock Megatron: one tensor-parallel size for all stages, in Megatron's order.

    Args:
        problem: the search problem.
        layers: how many layers its stages may hold.

    >>> from vtp_plugin.tune.search.problem import NodePool
    >>> from vtp_plugin.tune.cluster.speed import Speed
    >>> speed = Speed(forward_s=(1.0,), backward_s=(2.0,))
    >>> two, one = {1: speed, 2: speed}, {1: speed}
    >>> new = NodePool(name="a", cards_per_node=(2,), speeds=two)
    >>> old = NodePool(name="b", cards_per_node=(1,), speeds=one)
    >>> split = BatchSplit(num_replicas=1, num_microbatches=4, micro_batch_size=1, pools=(new, old))
    >>> stock = in_megatron(SearchProblem(num_layers=1, splits=(split,), least_stages=1, most_stages=2), "any")
    >>> [[tuple(pool.speeds) for pool in split.pools] for split in stock.splits]
    [[(1,), (1,)], [(2,), ()]]
    """
    splits = tuple(
        _of_size(split, size)
        for split in problem.splits
        for size in sorted({size for pool in split.pools for size in pool.speeds})
    )
    return replace(problem, splits=splits, layers=layers, is_stock=True, num_frozen=0)


def _of_size(split: BatchSplit, size: int) -> BatchSplit:
    pools = (
        replace(pool, speeds={own: speed for own, speed in pool.speeds.items() if own == size}) for pool in split.pools
    )
    return replace(split, pools=tuple(pools))


# A planned order is taken where it is quicker by the first share; fewer microbatches in flight are taken where they are
# slower by no more than the second.
_LEAST_GAIN = 0.005
_NEAR = 0.002
# Orders that are kept: many layouts in a row have as many stages. One of 64 stages takes 33 MB.
_MOST_COMPILED = 8

Fits = Callable[[Sequence[Sequence[Kept]]], bool]
"""Tells whether ranks have memory for what they keep at their fullest moments, by stage."""


class Order(NamedTuple):
    """An order of microbatches, with its simulated times.

    Attributes:
        pipeline_s: seconds until the last stage is done.
        ends_s: seconds until each stage is done.
        kept: what a rank keeps at its fullest moments, by stage
            (:func:`~vtp_plugin.plan.schedule.proof.check_schedule.peaks_kept`).
        peaks: most microbatches in flight, by virtual stage; until the gradients of their weights are there.
        is_planned: whether receives are posted ahead, as the plugin's executor does.
        in_flight: most microbatches in flight on every stage, where they were chosen; else empty.
        is_split: whether the gradients of weights are computed later than those of inputs.
    """

    pipeline_s: float
    ends_s: tuple[float, ...]
    kept: tuple[tuple[Kept, ...], ...]
    peaks: tuple[int, ...]
    is_planned: bool
    in_flight: tuple[int, ...]
    is_split: bool


def compiled_for(
    placement: Placement,
    costs: Costs,
    num_microbatches: int,
    *,
    is_planned: bool,
    in_flight: tuple[int, ...] = (),
    is_split: bool = False,
) -> CompiledSchedule:
    """Order microbatches and compile the order; the arguments are those of :func:`pipeline_time`."""
    if not num_rings(placement) and not is_split:
        return _compile(placement, num_microbatches, is_planned, in_flight)
    return compile_schedule(
        ScheduleRequest(
            placement=placement,
            num_microbatches=num_microbatches,
            costs=costs,
            in_flight=in_flight or None,
            split_backward=is_split,
        )
    )


@functools.lru_cache(_MOST_COMPILED)
def _compile(
    placement: Placement, num_microbatches: int, is_planned: bool, in_flight: tuple[int, ...]
) -> CompiledSchedule:
    """Compile an order that does not depend on costs."""
    if not is_planned:
        return CompiledSchedule(lower(one_f_one_b(placement, num_microbatches), lookahead=0))
    return compile_schedule(
        ScheduleRequest(placement=placement, num_microbatches=num_microbatches, in_flight=in_flight or None)
    )


def forget_compiled() -> None:
    """Free the cached orders; a run that continues after a search would hold them for ever."""
    _compile.cache_clear()


def pipeline_time(
    placement: Placement,
    costs: Costs,
    num_microbatches: int,
    *,
    is_planned: bool = True,
    in_flight: tuple[int, ...] = (),
    is_split: bool = False,
) -> Order:
    """Simulate the microbatches of a step.

    Once all stages are busy, every further microbatch takes as long as the one before. So a long step is simulated as
    far as that, and its rest is added.

    Args:
        placement: which stage holds which virtual stage.
        costs: durations and links of a microbatch.
        num_microbatches: number of microbatches of a replica.
        is_planned: whether receives are posted ahead, as in a planned order; else when they are needed, as in
            Megatron's 1F1B.
        in_flight: most microbatches in flight on every stage, for a planned order; empty for its default.
        is_split: whether the gradients of weights may be computed later than those of inputs.

    >>> from vtp_plugin.plan.schedule.cost.costs import uniform_costs
    >>> from vtp_plugin.plan.schedule.order.placement import interleaved_placement, plain_placement
    >>> placement = plain_placement(2)
    >>> costs = uniform_costs(placement, latency=1.0)
    >>> [pipeline_time(placement, costs, 1000, is_planned=is_planned)[0] for is_planned in (True, False)]
    [4003.0, 5003.0]
    >>> pipeline_time(placement, costs, 1000, in_flight=(3, 1)).pipeline_s
    3005.0
    >>> four = plain_placement(4)
    >>> [pipeline_time(four, uniform_costs(four), 8, is_split=is_split)[0] for is_split in (False, True)]
    [33.0, 27.0]
    >>> twice = interleaved_placement(2, 2)
    >>> pipeline_time(twice, uniform_costs(twice, forward=0.5, backward=1.0), 1000).pipeline_s
    3001.5
    """
    num_stages = placement.num_stages
    # Split backwards may keep as many as interleaving has in flight before a step is regular.
    most = max((placement.num_vstages if is_split else num_stages, *in_flight))
    # Interleaved microbatches go in groups of as many as there are stages.
    simulated = min(num_microbatches, -(-(4 * most + 4) // num_stages) * num_stages)
    compiled = compiled_for(placement, costs, simulated, is_planned=is_planned, in_flight=in_flight, is_split=is_split)
    times = compiled.times(costs, mode="rendezvous")
    more = 0.0
    if num_microbatches > simulated:
        more = (num_microbatches - simulated) * _cycle_s(compiled, times, costs, simulated, most)
    ends_s = tuple(times.of[ends[-1]] + more for ends in compiled.ends)
    # Where nothing is gained the order is one of whole backwards.
    is_split = is_split and any(action.op is Op.W for order in compiled.schedule.orders for action in order)
    peaks = tuple(
        max(sum(kept[placement.chunk(vstage)]) for kept in compiled.kept[stage])
        for vstage, stage in enumerate(placement.stages)
    )
    return Order(times.makespan + more, ends_s, compiled.kept, peaks, is_planned, in_flight, is_split)


def _cycle_s(compiled: CompiledSchedule, times: Times, costs: Costs, num_microbatches: int, most: int) -> float:
    """Give the seconds that a microbatch adds while all stages are busy.

    The backward passes of the first virtual stage that has some show it: over slow links it is more than what the
    busiest stage computes. A U is planned so that its busiest stage never waits, which its first stage may do.
    """
    placement = compiled.schedule.placement
    if not num_rings(placement):
        first = placement.num_frozen
        stage = placement.stages[first]
        computes = (action for action in compiled.schedule.orders[stage] if action.op.is_compute)
        ends = [
            times.of[end]
            for action, end in zip(computes, compiled.ends[stage], strict=True)
            if action.whole.op is Op.B and action.vstage == first
        ]
        last = num_microbatches - most - 1
        return (ends[last] - ends[last - 2 * most]) / (2 * most)
    loads = [0.0] * placement.num_stages
    for stage, *both in zip(placement.stages, costs.forward, costs.backward, strict=True):
        loads[stage] += sum(both)
    return max(loads)


def choose_order(
    placement: Placement, costs: Costs, num_microbatches: int, most: Sequence[int] | None, fits: Fits
) -> Order | None:
    """Choose between Megatron's order and planned ones with whole backwards, which are taken where they gain.

    Args:
        placement: which stage holds which virtual stage.
        costs: durations and links of a microbatch.
        num_microbatches: number of microbatches of a replica.
        most: number of microbatches in flight that every stage of a plain pipeline has memory for; empty for those of
            1F1B, None for Megatron's order alone.
        fits: tells whether ranks have memory for what they keep; not called for a plain pipeline, where that is known
            before.

    Returns:
        The order; None if none fits.
    """
    if num_rings(placement):
        return _choose_u_order(placement, costs, num_microbatches, fits)
    if placement.num_vstages > placement.num_stages:
        order = pipeline_time(placement, costs, num_microbatches)
        return order if fits(order.kept) else None
    best = pipeline_time(replace(placement, num_frozen=0), costs, num_microbatches, is_planned=False)
    if most is None or not costs.latency:
        return best
    planned = [pipeline_time(placement, costs, num_microbatches)]
    least_s, floor_s = planned[0].pipeline_s, least_pipeline_s(placement, costs, num_microbatches)
    for in_flight in more_in_flight(placement, costs, num_microbatches, most) if most else ():
        if least_s <= floor_s * (1 + _NEAR):
            break
        planned.append(pipeline_time(placement, costs, num_microbatches, in_flight=in_flight))
        least_s = min(least_s, planned[-1].pipeline_s)
    # In Megatron's order a stage whose layers are all frozen has a backward, which the costs leave out.
    if placement.num_frozen or least_s * (1 + _LEAST_GAIN) < best.pipeline_s:
        best = next(order for order in planned if order.pipeline_s <= least_s * (1 + _NEAR))
    return best


def choose_split_order(
    placement: Placement, costs: Costs, num_microbatches: int, most: Sequence[int], fits: Fits, whole: Order
) -> Order:
    """Give an order with split backwards where it gains and fits, else the one with whole backwards.

    Args:
        placement: which stage holds which virtual stage.
        costs: durations and links of a microbatch.
        num_microbatches: number of microbatches of a replica.
        most: number of microbatches that every stage of a plain pipeline has memory for until the gradients of their
            weights are there; empty for other pipelines.
        fits: tells whether ranks have memory for what they keep.
        whole: the order of :func:`choose_order`.
    """
    if not costs.latency:
        return whole
    split: Order | None
    if num_rings(placement):
        split = _choose_u_order(placement, costs, num_microbatches, fits, is_split=True)
    else:
        # Each stage may keep as many as the first, and as in the best whole order.
        usual = min(placement.num_stages, num_microbatches)
        row = tuple(min(limit, max((usual, *whole.in_flight))) for limit in most)
        in_flight = () if {*row} <= {usual} else row
        split = pipeline_time(placement, costs, num_microbatches, in_flight=in_flight, is_split=True)
        # A run that measures its costs may choose another order within these limits.
        kept = [(((number, 0),), ((0, number),)) for number in row] or split.kept
        split = split if fits(kept) else None
    gains = split is not None and split.is_split and split.pipeline_s * (1 + _LEAST_GAIN) < whole.pipeline_s
    return split if split is not None and gains else whole


def least_pipeline_s(placement: Placement, costs: Costs, num_microbatches: int, *, is_split: bool = False) -> float:
    """Bound the microbatches of a step from below: each stage computes all, from its first microbatch to its last.

    With whole backwards the last microbatch then has its way back to the first stage. With split ones a stage may have
    work left that fills this time.

    Args:
        placement: which stage holds which virtual stage.
        costs: durations and links of a microbatch.
        num_microbatches: number of microbatches of a replica.
        is_split: whether the gradients of weights may be computed later than those of inputs.

    >>> from vtp_plugin.plan.schedule.cost.costs import uniform_costs
    >>> from vtp_plugin.plan.schedule.order.placement import plain_placement
    >>> four = plain_placement(4)
    >>> [least_pipeline_s(four, uniform_costs(four), 8, is_split=is_split) for is_split in (False, True)]
    [33.0, 27.0]
    """
    way_s, before_s, loads_s = 0.0, dict[int, float](), [0.0] * placement.num_stages
    for vstage, (stage, *both) in enumerate(zip(placement.stages, costs.forward, costs.backward, strict=True)):
        before_s.setdefault(stage, way_s)
        loads_s[stage] += sum(both)
        way_s += both[0] if is_split else sum(both)
        if vstage < len(costs.latency) and placement.stages[vstage + 1] != stage:
            is_one_way = is_split or not placement.is_trained(vstage)
            way_s += (1 if is_one_way else 2) * (costs.latency[vstage] + costs.transfer_time(vstage))
    return max(before_s[stage] + num_microbatches * load_s for stage, load_s in enumerate(loads_s))


def _choose_u_order(
    placement: Placement,
    costs: Costs,
    num_microbatches: int,
    fits: Fits,
    *,
    is_split: bool = False,
) -> Order | None:
    """Plan the order of a U, with fewer microbatches in flight where the memory is too small."""
    order = pipeline_time(placement, costs, num_microbatches, is_split=is_split)
    limits, _ = choose_limits(None, placement, costs, num_microbatches)
    for most in range(max(limits) - 1, -1, -1):
        if fits(order.kept):
            return order
        if most:
            row = tuple(min(limit, most) for limit in limits)
            order = pipeline_time(placement, costs, num_microbatches, in_flight=row, is_split=is_split)
    return None
