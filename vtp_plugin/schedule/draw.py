"""Draw a simulated step: as text, as a picture, and as a trace for Perfetto or Chrome."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping

from vtp_plugin.schedule.actions import Action, Op
from vtp_plugin.schedule.channels import channel_label
from vtp_plugin.schedule.simulate import Span, Timeline

# Lengths in pixels.
_ROW_HEIGHT, _BOX_HEIGHT = 40, 24
_LEFT, _LEFT_OF_REPLICAS, _TOP, _MARGIN = 76, 136, 84, 24
_MIN_LABEL_WIDTH = 15  # of a box that has room for the number of its microbatch
_LEGEND_STEP = 160
_MAX_TICKS = 12

# The background is the reader's: the grey of the texts on it stands out from white (4.3 : 1) and from black (4.9 : 1).
_STYLE = """\
text { font-family: Helvetica, Arial, sans-serif; font-size: 12px; fill: #737b85; }
text.title { font-size: 15px; font-weight: bold; }
text.number { font-size: 11px; fill: #ffffff; text-anchor: middle; }
text.tick { text-anchor: middle; }
rect.row { fill: #737b85; fill-opacity: 0.12; }
rect.forward-first { fill: #3f6ca8; }
rect.forward-later { fill: #2f7d78; }
rect.backward-first { fill: #b4540a; }
rect.backward-later { fill: #9a3f73; }
line.message { stroke: #737b85; stroke-opacity: 0.6; }
line.tick { stroke: #737b85; stroke-opacity: 0.3; }"""
_KINDS = {
    "forward-first": "forward, first chunk",
    "forward-later": "forward, later chunk",
    "backward-first": "backward, first",
    "backward-later": "backward, later",
}


def draw_text(timeline: Timeline, *, columns: int = 120) -> str:
    """Draw one line for each worker, time from left to right.

    A compute is written as its action, or where that is too long as the last digit of its microbatch, and filled up
    with `-` (forward) or `=` (backward) as long as it lasts; a dot is idle time. The last line sums up the step.

    Args:
        timeline: What to draw.
        columns: Width of the time axis, in letters.

    >>> from vtp_plugin.schedule.costs import uniform_costs
    >>> from vtp_plugin.schedule.generate import one_f_one_b
    >>> from vtp_plugin.schedule.simulate import simulate
    >>> schedule = one_f_one_b(2, 2)
    >>> print(draw_text(simulate(schedule, uniform_costs(schedule.placement)), columns=36))
    stage 0 |0F0-0F1-........0B0=====....0B1=====|
    stage 1 |....1F0-1B0=====1F1-1B1=====........|
    step 9, bubble 33.3 %
    """
    scale = columns / timeline.makespan if timeline.makespan else 0.0
    labels = _labels(timeline)
    lines: list[str] = []
    for label, spans in zip(labels, timeline.spans, strict=True):
        row = ["."] * columns
        for span in spans:
            left, right = round(span.start * scale), round(span.end * scale)
            row[left:right] = _cell(span.action, right - left)
        lines.append(f"{label:{max(map(len, labels))}} |{''.join(row)}|")
    return "\n".join([*lines, _summary(timeline)])


def draw_svg(timeline: Timeline, *, title: str, width: int = 1200) -> str:
    """Draw one row for each worker: computes as boxes with the number of their microbatch, messages as thin lines.

    Args:
        timeline: What to draw.
        title: Heading.
        width: Of the time axis, in pixels.

    Returns:
        An SVG document: ASCII, no scripts, nothing loaded from elsewhere, a transparent background. Every compute has a
        title with its action and times. The same timeline always gives the same text.
    """
    scale = width / timeline.makespan if timeline.makespan else 0.0
    labels = _labels(timeline)
    left = _LEFT_OF_REPLICAS if timeline.placement.num_workers > timeline.placement.num_stages else _LEFT
    bottom = _TOP + len(labels) * _ROW_HEIGHT
    full_width, full_height = left + width + _MARGIN, bottom + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{full_width}" height="{full_height}" '
        f'viewBox="0 0 {full_width} {full_height}" role="img">',
        f"<title>{_escape(title)}</title>",
        f"<style>\n{_STYLE}\n</style>",
        f'<text class="title" x="{_MARGIN}" y="28">{_escape(title)}</text>',
        f'<text x="{_MARGIN}" y="48">{_summary(timeline)}</text>',
        *_legend(timeline),
        *_axis(timeline, left, scale, bottom),
    ]
    for worker, label in enumerate(labels):
        y = _TOP + worker * _ROW_HEIGHT
        lines.append(f'<text x="{_MARGIN}" y="{y + 16}">{label}</text>')
        lines.append(f'<rect class="row" x="{left}" y="{y}" width="{width}" height="{_BOX_HEIGHT}"/>')
    lines += _messages(timeline, left, scale)
    lines += [box for worker in range(len(labels)) for box in _boxes(timeline, worker, left, scale)]
    return "\n".join([*lines, "</svg>"]) + "\n"


def chrome_trace(timeline: Timeline) -> str:
    """Write the step as a trace in Chrome's JSON format, which ui.perfetto.dev opens.

    Workers are the threads of one process, channels those of another. The timeline must be in seconds.
    """
    events: list[Mapping[str, object]] = []
    events += [_meta("process_name", pid, 0, name) for pid, name in enumerate(("stages", "channels"))]
    for worker, (label, spans) in enumerate(zip(_labels(timeline), timeline.spans, strict=True)):
        events.append(_meta("thread_name", 0, worker, label))
        for span in spans:
            pass_name = "backward" if span.action.op is Op.B else "forward"
            events.append(
                {"ph": "X", "name": str(span.action), "cat": pass_name, "pid": 0, "tid": worker}
                | {"ts": _us(span.start), "dur": _us(span.end) - _us(span.start)}
            )
    names = {channel: channel_label(timeline.placement, channel) for channel, _ in timeline.bytes_by_channel}
    channels = [*names]
    events += [_meta("thread_name", 1, tid, name) for tid, name in enumerate(names.values())]
    for number, flight in enumerate(timeline.flights):
        # Messages overlap in time where latency is long, so they cannot be nested spans of a thread.
        common = {"name": str(flight.action), "cat": names[flight.channel], "id": number, "pid": 1}
        common["tid"] = channels.index(flight.channel)
        events.append({"ph": "b", "ts": _us(flight.start)} | common)
        events.append({"ph": "e", "ts": _us(flight.end)} | common)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")) + "\n"


def _labels(timeline: Timeline) -> list[str]:
    return [timeline.placement.label(worker) for worker in range(timeline.placement.num_workers)]


def _cell(action: Action, length: int) -> str:
    name = str(action)
    if len(name) > length:
        name = name[-1]
    return name.ljust(length, "=" if action.op is Op.B else "-")[:length]


def _summary(timeline: Timeline) -> str:
    return f"step {timeline.makespan:.6g}, bubble {100 * timeline.bubble:.1f} %"


def _kind(timeline: Timeline, span: Span) -> str:
    pass_name = "backward" if span.action.op is Op.B else "forward"
    return f"{pass_name}-{'later' if timeline.placement.chunk(span.action.vstage) else 'first'}"


def _boxes(timeline: Timeline, worker: int, left: int, scale: float) -> Iterator[str]:
    y = _TOP + worker * _ROW_HEIGHT
    for span in timeline.spans[worker]:
        x, box_width = left + span.start * scale, (span.end - span.start) * scale
        # The gap keeps neighbours apart without strokes.
        yield (
            f'<rect class="{_kind(timeline, span)}" x="{x:.1f}" y="{y}" width="{max(0.5, box_width - 1):.1f}" '
            f'height="{_BOX_HEIGHT}" rx="2"><title>{span.action}: {span.start:.6g} to {span.end:.6g}</title></rect>'
        )
        if box_width >= _MIN_LABEL_WIDTH:
            yield f'<text class="number" x="{x + box_width / 2:.1f}" y="{y + 16}">{span.action.microbatch}</text>'


def _messages(timeline: Timeline, left: int, scale: float) -> Iterator[str]:
    for flight in timeline.flights:
        down = flight.channel.dst > flight.channel.src
        y1 = _TOP + flight.channel.src * _ROW_HEIGHT + (_BOX_HEIGHT if down else 0)
        y2 = _TOP + flight.channel.dst * _ROW_HEIGHT + (0 if down else _BOX_HEIGHT)
        x1, x2 = left + flight.start * scale, left + flight.end * scale
        yield f'<line class="message" x1="{x1:.1f}" y1="{y1}" x2="{x2:.1f}" y2="{y2}"/>'


def _axis(timeline: Timeline, left: int, scale: float, bottom: int) -> Iterator[str]:
    step = _tick_step(timeline.makespan)
    for tick in range(int(timeline.makespan / step) + 1):
        time = tick * step
        x = left + time * scale
        yield f'<line class="tick" x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{bottom}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 16}">{time:.4g}</text>'


def _tick_step(makespan: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20 .. (also 0.5, 0.2 ..) that gives few enough ticks."""
    if not makespan:
        return 1.0
    decade = 10.0 ** math.floor(math.log10(makespan / _MAX_TICKS))
    return next(decade * factor for factor in (1, 2, 5, 10, 20) if makespan / (decade * factor) <= _MAX_TICKS)


def _legend(timeline: Timeline) -> Iterator[str]:
    used = {_kind(timeline, span) for spans in timeline.spans for span in spans}
    for index, kind in enumerate(kind for kind in _KINDS if kind in used):
        x = _LEFT + index * _LEGEND_STEP
        yield f'<rect class="{kind}" x="{x}" y="58" width="14" height="12" rx="2"/>'
        yield f'<text x="{x + 20}" y="68">{_KINDS[kind]}</text>'


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _meta(kind: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
