"""Draw a simulated step: as text, as a picture, and as a trace for Perfetto or Chrome."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Sequence

from vtp_plugin.plan.schedule.cost.simulator import Span, Timeline
from vtp_plugin.plan.schedule.order.actions import Action, Op, channel_label
from vtp_plugin.report.pictures import svg
from vtp_plugin.report.pictures.colours import COLOURS, LATER_CHUNKS
from vtp_plugin.util.text import in_digits

# Lengths in letters.
_LEAST_LETTERS = 2  # of a forward: of a single one nobody can tell whether it is a forward
_CUT = " ~ "  # stands for the middle of a step that is too long for a line
# Lengths in pixels.
_ROW_HEIGHT, _BOX_HEIGHT = 40, 24
_MARGIN = 20
_PERCENT_WIDTH = 52  # at the right of a row
_DIGIT_WIDTH = 6  # of the number of a microbatch

# Meaning and colour.
_KINDS = {
    "forward-first": ("forward, first chunk", COLOURS["forward"]),
    "forward-later": ("forward, later chunk", LATER_CHUNKS["forward"]),
    "backward-first": ("backward, first chunk", COLOURS["backward"]),
    "backward-later": ("backward, later chunk", LATER_CHUNKS["backward"]),
    "weights-first": ("gradients of weights, first chunk", COLOURS["weights"]),
    "weights-later": ("gradients of weights, later chunk", LATER_CHUNKS["weights"]),
}
_RULES = "\n".join(f"rect.{kind} {{ fill: {colour}; }}" for kind, (_, colour) in _KINDS.items())
_STYLE = f"""\
text.number {{ font-size: 10px; fill: #ffffff; text-anchor: middle; }}
text.tick {{ text-anchor: middle; }}
rect.row {{ fill: #737b85; fill-opacity: 0.12; }}
{_RULES}
line.message, line.sample {{ stroke: $line; stroke-opacity: 0.8; }}
line.tick {{ stroke: $line; stroke-opacity: 0.4; }}"""
_FILLINGS = {"forward": "-", "backward": "=", "weights": "+"}
_MESSAGE = "message on its way"
_LEGEND = """\
Time runs from left to right. 0F3---: part 0 of the model runs the forward of microbatch 3; 0B3===: its backward; where
that is too long, the last digit of the microbatch; dots: the stage is idle."""
_SPLIT_LEGEND = """
0I3===: the first half of a split backward, the gradient of the input; 0W3+++: the gradients of the weights."""


def draw_text(timeline: Timeline, *, columns: int = 120) -> str:
    """Draw one line for each worker, time from left to right, and a legend.

    A compute shows its action, or the last digit of its microbatch where the action is too long, padded to its duration
    with `-` (forward), `=` (backward) or `+` (gradients of weights alone). A dot is idle time. Of a step with too many
    microbatches for that, only the first and the last part are drawn.

    Args:
        timeline: the timeline to draw.
        columns: width of the time axis, in letters.

    >>> from vtp_plugin.plan.schedule.cost.costs import uniform_costs
    >>> from vtp_plugin.plan.schedule.make.u_shape import one_f_one_b
    >>> from vtp_plugin.plan.schedule.cost.simulator import simulate
    >>> schedule = one_f_one_b(2, 2)
    >>> for row in draw_text(simulate(schedule, uniform_costs(schedule.placement)), columns=36).splitlines()[:2]:
    ...     print(row)
    stage 0 |0F0-0F1-........0B0=====....0B1=====|
    stage 1 |....1F0-1B0=====1F1-1B1=====........|
    """
    labels = _labels(timeline)
    windows = _windows(timeline, columns)
    lines: list[str] = []
    for label, spans in zip(labels, timeline.spans, strict=True):
        row = _CUT.join(_row(spans, *window) for window in windows)
        lines.append(f"{label:{max(map(len, labels))}} |{row}|")
    lines.append(_LEGEND + (_SPLIT_LEGEND if _is_split(timeline) else ""))
    if len(windows) > 1:
        length = in_digits(windows[0][1])
        of_all = f"the last {length} of {in_digits(timeline.makespan, 6)} are drawn"
        lines.append(f"Only the first {length} and {of_all}; --output step.svg draws all.")
    return "\n".join(lines)


def _windows(timeline: Timeline, columns: int) -> list[tuple[float, float, int]]:
    """Choose what is drawn in so many letters: begin, end and letters of each part.

    The whole step, if a forward of the busiest worker gets enough letters; else as much of both ends as gives it room
    for the longest name.
    """
    whole = (0.0, timeline.makespan, columns)
    busiest = timeline.spans[timeline.busy.index(max(timeline.busy))]
    lengths = [span.end - span.start for span in busiest if span.action.op is Op.F and span.end > span.start]
    if not lengths or statistics.median(lengths) * columns >= _LEAST_LETTERS * timeline.makespan:
        return [whole]
    letters = (columns - len(_CUT)) // 2
    longest = max(len(str(span.action)) for spans in timeline.spans for span in spans)
    length = letters * statistics.median(lengths) / (longest + 1)
    return [(0.0, length, letters), (timeline.makespan - length, timeline.makespan, letters)]


def _row(spans: Sequence[Span], begin: float, end: float, columns: int) -> str:
    """Draw what one worker does from `begin` to `end`."""
    scale = columns / (end - begin) if end > begin else 0.0
    row = ["."] * columns
    for span in spans:
        left = max(0, round((span.start - begin) * scale))
        right = min(columns, round((span.end - begin) * scale))
        if right > left:
            row[left:right] = _cell(span.action, right - left)
    return "".join(row)


def summarize(timeline: Timeline, *, unit: str = "") -> str:
    """Say in one line how long the step takes, and for what share of it the stages compute.

    Args:
        timeline: the timeline to sum up.
        unit: unit of its times.

    >>> from vtp_plugin.plan.schedule.cost.costs import uniform_costs
    >>> from vtp_plugin.plan.schedule.make.u_shape import one_f_one_b
    >>> from vtp_plugin.plan.schedule.cost.simulator import simulate
    >>> schedule = one_f_one_b(2, 2)
    >>> summarize(simulate(schedule, uniform_costs(schedule.placement)), unit="ms")
    'simulated step 9 ms; the stages compute 66.7 % of it on average, the busiest (stage 0) 66.7 %'
    """
    shares, step = timeline.utilization, timeline.makespan
    if unit == "ms" and step >= 1000:
        step, unit = step / 1000, "s"
    busiest = shares.index(max(shares))
    return (
        f"simulated step {in_digits(step, 6)}{f' {unit}' if unit else ''}; the stages compute "
        f"{100 * sum(shares) / len(shares):.1f} % of it on average, the busiest "
        f"({timeline.placement.label(busiest)}) {100 * shares[busiest]:.1f} %"
    )


def draw_svg(timeline: Timeline, *, title: str, unit: str = "", width: int = 660) -> str:
    """Draw one row for each worker: computes as boxes with the number of their microbatch, messages as thin lines.

    The number at the right of a row is the share of the step in which the worker computes.

    Args:
        timeline: the timeline to draw.
        title: heading of the picture.
        unit: unit of the times.
        width: width of the time axis, in pixels.

    Returns:
        An SVG document (see :mod:`vtp_plugin.report.pictures.svg`). Every compute has a title with its action and
        times. Equal timelines give equal text.
    """
    scale = width / timeline.makespan if timeline.makespan else 0.0
    labels = _labels(timeline)
    left = _MARGIN + round(max(map(len, labels)) * svg.LETTER_WIDTH) + 8
    full_width = left + width + _PERCENT_WIDTH + _MARGIN // 2
    room = full_width - 2 * _MARGIN
    head = [(line, "title") for line in textwrap.wrap(title, int(room / svg.TITLE_LETTER_WIDTH))]
    head += [(line, "") for line in textwrap.wrap(summarize(timeline, unit=unit), int(room / svg.LETTER_WIDTH))]
    legend, y = _legend(timeline, _MARGIN + len(head) * svg.LINE_HEIGHT - 2, full_width - _MARGIN)
    top = y + 16
    bottom = top + len(labels) * _ROW_HEIGHT
    body = [svg.text(_MARGIN, _MARGIN + 8 + i * svg.LINE_HEIGHT, line, kind) for i, (line, kind) in enumerate(head)]
    body += [*legend, *svg.ticks(timeline.makespan, scale, left, top - 6, bottom, unit)]
    for worker, (label, share) in enumerate(zip(labels, timeline.utilization, strict=True)):
        y = top + worker * _ROW_HEIGHT
        body.append(svg.text(_MARGIN, y + 16, label))
        body.append(svg.element("rect", kind="row", x=left, y=y, width=width, height=_BOX_HEIGHT))
        body.append(svg.text(left + width + 8, y + 16, f"{100 * share:.0f} %"))
    body += _messages(timeline, left, scale, top)
    body += [box for worker in range(len(labels)) for box in _boxes(timeline, worker, left, scale, top)]
    about = (
        f"Rows of boxes over time: {', '.join(labels)}. A box is the forward or the backward of a microbatch"
        f"{', or one of the two parts of a backward' if _is_split(timeline) else ''}. "
        f"{summarize(timeline, unit=unit)}."
    )
    return svg.document(full_width, bottom + 30, title=title, about=about, style=_STYLE, body=body)


def chrome_trace(timeline: Timeline, *, unit_s: float = 1.0) -> str:
    """Write the step as a trace in Chrome's JSON format.

    Workers are the rows of one process, channels those of another.

    Args:
        timeline: the timeline to write.
        unit_s: unit of its times, in seconds.
    """
    events = [svg.name_process(process, name) for process, name in enumerate(("stages", "channels"))]
    for worker, (label, spans) in enumerate(zip(_labels(timeline), timeline.spans, strict=True)):
        events += svg.name_row(0, worker, label)
        for span in spans:
            times = unit_s * span.start, unit_s * span.end
            events.append(svg.box(0, worker, str(span.action), pass_name(span.action), *times))
    names = {channel: channel_label(timeline.placement, channel) for channel, _ in timeline.bytes_by_channel}
    for number, flight in enumerate(timeline.flights):
        times = unit_s * flight.start, unit_s * flight.end
        events += svg.flight(1, names[flight.channel], str(flight.action), number, *times)
    return svg.chrome_text(events)


def _labels(timeline: Timeline) -> list[str]:
    return [timeline.placement.label(worker) for worker in range(timeline.placement.num_workers)]


def _cell(action: Action, length: int) -> str:
    """Write a compute in so many letters."""
    name = str(action)
    if len(name) > length:
        name = name[-1]
    return name.ljust(length, _FILLINGS[pass_name(action)])[:length]


def pass_name(action: Action) -> str:
    """Name what a compute is: a forward, a backward or its first half, or the gradients of weights."""
    if action.op is Op.W:
        return "weights"
    return "backward" if action.op.is_backward else "forward"


def _is_split(timeline: Timeline) -> bool:
    return any(span.action.op is Op.W for spans in timeline.spans for span in spans)


def _kind(timeline: Timeline, span: Span) -> str:
    """Return the CSS class of a compute, a key of `_KINDS`."""
    return f"{pass_name(span.action)}-{'later' if timeline.placement.chunk(span.action.vstage) else 'first'}"


def _boxes(timeline: Timeline, worker: int, left: int, scale: float, top: int) -> Iterator[str]:
    y = top + worker * _ROW_HEIGHT
    for span in timeline.spans[worker]:
        x, box_width = left + span.start * scale, (span.end - span.start) * scale
        # The gap keeps neighbours apart without strokes.
        title = svg.title_of(f"{span.action}: {span.start:.6g} to {span.end:.6g}")
        shape = {"x": x, "y": y, "width": max(0.5, box_width - 1), "height": _BOX_HEIGHT, "rx": 2}
        yield svg.element("rect", title, kind=_kind(timeline, span), **shape)
        number = str(span.action.microbatch)
        if box_width >= _DIGIT_WIDTH * len(number) + 2:
            yield svg.text(x + box_width / 2, y + 16, number, "number")


def _messages(timeline: Timeline, left: int, scale: float, top: int) -> Iterator[str]:
    for flight in timeline.flights:
        down = flight.channel.dst > flight.channel.src
        y1 = top + flight.channel.src * _ROW_HEIGHT + (_BOX_HEIGHT if down else 0)
        y2 = top + flight.channel.dst * _ROW_HEIGHT + (0 if down else _BOX_HEIGHT)
        x1, x2 = left + flight.start * scale, left + flight.end * scale
        yield svg.element("line", kind="message", x1=x1, y1=y1, x2=x2, y2=y2)


def _legend(timeline: Timeline, y: int, right: int) -> tuple[list[str], int]:
    """Return the marks in the picture with their meanings, and the height below them."""
    used = {_kind(timeline, span) for spans in timeline.spans for span in spans}
    entries = {kind: text for kind, (text, _) in _KINDS.items() if kind in used}
    if timeline.flights:
        entries["message"] = _MESSAGE
    entries["row"] = "idle; at the right: share of the step that is computed"

    def mark(kind: str, x: int, y: int) -> str:
        if kind == "message":
            return svg.element("line", kind="sample", x1=x, y1=y + 10, x2=x + 14, y2=y)
        return svg.element("rect", kind=f"sample {kind}", x=x, y=y, width=14, height=12, rx=2)

    return svg.legend(entries.items(), mark, _MARGIN, y, right)
