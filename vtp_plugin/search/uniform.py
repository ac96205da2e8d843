"""Lists that stock Megatron has: one tensor-parallel size, as many layers on every stage."""

from __future__ import annotations

from collections.abc import Iterator

from vtp_plugin.search.question import Kind, Question, Shape
from vtp_plugin.search.split import has_room
from vtp_plugin.search.stage import Works


def uniform_lists(question: Question, shape: Shape, works: Works) -> Iterator[tuple[tuple[Kind, ...], tuple[int, ...]]]:
    """Yield uniform lists with their layers, each on the quickest cards, those first and those last.

    Args:
        question: what is asked.
        shape: of the step.
        works: what every kind costs.
    """
    for size in sorted({size for pool in shape.pools for size in pool.speeds}):
        stages = sorted(_stages(shape, size), key=lambda kind: works[kind].least_s)
        for number in range(question.least_stages, min(question.most_stages, question.num_layers, len(stages)) + 1):
            if question.num_layers % number:
                continue
            layers = (question.num_layers // number,) * number
            chosen = sorted(stages[:number], key=lambda kind: shape.pools[kind.places[0]].site)
            for order in {tuple(chosen), tuple(reversed(chosen))}:
                if _fits(question, shape, works, order, layers):
                    yield order, layers


def _stages(shape: Shape, size: int) -> Iterator[Kind]:
    """Make stages of one size of all cards, replicas as alike as can be."""
    for site in sorted({pool.site for pool in shape.pools}):
        groups = [
            place
            for place, pool in enumerate(shape.pools)
            if pool.site == site and size in pool.speeds
            for room in pool.rooms
            for _ in range(room // size)
        ]
        groups.sort(key=lambda place: (sum(shape.pools[place].speeds[size].forward_s), place))
        for start in range(0, len(groups) - shape.num_replicas + 1, shape.num_replicas):
            yield Kind(tuple(sorted(groups[start : start + shape.num_replicas])), size)


def _fits(
    question: Question,
    shape: Shape,
    works: Works,
    order: tuple[Kind, ...],
    layers: tuple[int, ...],
) -> bool:
    return all(
        has_room(
            question, shape, kind, works[kind], (sum(layers[:stage]), sum(layers[: stage + 1])), (stage, len(order))
        )
        for stage, kind in enumerate(order)
    )
