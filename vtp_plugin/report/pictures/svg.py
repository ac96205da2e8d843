"""Marks of pictures: shapes, labels, colours, the trace of a browser.

Elements of an SVG document.

All pictures are ASCII text without scripts, load nothing, and leave the background to the reader, light or dark. Texts
and thin lines have a colour for each ground (``prefers-color-scheme``); a program that knows no such rules shows those
for a light one. Lengths are in pixels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from string import Template

# A shade for white, and one for #0d1117.
_PALETTE = {
    "ink": ("#4b5563", "#a9b3bf"),
    "line": ("#6e7681", "#8b949e"),
    "blue": ("#2f6db5", "#6ea8f0"),
    "orange": ("#c05f00", "#f0883e"),
    "purple": ("#7d52ab", "#b492dc"),
    "green": ("#1f8263", "#45bd94"),
}
_FIRST_RULE = "text { font-family: Helvetica, Arial, sans-serif; font-size: 12px; fill: "
_STYLE = f"""\
{_FIRST_RULE}$ink; }}
text.title {{ font-size: 15px; font-weight: bold; }}"""
_STEPS = (1.0, 2.0, 2.5, 5.0)
_MAX_TICKS = 12
_TICK_WIDTH = 50  # room for the number of a tick
LINE_HEIGHT = 20
LETTER_WIDTH, TITLE_LETTER_WIDTH = 6.6, 8.6  # on average over a line, at most; there is no font to measure with


def document(width: int, height: int, *, title: str, about: str, style: str, body: Iterable[str]) -> str:
    """Assemble a document.

    Args:
        width: width of the picture.
        height: height of the picture.
        title: name of the picture.
        about: what it shows, in a sentence or two, for readers who cannot see it.
        style: CSS rules beside those of every picture, one a line. A rule that names a colour of the palette, such as
            ``$ink``, is given once for each ground.
        body: elements; later ones are painted on top.

    >>> document(1, 2, title="a", about="b", style="", body=()).startswith('<svg xmlns="http://www.w3.org/2000/svg" ')
    True
    """
    name = escape(title)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{name}">'
    )
    said = element("desc", escape(about, quote=False))
    rules = _for_each_ground(f"{_STYLE}\n{style}")
    return "\n".join([head, title_of(title), said, f"<style>\n{rules}\n</style>", *body, "</svg>\n"])


def _for_each_ground(style: str) -> str:
    r"""Fill in the colours of the palette.

    >>> print(_for_each_ground("text { fill: $ink; }\nrect { rx: 2; }"))
    text { fill: #4b5563; }
    rect { rx: 2; }
    @media (prefers-color-scheme: dark) {
    text { fill: #a9b3bf; }
    }
    """
    light, dark = ({name: colours[ground] for name, colours in _PALETTE.items()} for ground in (0, 1))
    again = "\n".join(rule for rule in style.splitlines() if "$" in rule)
    return (
        f"{Template(style).substitute(light)}\n"
        f"@media (prefers-color-scheme: dark) {{\n{Template(again).substitute(dark)}\n}}"
    )


def is_document(text: str) -> bool:
    """Tell whether a text begins as those of :func:`document` do, now or in an earlier version.

    >>> is_document(document(1, 2, title="a", about="b", style="", body=())), is_document('<svg xmlns="else">')
    (True, False)
    """
    return text.startswith("<svg ") and f"\n<style>\n{_FIRST_RULE}" in text


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


def ticks(
    length: float,
    scale: float,
    left: float,
    top: int,
    bottom: int,
    unit: str,
    bands: Sequence[tuple[int, int]] = (),
) -> Iterator[str]:
    """Draw the lines and numbers of an axis from 0 on, at round numbers; the style of the picture has a kind `tick`.

    Args:
        length: what the axis is long, in its unit.
        scale: pixels of a unit.
        left: where 0 is.
        top: upper end of the lines.
        bottom: their lower end, below which the numbers stand.
        unit: name of the unit, which stands behind the last number.
        bands: upper and lower ends of the pieces of each line, where it does not lead from `top` to `bottom`.

    >>> [part for part in ticks(20.0, 5.0, 0, 0, 9, "ms") if "100.0" in part]
    ['<line class="tick" x1="100.0" y1="0" x2="100.0" y2="9"/>', '<text x="100.0" y="25" class="tick">20 ms</text>']
    """
    most = max(2, min(_MAX_TICKS, round(length * scale / _TICK_WIDTH)))
    values = round_ticks(0.0, length, most=most)
    for value in values:
        x = left + value * scale
        for upper, lower in bands or [(top, bottom)]:
            yield element("line", kind="tick", x1=x, y1=upper, x2=x, y2=lower)
        is_last = value == values[-1]
        yield text(x, bottom + 16, f"{value:.10g}" + (f" {unit}" if unit and is_last else ""), "tick")


def round_ticks(low: float, high: float, *, most: int) -> list[float]:
    """List the multiples of the smallest round step that gives few enough of them, from `low` to `high`.

    Round is 1, 2, 2.5 or 5 times a power of ten.

    Args:
        low: lower end of an axis.
        high: its upper end.
        most: most ticks that may come out; at least 2.

    >>> round_ticks(0, 2.578, most=8), round_ticks(0.9, 1.15, most=8)
    ([0.0, 0.5, 1.0, 1.5, 2.0, 2.5], [0.9, 0.95, 1.0, 1.05, 1.1, 1.15])
    """
    if not high > low:
        return [low]
    decade = math.floor(math.log10((high - low) / most))
    while True:
        for factor in _STEPS:
            step = factor * 10.0**decade
            # An end that a rounding error moved past its tick still has one.
            first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
            if last - first < most:
                return [round(number * step, 1 - decade) for number in range(first, last + 1)]
        decade += 1


def legend(
    texts: Iterable[tuple[str, str]], mark: Callable[[str, int, int], str], left: int, y: int, right: int
) -> tuple[list[str], int]:
    """Explain marks, side by side, in as many lines as that takes.

    Args:
        texts: kinds of marks, each with what it means.
        mark: draws a mark of a kind, 14 pixels wide, from an upper left corner on.
        left: where each line begins.
        y: upper end of the marks in the first line.
        right: where lines end at the latest.

    Returns:
        The elements, and the upper end of a line below them.
    """
    x, found = left, list[str]()
    for kind, meaning in texts:
        width = 34 + round(LETTER_WIDTH * len(meaning))
        if x > left and x + width > right:
            x, y = left, y + LINE_HEIGHT
        found += [mark(kind, x, y), text(x + 20, y + 10, meaning)]
        x += width
    return found, y + LINE_HEIGHT


Event = dict[str, object]


def name_process(process: int, name: str) -> Event:
    """Name a group of rows."""
    return _meta("process_name", process, 0, {"name": name})


def name_row(process: int, row: int, name: str) -> Iterable[Event]:
    """Name a row, which stands at its number."""
    yield _meta("thread_name", process, row, {"name": name})
    yield _meta("thread_sort_index", process, row, {"sort_index": row})


def box(process: int, row: int, name: str, kind: str, start_s: float, end_s: float) -> Event:
    """Draw a box.

    >>> box(0, 1, "0F0", "forward", 0.5, 0.75)["dur"]
    250000.0
    """
    start_us = _us(start_s)
    times: Event = {"ts": start_us, "dur": round(_us(end_s) - start_us, 3)}
    return {"ph": "X", "name": name, "cat": kind, "pid": process, "tid": row, **times}


def flight(process: int, row_name: str, name: str, number: int, start_s: float, end_s: float) -> Iterable[Event]:
    """Draw a box that may overlap others of its row, such as a message.

    Perfetto makes a row of all boxes with one name, so the name is that of the row; the box's own name is shown when it
    is selected.

    Args:
        process: number of the group of rows.
        row_name: name of the row.
        name: name of the box.
        number: number of the box in the process.
        start_s: second at which it begins.
        end_s: second at which it ends.
    """
    common: Event = {"name": row_name, "cat": "message", "id2": {"local": number}, "pid": process, "tid": 0}
    yield {"ph": "b", "ts": _us(start_s), "args": {"message": name}} | common
    yield {"ph": "e", "ts": _us(end_s)} | common


def arrow(name: str, number: int, start: tuple[int, int, float], end: tuple[int, int, float]) -> Iterable[Event]:
    """Draw an arrow from a box to the first one that begins where it ends, or later.

    It never ends at a box that began before the other one: Perfetto turns such arrows round.

    Args:
        name: name of the arrow.
        number: number of the arrow in the trace.
        start: process, row and time of its start, inside a box.
        end: process, row and time of its end.
    """
    for letter, (process, row, at_s) in (("s", start), ("f", end)):
        common: Event = {"ph": letter, "name": name, "cat": "message", "id": number}
        yield common | {"pid": process, "tid": row, "ts": _us(at_s)}


def chrome_text(events: Iterable[Event]) -> str:
    """Write events as one file.

    Processes get numbers behind those of all rows: a row with the number of its process is its main thread in Perfetto,
    and so is row 0, so rows 0 and 1 of a process 1 would be one.

    Args:
        events: the events, in any order.

    >>> text = chrome_text([box(0, 0, "", "", 0.0, 1.0), box(1, 0, "", "", 0.0, 1.0), box(1, 2, "", "", 0.0, 1.0)])
    >>> [(event["pid"], event["tid"]) for event in json.loads(text)["traceEvents"]]
    [(3, 0), (4, 0), (4, 2)]
    """
    known = list(events)
    first = 1 + max((int(str(event["tid"])) for event in known), default=0)
    numbered = [event | {"pid": first + int(str(event["pid"]))} for event in known]
    whole: Event = {"displayTimeUnit": "ms", "traceEvents": numbered}
    return json.dumps(whole, separators=(",", ":")) + "\n"


def _meta(kind: str, process: int, row: int, args: Event) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": args}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
