"""Writes beside the arrows of a pipeline's picture how each boundary is crossed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from vtp_plugin.plan.boundary.strategies.known_strategies import STRATEGIES
from vtp_plugin.report.pictures import svg
from vtp_plugin.report.pictures.arrange import BOX_HEIGHT, STAGE_GAP, DrawnBoundary, Picture
from vtp_plugin.report.pictures.marks import LETTER_WIDTH, Point

Area = tuple[float, float, float, float]
"""Left, top, right and bottom."""


def labels(picture: Picture, lines: Sequence[Sequence[Point]], num_rings: int, *, is_split: bool) -> Iterator[str]:
    """Say how each boundary is crossed, next to its arrows; no label covers an arrow or another label.

    Args:
        picture: the arranged picture.
        lines: corners of all its arrows.
        num_rings: number of times that a microbatch passes the cloud in a U; else 0.
        is_split: whether replicas of different stages split microbatches among them.
    """
    taken: list[Area] = []
    for drawn in picture.boundaries:
        for text, places in _texts(picture, drawn, num_rings, is_split=is_split):
            for x, y in places:
                half = LETTER_WIDTH * len(text) / 2
                area = (x - half, y - 11, x + half, y + 4)
                if area in taken:  # by the same words: a replica that shares the arrows of this one
                    break
                is_free = not any(_overlap(area, other) for other in taken)
                if is_free and not any(_meets(part, area) for points in lines for part in pairwise(points)):
                    taken.append(area)
                    yield svg.text(x, y, text, "middle")
                    break


def way_of(drawn: DrawnBoundary) -> str:
    """Say how a tensor crosses a boundary."""
    transfers = drawn.plan.transfers
    is_sliced = any(transfer.boxes != transfers[0].boxes for transfer in transfers)
    has_leaders = STRATEGIES[drawn.plan.strategy].has_leaders
    return "leader to leader" if has_leaders else "in slices" if is_sliced else "rank to rank"


def _texts(
    picture: Picture, drawn: DrawnBoundary, num_rings: int, *, is_split: bool
) -> Iterator[tuple[str, list[Point]]]:
    """Yield what is to be said of a boundary, each with the places where it may stand, the best first."""
    text, boundary = way_of(drawn), drawn.boundary
    transfers = picture.transfers(drawn)
    sharing = _sharing(picture, drawn, is_split=is_split)
    if picture.goes_round(drawn):
        where = f"on to stage {boundary.downstream}"
        if drawn.is_wrap:
            where = "back to the edge" if num_rings else "to the next virtual stage"
            where += ", twice" if num_rings > 1 else ""
        num_lines = len(picture.edges(drawn))
        y = picture.way_round(drawn, transfers[0].src, num_lines - 1, num_lines)[1]
        text = f"{where}, {text}" + (f", {sharing}" if sharing else "")
        yield text, [((picture.frame_lefts[0] + picture.frames_right) // 2, y - 6)]
        return
    middle = picture.frame_lefts[boundary.downstream] - STAGE_GAP // 2
    first, last = transfers[0], transfers[-1]
    ends = [picture.box(rank)[1] for rank in (first.src, first.dst, last.src, last.dst)]
    heights = [ends[0] + BOX_HEIGHT // 2 - 9, min(ends), *(end + BOX_HEIGHT for end in ends)]
    yield text, [(middle, y) for y in heights]
    if sharing:
        yield sharing, [(middle, y - 16) for y in heights]


def _sharing(picture: Picture, drawn: DrawnBoundary, *, is_split: bool) -> str:
    """Say with how many replicas of the other stage one works, where the picture does not show it."""
    boundary, sizes = drawn.boundary, picture.layout.dp_sizes
    here, there = sizes[boundary.upstream], sizes[boundary.downstream]
    if not picture.is_cut or here == there:
        return ""
    number = max(here, there) // min(here, there)
    if is_split:
        return f"split over {number}" if there > here else f"joined from {number}"
    return f"{'to' if there > here else 'from'} {number} in turn"


def _overlap(one: Area, other: Area) -> bool:
    return all(one[axis] < other[axis + 2] and other[axis] < one[axis + 2] for axis in (0, 1))


def _meets(line: tuple[Point, Point], area: Area) -> bool:
    """Whether a line enters an area: cut off, axis by axis, what lies beside the area, and see if anything is left."""
    (ax, ay), (bx, by) = line
    begin, end = 0.0, 1.0
    for start, length, low, high in ((ax, bx - ax, area[0], area[2]), (ay, by - ay, area[1], area[3])):
        if length:
            near, far = sorted(((low - start) / length, (high - start) / length))
            begin, end = max(begin, near), min(end, far)
        elif not low < start < high:
            return False
    return begin < end
