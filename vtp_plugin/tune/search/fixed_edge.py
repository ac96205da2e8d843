"""Lists of a U whose edge is given, and interleaved ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from vtp_plugin.tune.cluster.read_cluster import HeldBytes, HeldPart
from vtp_plugin.tune.cluster.speed import Speed
from vtp_plugin.tune.search.enumerate_lists import StageCounts, stage_types_of
from vtp_plugin.tune.search.node_assignment import fits_nodes
from vtp_plugin.tune.search.problem import FixedEdge, NodePool, SearchSpace, StageType
from vtp_plugin.tune.search.schedule_time import orders
from vtp_plugin.tune.search.stage_cost import best_hop_s, fits_memory, held_by, held_twice

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


def beside_edges(whole: SearchSpace, edge_layers: tuple[int, int]) -> Iterator[SearchSpace]:
    """Yield the spaces of the clouds of a U, one for every edge that is possible.

    Args:
        whole: the space of the whole pipelines.
        edge_layers: number of layers of the first and of the last part of the edge.
    """
    problem, split = whole.problem, whole.split
    first, last = edge_layers
    start, end = first, problem.num_layers - last
    cloud = replace(
        split,
        pools=tuple(_middle(pool, start, end, is_kept=pool.site != problem.edge) for pool in split.pools),
        held_bytes=None if split.held_bytes is None else _middle_bytes(split.held_bytes, start),
    )
    edges = replace(
        split,
        pools=tuple(pool if pool.site == problem.edge else replace(pool, speeds={}) for pool in split.pools),
    )
    inner = replace(
        problem,
        num_layers=end - start,
        splits=(cloud,),
        least_stages=max(1, problem.least_stages - 1),
        most_stages=max(1, problem.most_stages - 1),
        tied_bytes=0,
        num_frozen=min(max(0, problem.num_frozen - start), end - start),
    )
    space = SearchSpace.of(inner, cloud)
    for edge in stage_types_of(edges, is_mixing=True):
        if not _edge_fits_memory(whole, edge, edge_layers):
            continue
        parts = whole.speeds[edge].times_s(0, first, is_first=True, is_last=False)
        ends = whole.speeds[edge].times_s(end, problem.num_layers, is_first=False, is_last=True)
        hops_s = [best_hop_s(whole, edge, stage_type) for stage_type in stage_types_of(cloud, is_mixing=False)]
        fixed = FixedEdge(
            whole=whole,
            stage_type=edge,
            # The edge's backward passes run while the cloud's first stage sums gradients, which the lists' bound has.
            before_s=parts[0] + min(hops_s, default=0.0),
            least_s=split.num_microbatches * sum(parts + ends),
        )
        yield replace(space, edge=fixed)


def _edge_fits_memory(space: SearchSpace, edge: StageType, edge_layers: tuple[int, int]) -> bool:
    """Whether an edge has memory for both parts, with one microbatch in flight."""
    split, num_layers, limit = space.split, space.problem.num_layers, space.memory_bytes(edge)
    first, last = edge_layers
    start = held_by(split, edge, (0, first), 1, is_first=True, is_last=False)
    end = held_by(split, edge, (num_layers - last, num_layers), 1, is_first=False, is_last=True)
    both = start + end - held_twice(split, edge, [(True, False), (False, True)])
    return fits_memory(both, limit)


def _middle(pool: NodePool, start: int, end: int, *, is_kept: bool) -> NodePool:
    """Restrict a pool to the layers of the cloud, without both ends of the model; one of the edge gets no speeds."""
    return replace(
        pool, speeds={size: _middle_speed(speed, start, end) for size, speed in pool.speeds.items() if is_kept}
    )


def _middle_speed(speed: Speed, start: int, end: int) -> Speed:
    part = slice(start, end)
    return replace(
        speed,
        forward_s=speed.forward_s[part],
        backward_s=speed.backward_s[part],
        weights_s=speed.weights_s[part],
        first_s=(0.0, 0.0),
        last_s=(0.0, 0.0),
        update_s=speed.update_s[part],
        gradient_bytes=speed.gradient_bytes[part],
        expert_bytes=speed.expert_bytes[part],
        peer_messages=speed.peer_messages[part],
    )


def _middle_bytes(held: HeldBytes, first: int) -> HeldBytes:
    """Count layers from the cloud's first on, with as few microbatches in flight as are asked for here: two."""

    def of_stage(part: HeldPart) -> int:
        start, end = first + part.start, first + part.end
        return held(part._replace(start=start, end=end, is_first=False, is_last=False, in_flight=2))

    return of_stage
