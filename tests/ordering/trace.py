"""What one rank issued, in host order: sends, receives, collectives, waits, and marks for the compute between them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from vtp_plugin.errors import PlanError
from vtp_plugin.util.text import TextEnum

# Mark behind the last communication of a training step: no message may be under way there.
END_OF_STEP = "end of step"


class Kind(TextEnum):
    """Sort of event. A blocking operation is the operation, with a handle, and its wait right behind."""

    SEND = "send"
    RECV = "recv"
    COLLECTIVE = "collective"
    WAIT = "wait"
    MARK = "mark"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group: the same name and ranks on all its members.

    Attributes:
        name: unique in the run.
        ranks: global ranks.
    """

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that a rank did.

    Attributes:
        rank: global rank that did it.
        position: place in the rank's trace, from 0.
        kind: sort of event; which further attributes count depends on it.
        name: of a collective, such as ``"allreduce_ sum"``; of a mark, such as ``"forward 3"``.
        group: of an operation.
        peer: global rank at the other end of a message; root of a collective that has one.
        tensor: number of the storage that a message or collective uses; numbers are the rank's own.
        offset_bytes: start of the (dense) memory inside the storage.
        num_bytes: of a message; of a collective, a size that is equal on all its members, or 0.
        dtype: of the elements, such as ``"float32"``.
        stream: current stream of the device; ``""`` on a CPU.
        batch: operations with one number were given to the backend in one call; they are neighbours.
        handle: what an operation returned, or what a wait waits for.
    """

    rank: int
    position: int
    kind: Kind
    name: str = ""
    group: Group | None = None
    peer: int | None = None
    tensor: int | None = None
    offset_bytes: int = 0
    num_bytes: int = 0
    dtype: str = ""
    stream: str = ""
    batch: int | None = None
    handle: int | None = None

    @property
    def is_message(self) -> bool:
        """Whether this is one end of a point-to-point message."""
        return self.kind in (Kind.SEND, Kind.RECV)

    @property
    def is_operation(self) -> bool:
        """Whether other ranks take part."""
        return self.is_message or self.kind is Kind.COLLECTIVE

    @property
    def ends(self) -> tuple[int, int]:
        """Source and destination of a message."""
        assert self.peer is not None
        return (self.rank, self.peer) if self.kind is Kind.SEND else (self.peer, self.rank)

    def __hash__(self) -> int:
        """Hash by what tells events of a run apart; all fields would make large traces slow to check."""
        return hash((self.rank, self.position))

    def __str__(self) -> str:
        """Show the event in one phrase.

        >>> print(Event(rank=2, position=7, kind=Kind.WAIT, handle=3))
        rank 2 #7 wait for handle 3
        """
        start = f"rank {self.rank} #{self.position}"
        if self.kind is Kind.WAIT:
            return f"{start} wait for handle {self.handle}"
        if self.kind is Kind.MARK or self.group is None:
            return f"{start} {self.name}"
        size = f"{self.num_bytes} B{self.dtype and ' '}{self.dtype} in {self.group.name!r}"
        if self.kind is Kind.COLLECTIVE:
            return f"{start} {self.name} of {size}"
        return f"{start} {self.kind} {'to' if self.kind is Kind.SEND else 'from'} {self.peer} of {size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All events of one rank in the order in which its host issued them, one after another."""

    rank: int
    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        for i, event in enumerate(self.events):
            if (event.rank, event.position) != (self.rank, i):
                raise PlanError(f"trace of rank {self.rank}: event {i} says rank {event.rank}, place {event.position}")


def renumbered(rank: int, events: tuple[Event, ...]) -> Trace:
    """Make a trace of events that were moved, dropped or added."""
    return Trace(
        rank=rank, events=tuple(dataclasses.replace(event, rank=rank, position=i) for i, event in enumerate(events))
    )


def format_trace(trace: Trace) -> str:
    """Write a trace as JSON lines: the rank with its groups, then one line per event without what is default.

    >>> print(format_trace(Trace(rank=0, events=(Event(rank=0, position=0, kind=Kind.MARK, name="forward 3"),))))
    {"rank":0,"groups":[]}
    {"kind":"mark","name":"forward 3"}
    """
    groups = list(dict.fromkeys(event.group for event in trace.events if event.group is not None))
    numbers = {group: i for i, group in enumerate(groups)}
    lines: list[dict[str, Any]] = [{"rank": trace.rank, "groups": [[group.name, group.ranks] for group in groups]}]
    for event in trace.events:
        values = {field.name: (getattr(event, field.name), field.default) for field in dataclasses.fields(event)}
        line = {name: value for name, (value, default) in values.items() if value != default}
        del line["rank"], line["position"]
        lines.append(line | ({} if event.group is None else {"group": numbers[event.group]}))
    return "\n".join(json.dumps(line, separators=(",", ":")) for line in lines)


def parse_trace(text: str) -> Trace:
    """Read what :func:`format_trace` wrote."""
    head, *lines = (json.loads(line) for line in text.splitlines())
    groups = [Group(name=name, ranks=tuple(ranks)) for name, ranks in head["groups"]]
    events: list[Event] = []
    for position, line in enumerate(lines):
        kind, number = Kind(line.pop("kind")), line.pop("group", None)
        group = None if number is None else groups[number]
        events.append(Event(rank=head["rank"], position=position, kind=kind, group=group, **line))
    return Trace(rank=head["rank"], events=tuple(events))
