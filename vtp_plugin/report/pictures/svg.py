"""Elements of an SVG document.

All pictures are ASCII text without scripts, load nothing, and leave the background to the reader, light or dark: the
grey of the text on it has a contrast of 4.3 : 1 against white and of 4.9 : 1 against black. Lengths are in pixels.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

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
