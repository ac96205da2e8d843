"""Where the boxes of a picture stand, with their marks and labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from vtp_plugin.plan.boundary.boundary_plan import CollectiveKind, Transfer
from vtp_plugin.plan.boundary.channel_spec import PipelineBoundary, pipeline_boundaries
from vtp_plugin.plan.boundary.strategies.known_strategies import STRATEGIES, TransportRules
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.layout.replica_map import DpMode
from vtp_plugin.report.pictures import svg

BOX_WIDTH, BOX_HEIGHT, BOX_GAP = 116, 42, 10
FRAME_PAD = 14
BRACKET_WIDTH = 26  # of a finish, between the frame and its boxes
STAGE_GAP = 112
MARGIN = 24
LINE_HEIGHT = 20  # of the title and of the line below it
_HEADER_HEIGHT = 30  # titles of the stages
_SITE_HEIGHT = 26
_ROW_LABEL_HEIGHT = 26
_ROW_GAP = 26
WRAP_STEP = 9  # between the parallel lines round a band
WRAP_LABEL_HEIGHT = 14  # above the innermost of them
_MAX_WIDTH = 1000  # of a band with its margins where possible: readers scale wider pictures down
_MAX_REPLICAS_DRAWN = 4
# Of all replicas together, where one shows what all are like: fewer where replicas mix, since arrows cross there.
_MAX_BOXES_DRAWN, _MAX_MIXED_BOXES_DRAWN = 32, 16
_MAX_BOXES = 8  # of a stage; if it has more ranks, only the first few and the last get a box each
_NUM_FIRST_BOXES = 3

Boxes = tuple[tuple[int, int], ...]
"""First and last tensor-parallel rank of every box of a stage, from the top."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What is drawn, and where. Coordinates start at the upper left corner.

    Attributes:
        layout: the pipeline layout.
        sites: site of every stage; empty if none were named.
        head_height: height of the title.
        replicas: the ``(dp_rank, cp_rank)`` in the picture, one row each; a stage without that replica has no frame
            in the row.
        boundaries: the boundaries of these replicas.
    """

    layout: PipelineLayout
    sites: tuple[str, ...]
    head_height: int
    replicas: tuple[tuple[int, int], ...]
    boundaries: tuple[PipelineBoundary, ...]

    @cached_property
    def boxes(self) -> tuple[Boxes, ...]:
        """Boxes of every stage."""
        return tuple(map(_boxes_of, self.layout.tp_sizes))

    @cached_property
    def stages_per_band(self) -> int:
        """How many stages stand side by side; the next ones follow below, in bands of about equal length.

        Where rows mix, all stages stand side by side: arrows lead from row to row, and would cross other bands.
        """
        widths = self._stage_widths
        room = _MAX_WIDTH - 2 * MARGIN + STAGE_GAP
        are_mixed = len(self.replicas) > 1 and not self.layout.has_equal_replicas
        if sum(widths) <= room or are_mixed:
            return len(widths)
        # With several bands, lines lead round them and take some of the room.
        most = max(1, (room - 6 * WRAP_STEP) // max(widths))
        num_bands = -(-len(widths) // most)
        return -(-len(widths) // num_bands)

    @cached_property
    def frame_lefts(self) -> tuple[int, ...]:
        """Left edge of the frames, by stage."""
        widths, band = self._stage_widths, self.stages_per_band
        first = MARGIN + self.wrap_room
        return tuple(first + sum(widths[stage - stage % band : stage]) for stage in range(len(widths)))

    @property
    def _stage_widths(self) -> list[int]:
        return [self.frame_width(stage) + STAGE_GAP for stage in range(self.layout.num_stages)]

    @cached_property
    def num_connectors(self) -> int:
        """Number of lines from a band to the next one."""
        return self._most_lines(is_wrap=False)

    @cached_property
    def num_wraps(self) -> int:
        """Number of lines from the last stage back to the first."""
        return self._most_lines(is_wrap=True)

    def _most_lines(self, *, is_wrap: bool) -> int:
        around = (drawn for drawn in self.boundaries if self.goes_round(drawn) and drawn.is_wrap == is_wrap)
        return max((len(self.edges(drawn)) for drawn in around), default=0)

    @property
    def has_row_labels(self) -> bool:
        """Whether rows need a name."""
        return len(self.layout.replicas) > 1

    @property
    def is_cut(self) -> bool:
        """Whether a replica in the picture stands for others that are like it."""
        return len(self.replicas) < len(self.layout.replicas)

    def times(self, stage: int) -> int:
        """Return how many replicas of a stage each one in the picture stands for, itself included."""
        grid = self.layout.stages[stage]
        return grid.dp * grid.cp // sum(self.has_frame(row, stage) for row in range(len(self.replicas)))

    @property
    def num_bands(self) -> int:
        """Number of bands."""
        return -(-self.layout.num_stages // self.stages_per_band)

    def band(self, stage: int) -> int:
        """Return the band of a stage."""
        return stage // self.stages_per_band

    def stages_of(self, band: int) -> range:
        """List the stages of a band."""
        return range(self.layout.num_stages)[band * self.stages_per_band :][: self.stages_per_band]

    @property
    def wrap_room(self) -> int:
        """Room that the lines round the bands need on each side."""
        num_lines = self.num_connectors + self.num_wraps
        return (num_lines + 2) * WRAP_STEP if num_lines else 0

    @property
    def header_height(self) -> int:
        """Room above the frames of a band for the titles of its stages."""
        return _HEADER_HEIGHT + (_SITE_HEIGHT if self.sites else 0)

    def has_header(self, row: int) -> bool:
        """Whether the titles of the stages stand above the bands of a replica."""
        return row == 0 or self.num_bands > 1

    def _head(self, row: int) -> int:
        label = _ROW_LABEL_HEIGHT if self.has_row_labels else 0
        return label + (self.header_height if self.has_header(row) else 0)

    def _band_height(self, row: int, band: int) -> int:
        num_lines = self.num_wraps if band == self.num_bands - 1 else self.num_connectors
        wraps = (num_lines + 2) * WRAP_STEP + WRAP_LABEL_HEIGHT if num_lines else 0
        return self.frame_height(self._tallest(row, band)) + wraps + _ROW_GAP

    def _tallest(self, row: int, band: int) -> int:
        own = (len(self.boxes[stage]) for stage in self.stages_of(band) if self.has_frame(row, stage))
        return max(own, default=1)  # dp and cp sizes that differ may leave a row without any

    def has_frame(self, row: int, stage: int) -> bool:
        """Whether a stage has the replica of a row."""
        (dp_rank, cp_rank), grid = self.replicas[row], self.layout.stages[stage]
        return dp_rank < grid.dp and cp_rank < grid.cp

    def band_top(self, row: int, band: int) -> int:
        """Return where a band of a replica starts; the bands of one replica follow each other."""
        above = sum(self._head(r) + self._band_height(r, b) for r in range(row) for b in range(self.num_bands))
        return MARGIN + self.head_height + above + sum(self._head(row) + self._band_height(row, b) for b in range(band))

    def frame_top(self, row: int, band: int) -> int:
        """Return where the frames of a replica start in a band."""
        return self.band_top(row, band) + self._head(row)

    @property
    def bottom(self) -> int:
        """Return where the last band ends."""
        row, band = len(self.replicas) - 1, self.num_bands - 1
        return self.frame_top(row, band) + self._band_height(row, band)

    @property
    def frames_right(self) -> int:
        """Right edge of the widest band."""
        return max(left + self.frame_width(stage) for stage, left in enumerate(self.frame_lefts))

    def bracket_width(self, stage: int) -> int:
        """Return the room for a finish at the left of the boxes in a stage's frame."""
        return BRACKET_WIDTH * any(has_finish(one) and one.downstream == stage for one in self.boundaries)

    def frame_width(self, stage: int) -> int:
        """Return the width of a stage's frame."""
        return self.bracket_width(stage) + BOX_WIDTH + 2 * FRAME_PAD

    def frame_height(self, num_boxes: int) -> int:
        """Return the height of a frame with so many boxes."""
        return num_boxes * (BOX_HEIGHT + BOX_GAP) - BOX_GAP + 2 * FRAME_PAD

    def _cell(self, rank: int) -> tuple[int, int, int]:
        """Return the row of a rank, its stage, and the number of its box in the frame."""
        place = self.layout.coord(rank)
        boxes = enumerate(self.boxes[place.stage])
        index = next(index for index, (first, last) in boxes if first <= place.tp_rank <= last)
        return self.replicas.index((place.dp_rank, place.cp_rank)), place.stage, index

    def is_shown(self, rank: int) -> bool:
        """Whether a rank has a box to itself."""
        _, stage, index = self._cell(rank)
        first, last = self.boxes[stage][index]
        return first == last

    def box(self, rank: int) -> tuple[int, int]:
        """Return the upper left corner of a rank's box."""
        row, stage, index = self._cell(rank)
        left = self.frame_lefts[stage] + FRAME_PAD + self.bracket_width(stage)
        return left, self.frame_top(row, self.band(stage)) + FRAME_PAD + index * (BOX_HEIGHT + BOX_GAP)

    def way_round(self, drawn: PipelineBoundary, rank: int, index: int, num_lines: int) -> tuple[int, int, int]:
        """Say how a line leads round a band: its right end, its height below the band, its left end.

        Args:
            drawn: boundary to the next band, or from the last stage to the first.
            rank: rank at which the line starts.
            index: number of the line among `num_lines`; on the right the first is the outermost, so that lines do not
                cross.
            num_lines: number of lines that the boundary has.
        """
        row, stage, _ = self._cell(rank)
        below = self.frame_top(row, self.band(stage)) + self.frame_height(self._tallest(row, self.band(stage)))
        out = (num_lines - index + 1) * WRAP_STEP
        # Lines back up to the first stage pass outside the lines down to the next bands; among the latter, the line
        # that ends lowest must be the outermost.
        left = out + self.num_connectors * WRAP_STEP if drawn.is_wrap else (index + 2) * WRAP_STEP
        return self.frames_right + out, below + WRAP_LABEL_HEIGHT + out, self.frame_lefts[0] - left

    def goes_round(self, drawn: PipelineBoundary) -> bool:
        """Whether a boundary leads round a band and not straight to a neighbour."""
        return self.band(drawn.upstream) != self.band(drawn.downstream) or drawn.is_wrap

    def way_across(self, src: int, dst: int) -> list[tuple[int, int]]:
        """List the corners of an arrow between neighbours: from row to row it is slanted between the frames only."""
        (src_row, upstream, _), (dst_row, downstream, _) = self._cell(src), self._cell(dst)
        start, end = straight(self.box(src), self.box(dst))
        if src_row == dst_row:
            return [start, end]
        right = self.frame_lefts[upstream] + self.frame_width(upstream)
        return [start, (right, start[1]), (self.frame_lefts[downstream], end[1]), end]

    def transfers(self, drawn: PipelineBoundary) -> list[Transfer]:
        """List the transfers of a boundary whose both ends are in the picture."""
        return [one for one in drawn.forward.transfers if self.is_drawn(one.src) and self.is_drawn(one.dst)]

    def is_drawn(self, rank: int) -> bool:
        """Whether a rank is in the picture, in a box of its own or not."""
        place = self.layout.coord(rank)
        return (place.dp_rank, place.cp_rank) in self.replicas

    def edges(self, drawn: PipelineBoundary) -> tuple[tuple[int, int, int], ...]:
        """Return the arrows of a boundary: two ranks, and how many transfers run between their boxes."""
        # Boxes are told apart by their cells: coordinates are not known yet when the lines round the bands are counted.
        found: dict[object, list[int]] = {}
        for transfer in self.transfers(drawn):
            ends = self._cell(transfer.src), self._cell(transfer.dst)
            found.setdefault(ends, [transfer.src, transfer.dst, 0])[2] += 1
        return tuple((src, dst, number) for src, dst, number in found.values())


def arrange(
    layout: PipelineLayout, *, is_ring: bool, rules: TransportRules, dp_mode: DpMode, head_height: int
) -> Picture:
    """Choose what is drawn.

    Args:
        layout: the pipeline layout.
        is_ring: whether the last stage sends to the first.
        rules: how the transport of every boundary is chosen.
        dp_mode: how stages of different data-parallel sizes work together.
        head_height: height of the title.
    """
    replicas = layout.replicas
    grids = zip(layout.stages, map(_boxes_of, layout.tp_sizes), strict=True)
    num_boxes = sum(grid.dp * grid.cp * len(boxes) for grid, boxes in grids)
    most = _MAX_BOXES_DRAWN if layout.has_equal_replicas else _MAX_MIXED_BOXES_DRAWN
    if len(replicas) > _MAX_REPLICAS_DRAWN or num_boxes > most:
        replicas = replicas[: 1 if layout.has_equal_replicas else max(layout.cp_sizes)]
    boundaries = tuple(
        boundary
        for boundary in pipeline_boundaries(layout, is_ring=is_ring, rules=rules, dp_mode=dp_mode)
        # Of a boundary between replicas that are not alone, the first ones.
        if all((dp_ranks[0], boundary.cp_rank or 0) in replicas for dp_ranks in boundary.dp_ranks)
    )
    return Picture(layout=layout, sites=rules.sites, head_height=head_height, replicas=replicas, boundaries=boundaries)


def _boxes_of(size: int) -> Boxes:
    """Give every rank of a stage a box; if there are many ranks, the middle ones share a box.

    >>> _boxes_of(2), _boxes_of(64)
    (((0, 0), (1, 1)), ((0, 0), (1, 1), (2, 2), (3, 62), (63, 63)))
    """
    if size <= _MAX_BOXES:
        return tuple((rank, rank) for rank in range(size))
    first = [(rank, rank) for rank in range(_NUM_FIRST_BOXES)]
    return (*first, (_NUM_FIRST_BOXES, size - 2), (size - 1, size - 1))


LEGEND_STEP = 24
# There is no font to measure with: a letter is at most this many pixels wide.
TITLE_LETTER_WIDTH, LETTER_WIDTH = 10, 7
_SAMPLE_WIDTH = 30  # of a mark in the legend

BADGE_HEIGHT = 18

Point = tuple[int, int]

STYLE = """\
text.stage { font-size: 14px; font-weight: bold; text-anchor: middle; }
text.rank { font-size: 14px; font-weight: bold; fill: #ffffff; text-anchor: middle; }
text.place { fill: #ffffff; text-anchor: middle; }
text.middle { text-anchor: middle; }
text.site { font-weight: bold; text-anchor: middle; }
rect.frame { fill: #737b85; fill-opacity: 0.1; stroke: $line; stroke-opacity: 0.7; }
path.behind { stroke: $line; stroke-opacity: 0.7; }
rect.badge { fill: #4b5563; }
text.badge { font-weight: bold; fill: #ffffff; text-anchor: middle; }
rect.member { fill: #4a6fa5; }
rect.leader { fill: #b4540a; }
rect.hidden { fill: #5f6f86; }
path.site { stroke: $line; stroke-width: 1.5; }
path.many { stroke-dasharray: 5 4; }
path { fill: none; stroke-linejoin: round; }
path.transfer { stroke: #d9730d; stroke-width: 2.5; marker-end: url(#transfer-head); }
path.finish { stroke: #5b82bd; stroke-width: 1.5; marker-end: url(#finish-head); }
path.transfer-head { fill: #d9730d; }
path.finish-head { fill: #5b82bd; }"""
"""CSS rules of the marks."""


def heads() -> str:
    """Define the arrow heads of transfers and of finishes."""
    return f"<defs>{_arrow_head('transfer', 5)}{_arrow_head('finish', 6)}</defs>"


def legend_entry(top: int, kind: str, text: str) -> Iterable[str]:
    """Draw a mark, and say what it means."""
    left, right = MARGIN, MARGIN + _SAMPLE_WIDTH
    if kind in ("leader", "hidden"):
        yield svg.element("rect", kind=f"sample {kind}", x=left, y=top, width=_SAMPLE_WIDTH, height=14, rx=3)
    elif kind == "badge":
        yield from badge(left, top - 2, "x 2")
    else:
        yield path([(left, top + 7), (right, top + 7)], f"sample {kind}")
    yield svg.text(right + 12, top + 11, text)


def badge(left: int, top: int, text: str) -> Iterable[str]:
    """Draw a number of things that are alike, such as `x 4`, beside the one that is drawn."""
    yield svg.element("rect", kind="badge", x=left, y=top, width=badge_width(text), height=BADGE_HEIGHT, rx=9)
    yield svg.text(left + badge_width(text) // 2, top + 13, text, "badge")


def badge_width(text: str) -> int:
    """Return the width of a badge."""
    return LETTER_WIDTH * len(text) + 10


def _arrow_head(kind: str, size: int) -> str:
    """Define the arrow head of a kind of path, `size` line widths long."""
    triangle = svg.element("path", kind=f"{kind}-head", d="M 0 0 L 10 5 L 0 10 z")
    box = {"viewBox": "0 0 10 10", "refX": 9, "refY": 5, "markerWidth": size, "markerHeight": size, "orient": "auto"}
    return svg.element("marker", triangle, id=f"{kind}-head", **box)


def straight(src: Point, dst: Point) -> list[Point]:
    """List the ends of an arrow from one box to another, which stand at these corners."""
    return [(src[0] + BOX_WIDTH, src[1] + BOX_HEIGHT // 2), (dst[0], dst[1] + BOX_HEIGHT // 2)]


def path(points: Sequence[Point], kind: str, title: str = "") -> str:
    """Draw a line through points."""
    corners = "M " + " L ".join(f"{x} {y}" for x, y in points)
    return svg.element("path", svg.title_of(title) if title else "", kind=kind, d=corners)


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


def has_finish(drawn: PipelineBoundary) -> bool:
    """Tell whether a collective of the receiving stage completes what crosses a boundary."""
    return drawn.forward.finish.kind is not CollectiveKind.NONE


def way_of(drawn: PipelineBoundary) -> str:
    """Say how a tensor crosses a boundary."""
    transfers = drawn.forward.transfers
    is_sliced = any(transfer.boxes != transfers[0].boxes for transfer in transfers)
    has_leaders = STRATEGIES[drawn.forward.strategy].has_leaders
    return "leader to leader" if has_leaders else "in slices" if is_sliced else "rank to rank"


def _texts(
    picture: Picture, drawn: PipelineBoundary, num_rings: int, *, is_split: bool
) -> Iterator[tuple[str, list[Point]]]:
    """Yield what is to be said of a boundary, each with the places where it may stand, the best first."""
    text = way_of(drawn)
    transfers = picture.transfers(drawn)
    sharing = _sharing(picture, drawn, is_split=is_split)
    if picture.goes_round(drawn):
        where = f"on to stage {drawn.downstream}"
        if drawn.is_wrap:
            where = "back to the edge" if num_rings else "to the next virtual stage"
            where += ", twice" if num_rings > 1 else ""
        num_lines = len(picture.edges(drawn))
        y = picture.way_round(drawn, transfers[0].src, num_lines - 1, num_lines)[1]
        text = f"{where}, {text}" + (f", {sharing}" if sharing else "")
        yield text, [((picture.frame_lefts[0] + picture.frames_right) // 2, y - 6)]
        return
    middle = picture.frame_lefts[drawn.downstream] - STAGE_GAP // 2
    first, last = transfers[0], transfers[-1]
    ends = [picture.box(rank)[1] for rank in (first.src, first.dst, last.src, last.dst)]
    heights = [ends[0] + BOX_HEIGHT // 2 - 9, min(ends), *(end + BOX_HEIGHT for end in ends)]
    yield text, [(middle, y) for y in heights]
    if sharing:
        yield sharing, [(middle, y - 16) for y in heights]


def _sharing(picture: Picture, drawn: PipelineBoundary, *, is_split: bool) -> str:
    """Say with how many replicas of the other stage one works, where the picture does not show it."""
    sizes = picture.layout.dp_sizes
    here, there = sizes[drawn.upstream], sizes[drawn.downstream]
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
