"""Draw a pipeline as a self-contained SVG: stages, their ranks, and what crosses from stage to stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from vtp_plugin.boundary.pipeline import Direction, PipelineBoundary, TransportRules, pipeline_boundaries
from vtp_plugin.boundary.plan import BoundaryPlan, CollectiveKind
from vtp_plugin.layout.pipeline import PipelineLayout
from vtp_plugin.layout.replicas import DpMode

# Lengths in pixels. A frame holds the boxes of one stage in one replica.
_BOX_WIDTH, _BOX_HEIGHT, _BOX_GAP = 116, 42, 10
_FRAME_PAD = 14
_BRACKET_WIDTH = 26  # of a finish, between the frame and its boxes
_STAGE_GAP = 112
_MARGIN = 24
_HEADER_HEIGHT = 70
_ROW_LABEL_HEIGHT = 26
_ROW_GAP = 26
_WRAP_STEP = 9  # between the parallel lines that lead from the last stage round to the first
_WRAP_LABEL_HEIGHT = 14  # above the innermost of them
_LEGEND_STEP = 24
_SAMPLE_WIDTH = 30  # of a mark in the legend
_MAX_REPLICAS_DRAWN = 4

# The background is the reader's: the grey of the texts on it stands out from white (4.3 : 1) and from black (4.9 : 1).
_STYLE = """\
text { font-family: Helvetica, Arial, sans-serif; font-size: 12px; fill: #737b85; }
text.title { font-size: 15px; font-weight: bold; }
text.stage { font-size: 14px; font-weight: bold; text-anchor: middle; }
text.rank { font-size: 14px; font-weight: bold; fill: #ffffff; text-anchor: middle; }
text.place { fill: #ffffff; text-anchor: middle; }
text.middle { text-anchor: middle; }
rect.frame { fill: #737b85; fill-opacity: 0.1; stroke: #737b85; stroke-opacity: 0.6; }
rect.member { fill: #4a6fa5; }
rect.leader { fill: #b4540a; }
path { fill: none; stroke-linejoin: round; }
path.transfer { stroke: #d9730d; stroke-width: 2.5; marker-end: url(#transfer-head); }
path.finish { stroke: #5b82bd; stroke-width: 1.5; marker-end: url(#finish-head); }
path.transfer-head { fill: #d9730d; }
path.finish-head { fill: #5b82bd; }"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Crossing:
    """One boundary of a replica that is drawn, with its forward plan."""

    boundary: PipelineBoundary
    plan: BoundaryPlan

    @property
    def is_wrap(self) -> bool:
        """Whether it leads from the last stage round to the first."""
        return self.boundary.downstream < self.boundary.upstream

    @property
    def has_finish(self) -> bool:
        return self.plan.finish.kind is not CollectiveKind.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Picture:
    """Where everything lies. Coordinates count from the upper left corner; a box is named by its global rank.

    Attributes:
        layout: who is where.
        replicas: the ``(dp_rank, cp_rank)`` that are drawn, one row each; a stage without one has no frame there.
        crossings: boundaries of these replicas.
        frame_lefts: left edge of the frames, by stage.
        bracket_widths: room for a finish at the left of a frame's boxes, by stage.
        num_wraps: lines from the last stage round to the first, per row.
    """

    layout: PipelineLayout
    replicas: tuple[tuple[int, int], ...]
    crossings: tuple[_Crossing, ...]
    frame_lefts: tuple[int, ...]
    bracket_widths: tuple[int, ...]
    num_wraps: int

    @property
    def has_row_labels(self) -> bool:
        return len(self.layout.replicas) > 1

    @property
    def row_height(self) -> int:
        label = _ROW_LABEL_HEIGHT if self.has_row_labels else 0
        wraps = self.wrap_room + _WRAP_LABEL_HEIGHT if self.num_wraps else 0
        return label + self.frame_height(max(self.layout.tp_sizes)) + wraps + _ROW_GAP

    @property
    def wrap_room(self) -> int:
        """Room that the lines round the picture need at each side of a row and below it."""
        return (self.num_wraps + 2) * _WRAP_STEP if self.num_wraps else 0

    @property
    def rows_bottom(self) -> int:
        return _MARGIN + _HEADER_HEIGHT + len(self.replicas) * self.row_height

    @property
    def frames_right(self) -> int:
        return self.frame_lefts[-1] + self.frame_width(self.layout.num_stages - 1)

    def frame_width(self, stage: int) -> int:
        return self.bracket_widths[stage] + _BOX_WIDTH + 2 * _FRAME_PAD

    def frame_height(self, num_boxes: int) -> int:
        return num_boxes * (_BOX_HEIGHT + _BOX_GAP) - _BOX_GAP + 2 * _FRAME_PAD

    def frame_top(self, row: int) -> int:
        label = _ROW_LABEL_HEIGHT if self.has_row_labels else 0
        return _MARGIN + _HEADER_HEIGHT + row * self.row_height + label

    def box(self, rank: int) -> tuple[int, int]:
        """Return the upper left corner of a rank's box."""
        place = self.layout.coord(rank)
        left = self.frame_lefts[place.stage] + _FRAME_PAD + self.bracket_widths[place.stage]
        row = self.replicas.index((place.dp_rank, place.cp_rank))
        return left, self.frame_top(row) + _FRAME_PAD + place.tp_rank * (_BOX_HEIGHT + _BOX_GAP)


def draw_pipeline(
    layout: PipelineLayout,
    *,
    is_ring: bool = False,
    rules: TransportRules | None = None,
    dp_mode: DpMode = DpMode.MULTIPLEX,
) -> str:
    """Draw the stages side by side, every rank as a box, and the forward transfers of the plans as arrows.

    Replicas are stacked; of more than four only those of the first dp rank are drawn, with the number of all, or the
    first one where replicas do not mix.

    Args:
        layout: Who is where.
        is_ring: Virtual stages let the last stage send to the first.
        rules: How boundaries are crossed; default is the automatic choice inside one site.
        dp_mode: How stages of different data-parallel sizes work together.

    Returns:
        An SVG document: ASCII, no scripts, nothing loaded from elsewhere, a transparent background. Transfers are paths
        of the class `transfer`, each with a title such as `rank 0 to rank 1`; boxes are of the class `leader` or
        `member`. The same arguments always give the same text.

    Raises:
        ConfigError: The dp sizes cannot be joined, or the rules do not fit a boundary.

    >>> svg = draw_pipeline(PipelineLayout.from_sizes((1, 2), world_size=3))
    >>> svg.count('class="transfer"'), svg.count("<title>rank 0 to rank 1</title>")
    (2, 1)
    """
    picture = _arrange(layout, is_ring=is_ring, rules=rules, dp_mode=dp_mode)
    what = "tensor-parallel size"
    title = f"--vtp-size-list {','.join(str(size) for size in layout.tp_sizes)}"
    if len(set(layout.cp_sizes)) > 1:
        what = "parallel sizes"
        title += f" --vtp-cp-list {','.join(str(size) for size in layout.cp_sizes)}"
    if len(set(layout.dp_sizes)) > 1:
        what = "parallel sizes"
        title += f" --vtp-dp-list {','.join(str(size) for size in layout.dp_sizes)} --vtp-dp-mode {dp_mode}"
    subtitle = _counts(layout) + ("" if layout.is_uniform else f"; every stage has its own {what}")
    body = [_text(_MARGIN, _MARGIN + 8, title, "title"), _text(_MARGIN, _MARGIN + 27, subtitle)]
    body += [*_headers(picture), *_rows(picture)]
    # Arrows are painted last, over the frames.
    for crossing in picture.crossings:
        body += [*_transfers(picture, crossing), *_finish(picture, crossing)]
    legend = _legend(picture)
    for index, (kind, text) in enumerate(legend):
        body += _legend_entry(picture.rows_bottom + index * _LEGEND_STEP, kind, text)
    # No font is at hand to measure with: a letter is at most 10 pixels wide in the title and 7 in the other texts.
    longest = max(len(subtitle), *(len(text) + 6 for _, text in legend))
    width = max(picture.frames_right + picture.wrap_room, _MARGIN + max(10 * len(title), 7 * longest)) + _MARGIN
    height = picture.rows_bottom + len(legend) * _LEGEND_STEP + _MARGIN // 2
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'role="img">',
        f"<title>{title}: {_counts(layout)}</title>",
        f"<style>\n{_STYLE}\n</style>",
        f"<defs>{_head('transfer', 5)}{_head('finish', 6)}</defs>",
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _arrange(layout: PipelineLayout, *, is_ring: bool, rules: TransportRules | None, dp_mode: DpMode) -> _Picture:
    replicas = layout.replicas
    if len(replicas) > _MAX_REPLICAS_DRAWN:
        replicas = replicas[:1] if layout.has_replicas else replicas[: max(layout.cp_sizes)]
    crossings = tuple(
        _Crossing(boundary=boundary, plan=boundary.crossing(Direction.FORWARD).probe)
        for boundary in pipeline_boundaries(layout, is_ring=is_ring, rules=rules, dp_mode=dp_mode)
        if (max(map(max, boundary.dp_ranks)), boundary.cp_rank or 0) in replicas
    )
    receiving = {crossing.boundary.downstream for crossing in crossings if crossing.has_finish}
    brackets = tuple(_BRACKET_WIDTH if stage in receiving else 0 for stage in range(layout.num_stages))
    num_wraps = max((len(crossing.plan.transfers) for crossing in crossings if crossing.is_wrap), default=0)
    wrap_room = (num_wraps + 2) * _WRAP_STEP if num_wraps else 0
    widths = [width + _BOX_WIDTH + 2 * _FRAME_PAD + _STAGE_GAP for width in brackets]
    return _Picture(
        layout=layout,
        replicas=replicas,
        crossings=crossings,
        frame_lefts=tuple(accumulate(widths[:-1], initial=_MARGIN + wrap_room)),
        bracket_widths=brackets,
        num_wraps=num_wraps,
    )


def _counts(layout: PipelineLayout) -> str:
    parts = [(layout.num_stages, "stage"), (layout.world_size, "rank")]
    if len(layout.replicas) > 1:
        parts.append((len(layout.replicas), "replica"))
    return ", ".join(f"{number} {noun}{'s' if number > 1 else ''}" for number, noun in parts)


def _headers(picture: _Picture) -> Iterable[str]:
    """Write the title of every stage above its column."""
    for stage, grid in enumerate(picture.layout.stages):
        middle = picture.frame_lefts[stage] + picture.frame_width(stage) // 2
        size = f"tp {grid.tp}" + (f", cp {grid.cp}" if len(set(picture.layout.cp_sizes)) > 1 else "")
        size += f", dp {grid.dp}" if len(set(picture.layout.dp_sizes)) > 1 else ""
        yield _text(middle, _MARGIN + _HEADER_HEIGHT - 12, f"stage {stage} - {size}", "stage")


def _rows(picture: _Picture) -> Iterable[str]:
    """Draw every replica: a label where there are several, frames, and boxes."""
    layout = picture.layout
    for row, (dp_rank, cp_rank) in enumerate(picture.replicas):
        top = picture.frame_top(row)
        if picture.has_row_labels:
            yield _text(picture.frame_lefts[0], top - 8, _row_label(picture, dp_rank, cp_rank))
        for stage, grid in enumerate(layout.stages):
            if dp_rank >= grid.dp or cp_rank >= grid.cp:
                continue
            yield (
                f'<rect class="frame" x="{picture.frame_lefts[stage]}" y="{top}" width="{picture.frame_width(stage)}" '
                f'height="{picture.frame_height(grid.tp)}" rx="10"/>'
            )
            for rank in layout.tp_ranks(stage, dp_rank, cp_rank):
                yield from _box(picture, rank)


def _row_label(picture: _Picture, dp_rank: int, cp_rank: int) -> str:
    num_dp, num_cp = max(picture.layout.dp_sizes), max(picture.layout.cp_sizes)
    label = f"replica dp {dp_rank}" + (f", cp {cp_rank}" if num_cp > 1 else "")
    hidden = len(picture.layout.replicas) - len(picture.replicas)
    sizes = f"x dp {num_dp}" + (f" x cp {num_cp}" if num_cp > 1 else "")
    return f"{label}, and {hidden} more like it ({sizes})" if hidden else label


def _box(picture: _Picture, rank: int) -> Iterable[str]:
    left, top = picture.box(rank)
    tp_rank = picture.layout.coord(rank).tp_rank
    kind, place = ("leader", "tp 0, leader") if tp_rank == 0 else ("member", f"tp {tp_rank}")
    middle = left + _BOX_WIDTH // 2
    yield f'<rect class="{kind}" x="{left}" y="{top}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="6"/>'
    yield _text(middle, top + 18, f"rank {rank}", "rank")
    yield _text(middle, top + 34, place, "place")


def _transfers(picture: _Picture, crossing: _Crossing) -> Iterable[str]:
    """Draw the arrows of one boundary and say above them how it is crossed."""
    transfers = crossing.plan.transfers
    for index, transfer in enumerate(transfers):
        start_x, start_y = picture.box(transfer.src)
        end_x, end_y = picture.box(transfer.dst)
        start = (start_x + _BOX_WIDTH, start_y + _BOX_HEIGHT // 2)
        end = (end_x, end_y + _BOX_HEIGHT // 2)
        # The first line is the outermost, so that the lines do not cross.
        points = (
            [start, *_way_round(picture, start, end, len(transfers) - index), end] if crossing.is_wrap else [start, end]
        )
        yield _path(points, "transfer", f"rank {transfer.src} to rank {transfer.dst}")
    first = picture.box(transfers[0].src)
    is_sliced = any(transfer.boxes != transfers[0].boxes for transfer in transfers)
    how = "leader to leader" if crossing.plan.strategy == "rank0" else "in slices" if is_sliced else "rank to rank"
    if crossing.is_wrap:
        right = picture.frames_right
        middle = (picture.frame_lefts[0] + right) // 2
        yield _text(middle, _wrap_y(picture, first[1], 1) - 6, f"to the next virtual stage, {how}", "middle")
    else:
        middle = picture.frame_lefts[crossing.boundary.downstream] - _STAGE_GAP // 2
        yield _text(middle, first[1] + _BOX_HEIGHT // 2 - 9, how, "middle")


def _way_round(
    picture: _Picture, start: tuple[int, int], end: tuple[int, int], depth: int
) -> Sequence[tuple[int, int]]:
    """Lead a line out of the last stage, below the row and up to the first stage; depth 1 is the innermost."""
    out = (depth + 1) * _WRAP_STEP
    right, left = picture.frames_right + out, picture.frame_lefts[0] - out
    bottom = _wrap_y(picture, start[1], depth)
    return (right, start[1]), (right, bottom), (left, bottom), (left, end[1])


def _wrap_y(picture: _Picture, inside_y: int, depth: int) -> int:
    """Return the height at which a line leads back below the row that a point lies in."""
    row = (inside_y - picture.frame_top(0)) // picture.row_height
    frames_bottom = picture.frame_top(row) + picture.frame_height(max(picture.layout.tp_sizes))
    return frames_bottom + _WRAP_LABEL_HEIGHT + (depth + 1) * _WRAP_STEP


def _finish(picture: _Picture, crossing: _Crossing) -> Iterable[str]:
    """Draw the collective that completes a plan as a bracket at the left of the stage.

    A broadcast leads from its root to the other ranks, an all-gather into every rank.
    """
    finish = crossing.plan.finish
    low = _BOX_HEIGHT - 8
    # In an all-gather every rank has the head of a transfer in the middle of its box.
    entry = low if finish.kind is CollectiveKind.ALL_GATHER else _BOX_HEIGHT // 2
    for group in finish.groups:
        root, *others = group
        left, top = picture.box(root)
        turn = left - _BRACKET_WIDTH + 8
        yield f"<g><title>{finish.kind} among {', '.join(f'rank {rank}' for rank in group)}</title>"
        start = (left, top + low)
        for rank in others:
            end = (left, picture.box(rank)[1] + entry)
            yield _path([start, (turn, start[1]), (turn, end[1]), end], "finish")
        if finish.kind is CollectiveKind.ALL_GATHER:
            yield _path([(turn, start[1]), start], "finish")
        yield "</g>"


def _legend(picture: _Picture) -> tuple[tuple[str, str], ...]:
    """Return the kinds of marks in the picture that need a word, and the word."""
    entries = [("leader", "leader: tensor-parallel rank 0 of a stage")]
    if picture.crossings:
        entries.append(("transfer", "activations, forward; gradients come back alike"))
    if any(crossing.has_finish for crossing in picture.crossings):
        kinds = " or ".join(sorted({one.plan.finish.kind for one in picture.crossings if one.has_finish}))
        entries.append(("finish", f"{kinds} inside the stage after the transfers"))
    return tuple(entries)


def _legend_entry(top: int, kind: str, text: str) -> Iterable[str]:
    left, right = _MARGIN, _MARGIN + _SAMPLE_WIDTH
    if kind == "leader":
        yield f'<rect class="sample leader" x="{left}" y="{top}" width="{_SAMPLE_WIDTH}" height="14" rx="3"/>'
    else:
        yield _path([(left, top + 7), (right, top + 7)], f"sample {kind}")
    yield _text(right + 12, top + 11, text)


def _head(kind: str, size: int) -> str:
    """Define the arrow head of a kind of path, `size` line widths long."""
    return (
        f'<marker id="{kind}-head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="{size}" markerHeight="{size}" '
        f'orient="auto"><path class="{kind}-head" d="M 0 0 L 10 5 L 0 10 z"/></marker>'
    )


def _path(points: Sequence[tuple[int, int]], kind: str, title: str = "") -> str:
    way = "M " + " L ".join(f"{x} {y}" for x, y in points)
    return f'<path class="{kind}" d="{way}"' + (f"><title>{title}</title></path>" if title else "/>")


def _text(x: int, y: int, text: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}"' + (f' class="{kind}"' if kind else "") + f">{text}</text>"
