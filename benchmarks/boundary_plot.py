"""Draw the results of ``benchmarks/boundary.py``: time over the size of the tensor, as SVG.

python -m benchmarks.boundary --plot docs/evidence/boundary.svg --from docs/evidence/boundary.json
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2

from benchmarks import svg
from benchmarks.boundary_report import RANK0, format_bytes
from benchmarks.boundary_results import KIB, Results

FLOOR = "floor"
# Of each line, in the order of the legend.
_STROKES = {
    "rank0": svg.stroke("blue", 2.4),
    "sliced": svg.stroke("orange", 2.8),
    "sliced, sharded receiver": svg.stroke("orange", 2.2, "3 3"),
    "bridge pattern": svg.stroke("purple", 1.8),
    "serial slices": svg.stroke("green", 1.8),
    FLOOR: svg.stroke("line", 2.2, "7 4"),
}
_MEANING = {
    "rank0": "rank0",
    "sliced": "sliced",
    "sliced, sharded receiver": "sliced, with sequence parallelism",
    "bridge pattern": "what Megatron's bridge does",
    "serial slices": "what FlagScale does",
    FLOOR: "least that the links allow",
}
_PANELS = (
    ("limited", (1, 4), "1 -> 4, links of 200 Mbit/s", "no gain: one rank sends it all"),
    ("limited", (2, 3), "2 -> 3, links of 200 Mbit/s", "sliced takes half the time"),
    ("loopback", (2, 3), "2 -> 3, no limit (loopback)", "small tensors: auto takes rank0"),
)
_LEAST_BYTES = 64 * KIB
_HIGHEST = 3.5  # of the axis: times the time of rank0
_WIDTH, _HEIGHT, _GAP = 228, 200, 26  # of a panel, in pixels
_LEFT, _TOP = 50, 106
_LEGEND_WIDTH, _LEGEND_HEIGHT = 252, 24  # of an entry
_WIDTH_OF_ALL = 820


def draw(results: Results) -> str:
    """Draw three of the pairs that were measured; sizes below 64 KiB are left out.

    Returns:
        An SVG document: ASCII, no scripts, nothing loaded from elsewhere, a transparent background.
    """
    title = "One tensor between two stages: time relative to rank0 (lower is better)"
    machine = f"{results.settings['machine']}; torch {results.settings['torch']}; medians"
    body = [svg.text(_LEFT, 30, title, "title"), svg.text(_LEFT, 51, machine)]
    for index, (network, sizes, heading, note) in enumerate(_PANELS):
        left = _LEFT + index * (_WIDTH + _GAP)
        lines = _lines(results, network, sizes)
        body += [svg.text(left, _TOP - 24, heading, "panel"), svg.text(left, _TOP - 8, note)]
        body += _panel(lines, left, has_labels=index == 0)
    top = _TOP + _HEIGHT + 64
    for index, (name, line) in enumerate(_STROKES.items()):
        left = _LEFT + index % 3 * _LEGEND_WIDTH
        body += svg.legend_entry(left, top + index // 3 * _LEGEND_HEIGHT, line, _MEANING[name])
    about = "; ".join(f"{heading}: {note}" for _, _, heading, note in _PANELS)
    return svg.document(
        _WIDTH_OF_ALL, top + 2 * _LEGEND_HEIGHT, title, f"Three panels, times of rank0 over sizes. {about}.", body
    )


def _lines(results: Results, network: str, sizes: tuple[int, int]) -> dict[str, list[tuple[int, float]]]:
    """Return the points of every line: bytes, and time in times of rank0."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for record in results.boundaries:
        if (record.network, record.sizes) != (network, sizes) or record.num_bytes < _LEAST_BYTES:
            continue
        unit_s = results.median_s(network, sizes, RANK0, record.num_bytes)
        if unit_s is None or record.name not in _STROKES:
            continue
        lines.setdefault(record.name, []).append((record.num_bytes, record.median_s / unit_s))
        if network == "limited" and record.name == RANK0:
            floor_s = results.floor_s(sizes, record.num_bytes)
            lines.setdefault(FLOOR, []).append((record.num_bytes, floor_s / unit_s))
    return lines


def _panel(lines: dict[str, list[tuple[int, float]]], left: float, *, has_labels: bool) -> Iterator[str]:
    """Draw frame, grid and lines; times are labelled at the first panel only."""
    bottom = _TOP + _HEIGHT
    sizes_bytes = sorted({num_bytes for line in lines.values() for num_bytes, _ in line})
    low, high = log2(sizes_bytes[0]), log2(sizes_bytes[-1])

    def x(num_bytes: int) -> float:
        return left + 16 + (_WIDTH - 32) * (log2(num_bytes) - low) / (high - low)

    def y(time: float) -> float:
        return bottom - _HEIGHT * time / _HIGHEST

    for time in svg.round_ticks(0.0, _HIGHEST, most=8):
        yield f'<path class="grid" d="M {left} {y(time):.1f} h {_WIDTH}"/>'
        if has_labels:
            yield svg.text(left - 6, y(time) + 4, f"{time:g}", "end")
    for index, num_bytes in enumerate(sizes_bytes):
        yield f'<path class="grid" d="M {x(num_bytes):.1f} {_TOP} V {bottom}"/>'
        if index % 2 == 0:
            yield svg.text(x(num_bytes), bottom + 17, format_bytes(num_bytes), "middle")
    yield svg.text(left + _WIDTH / 2, bottom + 37, "size of the tensor", "middle")
    yield f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}"/>'
    for name, line in reversed(_STROKES.items()):  # so that rank0 and sliced lie on top
        if name in lines:
            points = " L ".join(f"{x(num_bytes):.1f} {y(time):.1f}" for num_bytes, time in lines[name])
            yield f'<path d="M {points}" {line}><title>{_MEANING[name]}</title></path>'
