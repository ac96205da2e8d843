"""Planted wrong orders: every model catches what it forbids and accepts what it allows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.ordering.check import check
from tests.ordering.models import BUFFERED, HCCL, HCCL_SHARED, MODELS, NCCL, ONE_QUEUE, RENDEZVOUS, Model
from tests.ordering.overlap import blocking_sends, exposed_receives
from tests.ordering.trace import END_OF_STEP, Event, Group, Kind, Trace, format_trace, parse_trace

DEVICES = {NCCL, HCCL, HCCL_SHARED}
PAIR = Group(name="pair", ranks=(0, 1))
OTHER_PAIR = Group(name="other pair", ranks=(0, 1))
TRIO = Group(name="trio", ranks=(0, 1, 2))
OTHER_TRIO = Group(name="other trio", ranks=(0, 1, 2))


class Script:
    """Writes one rank's trace; operations return their handle."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.events: list[Event] = []
        self.batch: int | None = None
        self._num_handles = 0

    def send(self, peer: int, group: Group = PAIR, **values: object) -> int:
        return self._operation(Kind.SEND, peer=peer, group=group, batch=self.batch, **values)

    def recv(self, peer: int, group: Group = PAIR, **values: object) -> int:
        return self._operation(Kind.RECV, peer=peer, group=group, batch=self.batch, **values)

    def collective(self, name: str = "allreduce_ sum", group: Group = TRIO, **values: object) -> int:
        return self._operation(Kind.COLLECTIVE, name=name, group=group, **values)

    def wait(self, *handles: int, stream: str = "") -> None:
        for handle in handles:
            self._add(Kind.WAIT, handle=handle, stream=stream)

    def note(self, label: str) -> None:
        self._add(Kind.MARK, name=label)

    def trace(self) -> Trace:
        return Trace(rank=self.rank, events=tuple(self.events))

    def _operation(self, kind: Kind, **values: object) -> int:
        handle = self._num_handles
        self._num_handles += 1
        self._add(kind, handle=handle, **({"num_bytes": 8, "dtype": "float32"} | values))
        return handle

    def _add(self, kind: Kind, **values: object) -> None:
        event = Event(rank=self.rank, position=len(self.events), kind=kind)
        self.events.append(replace(event, **values))


def scripts(num_ranks: int) -> list[Script]:
    return [Script(rank) for rank in range(num_ranks)]


def problems(ranks: Sequence[Script], models: Sequence[Model] = MODELS) -> tuple[str, ...]:
    return check([script.trace() for script in ranks], models)


def forbidden_by(ranks: Sequence[Script]) -> set[Model]:
    """Give the models that find a deadlock; nothing else may be wrong."""
    models = (*MODELS, ONE_QUEUE)
    found = problems(ranks, models)
    assert all(": deadlock: " in line for line in found), found
    return {model for model in models if any(line.startswith(f"{model.name}: ") for line in found)}


def warm_up_ring(ranks: Sequence[Script], group: Group) -> None:
    num_ranks = len(ranks)
    for source in range(num_ranks):
        target = (source + 1) % num_ranks
        ranks[source].wait(ranks[source].send(target, group))
        ranks[target].wait(ranks[target].recv(source, group))


def test_nothing_is_in_order() -> None:
    assert problems(scripts(2)) == ()


@pytest.mark.parametrize("is_sender_first", [True, False])
def test_one_message_passes_everywhere(is_sender_first: bool) -> None:
    ranks = scripts(2)
    ranks[0].wait(ranks[0].send(1))
    ranks[1].wait(ranks[1].recv(0))
    assert forbidden_by(ranks if is_sender_first else ranks[::-1]) == set()


def test_naive_exchange_of_a_pair_is_caught_on_devices_only() -> None:
    ranks = scripts(2)
    for script in ranks:
        script.wait(script.send(1 - script.rank), script.recv(1 - script.rank))
    assert forbidden_by(ranks) == DEVICES | {ONE_QUEUE}
    (line,) = problems(ranks, [NCCL])
    assert line.split(" needs ") == [
        "NCCL: deadlock: rank 0 #0 send to 1 of 8 B float32 in 'pair'",
        "rank 1 #0 send to 0 of 8 B float32 in 'pair'",
        "rank 0 #0 send to 1 of 8 B float32 in 'pair'",
    ]


def test_exchange_in_opposite_order_on_both_sides_passes() -> None:
    ranks = scripts(2)
    ranks[0].wait(ranks[0].send(1), ranks[0].recv(1))
    ranks[1].wait(ranks[1].recv(0), ranks[1].send(0))
    assert forbidden_by(ranks) == set()


def test_batched_exchange_passes() -> None:
    ranks = scripts(2)
    for script in ranks:
        script.batch = 0
        script.wait(script.send(1 - script.rank), script.recv(1 - script.rank))
    assert forbidden_by(ranks) == set()


def test_a_group_for_each_direction_passes_on_devices_with_more_than_one_queue() -> None:
    ranks = scripts(2)
    groups = [PAIR, OTHER_PAIR]
    for i in range(2):
        ranks[i].wait(ranks[i].send(1 - i, groups[i]))
        ranks[1 - i].wait(ranks[1 - i].recv(i, groups[i]))
    for script in ranks:
        mine, theirs = groups[script.rank], groups[1 - script.rank]
        script.wait(script.recv(1 - script.rank, theirs), script.send(1 - script.rank, mine))
    assert forbidden_by(ranks) == {ONE_QUEUE}


def test_without_warm_up_even_a_group_for_each_direction_is_caught() -> None:
    ranks = scripts(2)
    for script in ranks:
        mine, theirs = (PAIR, OTHER_PAIR) if script.rank == 0 else (OTHER_PAIR, PAIR)
        script.wait(script.recv(1 - script.rank, theirs), script.send(1 - script.rank, mine))
    assert forbidden_by(ranks) == DEVICES | {ONE_QUEUE}


def test_blocking_sends_round_a_ring_pass_buffered_only() -> None:
    ranks = scripts(3)
    warm_up_ring(ranks, TRIO)
    for script in ranks:
        script.wait(script.send((script.rank + 1) % 3, TRIO))
        script.wait(script.recv((script.rank - 1) % 3, TRIO))
    assert forbidden_by(ranks) == {RENDEZVOUS, ONE_QUEUE} | DEVICES


def ring_of_posts(ranks: Sequence[Script]) -> None:
    for script in ranks:
        send = script.send((script.rank + 1) % 3, TRIO)
        script.wait(script.recv((script.rank - 1) % 3, TRIO), send)


def test_first_sends_round_a_ring_are_caught_where_communicators_are_created_at_first_use() -> None:
    ranks = scripts(3)
    ring_of_posts(ranks)
    assert forbidden_by(ranks) == DEVICES | {ONE_QUEUE}
    (line,) = problems(ranks, [NCCL])
    assert line.count(" needs ") == 3


def test_warmed_up_ring_passes_where_pairs_have_their_own_communicator() -> None:
    ranks = scripts(3)
    warm_up_ring(ranks, TRIO)
    ring_of_posts(ranks)
    assert forbidden_by(ranks) == {HCCL_SHARED, ONE_QUEUE}


def test_main_communicator_needs_all_members_at_first() -> None:
    ranks = scripts(3)
    for i in range(2):
        ranks[i].batch = 0
        ranks[i].wait(ranks[i].send(1 - i, TRIO), ranks[i].recv(1 - i, TRIO))
    assert forbidden_by(ranks) == DEVICES | {ONE_QUEUE}
    assert all(line.endswith("needs rank 2 #0 end of its trace") for line in problems(ranks))


def test_on_devices_a_batch_is_over_when_all_of_it_is() -> None:
    ranks = scripts(2)
    ranks[0].batch = ranks[1].batch = 0
    send, receive = ranks[0].send(1), ranks[0].recv(1)
    ranks[1].wait(ranks[1].recv(0))
    ranks[0].batch = ranks[1].batch = None
    ranks[0].wait(send)
    ranks[0].wait(ranks[0].send(1, OTHER_PAIR), receive)
    ranks[1].wait(ranks[1].recv(0, OTHER_PAIR))
    ranks[1].batch = 1
    ranks[1].wait(ranks[1].send(0))
    assert forbidden_by(ranks) == DEVICES | {ONE_QUEUE}


def test_batched_send_never_meets_an_unbatched_receive() -> None:
    ranks = scripts(2)
    ranks[0].batch = 0
    ranks[0].wait(ranks[0].send(1))
    ranks[1].wait(ranks[1].recv(0))
    assert problems(ranks, [BUFFERED, RENDEZVOUS]) == ()
    assert problems(ranks, [NCCL]) == (
        "NCCL: rank 0 #0 send to 1 of 8 B float32 in 'pair' has no counterpart on rank 1 on the same communicator",
        "NCCL: rank 1 #0 recv from 0 of 8 B float32 in 'pair' has no counterpart on rank 0 on the same communicator",
    )


def test_a_batch_with_two_messages_to_one_rank_is_caught_under_hccl() -> None:
    ranks = scripts(2)
    ranks[0].batch = ranks[1].batch = 0
    ranks[0].wait(ranks[0].send(1), ranks[0].send(1))
    ranks[1].wait(ranks[1].recv(0), ranks[1].recv(0))
    assert problems(ranks, [BUFFERED, RENDEZVOUS, NCCL]) == ()
    assert problems(ranks, [HCCL])[0] == "HCCL: batch 0 of rank 0 has 2 messages 0 -> 1, not one"


@pytest.mark.parametrize(
    ("is_async", "forbidden"), [(False, {BUFFERED, RENDEZVOUS, ONE_QUEUE} | DEVICES), (True, {ONE_QUEUE} | DEVICES)]
)
def test_collectives_of_two_groups_in_opposite_order(is_async: bool, forbidden: set[Model]) -> None:
    ranks = scripts(3)
    for script in ranks:
        groups = (TRIO, OTHER_TRIO) if script.rank else (OTHER_TRIO, TRIO)
        if is_async:
            script.wait(*[script.collective(group=group) for group in groups])
        else:
            for group in groups:
                script.wait(script.collective(group=group))
    assert forbidden_by(ranks) == forbidden


def test_collective_crossed_with_a_message_is_caught() -> None:
    ranks = scripts(3)
    ranks[0].wait(ranks[0].send(1))
    for script in ranks:
        script.wait(script.collective())
    ranks[1].wait(ranks[1].recv(0))
    assert forbidden_by(ranks) == {RENDEZVOUS, ONE_QUEUE} | DEVICES


@pytest.mark.parametrize("changed", [{"name": "allreduce_ max"}, {"num_bytes": 4}, {"dtype": "bfloat16"}, {"peer": 1}])
@pytest.mark.parametrize("odd_rank", [0, 1, 2])
def test_swapped_collectives_inside_a_group_are_caught(changed: dict[str, object], odd_rank: int) -> None:
    ranks = scripts(3)
    for script in ranks:
        both = [{}, changed]
        for values in both[::-1] if script.rank == odd_rank else both:
            script.wait(script.collective(**values))  # pyright: ignore[reportArgumentType]
    found = problems(ranks)
    assert found and all(" meets " in line for line in found)


def test_missing_collective_is_caught() -> None:
    ranks = scripts(3)
    for script in ranks[:2]:
        script.wait(script.collective())
    assert problems(ranks) == (
        "rank 0 #0 allreduce_ sum of 8 B float32 in 'trio' has no counterpart on ranks [2]",
        "rank 1 #0 allreduce_ sum of 8 B float32 in 'trio' has no counterpart on ranks [2]",
    )


@pytest.mark.parametrize(("name", "value"), [("num_bytes", 4), ("dtype", "bfloat16")])
def test_message_that_does_not_fit_its_receive_is_caught(name: str, value: object) -> None:
    ranks = scripts(2)
    ranks[0].wait(ranks[0].send(1, **{name: value}))  # pyright: ignore[reportArgumentType]
    ranks[1].wait(ranks[1].recv(0))
    (line,) = problems(ranks)
    assert line.startswith("rank 1 #0 recv from 0 of 8 B float32 in 'pair' meets rank 0 #0 send to 1 of ")


def test_unmatched_send_is_caught() -> None:
    ranks = scripts(2)
    ranks[0].wait(ranks[0].send(1), ranks[0].send(1))
    ranks[1].wait(ranks[1].recv(0))
    assert problems(ranks) == ("rank 0 #1 send to 1 of 8 B float32 in 'pair' has no counterpart on rank 1",)


def test_group_without_a_trace_of_all_members_is_caught() -> None:
    ranks = scripts(2)
    for script in ranks:
        script.wait(script.collective())
    assert problems(ranks)[0] == "group 'trio': no trace of its ranks [2]"


def test_messages_and_collectives_in_one_group_are_caught() -> None:
    ranks = scripts(2)
    ranks[0].wait(ranks[0].send(1))
    ranks[1].wait(ranks[1].recv(0))
    for script in ranks:
        script.wait(script.collective(group=PAIR))
    assert problems(ranks) == ("group 'pair' carries messages and collectives",)


def test_handles_are_waited_for_once() -> None:
    ranks = scripts(2)
    ranks[0].send(1)
    receive = ranks[1].recv(0)
    ranks[1].wait(receive, receive, 7)
    assert problems(ranks) == (
        "rank 0 #0 send to 1 of 8 B float32 in 'pair' is never waited for",
        "rank 1 #2 wait for handle 0, which was waited for before: rank 1 #0 recv from 0 of 8 B float32 in 'pair'",
        "rank 1 #3 wait for handle 7, which no operation has given yet",
    )


def test_second_wait_for_a_collective_is_harmless() -> None:
    ranks = scripts(3)
    for script in ranks:
        handle = script.collective()
        script.wait(handle, handle)
    assert problems(ranks) == ()


def test_message_under_way_at_the_end_of_a_step_is_caught() -> None:
    ranks = scripts(2)
    for script, post in zip(ranks, (ranks[0].send, ranks[1].recv), strict=True):
        handle = post(1 - script.rank)
        script.note(END_OF_STEP)
        script.wait(handle)
    assert [line.partition(" is ")[2] for line in problems(ranks)] == [
        "still under way at the end of the step (#1)",
        "still under way at the end of the step (#1)",
    ]


@pytest.mark.parametrize("offset_bytes", [0, 4, 8])
def test_received_memory_used_before_its_wait_is_caught(offset_bytes: int) -> None:
    ranks = scripts(2)
    ranks[0].wait(ranks[0].send(1), ranks[0].recv(1, OTHER_PAIR))
    receive = ranks[1].recv(0, tensor=5, offset_bytes=0)
    send = ranks[1].send(0, OTHER_PAIR, tensor=5, offset_bytes=offset_bytes)
    ranks[1].wait(receive, send)
    found = problems(ranks)
    assert len(found) == (offset_bytes < 8)
    assert all("uses memory before the wait for rank 1 #0 recv" in line for line in found)


def test_received_memory_used_on_a_stream_that_did_not_wait_is_caught() -> None:
    ranks = scripts(2)
    ranks[0].wait(ranks[0].send(1), ranks[0].recv(1, OTHER_PAIR))
    ranks[1].wait(ranks[1].recv(0, tensor=5, stream="compute"), stream="side")
    ranks[1].wait(ranks[1].send(0, OTHER_PAIR, tensor=5, stream="compute"), stream="compute")
    (line,) = problems(ranks)
    assert "on stream 'compute' uses what was waited for on 'side'" in line


def test_text_form_keeps_everything_and_is_one_line_per_event() -> None:
    script = Script(3)
    script.batch = 2
    send = script.send(1, TRIO, tensor=4, offset_bytes=16, num_bytes=32, dtype="bfloat16", stream="7")
    script.note("forward 3")
    script.collective("broadcast_", PAIR, peer=0)
    script.wait(send)
    trace = script.trace()
    text = format_trace(trace)
    assert parse_trace(text) == trace
    assert len(text.splitlines()) == 1 + len(trace.events)
    assert json.loads(text.splitlines()[2]) == {"kind": "mark", "name": "forward 3"}


def overlapping(receive_is_early: bool, send_waits_late: bool) -> Trace:
    script = Script(0)
    early = script.recv(1) if receive_is_early else None
    script.note("forward 0")
    receive = script.recv(1) if early is None else early
    send = script.send(1)
    if not send_waits_late:
        script.wait(send)
    script.wait(receive)
    script.note("forward 1")
    if send_waits_late:
        script.wait(send)
    script.note("forward 2")
    script.note(END_OF_STEP)
    return script.trace()


def test_hidden_receives_and_free_sends_are_told_from_others() -> None:
    for receive_is_early in (True, False):
        for send_waits_late in (True, False):
            trace = overlapping(receive_is_early, send_waits_late)
            assert len(exposed_receives(trace)) == (not receive_is_early)
            assert len(blocking_sends(trace)) == (not send_waits_late)


def test_send_behind_the_last_compute_of_a_step_blocks_nothing() -> None:
    script = Script(0)
    script.note("backward 0")
    script.wait(script.send(1))
    script.note(END_OF_STEP)
    script.note("forward 0")
    assert blocking_sends(script.trace()) == ()
