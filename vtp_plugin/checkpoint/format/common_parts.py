"""Finds the boxes that two stored tensors have in common, however each of them is cut into parts."""

from __future__ import annotations

import math

from vtp_plugin.checkpoint.format.contents import Part, Whole
from vtp_plugin.util.index_boxes import Box, format_box, intersect, overlaps, volume


def pairs(a: Whole, b: Whole) -> tuple[list[tuple[Part, Part, Box]], str | None]:
    """List the common boxes of two tensors, with the part of each that holds them; also say why they are not all."""
    ours, theirs = a.parts(), b.parts()
    parts = (*ours, *theirs)
    found: list[tuple[Part, Part, Box]] = []
    # A number has no dimension along which its parts could be sorted; it has one part.
    for i, j in overlaps([part.box for part in parts]) if a.shape else ((0, 1),):
        if (i < len(ours)) == (j < len(ours)):
            return [], f"{format_box(parts[i].box)} is stored twice in {'A' if i < len(ours) else 'B'}"
        common = intersect(parts[i].box, parts[j].box)
        assert common is not None
        found.append((parts[i], parts[j], common))
    count, size = sum(volume(box) for _, _, box in found), math.prod(a.shape)
    problem = None if count == size else f"only {count} of {size} elements are stored in both"
    return sorted(found, key=lambda pair: (pair[0].extent.file, pair[0].extent.offset, pair[2])), problem
