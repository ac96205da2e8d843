"""Draw the results of ``benchmarks/boundary.py``: time over tensor size, one panel per pair of sizes, as SVG.

python -m benchmarks.boundary --plot docs/boundary.svg --from docs/boundary.json
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, floor, log2, log10

from benchmarks import svg
from benchmarks.boundary_report import RANK0, SLICED, format_bytes
from benchmarks.boundary_results import KIB, ONE_LINK, Results

FLOOR, CUT = "floor", "sliced, cut all the same"
# Of each line, in the order of the legend.
_STROKES = {
    "bridge pattern": svg.stroke("#8a63b8", 2.0),
    "rank0": svg.stroke("#4a80c4", 2.0),
    "serial slices": svg.stroke("#2f9e78", 2.0),
    "sliced": svg.stroke("#d9730d", 2.6),
    "sliced, sharded receiver": svg.stroke("#d9730d", 1.6, "2 3"),
    CUT: svg.stroke("#d9730d", 1.6, "8 3 2 3"),
    FLOOR: svg.stroke("#737b85", 1.6, "7 4"),
}
_MEANING = {
    "bridge pattern": "bridge pattern: Megatron's BridgeCommunicator, imitated over gloo",
    "rank0": "rank0: leader to leader, then broadcast",
    "serial slices": "serial slices: one after another, receiver sequence-parallel (FlagScale)",
    "sliced": "sliced: every link carries its share, all at once",
    "sliced, sharded receiver": "sliced, receiver sequence-parallel: no finish",
    CUT: "sliced, cut and completed also where both sizes are equal",
    FLOOR: "floor: bytes of the busiest link over the goodput of one",
}
_LEAST_BYTES = 64 * KIB
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y = 216, 214, 44, 64  # of a panel, in pixels
_LEFT, _TOP = 58, 92
_LEGEND_WIDTH, _LEGEND_HEIGHT = 510, 22  # of an entry
_LEAST_WIDTH = _LEFT + 2 * _LEGEND_WIDTH


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """One pair of sizes on one network, and its scales: both logarithmic.

    Attributes:
        title: Written above.
        notes: Lines written in the lower right corner.
        left: Of the upper left corner, in pixels.
        top: The same.
        lines: Name of a line -> its points (bytes, seconds).
        bytes_range: Least and most bytes drawn.
        time_range: Powers of ten of the seconds at the bottom and at the top.
    """

    title: str
    notes: tuple[str, ...]
    left: float
    top: float
    lines: dict[str, list[tuple[int, float]]]
    bytes_range: tuple[int, int]
    time_range: tuple[int, int]

    def x(self, num_bytes: int) -> float:
        """Place a tensor size."""
        low, high = (log2(value) for value in self.bytes_range)
        return self.left + 10 + (_WIDTH - 20) * (log2(num_bytes) - low) / (high - low)

    def y(self, time_s: float) -> float:
        """Place a time."""
        low, high = self.time_range
        return self.top + _HEIGHT * (high - log10(time_s)) / (high - low)


def draw(results: Results) -> str:
    """Draw a row of panels per network; sizes below 64 KiB are left out.

    Returns:
        An SVG document: ASCII, no scripts, nothing loaded from elsewhere, a transparent background.
    """
    rows = [panels for row, network in enumerate(_networks(results)) if (panels := _row(results, network, row))]
    width = max(_LEFT + max(len(panels) for panels in rows) * (_WIDTH + _GAP_X), _LEAST_WIDTH)
    legend_top = _TOP + len(rows) * (_HEIGHT + _GAP_Y) + 6
    names = [name for name in _STROKES if any(name in panel.lines for panels in rows for panel in panels)]
    height = legend_top + (len(names) + 1) // 2 * _LEGEND_HEIGHT + 10
    title = "One tensor over a boundary between two stages: time over its size"
    body = [svg.text(_LEFT, 30, title, "title"), svg.text(_LEFT, 49, _subtitle(results))]
    for network, panels in zip(_networks(results), rows, strict=True):
        body.append(svg.text(_LEFT, panels[0].top - 24, _network_text(results, network), "panel"))
        for index, panel in enumerate(panels):
            body += _panel(panel, has_labels=index == 0)
    for index, name in enumerate(names):
        left, top = _LEFT + index % 2 * _LEGEND_WIDTH, legend_top + index // 2 * _LEGEND_HEIGHT
        body += svg.legend_entry(left, top, _STROKES[name], _MEANING[name])
    return svg.document(width, height, title, body)


def _networks(results: Results) -> list[str]:
    return list(dict.fromkeys(record.network for record in results.boundaries))


def _network_text(results: Results, network: str) -> str:
    return f"Links of {results.settings['links']}" if network == "limited" else "Loopback without limits"


def _subtitle(results: Results) -> str:
    return f"{results.settings['machine']}; torch {results.settings['torch']}; medians"


def _row(results: Results, network: str, row: int) -> list[_Panel]:
    records = [r for r in results.boundaries if r.network == network and r.num_bytes >= _LEAST_BYTES]
    records = [r for r in records if r.name != ONE_LINK]
    sizes_bytes = sorted({r.num_bytes for r in records})
    times_s = [r.median_s for r in records]
    if network == "limited":
        times_s += [results.floor_s(r.sizes, r.num_bytes) for r in records]
    panels = []
    for column, sizes in enumerate(dict.fromkeys(r.sizes for r in records)):
        lines: dict[str, list[tuple[int, float]]] = {}
        for record in records:
            if record.sizes == sizes:
                lines.setdefault(record.name, []).append((record.num_bytes, record.median_s))
        if network == "limited":
            lines[FLOOR] = [(num_bytes, results.floor_s(sizes, num_bytes)) for num_bytes in sizes_bytes]
        panels.append(
            _Panel(
                title=f"{sizes[0]} -> {sizes[1]}",
                left=_LEFT + column * (_WIDTH + _GAP_X),
                top=_TOP + 16 + row * (_HEIGHT + _GAP_Y + 16),
                notes=_notes(results, sizes) if network == "limited" else (),
                lines=lines,
                bytes_range=(sizes_bytes[0], sizes_bytes[-1]),
                time_range=(floor(log10(min(times_s))), ceil(log10(max(times_s)))),
            )
        )
    return panels


def _notes(results: Results, sizes: tuple[int, int]) -> tuple[str, ...]:
    """Say what a logarithmic scale hides: how far from the floor the two strategies are."""
    num_bytes = max(r.num_bytes for r in results.boundaries if r.sizes == sizes and r.name == RANK0)
    floor_s = results.floor_s(sizes, num_bytes)
    medians_s = {name: results.median_s("limited", sizes, name, num_bytes) for name in (RANK0, SLICED)}
    texts = [f"{name} {median_s / floor_s:.2f}" for name, median_s in medians_s.items() if median_s is not None]
    return f"{format_bytes(num_bytes)} over the floor:", ", ".join(texts)


def _panel(panel: _Panel, *, has_labels: bool) -> Iterator[str]:
    """Draw frame, grid and lines; times are labelled at the first panel of a row only."""
    bottom, right = panel.top + _HEIGHT, panel.left + _WIDTH
    yield svg.text(panel.left + 8, panel.top - 6, panel.title, "panel")
    for power in range(panel.time_range[0], panel.time_range[1] + 1):
        y = panel.y(10.0**power)
        yield f'<path class="grid" d="M {panel.left} {y:.1f} L {right} {y:.1f}"/>'
        if has_labels:
            yield svg.text(panel.left - 6, y + 4, _format_power(power), "end")
    sizes_bytes = sorted({num_bytes for line in panel.lines.values() for num_bytes, _ in line}, reverse=True)
    for index, num_bytes in enumerate(sizes_bytes):
        x = panel.x(num_bytes)
        yield f'<path class="grid" d="M {x:.1f} {panel.top} L {x:.1f} {bottom}"/>'
        if index % 2 == 0:
            yield svg.text(x, bottom + 16, format_bytes(num_bytes), "middle")
    for index, note in enumerate(reversed(panel.notes)):
        yield svg.text(right - 6, bottom - 8 - 16 * index, note, "end")
    yield f'<rect x="{panel.left}" y="{panel.top}" width="{_WIDTH}" height="{_HEIGHT}"/>'
    # In the order of the legend, so that `sliced` and the floor lie on top.
    for name, stroke in _STROKES.items():
        if name in panel.lines:
            points = [f"{panel.x(num_bytes):.1f} {panel.y(time_s):.1f}" for num_bytes, time_s in panel.lines[name]]
            yield f'<path d="M {" L ".join(points)}" {stroke}><title>{name}, {panel.title}</title></path>'


def _format_power(power: int) -> str:
    """Write a power of ten of seconds: -4 is 0.1 ms."""
    return f"{10**power:g} s" if power >= 0 else f"{10.0 ** (power + 3):g} ms"
