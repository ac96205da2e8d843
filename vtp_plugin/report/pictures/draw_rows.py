"""Draw rows of boxes over time, in groups one below the other, such as a traced step above its plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vtp_plugin.report.pictures import svg

# Lengths in pixels.
_WIDTH, _ROW_HEIGHT, _BOX_HEIGHT = 900, 30, 20
_MARGIN, _LINE_HEIGHT = 20, 20
_LETTER_WIDTH = 6.6
_DIGIT_WIDTH = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Something that takes time.

    Attributes:
        kind: kind of the box, which gives its colour.
        start: time at which it begins.
        end: time at which it ends.
        text: text that is shown where it fits.
    """

    kind: str
    start: float
    end: float
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows that belong together.

    Attributes:
        name: name of the group.
        rows: labels of the rows, each with its boxes.
    """

    name: str
    rows: Sequence[tuple[str, Sequence[Box]]]


def draw_rows(groups: Sequence[Group], *, title: str, unit: str, colours: Mapping[str, str]) -> str:
    """Draw groups over one axis of time.

    Args:
        groups: the groups, from top to bottom.
        title: heading of the picture.
        unit: unit of the times.
        colours: colour of every kind, in the order of the legend; a box of another kind is not drawn.

    Returns:
        An SVG document (see :mod:`vtp_plugin.report.pictures.svg`).
    """
    boxes = [box for group in groups for _, row in group.rows for box in row]
    end = max((box.end for box in boxes), default=0.0)
    scale = _WIDTH / end if end else 0.0
    left = _MARGIN + round(max(len(label) for group in groups for label, _ in group.rows) * _LETTER_WIDTH) + 8
    full_width = left + _WIDTH + 2 * _MARGIN
    legend, y = _legend(colours, {box.kind for box in boxes}, _MARGIN + _LINE_HEIGHT, full_width)
    body = [svg.text(_MARGIN, _MARGIN + 8, title, "title"), *legend]
    top = y + 12
    for group in groups:
        y += _LINE_HEIGHT + 12
        body.append(svg.text(_MARGIN, y, group.name, "title"))
        y += 8
        for label, row in group.rows:
            body.append(svg.text(_MARGIN, y + 15, label))
            body.append(svg.element("rect", kind="row", x=left, y=y, width=_WIDTH, height=_BOX_HEIGHT))
            body += [part for box in row if box.kind in colours for part in _box(box, left, y, scale, colours)]
            y += _ROW_HEIGHT
    body += svg.ticks(end, scale, left, top, y, unit)
    return svg.document(full_width, y + 30, title=title, style=_STYLE, body=body)


_STYLE = """\
text.number { font-size: 10px; fill: #ffffff; text-anchor: middle; }
text.tick { text-anchor: middle; }
rect.row { fill: #737b85; fill-opacity: 0.12; }
line.tick { stroke: #737b85; stroke-opacity: 0.3; }"""


def _box(box: Box, left: int, y: int, scale: float, colours: Mapping[str, str]) -> Iterator[str]:
    x, width = left + box.start * scale, (box.end - box.start) * scale
    name = svg.title_of(f"{box.kind} {box.text}: {box.start:.6g} to {box.end:.6g}")
    shape = {"x": x, "y": y, "width": max(0.3, width), "height": _BOX_HEIGHT}
    yield svg.element("rect", name, fill=colours[box.kind], **shape)
    if box.text and width >= _DIGIT_WIDTH * len(box.text) + 2:
        yield svg.text(x + width / 2, y + 14, box.text, "number")


def _legend(colours: Mapping[str, str], used: set[str], y: int, right: int) -> tuple[list[str], int]:
    """Return the marks with their meanings, and the height below them."""
    x, lines = _MARGIN, list[str]()
    for kind, colour in ((kind, colour) for kind, colour in colours.items() if kind in used):
        width = 34 + round(_LETTER_WIDTH * len(kind))
        if x > _MARGIN and x + width > right:
            x, y = _MARGIN, y + _LINE_HEIGHT
        lines.append(svg.element("rect", x=x, y=y + 6, width=14, height=12, fill=colour))
        lines.append(svg.text(x + 20, y + 16, kind))
        x += width
    return lines, y + _LINE_HEIGHT
