"""Run recorded orders on an imagined machine that has exactly the freedom that a model allows."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence

from tests.ordering.match import Partners
from tests.ordering.models import Communicator, Model
from tests.ordering.trace import Event, Kind, Trace
from vtp_plugin.plan.schedule.order.actions import advance

# Operations that start together: a batch where the model has communicators, otherwise a single operation.
Launch = tuple[Event, ...]
# Stands in a report for a host that has nothing left to do.
_END = "end of its trace"


class Replay:
    """Hosts walk through their events; launches queue up on communicators and finish with their partners.

    What can happen stays possible until it happens, so one run tells about all runs: the order in which the machine
    takes what is possible does not matter.
    """

    def __init__(self, traces: Sequence[Trace], model: Model, partners: Partners) -> None:
        """Take traces in which every operation has its partners and every wait has its operation before it."""
        self._model = model
        self._partners = partners
        self._traces = {trace.rank: trace.events for trace in traces}
        self._next = dict.fromkeys(self._traces, 0)
        self._came: defaultdict[Communicator, set[int]] = defaultdict(set)
        self._queues: dict[Hashable, deque[Launch]] = {}
        self._launch_of: dict[Event, tuple[Hashable, Launch]] = {}
        self._posted: defaultdict[tuple[int, int | None], list[Event]] = defaultdict(list)
        self._done: set[Event] = set()

    def run(self) -> str | None:
        """Go on until nothing moves; give the circle in which the rest waits, or None when all is done."""
        ranks = list(self._next)
        everybody = range(len(ranks))

        def go(index: int) -> Iterable[int]:
            has_moved = False
            while self._walk(ranks[index]) | self._finish():
                has_moved = True
            return everybody if has_moved else ()

        advance(len(ranks), go)
        blocked: list[Event] = [self._traces[rank][i] for rank, i in self._next.items() if i < len(self._traces[rank])]
        if not blocked:
            blocked = [event for queue in self._queues.values() for event in queue[0] if event not in self._done]
        return self._circle(blocked[0]) if blocked else None

    def _walk(self, rank: int) -> bool:
        """Let a host go as far as it can; tell whether it moved."""
        events, start = self._traces[rank], self._next[rank]
        while self._next[rank] < len(events):
            event = events[self._next[rank]]
            if event.kind is Kind.WAIT and self._unfinished(event) is not None:
                break
            if event.is_operation:
                if self._missing(event) is not None:
                    break
                self._post(self._launch(event))
            else:
                self._next[rank] += 1
        return self._next[rank] > start

    def _launch(self, event: Event) -> Launch:
        if event.batch is None or not self._model.has_communicators:
            return (event,)
        events = self._traces[event.rank]
        stop = event.position
        while stop < len(events) and events[stop].batch == event.batch:
            stop += 1
        return events[event.position : stop]

    def _post(self, launch: Launch) -> None:
        first = launch[0]
        queue: Hashable = first
        if self._model.has_one_queue:
            queue = first.rank
        elif self._model.has_communicators:
            queue = first.rank, self._model.communicator(first)
        self._queues.setdefault(queue, deque()).append(launch)
        for event in launch:
            self._launch_of[event] = queue, launch
            self._posted[event.rank, event.handle].append(event)
        self._next[first.rank] += len(launch)

    def _finish(self) -> bool:
        """Finish what has come to the head of its queue together with its partners; tell whether anything did."""
        num_before = len(self._done)
        for name in list(self._queues):
            queue = self._queues[name]
            self._done.update(event for event in queue[0] if event not in self._done and self._can_finish(event))
            if all(event in self._done for event in queue[0]):
                queue.popleft()
            if not queue:
                del self._queues[name]
        return len(self._done) > num_before

    def _can_finish(self, event: Event) -> bool:
        if self._model.buffers_sends and event.kind is Kind.SEND:
            return True
        return all(self._is_ready(partner) for partner in self._partners[event])

    def _is_ready(self, event: Event) -> bool:
        """Tell whether an operation is at the head of its queue, or was."""
        return event in self._done or (event in self._launch_of and self._head(event) == self._launch_of[event][1])

    def _head(self, event: Event) -> Launch:
        return self._queues[self._launch_of[event][0]][0]

    def _unfinished(self, wait: Event) -> Event | None:
        """Give an operation that a wait still waits for: on a device, a batch is over when all of it is."""
        for event in self._posted[wait.rank, wait.handle]:
            for member in self._launch_of[event][1]:
                if member not in self._done:
                    return member
        return None

    def _missing(self, event: Event) -> int | None:
        """Note that a host uses a communicator; give a rank without which it cannot be created yet."""
        if not self._model.has_communicators:
            return None
        communicator = self._model.communicator(event)
        came = self._came[communicator]
        came.add(event.rank)
        return next((rank for rank in communicator[1] if rank not in came), None)

    def _circle(self, start: Event) -> str:
        """Follow from a blocked event what it needs until an event comes again.

        An event of an operation stands for the operation when it was posted, else for its host's coming there. What is
        needed may also be a host that has come to its end.
        """
        path = [start]
        while (needed := self._needed(path[-1])) not in path and needed.name != _END:
            path.append(needed)
        first = path.index(needed) if needed in path else 0
        return " needs ".join(str(event) for event in [*path[first:], needed])

    def _needed(self, event: Event) -> Event:
        if event.kind is Kind.WAIT:
            unfinished = self._unfinished(event)
            assert unfinished is not None
            return unfinished
        if event not in self._launch_of:
            return self._needed_by_host(event)
        if event not in self._head(event):
            return self._open_head(event)
        partner = next(other for other in self._partners[event] if not self._is_ready(other))
        return partner if partner not in self._launch_of else self._open_head(partner)

    def _needed_by_host(self, event: Event) -> Event:
        """Say why an event was not reached or, where its host stands before it, what the host needs."""
        standing = self._traces[event.rank][self._next[event.rank]]
        if standing.position != event.position and event not in self._launch(standing):
            return standing
        missing = self._missing(standing)
        assert missing is not None
        if self._next[missing] == len(self._traces[missing]):
            return Event(rank=missing, position=self._next[missing], kind=Kind.MARK, name=_END)
        return self._traces[missing][self._next[missing]]

    def _open_head(self, event: Event) -> Event:
        return next(other for other in self._head(event) if other not in self._done)
