"""A U as a search problem: for each edge that is possible the layouts of its cloud."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vtp_plugin.tune.cluster.speed import Speed
from vtp_plugin.tune.cluster.stage_memory import HeldBytes, HeldPart
from vtp_plugin.tune.search.enumerate_lists import stage_types_of
from vtp_plugin.tune.search.memory_check import held_by, held_twice
from vtp_plugin.tune.search.problem import NodePool, StageType
from vtp_plugin.tune.search.search_space import FixedEdge, SearchSpace
from vtp_plugin.tune.search.stage_cost import best_hop_s


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
    )
    space = SearchSpace.of(inner, cloud)
    for edge in stage_types_of(edges, is_mixing=True):
        if not _fits_memory(whole, edge, edge_layers):
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


def _fits_memory(space: SearchSpace, edge: StageType, edge_layers: tuple[int, int]) -> bool:
    """Whether an edge has memory for both parts, with one microbatch in flight."""
    split, num_layers, limit = space.split, space.problem.num_layers, space.memory_bytes(edge)
    first, last = edge_layers
    start = held_by(split, edge, (0, first), 1, is_first=True, is_last=False)
    end = held_by(split, edge, (num_layers - last, num_layers), 1, is_first=False, is_last=True)
    both = start + end - held_twice(split, edge, [(True, False), (False, True)])
    return limit is None or both <= limit


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
