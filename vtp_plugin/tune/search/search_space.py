"""What a search goes through lists of: whole pipelines, or the cloud of a U around whose ends the edge lies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vtp_plugin.tune.cluster.speed import Speed
from vtp_plugin.tune.search.enumerate_lists import kinds_of
from vtp_plugin.tune.search.memory_check import held_by, held_twice
from vtp_plugin.tune.search.problem import BatchSplit, HeldBytes, NodePool, SearchProblem, StageType
from vtp_plugin.tune.search.stage_cost import Works, best_hop_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """Lists of one shape, with what is fixed around them.

    Attributes:
        question: of the lists; of a U that of its cloud, whose layers are those between the edge's.
        shape: likewise.
        works: likewise.
        whole: the shape of the whole pipeline.
        whole_works: what its stages cost.
        edge: the stage around them; None without a U.
        before_s: what every microbatch takes before the lists' first stage.
        least_s: no step is shorter.
    """

    question: SearchProblem
    shape: BatchSplit
    works: Works
    whole: BatchSplit
    whole_works: Works
    edge: StageType | None = None
    before_s: float = 0.0
    least_s: float = 0.0

    def kinds(self, own: Sequence[StageType]) -> tuple[StageType, ...]:
        """Give the stages of the whole pipeline."""
        return tuple(own) if self.edge is None else (self.edge, *own)

    def layers(self, own: Sequence[int]) -> tuple[int, ...]:
        """Give the layers of the whole pipeline's parts."""
        if self.edge is None or self.question.around is None:
            return tuple(own)
        first, last = self.question.around
        return (first, *own, last)


def search_spaces(question: SearchProblem) -> Iterator[SearchSpace]:
    """Yield what is gone through: every shape, in a U with every edge.

    Args:
        question: what is asked.
    """
    for shape in question.shapes:
        works = Works(shape)
        if question.around is None:
            yield SearchSpace(question=question, shape=shape, works=works, whole=shape, whole_works=works)
        else:
            yield from _around(question, shape, works)


def _around(question: SearchProblem, shape: BatchSplit, works: Works) -> Iterator[SearchSpace]:
    assert question.around is not None
    first, last = question.around
    start, end = first, question.num_layers - last
    cloud = replace(
        shape,
        pools=tuple(_cut(pool, start, end, is_kept=pool.site != question.edge) for pool in shape.pools),
        held_bytes=None if shape.held_bytes is None else _between(shape.held_bytes, start),
    )
    edges = replace(
        shape, pools=tuple(pool if pool.site == question.edge else replace(pool, speeds={}) for pool in shape.pools)
    )
    inner = replace(
        question,
        num_layers=end - start,
        shapes=(cloud,),
        least_stages=max(1, question.least_stages - 1),
        most_stages=max(1, question.most_stages - 1),
        tied_bytes=0,
    )
    cloud_works = Works(cloud)
    for edge in kinds_of(edges, is_mixing=True):
        if not _holds(question, shape, edge, works[edge].memory_bytes):
            continue
        parts = works[edge].times_s(0, first, is_first=True, is_last=False)
        ends = works[edge].times_s(end, question.num_layers, is_first=False, is_last=True)
        hops_s = [best_hop_s(question, shape, edge, kind) for kind in kinds_of(cloud, is_mixing=False)]
        yield SearchSpace(
            question=inner,
            shape=cloud,
            works=cloud_works,
            whole=shape,
            whole_works=works,
            edge=edge,
            # The edge's backward passes run while the cloud's first stage sums gradients, which the lists' bound has.
            before_s=parts[0] + min(hops_s, default=0.0),
            least_s=shape.num_microbatches * sum(parts + ends),
        )


def _holds(question: SearchProblem, shape: BatchSplit, edge: StageType, memory_bytes: int | None) -> bool:
    """Whether the edge has memory for its parts, with one microbatch in flight."""
    assert question.around is not None
    first, last = question.around
    start = held_by(shape, edge, (0, first), 1, is_first=True, is_last=False)
    end = held_by(shape, edge, (question.num_layers - last, question.num_layers), 1, is_first=False, is_last=True)
    both = start + end - held_twice(shape, edge, [(True, False), (False, True)])
    return memory_bytes is None or both <= memory_bytes


def _cut(pool: NodePool, start: int, end: int, *, is_kept: bool) -> NodePool:
    """Leave the layers between, without both ends of the model; nothing of a pool that is not in the cloud."""
    return replace(
        pool, speeds={size: _between_ends(speed, start, end) for size, speed in pool.speeds.items() if is_kept}
    )


def _between_ends(speed: Speed, start: int, end: int) -> Speed:
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


def _between(held: HeldBytes, first: int) -> HeldBytes:
    """Count layers from the cloud's first on, with as few microbatches in flight as are asked for here: two."""

    def of_stage(
        tp: int, num_replicas: int, start: int, end: int, is_first: bool, is_last: bool, in_flight: int
    ) -> int:
        return held(tp, num_replicas, first + start, first + end, False, False, 2)

    return of_stage
