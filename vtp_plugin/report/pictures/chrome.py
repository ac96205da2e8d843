"""Traces in Chrome's JSON format, which ui.perfetto.dev opens: rows of boxes, grouped by processes."""

from __future__ import annotations

import json
from collections.abc import Iterable

Event = dict[str, object]


def name_process(process: int, name: str) -> Event:
    """Name a group of rows."""
    return _meta("process_name", process, 0, {"name": name})


def name_row(process: int, row: int, name: str) -> Iterable[Event]:
    """Name a row, which stands at its number."""
    yield _meta("thread_name", process, row, {"name": name})
    yield _meta("thread_sort_index", process, row, {"sort_index": row})


def box(process: int, row: int, name: str, kind: str, start_s: float, end_s: float) -> Event:
    """Draw a box.

    >>> box(0, 1, "0F0", "forward", 0.5, 0.75)["dur"]
    250000.0
    """
    start_us = _us(start_s)
    times: Event = {"ts": start_us, "dur": round(_us(end_s) - start_us, 3)}
    return {"ph": "X", "name": name, "cat": kind, "pid": process, "tid": row, **times}


def flight(process: int, row_name: str, name: str, number: int, start_s: float, end_s: float) -> Iterable[Event]:
    """Draw a box that may overlap others of its row, such as a message.

    Perfetto makes a row of all boxes with one name, so the name is that of the row; the box's own name is shown when it
    is selected.

    Args:
        process: number of the group of rows.
        row_name: name of the row.
        name: name of the box.
        number: number of the box in the process.
        start_s: second at which it begins.
        end_s: second at which it ends.
    """
    common: Event = {"name": row_name, "cat": "message", "id2": {"local": number}, "pid": process, "tid": 0}
    yield {"ph": "b", "ts": _us(start_s), "args": {"message": name}} | common
    yield {"ph": "e", "ts": _us(end_s)} | common


def arrow(name: str, number: int, start: tuple[int, int, float], end: tuple[int, int, float]) -> Iterable[Event]:
    """Draw an arrow from a box to the first one that begins where it ends, or later.

    It never ends at a box that began before the other one: Perfetto turns such arrows round.

    Args:
        name: name of the arrow.
        number: number of the arrow in the trace.
        start: process, row and time of its start, inside a box.
        end: process, row and time of its end.
    """
    for letter, (process, row, at_s) in (("s", start), ("f", end)):
        common: Event = {"ph": letter, "name": name, "cat": "message", "id": number}
        yield common | {"pid": process, "tid": row, "ts": _us(at_s)}


def document(events: Iterable[Event], about: Event | None = None) -> str:
    """Write events as one file.

    Processes get numbers behind those of all rows: a row with the number of its process is its main thread in Perfetto,
    and so is row 0, so rows 0 and 1 of a process 1 would be one.

    Args:
        events: the events, in any order.
        about: further entries of the file.

    >>> text = document([box(0, 0, "", "", 0.0, 1.0), box(1, 0, "", "", 0.0, 1.0), box(1, 2, "", "", 0.0, 1.0)])
    >>> [(event["pid"], event["tid"]) for event in json.loads(text)["traceEvents"]]
    [(3, 0), (4, 0), (4, 2)]
    """
    known = list(events)
    first = 1 + max((int(str(event["tid"])) for event in known), default=0)
    numbered = [event | {"pid": first + int(str(event["pid"]))} for event in known]
    whole: Event = {"displayTimeUnit": "ms", **(about or {}), "traceEvents": numbered}
    return json.dumps(whole, separators=(",", ":")) + "\n"


def _meta(kind: str, process: int, row: int, args: Event) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": args}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
