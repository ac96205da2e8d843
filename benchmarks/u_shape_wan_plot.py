"""Draw the results of ``benchmarks/u_shape_wan.py``: time of a step over the latency, measured and simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, floor
from typing import TYPE_CHECKING

from benchmarks import svg

if TYPE_CHECKING:
    from benchmarks.u_shape_wan import Row

OURS, REFERENCE = "ours", "reference"
_COLOURS = {REFERENCE: "#4a80c4", OURS: "#d9730d"}
_MEANINGS = {
    OURS: "ours, at most need + 2 microbatches in flight",
    REFERENCE: "order of MindSpeed's layerwise disaggregated training, by the same executor",
}
_TICK = 20  # t_f
_WIDTH, _HEIGHT, _GAP = 250, 230, 48
_LEFT, _TOP = 62, 100


def draw(rows: Sequence[Row], t_f_s: float) -> str:
    """Draw a panel for each number of stages.

    Args:
        rows: What was measured, with one number of microbatches.
        t_f_s: Unit of the axes, in seconds.

    Returns:
        An SVG document: ASCII, no scripts, nothing loaded from elsewhere, a transparent background.
    """
    stages = sorted({row.num_stages for row in rows})
    num_steps, num_microbatches = len(rows[0].steps_s), rows[0].num_microbatches
    width = _LEFT + max(2, len(stages)) * (_WIDTH + _GAP)
    legend_top = _TOP + _HEIGHT + 64
    title = "U-shaped pipeline between two sites: time of a step, measured"
    notes = (
        f"{num_microbatches} microbatches, t_f = {1e3 * t_f_s:g} ms; compute is sleep, communication is real: "
        "gloo over an emulated line of 1 Gbit/s.",
        f"Points: medians of {num_steps} steps, with the fastest and the slowest. Lines: simulated.",
    )
    body = [svg.text(_LEFT, 26, title, "title"), *(svg.text(_LEFT, 46 + 17 * i, note) for i, note in enumerate(notes))]
    times = [time_s / t_f_s for row in rows for time_s in (*row.steps_s, row.simulated_s)]
    low, high = floor(min(times) / _TICK) * _TICK, ceil(max(times) / _TICK) * _TICK
    for column, num_stages in enumerate(stages):
        panel = [row for row in rows if row.num_stages == num_stages]
        body += _panel(panel, t_f_s, (low, high), _LEFT + column * (_WIDTH + _GAP))
    for index, (name, meaning) in enumerate(_MEANINGS.items()):
        y = legend_top + 20 * index
        body.append(f'<path d="M {_LEFT} {y} h 34" {svg.stroke(_COLOURS[name], 2)}/>')
        body.append(f'<circle cx="{_LEFT + 17}" cy="{y}" r="3.5" fill="{_COLOURS[name]}"/>')
        body.append(svg.text(_LEFT + 44, y + 4, meaning))
    height = legend_top + 20 * len(_MEANINGS)
    return svg.document(width, height, title, body)


def _panel(rows: Sequence[Row], t_f_s: float, ends: tuple[float, float], left: int) -> Iterator[str]:
    bottom, (low, high) = _TOP + _HEIGHT, ends
    longest = max(row.latency for row in rows) or 1.0

    def x(latency: float) -> float:
        return left + 14 + (_WIDTH - 28) * latency / longest

    def y(time_s: float) -> float:
        return bottom - _HEIGHT * (time_s / t_f_s - low) / (high - low)

    yield svg.text(left + 6, _TOP - 6, f"P = {rows[0].num_stages}", "panel")
    for tick in range(int(low), int(high) + 1, _TICK):
        at = y(tick * t_f_s)
        yield f'<path class="grid" d="M {left} {at:.1f} h {_WIDTH}"/>'
        if left == _LEFT:
            yield svg.text(left - 6, at + 4, f"{tick} t_f", "end")
    for latency in sorted({row.latency for row in rows}):
        yield f'<path class="grid" d="M {x(latency):.1f} {_TOP} v {_HEIGHT}"/>'
        yield svg.text(x(latency), bottom + 16, f"{latency:g}", "middle")
    yield svg.text(left + _WIDTH / 2, bottom + 33, "one-way latency L, in t_f", "middle")
    yield f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}"/>'
    for name, colour in _COLOURS.items():
        shown = [row for row in rows if row.order == name]
        points = " L ".join(f"{x(row.latency):.1f} {y(row.simulated_s):.1f}" for row in shown)
        yield f'<path d="M {points}" {svg.stroke(colour, 2)}><title>{name}, simulated</title></path>'
        for row in shown:
            at = x(row.latency)
            low_y, high_y = y(min(row.steps_s)), y(max(row.steps_s))
            yield f'<path d="M {at:.1f} {low_y:.1f} V {high_y:.1f}" {svg.stroke(colour, 1.5)}/>'
            yield (
                f'<circle cx="{at:.1f}" cy="{y(row.median_s):.1f}" r="3.5" fill="{colour}">'
                f"<title>{name}: {row.median_s / t_f_s:.1f} t_f</title></circle>"
            )
