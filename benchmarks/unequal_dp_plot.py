"""Draw the results of ``benchmarks/unequal_dp.py``: step time of both modes over latency, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil, floor
from typing import TYPE_CHECKING

from benchmarks import svg

if TYPE_CHECKING:
    from benchmarks.unequal_dp import Result

NUM_STAGES = 3  # of what is drawn
# Kind of order, mode, whether split saves a tenth; colour, width, dashes and meaning.
_LINES = (
    ("u", "multiplex", False, "#d9730d", 2.6, "", "multiplex, any number of microbatches in flight on the edge"),
    ("u", "split", False, "#4a80c4", 2.0, "", "split, any number in flight"),
    ("u, limit", "multiplex", False, "#d9730d", 1.6, "7 4", "multiplex, at most need + 2 k microbatches on the edge"),
    ("u, limit", "split", False, "#4a80c4", 1.6, "7 4", "split, in the same memory on the edge"),
    ("u", "split", True, "#8a63b8", 1.6, "2 3", "split, any number, if it saves the edge a tenth of its time"),
)
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y = 270, 150, 44, 92  # of a panel, in pixels
_LEFT, _TOP = 66, 124
_LEGEND_HEIGHT = 22
_ROWS = {
    0.5: "Load 0.5: the edge is the busiest stage, the cloud is busy half the time",
    1.0: "Load 1: all stages have equal work",
    2.0: "Load 2: the cloud is the busiest stage, the edge is busy half the time",
}


def draw(results: Sequence[Result]) -> str:
    """Draw a row of panels for each load of the cloud, and a panel in it for each number of replicas.

    Returns:
        An SVG document: ASCII, no scripts, nothing loaded from elsewhere, a transparent background.
    """
    shown = [r for r in results if r.case.num_stages == NUM_STAGES and r.case.is_u_shaped]
    # What no order of multiplex can beat is 1.
    bounds = {(r.case.width, r.case.load, r.case.latency): r.bound for r in shown if r.mode == "multiplex"}

    def relative(r: Result, *, has_gain: bool = False) -> float:
        step = r.step_with_gain if has_gain else r.step
        return step / bounds[r.case.width, r.case.load, r.case.latency]

    values = [relative(r) for r in shown]
    values += [relative(r, has_gain=True) for r in shown if (r.case.order, r.mode) == ("u", "split")]
    low, high = floor(20 * min(values)) / 20, ceil(20 * max(values)) / 20
    widths = sorted({r.case.width for r in shown})
    per_replica = shown[0].case.per_replica
    title = (
        f"U-shaped pipeline of {NUM_STAGES} stages, one edge and k cloud replicas, simulated: step time of both modes"
    )
    notes = (
        "Nothing here is measured. 1 is the time that no order of multiplex can beat.",
        f"{per_replica} microbatches for each cloud replica. L: one-way latency, in t_f; the edge works 6 t_f for a "
        "microbatch, 2 t_f of it forward.",
    )
    body = [svg.text(_LEFT, 30, title, "title"), *(svg.text(_LEFT, 50 + 18 * i, note) for i, note in enumerate(notes))]
    for row, (load, heading) in enumerate(_ROWS.items()):
        top = _TOP + row * (_HEIGHT + _GAP_Y)
        inside = [r for r in shown if r.case.load == load]
        body.append(svg.text(_LEFT, top - 24, heading, "panel"))
        for column, width in enumerate(widths):
            panel = [r for r in inside if r.case.width == width]
            left = _LEFT + column * (_WIDTH + _GAP_X)
            body += _panel(panel, left, top, low, high, relative)
    legend_top = _TOP + len(_ROWS) * (_HEIGHT + _GAP_Y) - 30
    for index, (*_, colour, line_width, dashes, meaning) in enumerate(_LINES):
        stroke = svg.stroke(colour, line_width, dashes)
        body += svg.legend_entry(_LEFT, legend_top + index * _LEGEND_HEIGHT, stroke, meaning)
    full_width, full_height = _LEFT + len(widths) * (_WIDTH + _GAP_X), legend_top + len(_LINES) * _LEGEND_HEIGHT
    return svg.document(full_width, full_height, title, body)


def _panel(
    panel: Sequence[Result], left: int, top: int, low: float, high: float, relative: Callable[..., float]
) -> Iterator[str]:
    """Draw frame, grid and lines."""
    bottom = top + _HEIGHT
    latencies = sorted({r.case.latency for r in panel})

    def x(latency: float) -> float:
        return left + 10 + (_WIDTH - 20) * latency / latencies[-1]

    def y(value: float) -> float:
        return bottom - _HEIGHT * (value - low) / (high - low)

    yield svg.text(left + 8, top - 6, f"k = {panel[0].case.width}", "panel")
    for twentieth in range(round(20 * (high - low)) + 1):
        value = low + twentieth / 20
        yield f'<path class="grid" d="M {left} {y(value):.1f} L {left + _WIDTH} {y(value):.1f}"/>'
        yield svg.text(left - 6, y(value) + 4, f"{value:.2f}", "end")
    for latency in latencies:
        yield f'<path class="grid" d="M {x(latency):.1f} {top} L {x(latency):.1f} {bottom}"/>'
        yield svg.text(x(latency), bottom + 16, f"{latency:g}", "middle")
    yield svg.text(left + _WIDTH / 2, bottom + 33, "L, in t_f", "middle")
    yield f'<rect x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}"/>'
    for order, mode, has_gain, colour, line_width, dashes, meaning in _LINES:
        row = [r for r in panel if (r.case.order, r.mode) == (order, mode)]
        points = " L ".join(f"{x(r.case.latency):.1f} {y(relative(r, has_gain=has_gain)):.1f}" for r in row)
        stroke = svg.stroke(colour, line_width, dashes)
        yield f'<path d="M {points}" {stroke}><title>{meaning}</title></path>'
