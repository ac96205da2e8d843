"""Elements of an SVG document.

All pictures are ASCII text without scripts, load nothing, and leave the background to the reader, light or dark: the
grey of the text on it has a contrast of 4.3 : 1 against white and of 4.9 : 1 against black. Lengths are in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from html import escape

_MAX_TICKS = 12
_STYLE = """\
text { font-family: Helvetica, Arial, sans-serif; font-size: 12px; fill: #737b85; }
text.title { font-size: 15px; font-weight: bold; }"""


def document(width: int, height: int, *, title: str, style: str, body: Iterable[str]) -> str:
    """Assemble a document.

    Args:
        width: width of the picture.
        height: height of the picture.
        title: name of the picture for readers who cannot see it.
        style: CSS rules beside those of every picture.
        body: elements; later ones are painted on top.
    """
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">'
    )
    return "\n".join([head, title_of(title), f"<style>\n{_STYLE}\n{style}\n</style>", *body, "</svg>\n"])


def is_document(text: str) -> bool:
    """Tell whether a text begins as those of :func:`document` do.

    >>> is_document(document(1, 2, title="a", style="", body=())), is_document('<svg xmlns="else">')
    (True, False)
    """
    return text.startswith("<svg ") and f"</title>\n<style>\n{_STYLE}\n" in text


def element(tag: str, content: str = "", **attributes: str | float) -> str:
    """Write an element.

    Args:
        tag: name of the element.
        content: what it contains, as markup.
        attributes: `kind` becomes `class`; floats get one decimal; an empty text is left out.

    >>> element("rect", kind="row", x=1, width=2.25)
    '<rect class="row" x="1" width="2.2"/>'
    """
    named = {"class" if name == "kind" else name: value for name, value in attributes.items() if value != ""}
    shown = [f' {name}="{f"{v:.1f}" if isinstance(v, float) else v}"' for name, v in named.items()]
    return f"<{tag}{''.join(shown)}" + (f">{content}</{tag}>" if content else "/>")


def text(x: float, y: float, content: str, kind: str = "") -> str:
    """Write a text that starts at `x`, or is centred there by the style of its kind, on the base line `y`.

    >>> text(10, 20, "a < b")
    '<text x="10" y="20">a &lt; b</text>'
    """
    return element("text", escape(content, quote=False), x=x, y=y, kind=kind)


def title_of(content: str) -> str:
    """Write the title of the element around it, which readers see when they point at that element."""
    return element("title", escape(content, quote=False))


def ticks(length: float, scale: float, left: float, top: int, bottom: int, unit: str) -> Iterator[str]:
    """Draw the lines and numbers of an axis from 0 on, at round numbers; the style of the picture has a kind `tick`.

    Args:
        length: what the axis is long, in its unit.
        scale: pixels of a unit.
        left: where 0 is.
        top: upper end of the lines.
        bottom: their lower end, below which the numbers stand.
        unit: name of the unit, which stands behind the last number.

    >>> [part for part in ticks(20.0, 1.0, 0, 0, 9, "ms") if "20" in part]
    ['<line class="tick" x1="20.0" y1="0" x2="20.0" y2="9"/>', '<text x="20.0" y="25" class="tick">20 ms</text>']
    """
    step = _tick_step(length)
    last = int(length / step)
    for tick in range(last + 1):
        x = left + tick * step * scale
        yield element("line", kind="tick", x1=x, y1=top, x2=x, y2=bottom)
        yield text(x, bottom + 16, f"{tick * step:.4g}" + (f" {unit}" if unit and tick == last else ""), "tick")


def _tick_step(length: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20 .. (also 0.5, 0.2 ..) that gives few enough ticks."""
    if not length:
        return 1.0
    decade = 10.0 ** math.floor(math.log10(length / _MAX_TICKS))
    return next(decade * factor for factor in (1, 2, 5, 10, 20) if length / (decade * factor) <= _MAX_TICKS)
