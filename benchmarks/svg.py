"""What the pictures of the benchmarks share: style, strokes, axes, entries of the legend.

The document is that of the product's pictures (``vtp_plugin/report/pictures/svg.py``). The background is the reader's,
light or dark. All lengths are in pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vtp_plugin.report.pictures import svg
from vtp_plugin.report.pictures.svg import round_ticks, text

__all__ = ["break_mark", "document", "dot", "legend_entry", "round_ticks", "stroke", "text"]

COLOURS = ("blue", "orange", "purple", "green", "line")
"""Names of the colours of lines; each has a shade for each ground."""

_STYLE = "\n".join(
    [
        "text.panel { font-size: 13px; font-weight: bold; }",
        "text.middle { text-anchor: middle; }",
        "text.end { text-anchor: end; }",
        "path { fill: none; stroke-linejoin: round; }",
        "path.grid { stroke: $line; stroke-opacity: 0.35; }",
        "path.break { stroke: $ink; stroke-width: 1.5; }",
        "rect { fill: none; stroke: $line; }",
        *(f"path.{name} {{ stroke: ${name}; }}" for name in COLOURS),
        *(f"circle.{name} {{ fill: ${name}; }}" for name in COLOURS),
    ]
)


def document(width: int, height: int, title: str, about: str, body: Iterable[str]) -> str:
    """Assemble a document.

    Args:
        width: width of the picture, in pixels.
        height: height of the picture, in pixels.
        title: name of the picture for readers who cannot see it; a visible heading is a text of the body.
        about: what it shows, in a sentence or two, for the same readers.
        body: Elements, later ones on top.

    Returns:
        An SVG document: no scripts, nothing loaded from elsewhere, a transparent background; ASCII if its texts are.
    """
    return svg.document(width, height, title=title, about=about, style=_STYLE, body=body)


def stroke(colour: str, width: float, dashes: str = "") -> str:
    """Give the attributes of a path that is drawn as a line.

    Args:
        colour: name of its colour, of `COLOURS`.
        width: width of the line, in pixels.
        dashes: Lengths of dashes and gaps in turn, in pixels; none for a solid line.

    >>> stroke("blue", 1.6, "7 4")
    'class="blue" stroke-width="1.6" stroke-dasharray="7 4"'
    """
    return f'class="{colour}" stroke-width="{width}"' + (f' stroke-dasharray="{dashes}"' if dashes else "")


def dot(x: float, y: float, colour: str, title: str = "") -> str:
    """Draw a point of a measurement.

    Args:
        x: its middle, in pixels.
        y: its middle, in pixels.
        colour: name of its colour, of `COLOURS`.
        title: what readers see when they point at it.
    """
    return svg.element("circle", svg.title_of(title) if title else "", kind=colour, cx=x, cy=y, r=3.5)


def break_mark(x: float, bottom: float) -> Iterator[str]:
    """Draw the mark of an axis that does not begin at 0: two strokes across the axis, near its lower end.

    Args:
        x: where the axis lies, in pixels.
        bottom: its lower end, in pixels.
    """
    for y in (bottom - 15, bottom - 20):
        yield f'<path class="break" d="M {x - 6:g} {y + 3:g} L {x + 6:g} {y - 3:g}"/>'


def legend_entry(left: int, top: int, line: str, meaning: str) -> Iterator[str]:
    """Draw a piece of a line and say beside it what the line means.

    Args:
        left: Where the piece begins, in pixels.
        top: Height at which it lies, in pixels.
        line: attributes that `stroke` gave.
        meaning: meaning of the line.
    """
    yield f'<path d="M {left} {top} L {left + 34} {top}" {line}/>'
    yield text(left + 42, top + 4, meaning)
