"""Share out the layers of a model in proportion to the cards of the stages."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence


def share_layers(
    num_layers: int, sizes: Sequence[int], most: Sequence[int | None], *, is_alike: bool = False
) -> tuple[int, ...] | None:
    """Give every stage layers so that the slowest one is as fast as can be; each has at least one.

    A layer goes where it makes the least load, layers over size; of equals the stage with fewer layers, then the
    earlier one, since the last one computes the loss, too.

    Args:
        num_layers: of all stages.
        sizes: ranks that share a layer, by stage.
        most: layers that a stage can hold; None for any number.
        is_alike: stages between the first and the last must have equally many.

    Returns:
        The layers of every stage; None if they do not go in.

    >>> share_layers(12, (4, 2), (None, None)), share_layers(7, (4, 2, 1), (None, None, None))
    ((8, 4), (4, 2, 1))
    >>> share_layers(12, (4, 2), (6, None)), share_layers(12, (4, 2), (6, 5))
    ((6, 6), None)
    >>> share_layers(9, (1, 2, 1, 2), (None,) * 4, is_alike=True)
    (2, 2, 2, 3)
    """
    if is_alike and len(sizes) > 3:
        return _share_alike(num_layers, sizes, most)
    num_stages = len(sizes)
    limits = [num_layers if limit is None else limit for limit in most]
    if num_stages > num_layers or min(limits) < 1 or sum(limits) < num_layers:
        return None
    layers = [1] * num_stages
    heap = [(2 / size, 1, stage) for stage, size in enumerate(sizes) if limits[stage] > 1]
    heapq.heapify(heap)
    for _ in range(num_layers - num_stages):
        _, _, stage = heapq.heappop(heap)
        layers[stage] += 1
        if layers[stage] < limits[stage]:
            heapq.heappush(heap, ((layers[stage] + 1) / sizes[stage], layers[stage], stage))
    return tuple(layers)


def _share_alike(num_layers: int, sizes: Sequence[int], most: Sequence[int | None]) -> tuple[int, ...] | None:
    """Try every number of layers between the ends, which share the rest."""
    num_between = len(sizes) - 2
    limits = [limit for limit in most[1:-1] if limit is not None]
    tries: list[tuple[float, tuple[int, ...]]] = []
    for number in range(1, min([num_layers // num_between, *limits]) + 1):
        ends = share_layers(num_layers - number * num_between, (sizes[0], sizes[-1]), (most[0], most[-1]))
        if ends is not None:
            layers = (ends[0], *(number,) * num_between, ends[1])
            tries.append((slowest(layers, sizes), layers))
    return min(tries)[1] if tries else None


def slowest(layers: Sequence[int], sizes: Sequence[int]) -> float:
    """Return the load of the slowest stage, in layers of one card.

    >>> slowest((8, 4), (4, 1))
    4.0
    """
    return max(number / size for number, size in zip(layers, sizes, strict=True))


def share_within(
    share: Callable[[Sequence[int | None]], tuple[int, ...] | None],
    is_over: Callable[[tuple[int, ...]], Sequence[bool]],
    num_stages: int,
) -> tuple[int, ...] | None:
    """Share out layers so that no stage is over its memory.

    A stage that is over gets one layer fewer, until all fit: what a stage holds does not depend on the others' layers.

    Args:
        share: gives the layers for how many a stage can hold, as :func:`share_layers`.
        is_over: tells of every stage whether so many layers are too many.
        num_stages: of the pipeline.

    >>> share_within(lambda most: share_layers(6, (2, 1), most), lambda layers: [layers[0] > 3, False], 2)
    (3, 3)
    """
    most: list[int | None] = [None] * num_stages
    while (layers := share(most)) is not None:
        over = is_over(layers)
        if not any(over):
            return layers
        most = [number - 1 if too_many else limit for number, too_many, limit in zip(layers, over, most, strict=True)]
    return None
