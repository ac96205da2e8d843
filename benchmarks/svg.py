"""What the pictures of the benchmarks share: the SVG document with its style, texts, strokes, entries of the legend.

The background is the reader's, light or dark. All lengths are in pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

_STYLE = """\
text { font-family: Helvetica, Arial, sans-serif; font-size: 12px; fill: #737b85; }
text.title { font-size: 15px; font-weight: bold; }
text.panel { font-size: 13px; font-weight: bold; }
text.middle { text-anchor: middle; }
text.end { text-anchor: end; }
path { fill: none; stroke-linejoin: round; }
path.grid { stroke: #737b85; stroke-opacity: 0.22; }
rect { fill: none; stroke: #737b85; stroke-opacity: 0.6; }"""


def document(width: int, height: int, title: str, body: Iterable[str]) -> str:
    """Assemble a document.

    Args:
        width: width of the picture, in pixels.
        height: height of the picture, in pixels.
        title: name of the picture for readers who cannot see it; a visible heading is a text of the body.
        body: Elements, later ones on top.

    Returns:
        An SVG document: no scripts, nothing loaded from elsewhere, a transparent background; ASCII if its texts are.
    """
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'role="img">',
        f"<title>{escape(title, quote=False)}</title>",
        f"<style>\n{_STYLE}\n</style>",
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def text(x: float, y: float, content: str, kind: str = "") -> str:
    """Write a text.

    Args:
        x: left end of the text, in pixels; its middle or its right end for the kinds `middle` and `end`.
        y: base line of the text, in pixels.
        content: the text.
        kind: `title`, `panel`, `middle`, `end`, or none of them.

    >>> text(10, 20.5, "a < b", "end")
    '<text x="10" y="20.5" class="end">a &lt; b</text>'
    """
    safe = escape(content, quote=False)
    return f'<text x="{x:g}" y="{y:g}"' + (f' class="{kind}"' if kind else "") + f">{safe}</text>"


def stroke(colour: str, width: float, dashes: str = "") -> str:
    """Give the attributes of a path that is drawn as a line.

    Args:
        colour: colour in SVG's notation.
        width: width of the line, in pixels.
        dashes: Lengths of dashes and gaps in turn, in pixels; none for a solid line.

    >>> stroke("#4a80c4", 1.6, "7 4")
    'stroke="#4a80c4" stroke-width="1.6" stroke-dasharray="7 4"'
    """
    return f'stroke="{colour}" stroke-width="{width}"' + (f' stroke-dasharray="{dashes}"' if dashes else "")


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
