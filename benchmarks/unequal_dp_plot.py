"""Draw the results of ``benchmarks/unequal_dp.py``: step time of both modes over latency, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil, floor

from benchmarks import svg
from benchmarks.unequal_dp_results import Result

NUM_STAGES, NUM_REPLICAS = 3, 4  # of what is drawn
# Mode, whether split saves a tenth; stroke and meaning.
_LINES = (
    ("multiplex", False, svg.stroke("orange", 2.6), "multiplex"),
    ("split", False, svg.stroke("blue", 2.2), "split, with the same memory on the edge"),
    ("split", True, svg.stroke("blue", 2.2, "3 3"), "the same, if larger microbatches save the edge a tenth"),
)
_PANELS = {
    1.0: "Edge and cloud are equally busy",
    0.5: "The edge has twice the work of a cloud stage",
}
_WIDTH, _HEIGHT, _GAP = 352, 200, 26  # of a panel, in pixels
_LEFT, _TOP = 60, 112
_LEGEND_HEIGHT = 22


def draw(results: Sequence[Result]) -> str:
    """Draw a panel for each of two loads of the cloud, of orders that keep a limit of memory on the edge.

    Returns:
        An SVG document: ASCII, no scripts, nothing loaded from elsewhere, a transparent background.
    """
    shown = [
        r for r in results if (r.case.num_stages, r.case.width, r.case.order) == (NUM_STAGES, NUM_REPLICAS, "u, limit")
    ]
    shown = [r for r in shown if r.case.load in _PANELS]
    # What no order of multiplex can beat is 1.
    bounds = {(r.case.load, r.case.latency): r.bound for r in shown if r.mode == "multiplex"}

    def relative(r: Result, has_gain: bool) -> float:
        return (r.step_with_gain if has_gain else r.step) / bounds[r.case.load, r.case.latency]

    values = [relative(r, has_gain) for r in shown for mode, has_gain, *_ in _LINES if r.mode == mode]
    low, high = floor(20 * min(values)) / 20, ceil(20 * max(values)) / 20
    title = "One edge, four cloud replicas: time of a step in both modes (lower is better)"
    notes = (
        f"Simulated: U-shaped pipeline of {NUM_STAGES} stages, {shown[0].case.per_replica} microbatches for each cloud "
        "replica. 1.00: no order of multiplex is faster.",
        f"t_f: half of the edge's forward for one microbatch. The axis of times begins at {low:.2f}, not at 0.",
    )
    body = [svg.text(_LEFT, 28, title, "title"), *(svg.text(_LEFT, 50 + 18 * i, note) for i, note in enumerate(notes))]
    for column, (load, heading) in enumerate(_PANELS.items()):
        left = _LEFT + column * (_WIDTH + _GAP)
        body.append(svg.text(left, _TOP - 8, heading, "panel"))
        body += _panel([r for r in shown if r.case.load == load], left, low, high, relative)
    legend_top = _TOP + _HEIGHT + 64
    for index, (*_, stroke, meaning) in enumerate(_LINES):
        body += svg.legend_entry(_LEFT, legend_top + index * _LEGEND_HEIGHT, stroke, meaning)
    full_width, full_height = _LEFT + len(_PANELS) * (_WIDTH + _GAP), legend_top + len(_LINES) * _LEGEND_HEIGHT
    about = f"Two panels, relative time of a step over the latency between edge and cloud. {' '.join(notes)}"
    return svg.document(full_width, full_height, title, about, body)


def _panel(
    panel: Sequence[Result], left: int, low: float, high: float, relative: Callable[[Result, bool], float]
) -> Iterator[str]:
    """Draw frame, grid and lines."""
    bottom = _TOP + _HEIGHT
    latencies = sorted({r.case.latency for r in panel})

    def x(latency: float) -> float:
        return left + 18 + (_WIDTH - 36) * latency / latencies[-1]

    def y(value: float) -> float:
        return bottom - _HEIGHT * (value - low) / (high - low)

    for value in svg.round_ticks(low, high, most=8):
        yield f'<path class="grid" d="M {left} {y(value):.1f} L {left + _WIDTH} {y(value):.1f}"/>'
        if left == _LEFT:
            yield svg.text(left - 6, y(value) + 4, f"{value:.2f}", "end")
    for latency in latencies:
        yield f'<path class="grid" d="M {x(latency):.1f} {_TOP} L {x(latency):.1f} {bottom}"/>'
        yield svg.text(x(latency), bottom + 17, f"{latency:g}", "middle")
    yield svg.text(left + _WIDTH / 2, bottom + 37, "latency between edge and cloud, one way, in t_f", "middle")
    yield f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}"/>'
    yield from svg.break_mark(left, bottom)
    for mode, has_gain, stroke, meaning in _LINES:
        points = " L ".join(f"{x(r.case.latency):.1f} {y(relative(r, has_gain)):.1f}" for r in panel if r.mode == mode)
        yield f'<path d="M {points}" {stroke}><title>{meaning}</title></path>'
