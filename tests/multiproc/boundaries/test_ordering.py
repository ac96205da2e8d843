"""Whole training steps, recorded on gloo, are safe under the rules of every backend; so is what the recorder says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch._C._distributed_c10d import ReduceOp

from tests.multiproc.cases.core_cases import OVERLAPPED, Case, Runs
from tests.ordering.check import check
from tests.ordering.models import BUFFERED, MODELS, ONE_QUEUE, RENDEZVOUS
from tests.ordering.overlap import blocking_sends, exposed_receives, steady_state
from tests.ordering.trace import Event, Kind, Trace, parse_trace, renumbered
from tests.support.pool import Pool

TRANSPORTS = ("rank0", "sliced")
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "1f1b-batched": {"batch_p2p": True},
    "1f1b-varying": {"varying_lengths": True},
    "interleaved": {"vpp": 2},
    "interleaved-batched": {"vpp": 2, "batch_p2p": True, "varying_lengths": True},
    "interleaved-overlapped": {"vpp": 2, "overlap_p2p": True},
}
LISTS = [(1, 2), (2, 3), (1, 2, 1)]
DEFAULT = {((1, 2), "1f1b"), ((2, 3), "interleaved-overlapped"), ((1, 2, 1), "interleaved-batched")}
OPTIONS = {
    "tied": Case.of(sizes=(1, 2), tied=True, recompute=True, layers_per_chunk=2),
    "distributed": Case.of(sizes=(2, 1), dp=2, **OVERLAPPED),
    "context-parallel": Case.of(sizes=(2, 1), cp_list=(1, 2), gathered_attention=True, seq=8, tied=True),
}


def case_of(sizes: tuple[int, ...], schedule: str, transport: str) -> Case:
    # The interleaved schedule takes multiples of the number of stages.
    return Case.of(
        sizes=sizes, transport=transport, num_steps=2, num_microbatches=2 * len(sizes), **SCHEDULES[schedule]
    )


class Recordings:
    """Runs every case once."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._kept: dict[tuple[Case, bool], tuple[list[Trace], list[list[float]]]] = {}

    def of(self, case: Case, *, gathers_by_messages: bool = False) -> list[Trace]:
        return self._of(case, gathers_by_messages)[0]

    def losses(self, case: Case) -> list[list[float]]:
        """Losses of the last rank, by step and microbatch."""
        return self._of(case, False)[1]

    def _of(self, case: Case, gathers_by_messages: bool) -> tuple[list[Trace], list[list[float]]]:
        key = case, gathers_by_messages
        if key not in self._kept:
            kwargs = {"case": case, "gathers_by_messages": gathers_by_messages}
            results = self._pool.run(case.world_size, "tests.multiproc.jobs.variants:record", kwargs)
            self._kept[key] = [parse_trace(text) for text, _ in results], results[-1][1]
        return self._kept[key]


@pytest.fixture(scope="module")
def recordings(pool: Pool) -> Recordings:
    return Recordings(pool)


def test_recorder_sees_every_operation_and_changes_none(pool: Pool) -> None:
    results = pool.run(2, "tests.multiproc.jobs.variants:record_every_operation")
    traces = [parse_trace(text) for text, _ in results]
    # Both ranks send first on one group: gloo carries it out, and devices would not.
    assert [line.partition(" send to ")[0] for line in check(traces)] == [
        f"{model.name}: deadlock: rank 0 #1" for model in MODELS if model.has_communicators
    ]
    names = [event.name or event.kind for event in traces[0].events if event.kind is not Kind.WAIT]
    expected = [
        *("allreduce_ sum", "send", "recv", "compute", "send", "recv"),
        *("send", "broadcast_", "_allgather_base_", "allgather_", "_reduce_scatter_base_ sum", "gather_"),
        *("scatter_", "reduce_ max", "alltoall_base_", "barrier", "allreduce_ sum"),
    ]
    # Before 2.8 torch does not show which operation it is.
    assert names == (expected if hasattr(ReduceOp, "unbox") else [name.partition(" ")[0] for name in expected])
    first, send, receive, _, *waits = traces[0].events[:7]
    assert [wait.handle for wait in waits] == [receive.handle, send.handle, first.handle]
    assert send.group is not None and send.group.name.endswith(" messages") and send.group.ranks == (0, 1)
    assert (first.tensor, first.offset_bytes, first.num_bytes, first.dtype) == (send.tensor, 0, 8, "float32")
    assert (send.peer, send.offset_bytes, send.num_bytes, send.batch) == (1, 8, 8, None)
    assert [event.batch for event in traces[0].events if event.is_message] == [None, None, 0, 0, None]


def test_recorder_reports_a_handle_that_nobody_waits_for(pool: Pool) -> None:
    results = pool.run(2, "tests.multiproc.jobs.variants:record_every_operation")
    (problem,) = check([parse_trace(text) for _, text in results])
    assert problem.startswith("rank 0 #0 send to 1 of 16 B float32 in ") and problem.endswith(" is never waited for")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("sizes", "schedule"),
    [
        pytest.param(sizes, schedule, marks=[] if (sizes, schedule) in DEFAULT else pytest.mark.full)
        for sizes in LISTS
        for schedule in SCHEDULES
    ],
)
def test_whole_steps_pass_all_models(
    recordings: Recordings, sizes: tuple[int, ...], schedule: str, transport: str
) -> None:
    case = case_of(sizes, schedule, transport)
    traces = recordings.of(case)
    num_computes = [sum(event.kind is Kind.MARK for event in trace.events) for trace in traces]
    assert (
        num_computes == [case.data.num_steps * (2 * case.data.num_microbatches * case.model.vpp + 1)] * case.world_size
    )
    # A header must be there before its tensor's receive can be posted; one queue for all cannot wait for that.
    assert check(traces, MODELS if case.data.varying_lengths else (*MODELS, ONE_QUEUE)) == ()


def test_parameters_are_gathered_without_gloos_coalesced_all_gather(recordings: Recordings) -> None:
    """Two threads of a group would free the memory of its long name: docs/development/gloo-double-free.md."""
    names = {event.name for trace in recordings.of(OPTIONS["distributed"]) for event in trace.events}
    assert "_allgather_base_" in names
    assert not [name for name in names if name.startswith(("allgather_coalesced", "allgather_into_tensor_coalesced"))]


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved-overlapped", marks=pytest.mark.full)])
def test_slices_completed_by_messages_pass_the_models_of_gloo(recordings: Recordings, schedule: str) -> None:
    traces = recordings.of(case_of((2, 3), schedule, "sliced"), gathers_by_messages=True)
    assert any(" finish" in str(event.group) for trace in traces for event in trace.events)
    assert check(traces, (BUFFERED, RENDEZVOUS)) == ()


@pytest.mark.full
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_other_traffic_passes_all_models(recordings: Recordings, name: str, transport: str) -> None:
    if OPTIONS[name].stages.cp_list and transport == "rank0":
        pytest.skip("the leaders alone cannot carry what several context-parallel ranks hold")
    assert check(recordings.of(OPTIONS[name].but(transport=transport)), (*MODELS, ONE_QUEUE)) == ()


def test_recording_changes_no_bit(recordings: Recordings, runs: Runs) -> None:
    case = case_of((1, 2), "1f1b", TRANSPORTS[0])
    assert [recordings.losses(case)] == runs.run(case).losses


def exchanges(events: list[Event]) -> list[int]:
    """Places of the first of two neighbouring events, one a send and one a receive: the middle of an exchange."""
    both = {Kind.SEND, Kind.RECV}
    return [i for i in range(len(events) - 1) if {events[i].kind, events[i + 1].kind} == both]


def with_receives_first_on_one_group(trace: Trace) -> Trace:
    """Let both directions of a boundary share a group, and post every receive of an exchange before its send."""
    events = [
        replace(event, group=replace(event.group, name="boundary")) if event.is_message and event.group else event
        for event in trace.events
    ]
    for i in exchanges(events):
        if events[i].kind is Kind.SEND:
            events[i], events[i + 1] = events[i + 1], events[i]
    return renumbered(trace.rank, tuple(events))


def with_first_send_after_waits(trace: Trace) -> Trace:
    """Wait for what is received before posting what is sent, in the first exchange of both."""
    events = list(trace.events)
    places = exchanges(events)
    if not places:
        return trace
    i = places[0]
    send, receive = sorted(events[i : i + 2], key=lambda event: event.kind is not Kind.SEND)
    events.remove(send)
    wait = next(j for j in range(i, len(events)) if events[j].kind is Kind.WAIT and events[j].handle == receive.handle)
    events.insert(wait + 1, send)
    return renumbered(trace.rank, tuple(events))


@pytest.mark.parametrize(
    ("plant", "allowed_by"),
    [(with_receives_first_on_one_group, {BUFFERED, RENDEZVOUS}), (with_first_send_after_waits, set())],
)
def test_planted_wrong_order_is_caught(
    recordings: Recordings, plant: Callable[[Trace], Trace], allowed_by: set[object]
) -> None:
    traces = recordings.of(case_of((1, 2), "1f1b", TRANSPORTS[0]))
    assert check(traces, (*MODELS, ONE_QUEUE)) == ()
    for model in MODELS:
        problems = check([plant(trace) for trace in traces], [model])
        if model in allowed_by:
            assert problems == ()
        else:
            assert [line.startswith(f"{model.name}: deadlock: ") for line in problems] == [True]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("sizes", [pytest.param((2, 3)), pytest.param((1, 2, 1), marks=pytest.mark.full)])
def test_overlapped_messages_are_hidden_behind_compute(
    recordings: Recordings, sizes: tuple[int, ...], transport: str
) -> None:
    """In the steady state; Megatron's warm-up and flush wait at once unless told otherwise."""
    num_hidden = 0
    for trace in recordings.of(case_of(sizes, "interleaved-overlapped", transport)):
        open_ends = {*exposed_receives(trace), *blocking_sends(trace)}
        for steady in steady_state(trace):
            messages = [trace.events[i] for i in steady if trace.events[i].is_message]
            assert not [str(event) for event in messages if event in open_ends]
            num_hidden += len(messages)
    assert num_hidden > 0
