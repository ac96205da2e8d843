"""Whether communication is hidden behind compute, read from a trace and not from a clock."""

from __future__ import annotations

from collections.abc import Iterator

from tests.ordering.trace import END_OF_STEP, Event, Kind, Trace


def exposed_receives(trace: Trace) -> tuple[Event, ...]:
    """List the receives that nothing hides: no compute is marked between their post and their wait.

    A schedule has some of them: what the first compute of a step needs cannot be received behind another one.
    """
    return tuple(
        post for post, wait in _messages(trace, Kind.RECV) if not _computes(trace, post.position, wait.position)
    )


def blocking_sends(trace: Trace) -> tuple[Event, ...]:
    """List the sends that hold up compute: waited for before the next compute of the step that is marked behind them.

    Sends with no compute behind them hold up nothing.
    """
    return tuple(
        post
        for post, wait in _messages(trace, Kind.SEND)
        if not _computes(trace, post.position, wait.position) and _computes(trace, wait.position, len(trace.events))
    )


def _messages(trace: Trace, kind: Kind) -> Iterator[tuple[Event, Event]]:
    """Yield every message of a kind with its first wait."""
    waits: dict[int | None, Event] = {}
    for event in trace.events:
        if event.kind is Kind.WAIT:
            waits.setdefault(event.handle, event)
    for event in trace.events:
        if event.kind is kind and event.handle in waits:
            yield event, waits[event.handle]


def _computes(trace: Trace, start: int, stop: int) -> bool:
    """Tell whether compute is marked at a position in [start, stop), before the step ends."""
    for event in trace.events[start:stop]:
        if event.kind is Kind.MARK:
            return event.name != END_OF_STEP
    return False


def steady_state(trace: Trace) -> tuple[range, ...]:
    """Give, for every step, the positions from its first backward pass to its last forward pass.

    Needs marks ``"forward ..."``, ``"backward ..."`` and :data:`END_OF_STEP`. Before and behind, a schedule fills and
    drains the pipeline.
    """
    found: list[range] = []
    first = last = None
    for event in trace.events:
        if event.kind is Kind.MARK and event.name == END_OF_STEP:
            if first is not None and last is not None:
                found.append(range(first, last))
            first = last = None
        elif event.kind is Kind.MARK and event.name.startswith("forward"):
            last = event.position
        elif event.kind is Kind.MARK and event.name.startswith("backward") and first is None:
            first = event.position
    return tuple(found)
