"""Where a box of the global tensor lies in a rank's local tensor."""

from __future__ import annotations

from collections.abc import Sequence

from vtp_plugin.errors import PlanError
from vtp_plugin.plan.boundary.sharding import LocalBoxes
from vtp_plugin.util.index_boxes import Box, format_box, intersect

Widths = Sequence[int]
"""Length in memory of every unit of the second dimension, where a plan counts units and not elements; see
:class:`vtp_plugin.plan.boundary.bridge_spec.BridgeSpec`."""


def local_slices(box: Box, holding: LocalBoxes, widths: Widths | None = None) -> tuple[slice, ...]:
    """Find a global box in the local tensor of a rank.

    Args:
        box: Box in global coordinates, inside one that the rank holds.
        holding: What the rank holds; in the local tensor the boxes follow each other along the first dimension.
        widths: Length of every unit of the second dimension, in elements; None if each unit is one element.

    Returns:
        One slice per dimension that indexes the local tensor.

    >>> local_slices(((3, 4), (0, 2)), LocalBoxes(rank=1, boxes=(((2, 4), (0, 2)),)))
    (slice(1, 2, None), slice(0, 2, None))
    >>> local_slices(((7, 8),), LocalBoxes(rank=1, boxes=(((0, 2),), ((6, 8),))))
    (slice(3, 4, None),)
    >>> local_slices(((0, 2), (2, 3)), LocalBoxes(rank=1, boxes=(((0, 2), (1, 3)),)), widths=(5, 4, 3))
    (slice(0, 2, None), slice(4, 7, None))
    """
    base = 0
    for held in holding.boxes:
        if intersect(box, held) == box:
            first, *rest = (
                slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, held, strict=True)
            )
            if widths is not None:
                (start, stop), (origin, _) = box[1], held[1]
                rest[0] = slice(sum(widths[origin:start]), sum(widths[origin:stop]))
            return (slice(first.start + base, first.stop + base), *rest)
        base += held[0][1] - held[0][0]
    raise PlanError(f"rank {holding.rank} holds {holding.boxes}, not {format_box(box)}")


def local_shape(holding: LocalBoxes, widths: Widths | None = None) -> tuple[int, ...]:
    """Return the shape of a rank's local tensor; the arguments are those of :func:`local_slices`.

    >>> local_shape(LocalBoxes(rank=0, boxes=(((0, 2), (1, 3), (0, 7)),)), widths=(5, 4, 3))
    (2, 7, 7)
    """
    shape = holding.local_shape
    if widths is None:
        return shape
    (start, stop) = holding.boxes[0][1]
    return (shape[0], sum(widths[start:stop]), *shape[2:])
