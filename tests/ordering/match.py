"""Which operations of different ranks belong together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tests.ordering.models import Communicator, Model
from tests.ordering.trace import Event, Group, Kind, Trace

# The operations that an operation needs on other ranks: one end of a message, or all other members' parts.
Partners = Mapping[Event, tuple[Event, ...]]


def match(traces: Sequence[Trace], model: Model) -> tuple[Partners, tuple[str, ...]]:
    """Match messages first in, first out per communicator, source and destination, and collectives by their number.

    Tags play no part: device backends ignore them.

    Returns:
        Partners of every operation, and one line for everything that has none.
    """
    partners: dict[Event, tuple[Event, ...]] = {}
    problems: list[str] = []
    queues: defaultdict[tuple[Communicator, tuple[int, int], Kind], list[Event]] = defaultdict(list)
    collectives: defaultdict[Group, dict[int, list[Event]]] = defaultdict(dict)
    for event in (event for trace in traces for event in trace.events):
        if event.is_message:
            queues[model.communicator(event), event.ends, event.kind].append(event)
        elif event.kind is Kind.COLLECTIVE:
            assert event.group is not None
            collectives[event.group].setdefault(event.rank, []).append(event)
    for (communicator, ends, kind), events in list(queues.items()):
        others = queues.get((communicator, ends, Kind.RECV if kind is Kind.SEND else Kind.SEND), [])
        partners.update({event: (other,) for event, other in zip(events, others, strict=False)})
        problems += [f"{event} has no counterpart on rank {event.peer}" for event in events[len(others) :]]
    for group, by_rank in collectives.items():
        problems += _match_collectives(group, by_rank, partners)
    return partners, tuple(problems)


def _match_collectives(
    group: Group, by_rank: Mapping[int, list[Event]], partners: dict[Event, tuple[Event, ...]]
) -> Iterator[str]:
    num_complete = min(len(by_rank.get(rank, ())) for rank in group.ranks)
    for i in range(num_complete):
        members = [by_rank[rank][i] for rank in group.ranks]
        partners.update({event: tuple(other for other in members if other is not event) for event in members})
    for rank, events in by_rank.items():
        if rank not in group.ranks:
            yield f"{events[0]}: {rank} is not one of the group's ranks {group.ranks}"
        elif len(events) > num_complete:
            missing = [r for r in group.ranks if len(by_rank.get(r, ())) <= num_complete]
            yield f"{events[num_complete]} has no counterpart on ranks {missing}"
