"""Search spaces: lists of whole pipelines, or lists of a U's cloud, beside a given edge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vtp_plugin.tune.cluster.speed import Speed
from vtp_plugin.tune.search.enumerate_lists import stage_types_of
from vtp_plugin.tune.search.memory_check import held_by, held_twice
from vtp_plugin.tune.search.problem import BatchSplit, HeldBytes, NodePool, SearchProblem, StageType
from vtp_plugin.tune.search.stage_cost import Works, best_hop_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """The lists for one split of the batch, with the edge that is fixed in a U.

    Attributes:
        problem: problem of the lists; for a U that of its cloud, whose layers are those between the edge's.
        split: how the samples are shared out; for a U as the cloud sees it.
        works: what each stage type of the lists costs.
        whole: how the samples are shared out in the whole pipeline.
        whole_works: what each stage type of the whole pipeline costs.
        edge: stage type of a U's edge; None without a U.
        before_s: seconds of every microbatch before the first stage of the lists.
        least_s: lower bound on every step, in seconds.
    """

    problem: SearchProblem
    split: BatchSplit
    works: Works
    whole: BatchSplit
    whole_works: Works
    edge: StageType | None = None
    before_s: float = 0.0
    least_s: float = 0.0

    def stage_types(self, inner: Sequence[StageType]) -> tuple[StageType, ...]:
        """Give the stage types of the whole pipeline, from those of a list."""
        return tuple(inner) if self.edge is None else (self.edge, *inner)

    def layers(self, inner: Sequence[int]) -> tuple[int, ...]:
        """Give the number of layers of each part of the whole pipeline, from those of a list."""
        if self.edge is None or self.problem.edge_layers is None:
            return tuple(inner)
        first, last = self.problem.edge_layers
        return (first, *inner, last)


def search_spaces(problem: SearchProblem) -> Iterator[SearchSpace]:
    """Yield the spaces to search: one for every split, in a U one for every split and edge.

    Args:
        problem: the search problem.
    """
    for split in problem.splits:
        works = Works(split)
        if problem.edge_layers is None:
            yield SearchSpace(problem=problem, split=split, works=works, whole=split, whole_works=works)
        else:
            yield from _u_spaces(problem, split, works)


def _u_spaces(problem: SearchProblem, split: BatchSplit, works: Works) -> Iterator[SearchSpace]:
    assert problem.edge_layers is not None
    first, last = problem.edge_layers
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
    cloud_works = Works(cloud)
    for edge in stage_types_of(edges, is_mixing=True):
        if not _fits_memory(problem, split, edge, works[edge].memory_bytes):
            continue
        parts = works[edge].times_s(0, first, is_first=True, is_last=False)
        ends = works[edge].times_s(end, problem.num_layers, is_first=False, is_last=True)
        hops_s = [best_hop_s(problem, split, edge, stage_type) for stage_type in stage_types_of(cloud, is_mixing=False)]
        yield SearchSpace(
            problem=inner,
            split=cloud,
            works=cloud_works,
            whole=split,
            whole_works=works,
            edge=edge,
            # The edge's backward passes run while the cloud's first stage sums gradients, which the lists' bound has.
            before_s=parts[0] + min(hops_s, default=0.0),
            least_s=split.num_microbatches * sum(parts + ends),
        )


def _fits_memory(problem: SearchProblem, split: BatchSplit, edge: StageType, memory_bytes: int | None) -> bool:
    """Whether an edge has memory for both parts, with one microbatch in flight."""
    assert problem.edge_layers is not None
    first, last = problem.edge_layers
    start = held_by(split, edge, (0, first), 1, is_first=True, is_last=False)
    end = held_by(split, edge, (problem.num_layers - last, problem.num_layers), 1, is_first=False, is_last=True)
    both = start + end - held_twice(split, edge, [(True, False), (False, True)])
    return memory_bytes is None or both <= memory_bytes


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
        first_s=(0.0, 0.0),
        last_s=(0.0, 0.0),
        update_s=speed.update_s[part],
        gradient_bytes=speed.gradient_bytes[part],
        expert_bytes=speed.expert_bytes[part],
        peer_messages=speed.peer_messages[part],
    )


def _middle_bytes(held: HeldBytes, first: int) -> HeldBytes:
    """Count layers from the cloud's first on, with as few microbatches in flight as are asked for here: two."""

    def of_stage(
        tp: int, num_replicas: int, start: int, end: int, is_first: bool, is_last: bool, in_flight: int
    ) -> int:
        return held(tp, num_replicas, first + start, first + end, False, False, 2)

    return of_stage
