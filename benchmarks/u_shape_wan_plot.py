"""Draw the results of ``benchmarks/u_shape_wan.py``: time of a step over the latency, measured and simulated.

python -m benchmarks.u_shape_wan --from docs/evidence/u-shape-wan.json --output docs/evidence
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from benchmarks import svg
from benchmarks.u_shape_wan_results import OURS, REFERENCE, Row

_COLOURS = {REFERENCE: "blue", OURS: "orange"}
_MEANINGS = {
    OURS: "the plugin's planned order",
    REFERENCE: "order of MindSpeed's layerwise disaggregated training, run by the same executor",
}
_MOST_TICKS = 6
_WIDTH, _HEIGHT, _GAP = 352, 230, 26  # of a panel, in pixels
_LEFT, _TOP = 60, 112


def draw(rows: Sequence[Row], t_f_s: float) -> str:
    """Draw a panel for the least and for the largest number of stages.

    Args:
        rows: What was measured, with one number of microbatches.
        t_f_s: Unit of the rows' latencies, in seconds.

    Returns:
        An SVG document: ASCII, no scripts, nothing loaded from elsewhere, a transparent background.
    """
    stages = sorted({row.num_stages for row in rows})
    ends = sorted({stages[0], stages[-1]})
    num_steps, num_microbatches = len(rows[0].steps_s), rows[0].num_microbatches
    width, legend_top = _LEFT + len(ends) * (_WIDTH + _GAP), _TOP + _HEIGHT + 64
    title = "U-shaped pipeline over two sites: time of a step (lower is better)"
    notes = (
        f"{num_microbatches} microbatches; forward of the edge: 2 x {1e3 * t_f_s:g} ms. "
        "Compute is sleep, communication is real: gloo over an emulated line.",
        f"Points: measured, medians of {num_steps} steps with the fastest and the slowest. Lines: simulated.",
    )
    body = [svg.text(_LEFT, 28, title, "title"), *(svg.text(_LEFT, 50 + 18 * i, note) for i, note in enumerate(notes))]
    most_s = max(time_s for row in rows for time_s in (*row.steps_s, row.simulated_s))
    # The axis ends at a tick.
    tick_s = svg.round_ticks(0.0, most_s, most=_MOST_TICKS)[1]
    highest = ceil(most_s / tick_s) * tick_s
    for column, num_stages in enumerate(ends):
        panel = [row for row in rows if row.num_stages == num_stages]
        body += _panel(panel, t_f_s, highest, _LEFT + column * (_WIDTH + _GAP))
    for index, (name, meaning) in enumerate(_MEANINGS.items()):
        y = legend_top + 22 * index
        body.append(svg.dot(_LEFT + 17, y, _COLOURS[name]))
        body += svg.legend_entry(_LEFT, y, svg.stroke(_COLOURS[name], 2), meaning)
    about = f"{len(ends)} panels, seconds over the latency between the sites. {' '.join(notes)}"
    return svg.document(width, legend_top + 22 * len(_MEANINGS), title, about, body)


def _panel(rows: Sequence[Row], t_f_s: float, highest: float, left: int) -> Iterator[str]:
    bottom = _TOP + _HEIGHT
    longest = max(row.latency for row in rows) or 1.0

    def x(latency: float) -> float:
        return left + 18 + (_WIDTH - 36) * latency / longest

    def y(time_s: float) -> float:
        return bottom - _HEIGHT * time_s / highest

    yield svg.text(left, _TOP - 8, f"{rows[0].num_stages} stages", "panel")
    for tick in svg.round_ticks(0.0, highest, most=_MOST_TICKS + 1):
        yield f'<path class="grid" d="M {left} {y(tick):.1f} h {_WIDTH}"/>'
        if left == _LEFT:
            yield svg.text(left - 6, y(tick) + 4, f"{tick:g} s", "end")
    for latency in sorted({row.latency for row in rows}):
        yield f'<path class="grid" d="M {x(latency):.1f} {_TOP} v {_HEIGHT}"/>'
        yield svg.text(x(latency), bottom + 17, f"{1e3 * latency * t_f_s:g}", "middle")
    yield svg.text(left + _WIDTH / 2, bottom + 37, "latency between the sites, one way, in ms", "middle")
    yield f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}"/>'
    for name, colour in _COLOURS.items():
        shown = [row for row in rows if row.order == name]
        points = " L ".join(f"{x(row.latency):.1f} {y(row.simulated_s):.1f}" for row in shown)
        yield f'<path d="M {points}" {svg.stroke(colour, 2)}><title>{name}, simulated</title></path>'
        for row in shown:
            at = x(row.latency)
            low_y, high_y = y(min(row.steps_s)), y(max(row.steps_s))
            yield f'<path d="M {at:.1f} {low_y:.1f} V {high_y:.1f}" {svg.stroke(colour, 1.5)}/>'
            yield svg.dot(at, y(row.median_s), colour, f"{name}: {row.median_s:.2f} s")
