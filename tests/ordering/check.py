"""Proof that the recorded orders of all ranks fit together, under every model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from tests.ordering.match import match
from tests.ordering.models import MODELS, RENDEZVOUS, Model
from tests.ordering.replay import Replay
from tests.ordering.trace import END_OF_STEP, Event, Kind, Trace
from vtp_plugin.errors import PlanError


def check(traces: Sequence[Trace], models: Sequence[Model] = MODELS) -> tuple[str, ...]:
    """List everything that is wrong with the order in which ranks issued their operations; empty means it is proved.

    Proved is, for traces that begin with the first use of each communicator: every message and collective has its
    counterpart of the same size and type; groups carry either messages or collectives; every handle is waited for,
    messages once and before the step ends; received memory is used after its wait only, on the stream that waited; and
    under no model does a rank or a device wait for ever. Problems are one line each, in a fixed order. When
    counterparts or waits are wrong, deadlocks are not looked for: there would be nothing new.

    Args:
        traces: of all ranks that are members of a group in use, one each.
        models: rules of the backends in question.

    >>> from tests.ordering.trace import Group
    >>> pair = Group(name="pp", ranks=(0, 1))
    >>> def post(rank, i, kind):
    ...     return Event(rank=rank, position=i, kind=kind, group=pair, peer=1 - rank, num_bytes=4, handle=i)
    >>> def wait(rank, i, handle):
    ...     return Event(rank=rank, position=i, kind=Kind.WAIT, handle=handle)
    >>> def send_and_receive(rank):
    ...     events = post(rank, 0, Kind.SEND), post(rank, 1, Kind.RECV), wait(rank, 2, 0), wait(rank, 3, 1)
    ...     return Trace(rank=rank, events=events)
    >>> for problem in check([send_and_receive(0), send_and_receive(1)]):
    ...     print(problem.partition(" to ")[0])
    NCCL: deadlock: rank 0 #0 send
    HCCL: deadlock: rank 0 #0 send
    HCCL (P2P_HCCL_BUFFSIZE=0): deadlock: rank 0 #0 send
    """
    ranks = [trace.rank for trace in traces]
    if len(set(ranks)) != len(ranks):
        raise PlanError(f"two traces of one rank: {ranks}")
    waits = [line for trace in traces for line in _wait_problems(trace)]
    partners, unmatched = match(traces, RENDEZVOUS)
    problems = [
        *_group_problems(traces),
        *waits,
        *(line for trace in traces for line in _memory_problems(trace)),
        *unmatched,
        *(line for event, others in partners.items() for line in _pair_problems(event, others)),
    ]
    if not waits and not unmatched:
        problems += [f"{model.name}: {line}" for model in models for line in _model_problems(traces, model)]
    return tuple(problems)


def _model_problems(traces: Sequence[Trace], model: Model) -> Iterator[str]:
    """Yield what is wrong under one model only."""
    if model.has_unique_peers:
        batches = Counter(
            (event.rank, event.batch, event.ends)
            for trace in traces
            for event in trace.events
            if event.is_message and event.batch is not None
        )
        for (rank, batch, (source, destination)), num_messages in batches.items():
            if num_messages > 1:
                yield f"batch {batch} of rank {rank} has {num_messages} messages {source} -> {destination}, not one"
    partners, unmatched = match(traces, model)
    if unmatched:
        yield from (f"{line} on the same communicator" for line in unmatched)
        return
    circle = Replay(traces, model, partners).run()
    if circle is not None:
        yield f"deadlock: {circle}"


def _group_problems(traces: Sequence[Trace]) -> Iterator[str]:
    """Yield groups of which a trace is missing, and those that carry messages and collectives."""
    kinds: defaultdict[tuple[str, tuple[int, ...]], set[bool]] = defaultdict(set)
    for event in (event for trace in traces for event in trace.events):
        if event.group is not None:
            kinds[event.group.name, event.group.ranks].add(event.is_message)
    for (name, ranks), found in kinds.items():
        missing = sorted(set(ranks) - {trace.rank for trace in traces})
        if missing:
            yield f"group {name!r}: no trace of its ranks {missing}"
        if len(found) > 1:
            yield f"group {name!r} carries messages and collectives"


def _wait_problems(trace: Trace) -> Iterator[str]:
    """Yield handles that are not waited for, or at the wrong time, or too often.

    A second wait for a collective does nothing; for a gloo message it blocks until the timeout.
    """
    operations: dict[int | None, Event] = {}
    open_handles: dict[int | None, Event] = {}
    for event in trace.events:
        if event.is_operation:
            operations[event.handle] = open_handles[event.handle] = event
        elif event.kind is Kind.WAIT:
            if event.handle not in operations:
                yield f"{event}, which no operation has given yet"
            elif open_handles.pop(event.handle, None) is None and operations[event.handle].is_message:
                yield f"{event}, which was waited for before: {operations[event.handle]}"
        elif event.name == END_OF_STEP:
            for operation in open_handles.values():
                if operation.is_message:
                    yield f"{operation} is still under way at the end of the step (#{event.position})"
    for operation in open_handles.values():
        yield f"{operation} is never waited for"


def _memory_problems(trace: Trace) -> Iterator[str]:
    """Yield operations on memory that a receive has not filled yet, or filled in the order of another stream only."""
    arriving: dict[int | None, list[Event]] = defaultdict(list)
    arrived: dict[tuple[int, int, int], Event] = {}
    for event in trace.events:
        if event.kind is Kind.WAIT:
            for receive in arriving.pop(event.handle, ()):
                if receive.tensor is not None:
                    arrived[receive.tensor, receive.offset_bytes, receive.num_bytes] = event
        elif event.is_operation:
            for receive in (receive for receives in arriving.values() for receive in receives):
                if _overlap(event, receive):
                    yield f"{event} uses memory before the wait for {receive}"
            if event.kind is Kind.RECV:
                arriving[event.handle].append(event)
            elif event.tensor is not None:
                wait = arrived.get((event.tensor, event.offset_bytes, event.num_bytes))
                if wait is not None and wait.stream != event.stream:
                    yield f"{event} on stream {event.stream!r} uses what was waited for on {wait.stream!r}: {wait}"


def _overlap(first: Event, second: Event) -> bool:
    return (
        first.tensor is not None
        and first.tensor == second.tensor
        and first.offset_bytes < second.offset_bytes + second.num_bytes
        and second.offset_bytes < first.offset_bytes + first.num_bytes
    )


def _pair_problems(event: Event, others: Sequence[Event]) -> Iterator[str]:
    """Yield how a receive differs from its send, or a member's part of a collective from the first member's."""
    assert event.group is not None
    if event.kind is Kind.RECV:
        if (event.num_bytes, event.dtype) != (others[0].num_bytes, others[0].dtype):
            yield f"{event} meets {others[0]}"
    elif event.kind is Kind.COLLECTIVE and event.rank != event.group.ranks[0]:
        first = others[0]
        if (event.name, event.peer, event.num_bytes, event.dtype) != (
            first.name,
            first.peer,
            first.num_bytes,
            first.dtype,
        ):
            yield f"{event} meets {first}"
