"""Draw rows of boxes over time, in groups one below the other, such as a traced step above its plan."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from vtp_plugin.report.pictures import svg
from vtp_plugin.report.pictures.colours import COLOURS
from vtp_plugin.util.text import in_digits

# Lengths in pixels. The whole picture is as wide as the column of a page, so that no reader scales its texts down.
_WIDTH, _ROW_HEIGHT, _BOX_HEIGHT = 800, 30, 20
_MARGIN = 16
_DIGIT_WIDTH = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Something that takes time.

    Attributes:
        kind: kind of the box, which gives its colour.
        start: time at which it begins.
        end: time at which it ends.
        text: text that is shown where it fits.
        short: text that is shown where that does not fit, but this does.
    """

    kind: str
    start: float
    end: float
    text: str = ""
    short: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows that belong together.

    Attributes:
        name: name of the group, above its rows.
        note: more about the group, in a line below its name.
        rows: labels of the rows, each with its boxes.
    """

    name: str
    note: str = ""
    rows: Sequence[tuple[str, Sequence[Box]]]


def draw_rows(groups: Sequence[Group], *, title: str, unit: str, colours: Mapping[str, str] = COLOURS) -> str:
    """Draw groups over one axis of time.

    Args:
        groups: the groups, from top to bottom.
        title: heading of the picture.
        unit: unit of the times.
        colours: colour of every kind, in the order of the legend; a box of another kind is not drawn.

    Returns:
        An SVG document (see :mod:`vtp_plugin.report.pictures.svg`), 800 pixels wide.
    """
    boxes = [box for group in groups for _, row in group.rows for box in row]
    end = max((box.end for box in boxes), default=0.0)
    left = _MARGIN + round(max(len(label) for group in groups for label, _ in group.rows) * svg.LETTER_WIDTH) + 8
    # The number at the end of the axis needs room on the right.
    width = _WIDTH - left - 2 * _MARGIN
    scale = width / end if end else 0.0
    used = {box.kind for box in boxes}
    y = _MARGIN + 8
    body: list[str] = []
    for line in textwrap.wrap(title, int((_WIDTH - 2 * _MARGIN) / svg.TITLE_LETTER_WIDTH)):
        body.append(svg.text(_MARGIN, y, line, "title"))
        y += svg.LINE_HEIGHT

    def mark(kind: str, x: int, y: int) -> str:
        return svg.element("rect", x=x, y=y, width=14, height=12, fill=colours[kind])

    kinds = [kind for kind in colours if kind in used]
    legend, y = svg.legend(zip(kinds, kinds, strict=True), mark, _MARGIN, y - 2, _WIDTH - _MARGIN)
    body += legend
    y -= 6
    bands: list[tuple[int, int]] = []
    drawn: list[str] = []
    for group in groups:
        y += svg.LINE_HEIGHT + 8
        body.append(svg.text(_MARGIN, y, group.name, "group"))
        if group.note:
            y += svg.LINE_HEIGHT - 3
            body.append(svg.text(_MARGIN, y, group.note))
        y += 8
        bands.append((y, y + len(group.rows) * _ROW_HEIGHT - (_ROW_HEIGHT - _BOX_HEIGHT) + 4))
        for label, row in group.rows:
            body.append(svg.text(_MARGIN, y + 15, label))
            body.append(svg.element("rect", kind="row", x=left, y=y, width=width, height=_BOX_HEIGHT))
            drawn += [part for box in row if box.kind in colours for part in _box(box, left, y, scale, colours)]
            y += _ROW_HEIGHT
        y -= _ROW_HEIGHT - _BOX_HEIGHT
    body += [*svg.ticks(end, scale, left, bands[0][0], y + 4, unit, bands), *drawn]
    about = _about(groups, end, unit, kinds)
    return svg.document(_WIDTH, y + 34, title=title, about=about, style=_STYLE, body=body)


def _about(groups: Sequence[Group], end: float, unit: str, kinds: Sequence[str]) -> str:
    """Say in words what is drawn."""
    named = "; ".join(
        f"{group.name}{f', {group.note}' if group.note else ''}: {len(group.rows)} rows, from {group.rows[0][0]} on"
        for group in groups
    )
    return f"Rows of boxes over time, which ends at {in_digits(end)} {unit}. {named}. Boxes: {', '.join(kinds)}."


_STYLE = """\
text.number { font-size: 10px; fill: #ffffff; text-anchor: middle; }
text.tick { text-anchor: middle; }
text.group { font-size: 13px; font-weight: bold; }
rect.row { fill: #737b85; fill-opacity: 0.12; }
line.tick { stroke: $line; stroke-opacity: 0.4; }"""


def _box(box: Box, left: int, y: int, scale: float, colours: Mapping[str, str]) -> Iterator[str]:
    x, width = left + box.start * scale, (box.end - box.start) * scale
    name = svg.title_of(f"{box.kind} {box.text}: {box.start:.6g} to {box.end:.6g}")
    shape = {"x": x, "y": y, "width": max(0.3, width - 0.5), "height": _BOX_HEIGHT}
    yield svg.element("rect", name, fill=colours[box.kind], **shape)
    fitting = (text for text in (box.text, box.short) if text and width >= _DIGIT_WIDTH * len(text) + 2)
    for text in islice(fitting, 1):
        yield svg.text(x + width / 2, y + 14, text, "number")
