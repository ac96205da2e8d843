"""Draw the results of ``benchmarks/u_shape.py``: efficiency over latency and over microbatches, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import floor, log2
from typing import TYPE_CHECKING

from benchmarks import svg

if TYPE_CHECKING:
    from benchmarks.u_shape import Result

OURS, OURS_NEED = "ours, limit m", "ours, limit need+2"
REFERENCE = "reference"
INTERLEAVED, INTERLEAVED_M = "interleaved, small", "interleaved, m"
_BOUND = "bound"
# Stroke and meaning of each line, later ones on top.
_LINES = {
    _BOUND: (svg.stroke("#737b8566", 8.0), "bound: no order of the U's placement does better"),
    INTERLEAVED: (svg.stroke("#8a63b8", 2.0), "Megatron's interleaved 1F1B (another placement), smallest groups"),
    INTERLEAVED_M: (svg.stroke("#8a63b8", 1.6, "2 3"), "Megatron's interleaved 1F1B, all m microbatches in one group"),
    REFERENCE: (svg.stroke("#4a80c4", 2.0), "reference: order of MindSpeed's layerwise disaggregated training"),
    OURS: (svg.stroke("#d9730d", 2.6), "ours, any number of microbatches in flight"),
    OURS_NEED: (svg.stroke("#2f9e78", 1.6, "8 4"), "ours, at most need + 2 in flight on each stage"),
}
_LEGEND = (OURS, _BOUND, OURS_NEED, INTERLEAVED, REFERENCE, INTERLEAVED_M)  # row by row
_MICROBATCHES, _LATENCY = 16, 2.0  # what the one row of panels keeps while the other varies it
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y = 216, 190, 44, 84  # of a panel, in pixels
_LEFT, _TOP = 58, 104
_LEGEND_WIDTH, _LEGEND_HEIGHT = 510, 22  # of an entry


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Panels that share their axes, one for each number of stages.

    Attributes:
        title: Written above.
        unit: Of the horizontal axis.
        results: What is drawn.
        top: Upper end, in pixels.
        value: Value of a result on the horizontal axis.
        scale: From a value to a number that grows evenly along the axis.
    """

    title: str
    unit: str
    results: Sequence[Result]
    top: int
    value: Callable[[Result], float]
    scale: Callable[[float], float]

    @property
    def least(self) -> float:
        """Efficiency at the bottom: the last full tenth below all points."""
        return floor(10 * min(r.efficiency for r in self.results)) / 10

    def x(self, value: float) -> float:
        """Place a value, from the left end of a panel."""
        low, high = (self.scale(end(map(self.value, self.results))) for end in (min, max))
        return 10 + (_WIDTH - 20) * (self.scale(value) - low) / (high - low)

    def y(self, efficiency: float) -> float:
        """Place an efficiency."""
        return self.top + _HEIGHT * (1 - efficiency) / (1 - self.least)


def draw(results: Sequence[Result]) -> str:
    """Draw a row of panels over the latency and one over the number of microbatches, a panel for each number of stages.

    Returns:
        An SVG document: ASCII, no scripts, nothing loaded from elsewhere, a transparent background.
    """
    rows = (
        _Row(
            title=f"Over the latency L between edge and cloud, with {_MICROBATCHES} microbatches",
            unit="L, in t_f",
            results=[r for r in results if r.num_microbatches == _MICROBATCHES],
            top=_TOP,
            value=lambda r: r.latency,
            scale=lambda latency: latency,
        ),
        _Row(
            title=f"Over the number of microbatches m, with latency L = {_LATENCY:g} t_f",
            unit="m",
            results=[r for r in results if r.latency == _LATENCY],
            top=_TOP + _HEIGHT + _GAP_Y,
            value=lambda r: r.num_microbatches,
            scale=log2,
        ),
    )
    stages = list(dict.fromkeys(r.num_stages for r in results))
    width = _LEFT + max(len(stages) * (_WIDTH + _GAP_X), 2 * _LEGEND_WIDTH)
    legend_top = rows[-1].top + _HEIGHT + 58
    title = "U-shaped pipeline, simulated: share of the step in which a stage computes"
    notes = (
        "Nothing here is measured. t_f: forward of one of the edge's two parts; every stage works 6 t_f for a "
        "microbatch, a third of it forward."
    )
    body = [svg.text(_LEFT, 30, title, "title"), svg.text(_LEFT, 50, notes)]
    for row in rows:
        body.append(svg.text(_LEFT, row.top - 24, row.title, "panel"))
        for column, num_stages in enumerate(stages):
            body += _panel(row, num_stages, _LEFT + column * (_WIDTH + _GAP_X), has_labels=column == 0)
    for index, name in enumerate(_LEGEND):
        left, top = _LEFT + index % 2 * _LEGEND_WIDTH, legend_top + index // 2 * _LEGEND_HEIGHT
        body += svg.legend_entry(left, top, *_LINES[name])
    height = legend_top + len(_LEGEND) // 2 * _LEGEND_HEIGHT
    return svg.document(width, height, title, body)


def _panel(row: _Row, num_stages: int, left: int, *, has_labels: bool) -> Iterator[str]:
    """Draw frame, grid and lines; efficiencies are labelled at the first panel of a row only."""
    bottom = row.top + _HEIGHT
    yield svg.text(left + 8, row.top - 6, f"P = {num_stages}", "panel")
    for tenth in range(round(10 * row.least), 11):
        y = row.y(tenth / 10)
        yield f'<path class="grid" d="M {left} {y:.1f} L {left + _WIDTH} {y:.1f}"/>'
        if has_labels:
            yield svg.text(left - 6, y + 4, f"{10 * tenth} %", "end")
    for value in sorted({row.value(r) for r in row.results}):
        x = left + row.x(value)
        yield f'<path class="grid" d="M {x:.1f} {row.top} L {x:.1f} {bottom}"/>'
        yield svg.text(x, bottom + 16, f"{value:g}", "middle")
    yield svg.text(left + _WIDTH / 2, bottom + 33, row.unit, "middle")
    yield f'<rect x="{left}" y="{row.top}" width="{_WIDTH}" height="{_HEIGHT}"/>'
    for name, (stroke, _) in _LINES.items():
        shown = [r for r in row.results if (r.order, r.num_stages) == (OURS if name == _BOUND else name, num_stages)]
        heights = [r.efficiency * r.step / r.bound if name == _BOUND else r.efficiency for r in shown]
        points = [
            f"{left + row.x(row.value(r)):.1f} {row.y(height):.1f}" for r, height in zip(shown, heights, strict=True)
        ]
        yield f'<path d="M {" L ".join(points)}" {stroke}><title>{name}, P = {num_stages}</title></path>'
