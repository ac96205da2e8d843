"""Where everything of a pipeline's picture lies, in pixels: stages in bands, replicas one below the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from vtp_plugin.boundary.pipeline import PipelineBoundary, pipeline_boundaries
from vtp_plugin.boundary.plan import BoundaryPlan, CollectiveKind
from vtp_plugin.boundary.rules import TransportRules
from vtp_plugin.layout.channel import Direction
from vtp_plugin.layout.pipeline import PipelineLayout
from vtp_plugin.layout.replicas import DpMode

BOX_WIDTH, BOX_HEIGHT, BOX_GAP = 116, 42, 10
FRAME_PAD = 14
BRACKET_WIDTH = 26  # of a finish, between the frame and its boxes
STAGE_GAP = 112
MARGIN = 24
LINE_HEIGHT = 20  # of the title and of what stands below it
_HEADER_HEIGHT = 30  # titles of the stages
_SITE_HEIGHT = 26
_ROW_LABEL_HEIGHT = 26
_ROW_GAP = 26
WRAP_STEP = 9  # between the parallel lines that lead round a band
WRAP_LABEL_HEIGHT = 14  # above the innermost of them
_MAX_WIDTH = 1000  # of a band with its margins, as far as that can be kept: readers scale wider pictures down
_MAX_REPLICAS_DRAWN = 4
_MAX_BOXES = 8  # of a stage; of more ranks the first and the last are drawn
_NUM_FIRST_BOXES = 3

Boxes = tuple[tuple[int, int], ...]
"""First and last tensor-parallel rank of every box of a stage, from above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnBoundary:
    """One boundary of a replica that is drawn, with its forward plan."""

    boundary: PipelineBoundary
    plan: BoundaryPlan

    @property
    def is_wrap(self) -> bool:
        """Whether it leads from the last stage round to the first."""
        return self.boundary.downstream < self.boundary.upstream

    @property
    def has_finish(self) -> bool:
        """Whether ranks of the receiving stage do something together afterwards."""
        return self.plan.finish.kind is not CollectiveKind.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Where everything lies. Coordinates count from the upper left corner.

    Attributes:
        layout: who is where.
        sites: of every stage; empty where none were named.
        head_height: room for the title.
        replicas: the ``(dp_rank, cp_rank)`` that are drawn, one row each; a stage without one has no frame there.
        boundaries: of these replicas.
        boxes: of every stage.
        frame_lefts: left edge of the frames, by stage.
        bracket_widths: room for a finish at the left of a frame's boxes, by stage.
        stages_per_band: so many stages stand side by side; the next ones below.
        num_connectors: lines that lead from one band to the next.
        num_wraps: lines from the last stage round to the first.
    """

    layout: PipelineLayout
    sites: tuple[str, ...]
    head_height: int
    replicas: tuple[tuple[int, int], ...]
    boundaries: tuple[DrawnBoundary, ...]
    boxes: tuple[Boxes, ...]
    frame_lefts: tuple[int, ...]
    bracket_widths: tuple[int, ...]
    stages_per_band: int
    num_connectors: int
    num_wraps: int

    @property
    def has_row_labels(self) -> bool:
        """Whether rows need a name."""
        return len(self.layout.replicas) > 1

    @property
    def num_bands(self) -> int:
        """Number of bands."""
        return -(-self.layout.num_stages // self.stages_per_band)

    def band(self, stage: int) -> int:
        """Return the band of a stage."""
        return stage // self.stages_per_band

    def stages_of(self, band: int) -> range:
        """List the stages of a band."""
        first = band * self.stages_per_band
        return range(first, min(first + self.stages_per_band, self.layout.num_stages))

    @property
    def wrap_room(self) -> int:
        """Room that the lines round the bands need at each side."""
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

    def _band_height(self, band: int) -> int:
        num_lines = self.num_wraps if band == self.num_bands - 1 else self.num_connectors
        wraps = (num_lines + 2) * WRAP_STEP + WRAP_LABEL_HEIGHT if num_lines else 0
        return self.frame_height(self._tallest(band)) + wraps + _ROW_GAP

    def _tallest(self, band: int) -> int:
        return max(len(self.boxes[stage]) for stage in self.stages_of(band))

    def band_top(self, row: int, band: int) -> int:
        """Return where a band of a replica begins: the bands of one replica follow each other."""
        heights = [self._band_height(b) for b in range(self.num_bands)]
        above = sum(self.num_bands * self._head(r) + sum(heights) for r in range(row))
        return MARGIN + self.head_height + above + band * self._head(row) + sum(heights[:band])

    def frame_top(self, row: int, band: int) -> int:
        """Return where the frames of a replica begin in a band."""
        return self.band_top(row, band) + self._head(row)

    @property
    def bottom(self) -> int:
        """Return where the last band ends."""
        return self.band_top(len(self.replicas), 0)

    @property
    def frames_right(self) -> int:
        """Right edge of the widest band."""
        return max(self.frame_lefts[stage] + self.frame_width(stage) for stage in range(self.layout.num_stages))

    def frame_width(self, stage: int) -> int:
        """Width of a stage's frame."""
        return self.bracket_widths[stage] + BOX_WIDTH + 2 * FRAME_PAD

    def frame_height(self, num_boxes: int) -> int:
        """Height of a frame with so many boxes."""
        return num_boxes * (BOX_HEIGHT + BOX_GAP) - BOX_GAP + 2 * FRAME_PAD

    def box_index(self, rank: int) -> int:
        """Return which box of its stage a rank is in."""
        place = self.layout.coord(rank)
        return next(i for i, (first, last) in enumerate(self.boxes[place.stage]) if first <= place.tp_rank <= last)

    def is_shown(self, rank: int) -> bool:
        """Whether a rank has a box of its own."""
        first, last = self.boxes[self.layout.stage_of(rank)][self.box_index(rank)]
        return first == last

    def box(self, rank: int) -> tuple[int, int]:
        """Return the upper left corner of a rank's box."""
        place = self.layout.coord(rank)
        left = self.frame_lefts[place.stage] + FRAME_PAD + self.bracket_widths[place.stage]
        row = self.replicas.index((place.dp_rank, place.cp_rank))
        top = self.frame_top(row, self.band(place.stage))
        return left, top + FRAME_PAD + self.box_index(rank) * (BOX_HEIGHT + BOX_GAP)

    def way_round(self, drawn: DrawnBoundary, rank: int, index: int, num_lines: int) -> tuple[int, int, int]:
        """Say how a line leads round a band: its right end, its height below the band, its left end.

        Args:
            drawn: to the next band, or from the last stage to the first.
            rank: where it begins.
            index: of the line among `num_lines`; at the right the first is the outermost, so that they do not cross.
            num_lines: of the boundary.
        """
        out = (num_lines - index + 1) * WRAP_STEP
        # What leads back up to the first stage passes outside of what leads down to the next bands; there, the line
        # that ends lowest must be the outermost.
        left = out + self.num_connectors * WRAP_STEP if drawn.is_wrap else (index + 2) * WRAP_STEP
        return self.frames_right + out, self.below(rank) + out, self.frame_lefts[0] - left

    def below(self, rank: int) -> int:
        """Return where the lines round a band begin, below the row of a rank."""
        place = self.layout.coord(rank)
        band, row = self.band(place.stage), self.replicas.index((place.dp_rank, place.cp_rank))
        return self.frame_top(row, band) + self.frame_height(self._tallest(band)) + WRAP_LABEL_HEIGHT

    def goes_round(self, drawn: DrawnBoundary) -> bool:
        """Whether a boundary leads round a band and not straight to a neighbour."""
        return self.band(drawn.boundary.upstream) != self.band(drawn.boundary.downstream) or drawn.is_wrap

    def edges(self, drawn: DrawnBoundary) -> tuple[tuple[int, int, int], ...]:
        """Return the arrows of a boundary: two ranks, and how many transfers are between their boxes."""
        found: dict[tuple[object, object], list[int]] = {}
        for transfer in drawn.plan.transfers:
            ends = self.box(transfer.src), self.box(transfer.dst)
            found.setdefault(ends, [transfer.src, transfer.dst, 0])[2] += 1
        return tuple((src, dst, number) for src, dst, number in found.values())


def arrange(
    layout: PipelineLayout, *, is_ring: bool, rules: TransportRules, dp_mode: DpMode, head_height: int
) -> Picture:
    """Choose what is drawn, and where.

    Args:
        layout: Who is where.
        is_ring: The last stage sends to the first.
        rules: How boundaries are crossed.
        dp_mode: How stages of different data-parallel sizes work together.
        head_height: Room for the title.
    """
    replicas = layout.replicas
    if len(replicas) > _MAX_REPLICAS_DRAWN:
        replicas = replicas[:1] if layout.has_equal_replicas else replicas[: max(layout.cp_sizes)]
    boundaries = tuple(
        DrawnBoundary(boundary=boundary, plan=boundary.channel(Direction.FORWARD).probe)
        for boundary in pipeline_boundaries(layout, is_ring=is_ring, rules=rules, dp_mode=dp_mode)
        if (max(map(max, boundary.dp_ranks)), boundary.cp_rank or 0) in replicas
    )
    receiving = {drawn.boundary.downstream for drawn in boundaries if drawn.has_finish}
    brackets = tuple(BRACKET_WIDTH if stage in receiving else 0 for stage in range(layout.num_stages))
    widths = [width + BOX_WIDTH + 2 * FRAME_PAD + STAGE_GAP for width in brackets]
    per_band = _stages_per_band(widths)
    boxes = tuple(_boxes_of(size) for size in layout.tp_sizes)
    plain = Picture(
        layout=layout,
        sites=rules.sites,
        head_height=head_height,
        replicas=replicas,
        boundaries=boundaries,
        boxes=boxes,
        frame_lefts=(),
        bracket_widths=brackets,
        stages_per_band=per_band,
        num_connectors=0,
        num_wraps=0,
    )
    plain = replace(plain, frame_lefts=_lefts(widths, per_band, MARGIN))
    counts = {
        is_wrap: max(
            (len(plain.edges(c)) for c in boundaries if plain.goes_round(c) and c.is_wrap == is_wrap), default=0
        )
        for is_wrap in (False, True)
    }
    picture = replace(plain, num_connectors=counts[False], num_wraps=counts[True])
    return replace(picture, frame_lefts=_lefts(widths, per_band, MARGIN + picture.wrap_room))


def _stages_per_band(widths: Sequence[int]) -> int:
    """Return how many stages stand side by side; bands are about equally long."""
    room = _MAX_WIDTH - 2 * MARGIN + STAGE_GAP
    if sum(widths) <= room:
        return len(widths)
    # Lines that lead round the bands need some of it.
    num = max(1, (room - 6 * WRAP_STEP) // max(widths))
    return -(-len(widths) // -(-len(widths) // num))


def _lefts(widths: Sequence[int], per_band: int, first: int) -> tuple[int, ...]:
    lefts: list[int] = []
    for start in range(0, len(widths), per_band):
        lefts += list(accumulate(widths[start : start + per_band], initial=first))[:-1]
    return tuple(lefts)


def _boxes_of(size: int) -> Boxes:
    """Give every rank of a stage a box; of many ranks those in the middle share one.

    >>> _boxes_of(2), _boxes_of(64)
    (((0, 0), (1, 1)), ((0, 0), (1, 1), (2, 2), (3, 62), (63, 63)))
    """
    if size <= _MAX_BOXES:
        return tuple((rank, rank) for rank in range(size))
    first = [(rank, rank) for rank in range(_NUM_FIRST_BOXES)]
    return (*first, (_NUM_FIRST_BOXES, size - 2), (size - 1, size - 1))
