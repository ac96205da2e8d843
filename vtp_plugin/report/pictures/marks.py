"""Marks that the pictures of pipelines and of bridges have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vtp_plugin.report.pictures import svg
from vtp_plugin.report.pictures.arrange import MARGIN

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


def path(points: Sequence[Point], kind: str, title: str = "") -> str:
    """Draw a line through points."""
    corners = "M " + " L ".join(f"{x} {y}" for x, y in points)
    return svg.element("path", svg.title_of(title) if title else "", kind=kind, d=corners)
