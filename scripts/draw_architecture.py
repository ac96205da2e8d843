"""The picture of docs/how/architecture.md: the packages in their layers, and what they touch outside."""

from __future__ import annotations

from collections.abc import Iterator

from tests.rules.import_rules import INNER_LAYERS, LAYERS, PURE_PARTS
from vtp_plugin.report.pictures import svg
from vtp_plugin.report.pictures.arrange import STYLE, heads, legend_entry, path

# From the highest layer to the lowest: what a package is for, in what fits into its box.
_ROWS: tuple[dict[str, str], ...] = (
    {"cli": "vtp ..., or python -m vtp_plugin ..."},
    {"bridge": "modules", "adapters": "LoRA", "edge": "its key", "functional": "hand-written steps"},
    {"api": "apply(), revert()"},
    {"patches": "what is replaced in Megatron, and why: the only code that imports it"},
    {"session": "what is known between apply() and revert()"},
    {"elastic": "a run that loses devices: test, remember, decide, join or wait"},
    {"runtime": "the only code that communicates: health, comm, bridges, step"},
    {"tune": "which layout suits these machines", "platform": "NVIDIA, Ascend or CPU"},
    {"config": "what the user asked for, and what follows from it"},
    {"certify": "what is shown", "leak": "what a cut tells", "checkpoint": "on disk"},
    {"report": "pictures", "host": "Megatron known"},
    {"trace": "what ranks record of their steps, and where their time went"},
    {"plan": "who is where, what crosses, when", "link": "between sites, for nobody else"},
    {"util": "log, texts, files", "errors": "one line each"},
)
_NOT_DRAWN = {"__init__", "__main__", "can_start"}
# What lies outside, beside the row of the package that touches it; on the left what the plugin is put into.
_LEFT = {"api": "your script", "patches": "Megatron"}
_RIGHT = {"elastic": "devices", "runtime": "other ranks", "checkpoint": "disk"}
_MARGIN, _GAP, _HEIGHT, _STEP = 16, 10, 44, 56
_OUTSIDE, _ARROW, _INSIDE = 86, 40, 516
_STYLE = f"{STYLE}\nrect.hidden {{ fill: #4a6fa5; }}\ntext.outside {{ font-size: 14px; text-anchor: middle; }}"


def draw_architecture() -> str:
    """Draw the packages.

    Raises:
        ValueError: a package has no box, or a box no package, or one lies below what it may not import.
    """
    _require_all()
    left = _MARGIN + _OUTSIDE + _ARROW
    body = [heads()]
    for index, row in enumerate(_ROWS):
        top = _MARGIN + index * _STEP
        width = (_INSIDE - _GAP * (len(row) - 1)) / len(row)
        for place, (name, what) in enumerate(row.items()):
            body += _box(left + place * (width + _GAP), top, width, name, what)
            if name in _LEFT:
                body += _outside(_MARGIN, top, _LEFT[name])
            if name in _RIGHT:
                body += _outside(left + _INSIDE + _ARROW, top, _RIGHT[name])
        middle, right = top + _HEIGHT // 2, left + _INSIDE
        if _LEFT.keys() & row.keys():
            is_called = "api" in row
            ends = [(_MARGIN + _OUTSIDE + 2, middle), (left - 3, middle)]
            body.append(path(ends if is_called else ends[::-1], "transfer"))
        if _RIGHT.keys() & row.keys():
            body.append(path([(right + 2, middle), (right + _ARROW - 3, middle)], "transfer"))
    bottom = _MARGIN + len(_ROWS) * _STEP + 4
    body += legend_entry(bottom, "hidden", "needs only the standard library: it can be planned and proved anywhere")
    body += legend_entry(bottom + 24, "leader", "may need torch; a box of two colours holds packages of both kinds")
    width = left + _INSIDE + _ARROW + _OUTSIDE + _MARGIN
    title = "The packages of vtp_plugin, in their layers"
    rows = "; ".join(", ".join(row) for row in _ROWS)
    about = f"From the highest layer to the lowest; each may import those below it: {rows}."
    return svg.document(width, bottom + 48 + _MARGIN, title=title, about=about, style=_STYLE, body=body)


def _require_all() -> None:
    known = {part for layer in LAYERS for part in layer} - _NOT_DRAWN
    height = {part: number for number, layer in enumerate(LAYERS) for part in layer}
    drawn = [name for row in _ROWS for name in row]
    if known != set(drawn) or len(drawn) != len(known):
        raise ValueError(f"not drawn once: {sorted(known ^ set(drawn)) or drawn}; see _ROWS in {__file__}")
    lows = [min(height[name] for name in row) for row in _ROWS]
    highs = [max(height[name] for name in row) for row in _ROWS]
    if any(low <= high for low, high in zip(lows, highs[1:], strict=False)):
        raise ValueError(f"a row is not above the next one: {list(zip(lows, highs, strict=True))}; see {__file__}")


def _box(left: float, top: int, width: float, name: str, what: str) -> Iterator[str]:
    """Draw a package: blue as far as its packages are pure."""
    share = _pure_share(name)
    for kind, part in (("leader", 1.0), ("member", share)):
        if part:
            yield svg.element("rect", kind=kind, x=left, y=top, width=width * part, height=_HEIGHT, rx=6)
    yield svg.text(round(left + width / 2), top + 18, name, "rank")
    yield svg.text(round(left + width / 2), top + 35, what, "place")


def _pure_share(name: str) -> float:
    if name in PURE_PARTS:
        return 1.0
    inner = {f"{name}.{part}" for layer in INNER_LAYERS.get(name, ()) for part in layer}
    return len(inner & PURE_PARTS) / len(inner) if inner else 0.0


def _outside(left: int, top: int, name: str) -> Iterator[str]:
    yield svg.element("rect", kind="frame", x=left, y=top, width=_OUTSIDE, height=_HEIGHT, rx=6)
    yield svg.text(left + _OUTSIDE // 2, top + 27, name, "outside")
