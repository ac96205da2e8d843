"""Laws of the ordering check, against a search through all interleavings that shares no code with it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import hypothesis
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.ordering.check import check
from tests.ordering.models import BUFFERED, HCCL_SHARED, MODELS, ONE_QUEUE, Model
from tests.ordering.trace import Event, Group, Kind, Trace, format_trace, parse_trace, renumbered

ALL_MODELS = (*MODELS, ONE_QUEUE)
NUM_RANKS = 3
# Each with its own name, so that messages and collectives never share one.
MESSAGE_GROUPS = [Group(name=f"messages {ranks}", ranks=ranks) for ranks in ((0, 1), (1, 2), (0, 2), (0, 1, 2))]
COLLECTIVE_GROUPS = [Group(name=f"collectives {ranks}", ranks=ranks) for ranks in ((0, 1), (0, 1, 2))]


@dataclass(slots=True)
class Writer:
    """Appends to the traces of all ranks what happens in one global order; sizes tell messages apart."""

    events: list[list[Event]] = field(default_factory=lambda: [[] for _ in range(NUM_RANKS)])
    num_operations: int = 0

    def add(self, rank: int, kind: Kind, **values: object) -> None:
        event = Event(rank=rank, position=len(self.events[rank]), kind=kind)
        self.events[rank].append(replace(event, **values))

    def message(self, group: Group, source: int, target: int, batch: int | None = None) -> int:
        handle = self._next()
        for rank, kind, peer in ((source, Kind.SEND, target), (target, Kind.RECV, source)):
            self.add(rank, kind, group=group, peer=peer, batch=batch, num_bytes=handle, handle=handle)
        return handle

    def collective(self, group: Group) -> int:
        handle = self._next()
        for rank in group.ranks:
            self.add(rank, Kind.COLLECTIVE, name="allreduce_", group=group, num_bytes=handle, handle=handle)
        return handle

    def wait(self, rank: int, handle: int) -> None:
        self.add(rank, Kind.WAIT, handle=handle)

    def warm_up(self, group: Group) -> None:
        for source, target in zip(group.ranks, group.ranks[1:], strict=False):
            handle = self.message(group, source, target)
            self.wait(source, handle)
            self.wait(target, handle)

    def traces(self) -> list[Trace]:
        return [Trace(rank=rank, events=tuple(events)) for rank, events in enumerate(self.events)]

    def _next(self) -> int:
        self.num_operations += 1
        return self.num_operations


@st.composite
def programs(draw: st.DrawFn, max_operations: int) -> list[Trace]:
    """Operations in one global order; every rank waits for its handles at once or some time later, in any order."""
    writer = Writer()
    num_warm = draw(st.sampled_from([0, 0, 0, 1]))
    message_groups = MESSAGE_GROUPS[: 3 + num_warm]
    for group in message_groups[3:]:
        writer.warm_up(group)
    open_handles: list[list[int]] = [[] for _ in range(NUM_RANKS)]
    for _ in range(draw(st.integers(1, max_operations))):
        sort = draw(st.sampled_from(["message", "message", "collective", "batch"]))
        if sort == "collective":
            group = draw(st.sampled_from(COLLECTIVE_GROUPS))
            number = writer.collective(group)
            handles = [(rank, number) for rank in group.ranks]
        else:
            # A batch runs on the group's communicator, which needs all members at first: here these are both.
            group = draw(st.sampled_from(message_groups[:3] if sort == "batch" else message_groups))
            first, second = draw(st.permutations(group.ranks))[:2]
            batch = writer.num_operations if sort == "batch" else None
            ends = [(first, second), (second, first)] if sort == "batch" else [(first, second)]
            numbers = [writer.message(group, *pair, batch=batch) for pair in ends]
            handles = [(rank, number) for number in numbers for rank in (first, second)]
        for rank, handle in handles:
            open_handles[rank].append(handle)
        for rank in range(NUM_RANKS):
            for handle in draw(st.permutations(open_handles[rank])):
                if draw(st.booleans()):
                    open_handles[rank].remove(handle)
                    writer.wait(rank, handle)
    for rank in range(NUM_RANKS):
        for handle in draw(st.permutations(open_handles[rank])):
            writer.wait(rank, handle)
    return writer.traces()


@settings(max_examples=60)
@given(traces=programs(max_operations=12))
def test_programs_in_one_global_order_pass_all_models(traces: list[Trace]) -> None:
    assert check(traces, ALL_MODELS) == ()


@settings(max_examples=30)
@given(traces=programs(max_operations=6))
def test_text_form_is_invertible(traces: list[Trace]) -> None:
    assert [parse_trace(format_trace(trace)) for trace in traces] == traces


def can_swap(first: Event, second: Event) -> bool:
    """A wait stays behind its operation, and a batch together."""
    return first.batch == second.batch and not (second.kind is Kind.WAIT and first.handle == second.handle)


@pytest.mark.parametrize("model", ALL_MODELS, ids=lambda model: model.name)
@settings(max_examples=40)
@given(data=st.data(), traces=programs(max_operations=3))
def test_swapped_neighbours_are_caught_exactly_when_a_search_finds_a_deadlock(
    model: Model, data: st.DataObject, traces: list[Trace]
) -> None:
    for _ in range(data.draw(st.integers(1, 12))):
        places = [(t.rank, i) for t in traces for i in range(len(t.events) - 1) if can_swap(*t.events[i : i + 2])]
        assume(places)
        rank, i = data.draw(st.sampled_from(places))
        events = list(traces[rank].events)
        events[i], events[i + 1] = events[i + 1], events[i]
        traces[rank] = renumbered(rank, tuple(events))
    problems = check(traces, [model])
    # A message met another receive than before: no deadlock, but wrong data.
    if any(": deadlock: " not in line for line in problems):
        hypothesis.event("wrong counterpart")
        return
    hypothesis.event("deadlock" if problems else "harmless")
    assert bool(problems) == Search(traces, model).finds_deadlock()


class Search:
    """Goes through every state that the ranks can reach together, one move at a time.

    A state is how far each host has come and which operations are complete.
    """

    def __init__(self, traces: Sequence[Trace], model: Model) -> None:
        self._events = [trace.events for trace in traces]
        self._model = model
        self._operations = [e for events in self._events for e in events if e.kind not in (Kind.WAIT, Kind.MARK)]
        self._sets = list(self._matched())

    def finds_deadlock(self) -> bool:
        start = (0,) * len(self._events), frozenset[Event]()
        seen, open_states = {start}, [start]
        while open_states:
            came, done = open_states.pop()
            moves = [*self._host_moves(came, done), *self._completions(came, done)]
            if not moves and (len(done) < len(self._operations) or came != tuple(len(e) for e in self._events)):
                return True
            open_states += [state for state in moves if state not in seen]
            seen.update(moves)
        return False

    def _matched(self) -> Iterator[tuple[Event, ...]]:
        """Yield what completes together: the i-th operations with the same parts on the same communicator."""
        found: defaultdict[Hashable, list[Event]] = defaultdict(list)
        count: defaultdict[Hashable, int] = defaultdict(int)
        for event in self._operations:
            ends = (
                tuple(sorted([(event.rank, event.kind), (event.peer, _OTHER[event.kind])])) if event.is_message else ()
            )
            key = self._queue_name(event), ends
            found[key, count[key, event.rank]].append(event)
            count[key, event.rank] += 1
        return (tuple(events) for events in found.values())

    def _queue_name(self, event: Event) -> Hashable:
        assert event.group is not None
        is_of_pair = self._model.communicators == "pair" and event.is_message and event.batch is None
        return event.group, frozenset([event.rank, event.peer]) if is_of_pair else None

    def _host_moves(
        self, came: tuple[int, ...], done: frozenset[Event]
    ) -> Iterator[tuple[tuple[int, ...], frozenset[Event]]]:
        for rank, events in enumerate(self._events):
            if came[rank] < len(events) and self._can_pass(events[came[rank]], came, done):
                stop = came[rank] + len(self._launch(events[came[rank]]))
                yield (*came[:rank], stop, *came[rank + 1 :]), done

    def _launch(self, event: Event) -> list[Event]:
        if event.batch is None or self._model.communicators == "none":
            return [event]
        return [other for other in self._events[event.rank] if other.batch == event.batch]

    def _can_pass(self, event: Event, came: tuple[int, ...], done: frozenset[Event]) -> bool:
        if event.kind is Kind.WAIT:
            mine = [o for o in self._operations if (o.rank, o.handle) == (event.rank, event.handle)]
            return all(other in done for operation in mine for other in self._launch(operation))
        if self._model.communicators == "none":
            return True
        assert event.group is not None
        name = self._queue_name(event)
        is_of_pair = name != (event.group, None)
        members = {event.rank, event.peer} if is_of_pair else set(event.group.ranks)
        return all(any(self._queue_name(o) == name for o in self._reached(rank, came)) for rank in members)

    def _reached(self, rank: int | None, came: tuple[int, ...]) -> list[Event]:
        assert rank is not None
        return [e for e in self._events[rank][: came[rank] + 1] if e.kind is not Kind.WAIT]

    def _completions(
        self, came: tuple[int, ...], done: frozenset[Event]
    ) -> Iterator[tuple[tuple[int, ...], frozenset[Event]]]:
        for events in self._sets:
            for event in events:
                is_alone = self._model is BUFFERED and event.kind is Kind.SEND
                needed = (event,) if is_alone else events
                if event not in done and all(self._is_running(other, came, done) for other in needed):
                    yield came, done | {event} if self._model is BUFFERED else done | set(events)

    def _is_running(self, event: Event, came: tuple[int, ...], done: frozenset[Event]) -> bool:
        if event.position >= came[event.rank]:
            return False
        if self._model.communicators == "none":
            return True
        launch = self._launch(event)
        return all(
            other in done or other in launch
            for other in self._events[event.rank][: event.position]
            if other.kind is not Kind.WAIT
            and (self._model.has_one_queue or self._queue_name(other) == self._queue_name(event))
        )


_OTHER = {Kind.SEND: Kind.RECV, Kind.RECV: Kind.SEND}


def test_search_knows_both_answers() -> None:
    def program(is_crossed: bool) -> list[Trace]:
        group = MESSAGE_GROUPS[0]
        writer = Writer()
        for rank in (0, 1):
            kinds = [Kind.SEND, Kind.RECV] if rank == 0 or is_crossed else [Kind.RECV, Kind.SEND]
            for handle, kind in enumerate(kinds):
                writer.add(rank, kind, group=group, peer=1 - rank, handle=handle)
            for handle in range(2):
                writer.wait(rank, handle)
        return writer.traces()

    assert not Search(program(is_crossed=False), HCCL_SHARED).finds_deadlock()
    assert Search(program(is_crossed=True), HCCL_SHARED).finds_deadlock()
    assert not Search(program(is_crossed=True), BUFFERED).finds_deadlock()
