"""Boxes: index intervals of a tensor with several dimensions, and what they have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

Box = tuple[tuple[int, int], ...]
"""Half-open interval ``(start, stop)`` for every dimension of the global tensor."""


def volume(box: Box) -> int:
    """Count the elements of a box.

    >>> volume(((0, 4), (2, 5)))
    12
    """
    return math.prod(max(stop - start, 0) for start, stop in box)


def format_box(box: Box) -> str:
    """Write a box as an index into a tensor.

    >>> format_box(((0, 4), (2, 5)))
    '[0:4, 2:5]'
    """
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box that is the whole tensor.

    >>> whole_box((4, 2))
    ((0, 4), (0, 2))
    """
    return tuple((0, length) for length in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the lengths of a box.

    >>> box_shape(((0, 4), (2, 5)))
    (4, 3)
    """
    return tuple(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the common part of two boxes with the same number of dimensions; None if they share no element.

    >>> intersect(((0, 4), (0, 2)), ((3, 6), (0, 2)))
    ((3, 4), (0, 2))
    >>> intersect(((0, 4),), ((4, 6),)) is None
    True
    """
    common = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def subtract(box: Box, holes: Sequence[Box]) -> tuple[Box, ...]:
    """Return disjoint boxes that together contain the elements of `box` outside all `holes`.

    The order of `holes` decides how the remainder is cut into boxes, but not which elements it contains.

    >>> subtract(((0, 4), (0, 2)), [((1, 2), (0, 2))])
    (((0, 1), (0, 2)), ((2, 4), (0, 2)))
    >>> subtract(((0, 4),), [((0, 3),), ((2, 4),)])
    ()
    """
    left = [box] if volume(box) else []
    for hole in holes:
        left = [part for piece in left for part in _without(piece, hole)]
    return tuple(left)


def _without(box: Box, hole: Box) -> Iterator[Box]:
    """Yield `box` minus one hole: for each dimension the slabs before and after the hole, within it beyond that."""
    common = intersect(box, hole)
    if common is None:
        yield box
        return
    for dim, ((start, stop), (hole_start, hole_stop)) in enumerate(zip(box, common, strict=True)):
        for slab in ((start, hole_start), (hole_stop, stop)):
            if slab[0] < slab[1]:
                yield (*common[:dim], slab, *box[dim + 1 :])


def overlaps(boxes: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Yield every pair of positions ``(i, j)``, i < j, whose boxes share an element. Boxes have at least one dimension.

    A sweep along the dimension with the most different intervals makes a tensor cut into n pieces along one dimension
    cost n log n comparisons, not n * n.

    >>> list(overlaps([((0, 3),), ((3, 5),), ((2, 4),)]))
    [(0, 2), (1, 2)]
    """
    if len(boxes) < 2:
        return
    dim = max(range(len(boxes[0])), key=lambda d: len({box[d] for box in boxes}))
    order = sorted(range(len(boxes)), key=lambda i: boxes[i][dim][0])
    for position, i in enumerate(order):
        for j in islice(order, position + 1, None):
            if boxes[j][dim][0] >= boxes[i][dim][1]:
                break
            if intersect(boxes[i], boxes[j]) is not None:
                yield min(i, j), max(i, j)
