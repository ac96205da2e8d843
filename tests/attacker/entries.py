"""The places that read bytes of another site, or of a stranger at the port of the store, and what attacks them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import json
import os
import pickle
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.attacker.inputs import Inputs
from tests.attacker.play import Entry
from tests.attacker.served import Served
from vtp_plugin import adapters
from vtp_plugin.checkpoint.format.shard_map import Block, Bucket, BucketEntry, ShardSpec, Strided
from vtp_plugin.checkpoint.format.site_part import PART, read_part
from vtp_plugin.checkpoint.save import saving
from vtp_plugin.config import VtpConfig
from vtp_plugin.config.resolve import ScheduleOptions
from vtp_plugin.elastic.cards import RankCard, settle_seats
from vtp_plugin.elastic.coordinator import Coordinator
from vtp_plugin.elastic.failed_cards import MEMORY, leave_out
from vtp_plugin.elastic.join import SpareRank
from vtp_plugin.elastic.progress import FAILED_STARTS, PROGRESS, note_failed_start, read_last
from vtp_plugin.link.site_file import read_site
from vtp_plugin.patches.core.dist_checkpointing.serialization import _text_of
from vtp_plugin.patches.mindspeed import multimodal, two_rings
from vtp_plugin.patches.site_objects import _BoundedMemory
from vtp_plugin.patches.training.choose_checkpoint import _agreed, _of_all
from vtp_plugin.patches.training.global_vars import _read_sizes
from vtp_plugin.plan.boundary.boundary_plan import compile_plan
from vtp_plugin.plan.boundary.bridge_spec import BridgeSpec
from vtp_plugin.plan.boundary.channel_spec import ChannelSpec
from vtp_plugin.plan.boundary.endpoint import BridgeEndpoint, Endpoint
from vtp_plugin.plan.schedule.cost.costs import uniform_costs
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
from vtp_plugin.plan.schedule.order.placement import u_placement
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.runtime.comm.plain_data import PlainData
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.comm.transfers import Headers
from vtp_plugin.runtime.comm.work import Recorder
from vtp_plugin.runtime.health import ask_store, meeting_store
from vtp_plugin.runtime.health.meeting_store import agree_on_attempt, open_own_store
from vtp_plugin.runtime.health.monitor import EarlyExits, LivenessCheck, Monitor, Together
from vtp_plugin.runtime.health.position import Standing, follow
from vtp_plugin.runtime.health.redaction import Redaction
from vtp_plugin.runtime.health.startup import Agreement
from vtp_plugin.runtime.health.store import (
    Board,
    Leaver,
    Round,
    Topic,
    connect_again,
    estimate_offset,
    gather_node_sizes,
    name_run,
    part_of,
)
from vtp_plugin.runtime.step.communicator import TransportChoice, _read_times, _slowest
from vtp_plugin.runtime.step.companion_tensors import packed_rows
from vtp_plugin.runtime.step.schedule_runner import ScheduleRunner
from vtp_plugin.runtime.step.step_times import StepSums, StepTimes, Timing, _sum_up, share_reports
from vtp_plugin.trace.stretches import Owner, read_step

LOCK = "vtp_lock.json"
_HEALTH = "vtp_plugin/runtime/health"
_STEP = "vtp_plugin/runtime/step"
_ELASTIC = "vtp_plugin/elastic"
_SOON_S = 0.005  # an exchange that the attacker spoils ends by its timeout


# --- what stands in the store ---


def _planted(part: dist.Store, posts: Mapping[str, bytes]) -> dist.Store:
    for key, post in posts.items():
        part.set(key, post)
    return part


def _checks(store: dist.Store) -> dist.Store:
    return Round(dist.PrefixStore("start", part_of(store, Topic.CHECKS)), 1).posts


def _settle(posts: Mapping[str, bytes], rank: int, counters: Mapping[str, bytes] | None = None) -> None:
    store = Served()
    _planted(_checks(store), posts)
    _planted(dist.PrefixStore("start", part_of(store, Topic.CHECKS)), counters or {})
    redaction = Redaction(site="edge")
    # Rank 0 waits for nobody who has posted, and may read for a second.
    limit_s = _SOON_S if rank else 60.0
    given: Any = {"world_size": 2, "timeout_s": lambda: limit_s, "redaction": lambda: redaction}
    Agreement(store, rank=rank, **given).settle("start", lambda: {"vtp_size_list": "1,2", "--data": "/home"})


_STATED = {"digest": "0123456789abcdef", "value": "1,2"}
_STATEMENT = {"says": {"vtp_size_list": _STATED, "--data": {"digest": "00"}}, "error": "", "is_final": False}
_ERROR = {"says": None, "error": "rank 1: OSError at site cloud", "is_final": True}
_VERDICT = {"text": "rank 1: no", "name": "vtp_size_list", "is_missing": False, "is_final": True, "speakers": [1]}
_NOTICES = {
    "num_calls": 2,
    "leaver": {"rank": 1, "num_passes": 3, "is_inside": False},
    "failure": "rank 1 failed: ValueError",
}
_STANDING = {"text": "waits at boundary 0->1 for rank 0", "peers": [0], "group": [0, 1]}


def _take_board(post: bytes) -> None:
    store = Served()
    store.set("board", post)
    board, exits = Board(store), EarlyExits(0)
    notices = board.read()
    exits.note(notices.leaver, 0.0)
    with exits.passing():
        lines = [notices.failure, exits.find_early_end(99.0), exits.describe_early_end("lost a connection")]
    board.call_all()
    board.leave(Leaver(rank=0, num_passes=1, is_inside=False))
    lines.append(board.post("own"))
    _require_lines(lines)


def _require_lines(texts: Sequence[object]) -> None:
    """Let a text that a rank would show fail as an error would: unless it is one plain line of a bounded length."""
    for text in texts:
        if text:
            _show(str(text))


def _show(text: str) -> None:
    if not text.isprintable() or len(text) > 30_000:
        raise AssertionError(f"no plain line: {ascii(text[:200])}, {len(text)} characters")


def _take_standings(post: bytes) -> None:
    store = Served()
    for rank in (1, 2):
        store.set(f"here/{rank}", post)
    check = LivenessCheck(store, Board(store), 0, 3)
    _require_lines([follow(0, Standing(text="waits", peers=(1,)), check.standing)])
    check._is_here(1, 1, lambda rank: False)


def _take_suspects(posts: tuple[bytes, bytes, bytes]) -> None:
    store, now_s = Served(), [0.0]
    suspects, suspect, still = posts
    _planted(store, {"suspects": suspects, "suspect 1": suspect, "suspect 2": b"1", "still/1": still, "moves": b"7"})
    together = Together(store, 0, 1.0, lambda: now_s[0])
    with together.during("the save of a checkpoint"):
        now_s[0] = 10.0
        _require_lines([together._reason(), together.beat()])


def _monitor(store: dist.Store) -> Monitor:
    ends: Any = {"timeout_s": _SOON_S, "exit_process": lambda code: None}
    return Monitor(dist.PrefixStore("monitor", store), rank=0, world_size=2, **ends)


def _take_counters(counters: Mapping[str, bytes]) -> None:
    """Let a monitor count where others have counted; it knows that its store is gone, or goes on."""
    store = Served()
    part = part_of(dist.PrefixStore("monitor", store), Topic.WATCH)
    _planted(part, {"rounds of 0": counters["rounds of 0"]} if "rounds of 0" in counters else {})
    monitor = _monitor(store)
    _planted(monitor._store, {key: post for key, post in counters.items() if key != "rounds of 0"})
    monitor._stopping.set()
    for action in (
        lambda: monitor._find_absent(_SOON_S),
        monitor._say_farewell,
        lambda: monitor._await_farewells(_SOON_S),
        lambda: monitor._liveness_check.answer(1, lambda: Standing(text="computes")),
        lambda: _one_look(monitor),
    ):
        monitor._cut_s = None
        monitor._try(action)


def _one_look(monitor: Monitor) -> None:
    monitor._stopping.clear()
    monitor._stopping.wait = lambda timeout=None: bool(monitor._stopping.set()) or True  # type: ignore[method-assign]
    monitor._watch_others()


_COUNTERS = ["rounds of 0", "life/0", "life/1", "farewells", "answers/1", "moves"]


def _make_counters(inputs: Inputs) -> dict[str, bytes]:
    keys = inputs.random.sample(_COUNTERS, inputs.random.choice([1, 1, 2, 6]))
    return {key: inputs.counter() for key in keys}


def _take_name(post: bytes) -> None:
    store = Served()
    part_of(store, Topic.WATCH).set("name", post)
    connect_again(store)


def _take_run(post: bytes) -> None:
    store = Served()
    part_of(store, Topic.FOLDER).set("run", post)
    name_run(store)


def _take_attempt(given: tuple[int, dict[str, bytes]]) -> None:
    store = Served()
    rank, posts = given
    _planted(part_of(store, Topic.ATTEMPTS), posts)
    agree_on_attempt(store, rank=rank, world_size=2, timeout_s=_SOON_S)


def _make_attempt(inputs: Inputs) -> tuple[int, dict[str, bytes]]:
    posts = {
        "newest": inputs.post([1, 2]),
        "1 is": inputs.word("whole"),
        "count": inputs.counter(),
        "1 seat 1": inputs.word("-", "0" * 32),
    }
    return inputs.random.randrange(2), {key: post for key, post in posts.items() if inputs.chance(0.6)}


def _take_port(post: bytes) -> None:
    store = Served()
    part_of(store, Topic.ATTEMPTS).set("port", post)
    number = post.strip()
    if number.isdigit() and 1 <= int(number[:9]) <= 65535:
        return  # then it connects, which tests/attacker/at_the_port.py tries
    open_own_store(store, 1, {"MASTER_ADDR": "127.0.0.1"}, _SOON_S)


def _take_nodes(post: bytes) -> None:
    store = Served()
    part_of(store, Topic.NODES).set("1", post)
    gather_node_sizes(
        store, {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, divisor=1, timeout_s=_SOON_S
    )


def _take_clock(given: tuple[bytes, bytes]) -> None:
    store = Served()
    post, counter = given
    part = part_of(store, Topic.CLOCKS)
    part.set("rounds of 1", counter)
    for number in range(8):
        Round(part, 1).posts.set(f"1 hears {number}", post)
    estimate_offset(store, rank=1, world_size=2, timeout_s=_SOON_S)


def _take_sizes(post: bytes) -> None:
    store = Served()
    part_of(store, Topic.VOCABULARY).set("sizes", post)
    _read_sizes(store)


# --- what ranks report to each other ---

_PLACEMENT = u_placement(3)
_COSTS = "forward_ms=1,2,2,1 backward_ms=2,4,4,2 weights_ms=1,2,2,1 latency_ms=0.5,0.5,1 mbit=100,0.5,9 message_kib=64"
_REPORT = {
    **{name: {"0": 1.0, "1": 2.0, "3": 3.0} for name in ("forward_ms", "backward_ms", "weights_ms", "step_ms")},
    **{name: {"0": 0.5, "1": 0.25} for name in ("latency_ms", "transfer_ms", "message_bytes")},
}


class _Posting:
    """Ranks of which another one has posted: rank 0 combines that; a text that comes from rank 0 is read as it is."""

    def __init__(self, post: bytes, *, is_text: bool) -> None:
        self._post, self._is_text = post, is_text
        self.store = Served()

    def share_reports(self, own: Any, combine: Callable[[Any], str], kind: Any = None) -> str:
        posts = Round(part_of(self.store, Topic.REPORTS), 1).posts
        _planted(posts, {"text" if self._is_text else "1": self._post})
        given: Any = {} if kind is None else {"kind": kind}
        rank = int(self._is_text)
        return share_reports(self.store, own, combine, rank=rank, world_size=2, timeout_s=_SOON_S, **given)

    def agree(self, name: str, prepare: Callable[[], Mapping[str, object]]) -> None:
        prepare()

    def computing(self, name_compute: Callable[[], str]) -> Any:
        raise NotImplementedError


def _take_costs(post: bytes, *, is_text: bool) -> None:
    """Combine what ranks have measured, or read the costs of rank 0; then make an order for them."""
    runner = ScheduleRunner(
        _PLACEMENT, 0, _Posting(post, is_text=is_text), CpuPlatform("test"), ScheduleOptions(split_backward=True)
    )
    runner._combine(_REPORT)
    runner._report = None
    if len(post) % 8 == 0:  # which takes as long as all the rest
        runner.schedule(2, forward_only=False, group_size=None)


def _take_step_time(post: bytes, *, is_text: bool) -> None:
    times = StepTimes(_Watch(), _Posting(post, is_text=is_text).share_reports, interval=1, share=0.25)
    schedule, costs = _known_schedule()
    for _ in range(3):
        if (time_of_step := times.end(times.begin(), schedule, costs)) is not None:
            _require_lines([time_of_step, time_of_step.differs])


@functools.cache
def _known_schedule() -> tuple[Any, Any]:
    costs = uniform_costs(_PLACEMENT)
    request = ScheduleRequest(placement=_PLACEMENT, num_microbatches=2, forward_only=False, costs=costs)
    return make_schedule(request)[0], costs


class _Watch:
    def mark(self) -> float:
        return 0.0

    def between_ms(self, start: float, end: float) -> float:
        return 1.0


_BOUNDARIES: Any = {(0, 1): SimpleNamespace(strategy="rank0", rivals=("sliced",))}


def _take_transports(post: bytes, *, is_text: bool) -> None:
    own = {"0->1": {"rank0": 1.0, "sliced": 2.0}}
    found = _read_times(_Posting(post, is_text=is_text).share_reports(own, _slowest), _BOUNDARIES)
    choice = TransportChoice(pair=(0, 1), num_bytes=1 << 20, times_ms=found["0->1"])
    _require_lines([choice, choice.strategy])


_LINE = {
    **{"rank": 1, "stage": 1, "worker": 1, "site": "cloud", "network": "n", "offset_s": 0.0},
    **{"step": 2, "plan": "p", "start_s": 1.0, "end_s": 2.0, "num_resent": 3},
    "done": [
        ["forward", "1F0", 1.0, 1.1],
        ["send", "boundary 1->0, backward, microbatch 0", 1.1, 1.2, 4096],
        ["wait", "boundary 0->1, forward, microbatch 0", 1.2, 1.5, 4096],
        ["optimizer", "", 1.5, 2.0],
    ],
}
_OWN_LINE = {**_LINE, "rank": 0, "stage": 0, "worker": 0, "site": "edge", "network": "m"}
_SUMS = json.loads(_sum_up([_OWN_LINE, _LINE]))


def _take_timing(post: bytes, *, is_text: bool) -> None:
    """Sum up what two ranks did in a step, and write the sums as the log does."""
    share = functools.partial(_Posting(post, is_text=is_text).share_reports, kind=dict[str, Any])
    owner = Owner(run="r", rank=0, world_size=2, stage=0, worker=0, site="edge")
    timing = Timing(owner, Recorder(CpuPlatform("test")), share_lines=share, compare_clocks=lambda: _NO_OFFSET)
    timing._times = timing._step = _STEP_OF_OWN  # type: ignore[assignment]
    sums: StepSums = timing.report()
    _require_lines([*sums.stages, *sums.sites, *(f"{name}" for site in sums.sites for name, _ in site.values())])


_NO_OFFSET: Any = SimpleNamespace(offset_s=0.0)


class _OwnStep:
    """The step of this rank, already recorded."""

    def finish(self, recorder: Any) -> None:
        pass

    def read(self, times: Any) -> Any:
        return read_step(_OWN_LINE)


_STEP_OF_OWN: Any = _OwnStep()


def _take_problem(post: bytes, *, is_text: bool) -> None:
    ranks = _Posting(post, is_text=is_text)
    ranks.redaction = Redaction(site="edge")  # type: ignore[attr-defined]
    session: Any = SimpleNamespace(ranks=ranks)
    _require_lines([_agreed(session, None)])


def _take_names(post: bytes, *, is_text: bool) -> None:
    session: Any = SimpleNamespace(ranks=_Posting(post, is_text=is_text))
    _of_all(session, [["iter_0000004"], ["release"]])


def _take_whole_layers(post: bytes, *, is_text: bool) -> None:
    runner = ScheduleRunner(
        _PLACEMENT, 0, _Posting(post, is_text=is_text), CpuPlatform("test"), ScheduleOptions(split_backward=True)
    )
    with mock.patch.object(dist, "get_rank", return_value=int(is_text)):
        runner.settle_whole(lambda: {"linear_qkv": (None, True)})


def _take_adapters(post: bytes, *, is_text: bool) -> None:
    layout = SimpleNamespace(stage_ranks=lambda stage: [stage], num_stages=2)
    session: Any = SimpleNamespace(
        is_running=True, ranks=_Posting(post, is_text=is_text), planned=SimpleNamespace(layout=layout)
    )
    before, adapters.current_session = adapters.current_session, lambda: session  # type: ignore[assignment]
    try:
        adapters.targets_of_chunks([torch.nn.Sequential(torch.nn.Linear(1, 1))], ["0", "linear_qkv"])
    finally:
        adapters.current_session = before  # type: ignore[assignment]


def _reported(name: str, take: Any, post: Any, text: Any, places: Sequence[str]) -> Iterator[Entry]:
    """Give the two entries of an exchange: what rank 0 reads of others, and what others read of rank 0."""

    def make_text(inputs: Inputs) -> bytes:
        return inputs.word(text) if isinstance(text, str) else inputs.post(text)

    common = f"{_STEP}/step_times.py:share_reports"
    yield Entry(name=f"{name}: a report", places=[common], make=lambda one: one.post(post), take=_as(take, False))
    yield Entry(name=f"{name}: rank 0's text", places=[common, *places], make=make_text, take=_as(take, True))


def _as(take: Any, is_text: bool) -> Callable[[bytes], None]:
    return lambda post: take(post, is_text=is_text)


# --- a fit ---

_CARD = {"node": "a", "local_rank": 1, "site": "", "kind": "cpu", "why": "", "versions": "1", "reported": ""}
_SEATS = {
    "seats": {"0": 0, "1": 1},
    "chosen": {"sizes": [1, 1], "layers": [2, 2], "num_replicas": 1, "sites": [], "in_flight": [2]},
    "why": {"1": "hanging: no answer"},
    "last": {
        **{"iteration": 7, "samples": 56, "at_s": 100.0, "sizes": "1,1"},
        **{"is_end": False, "later": "", "num_later": 0},
    },
}
_ENDED = {"error": "too few", "kind": "ShortageError", "is_final": True}


class _Coordinator(Coordinator):
    """One that locks no folder."""

    def _take_folder(self) -> None:
        return None


def _coordinator(folder: Path | None = None) -> Coordinator:
    args = SimpleNamespace(
        **{"num_layers": 4, "micro_batch_size": 1, "global_batch_size": 8, "num_attention_heads": 12},
        **{"context_parallel_size": 1, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": None},
        mtp_num_layers=None,
    )
    config = VtpConfig(size_list="auto", stages=(1, 2))
    return _Coordinator(args=args, config=config, folder=folder, redaction=Redaction(site="edge"))


def _take_card(post: bytes) -> None:
    store = Served()
    part = _planted(part_of(store, Topic.CARDS), {"1": post, "read": b"1"})
    own = RankCard(**{**_CARD, "local_rank": 0})
    with tempfile.TemporaryDirectory() as folder:
        coordinator = _coordinator(Path(folder) / "save")
        place: Any = {"rank": 0, "world_size": 2, "timeout_s": _SOON_S, "redaction": coordinator.redaction}
        outcome = settle_seats(store, own, coordinator.decide, **place)
    outcome.require_seats(2)
    _require_lines([*coordinator.lines, *outcome.why.values()])
    assert part.check(["seats"])


def _take_seats(given: tuple[bytes, bytes]) -> None:
    store, (post, counter) = Served(), given
    _planted(part_of(store, Topic.CARDS), {"seats": post, "read": counter})
    place: Any = {"rank": 1, "world_size": 2, "timeout_s": _SOON_S, "redaction": Redaction(site="edge")}
    outcome = settle_seats(store, RankCard(**_CARD), lambda cards: None, **place)  # type: ignore[arg-type]
    outcome.require_seats(2)
    _require_lines([_coordinator().argv(outcome.chosen, len(outcome.seats)), *outcome.why.values()])
    if outcome.last is not None:
        _require_lines([outcome.last])


def _take_spare(given: tuple[bytes, dict[str, bytes]]) -> None:
    """Let a spare rank wait for the end of a run; the clock of its waits runs fast."""
    store, (name, posts) = Served(), given
    _planted(part_of(store, Topic.WATCH), {"name": name})
    _planted(part_of(store, Topic.CARDS), {"ended": posts.pop("ended")})
    watched = dist.PrefixStore(name.decode(errors="replace"), store)
    _planted(Round(part_of(watched, Topic.WATCH), 1).posts, posts)
    spare = SpareRank(store, num_ranks=2, timeout_s=0.0)
    _require_lines([spare.wait()])
    with contextlib.suppress(RuntimeError):  # as whoever calls it
        spare.let_go(keeps_store=True, num_others=1, limit_s=0.0)


def _make_spare(inputs: Inputs) -> tuple[bytes, dict[str, bytes]]:
    name = b"monitor 01234567-0123-0123-0123-0123456789ab"
    posts = {"ended": inputs.counter() if inputs.chance(0.3) else b"0", "board": inputs.post(_NOTICES)}
    if inputs.chance(0.5):
        posts["life/0"] = inputs.counter()
    return inputs.word(name.decode()) if inputs.chance(0.3) else name, posts


def _take_beside(given: tuple[str, bytes]) -> None:
    """Read what stands beside a checkpoint, in a folder that the other site may write."""
    name, data = given
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(data)
        if name == PROGRESS:
            last = read_last(Path(folder))
            _require_lines([last] if last else [])
        elif name == FAILED_STARTS:
            environment = {"VTP_RUN_FOLDER": folder, "VTP_START": "f a"}
            note_failed_start(OSError("disk"), environment)
        elif name == PART:
            part = read_part(Path(folder))
            _require_lines([] if part is None else [part.site, *part.sites, part.save])
        elif name == LOCK:
            _require_lines([saving._describe(data.decode(errors="replace"))])
        else:
            leave_out([RankCard(**_CARD), RankCard(**{**_CARD, "local_rank": 2, "why": "erring: x"})], Path(folder))


_PROGRESS = {**_SEATS["last"]}
_HOLDER = {"run": "r1", "host": "n2", "process": 7, "since": "2026-01-01 00:00:00", "token": "t"}
_PART = {"site": "edge", "sites": ["edge", "cloud"], "save": "0f" * 16}
_STARTS = {"flags": "f", "reasons": {"OSError: disk": [2, "b"]}}
_MEMORY = {"forgiven by": "x", "cards": {"a local rank 1": {"failures": 2, "is bad": False, "why": "erring: y"}}}


def _make_beside(inputs: Inputs) -> tuple[str, bytes]:
    files = {PROGRESS: _PROGRESS, FAILED_STARTS: _STARTS, MEMORY: _MEMORY, LOCK: _HOLDER, PART: _PART}
    name = inputs.random.choice([*files])
    return name, inputs.post(files[name])


# --- messages ---


def _take_header(given: tuple[Any, TensorFormat, int, list[int]]) -> None:
    """Read a header, plan for what it announces, and take the memory."""
    spec, form, rank, values = given
    headers = Headers.__new__(Headers)
    headers._platform, headers._peer = CpuPlatform("test"), "rank 0"
    headers._memory_bytes = _DEVICE_BYTES  # a header may ask for all of it
    headers._num_ranks, headers._codec = len(spec.dst.ranks), spec.header_codec(rank)
    whole = headers.read(torch.tensor(values, dtype=torch.int64), form, f"{spec.name}, microbatch 0")
    shape, widths = spec.crossing(whole)
    plan = spec.plan(shape, src_sharded=form.src_sharded, dst_sharded=form.dst_sharded)
    compiled = compile_plan(plan, rank, itemsize_bytes=form.dtype.itemsize, widths=widths)
    if compiled.wanted is not None:
        torch.empty(compiled.wanted, dtype=form.dtype)


_DEVICE_BYTES = 256 << 20
_PIPELINE = ChannelSpec(
    name="boundary 0->1, forward",
    src=Endpoint(ranks_by_cp=((0,),)),
    dst=Endpoint(ranks_by_cp=((1, 2),)),
    strategy="rank0",
)
_BRIDGE = BridgeSpec.between(
    "vision -> language",
    BridgeEndpoint(ranks=(((0,),), ((1,),))),
    BridgeEndpoint(ranks=(((2,),), ((3,),), ((4,),))),
    num_dims=3,
)


def _make_header(inputs: Inputs) -> tuple[Any, TensorFormat, int, list[int]]:
    is_sharded = inputs.chance(0.5)
    form = TensorFormat(
        dtype=torch.float32, dst_sharded=is_sharded, has_variable_shapes=True, width=64, most_tokens=16 * 12 * 2
    )
    return _PIPELINE, form, 1, inputs.wholes(4, [12, 2, 64, 0])


def _make_bridge_header(inputs: Inputs) -> tuple[Any, TensorFormat, int, list[int]]:
    form = TensorFormat(dtype=torch.float32, has_variable_shapes=True)
    valid = [8, 4, 5, 5, 5, 0] * 2
    return _BRIDGE, form, 3, inputs.wholes(len(valid), valid)


_ARGS: Any = SimpleNamespace(seq_length=16, micro_batch_size=1)


def _take_lengths(values: list[int]) -> None:
    row = packed_rows(8).give(torch.tensor(values, dtype=torch.int64).to(torch.int32).view(9, 1, 1))
    lengths = row["cu_seqlens"].flatten().tolist()
    if lengths != sorted(lengths) or not 0 <= lengths[0] <= lengths[-1] <= 8:
        raise AssertionError(f"lengths {lengths} lead out of the row")


def _take_pictures(values: list[int]) -> None:
    encoder = SimpleNamespace(vision_encoder=SimpleNamespace(spatial_merge_size=2))
    args: Any = SimpleNamespace(mm=SimpleNamespace(model=SimpleNamespace(image_encoder=encoder)), **vars(_ARGS))
    two_rings.grids(args).give(torch.tensor(values, dtype=torch.int64).to(torch.int32).view(16, 1, 3))


def _take_positions(values: list[int]) -> None:
    multimodal._batch(torch.tensor(values, dtype=torch.int64).to(torch.int32).view(4, 1, 4))


# --- objects ---


class _Plain:
    """A class of the table."""

    def __init__(self) -> None:
        self.name, self.parts = "plan", [slice(0, 2)]


_DATA = PlainData((_Plain,), str)
_OBJECTS: list[Any] = [
    None,
    [True, 1, -5, 1.5, "text", b"\x00", (), {"a": [1]}, {1, 2}, frozenset({3})],
    {"size": torch.Size([2, 3]), "part": slice(0, 2, None), "type": torch.bfloat16},
    {"tensor": torch.ones(2, 3), "empty": torch.ones(0, 2)},
    [_Plain(), ValueError("x"), io.BytesIO(b"state")],
    [torch.arange(3).numpy(), torch.arange(3).numpy()[0]],
    [{f"decoder.layers.{number}.weight": [number] * 3} for number in range(20)],
]


def _object_bytes(inputs: Inputs) -> bytes:
    """Make bytes of an object: of a valid one, with changed ones, of opcodes, or of entries with other contents."""
    kind = inputs.random.randrange(10)
    if kind == 0:
        return inputs.garbage()
    if kind == 1:
        return _opcodes(inputs)
    if kind < 5:
        return _entries(inputs)
    if kind == 5:
        return pickle.dumps(inputs.random.choice(_OBJECTS[:2]), protocol=inputs.random.randrange(5))
    data = _DATA.write(inputs.random.choice(_OBJECTS))
    return inputs.damaged(data) if kind < 9 else data


_OPCODES = [
    each for name, each in vars(pickle).items() if name.isupper() and isinstance(each, bytes) and len(each) == 1
]


def _opcodes(inputs: Inputs) -> bytes:
    data = b"\x80\x04"
    for _ in range(inputs.random.randrange(1, 40)):
        data += inputs.random.choice(_OPCODES)
        kind = inputs.random.randrange(6)
        if kind == 0:
            data += struct.pack("<I", inputs.whole() & 0xFFFFFFFF)
        elif kind == 1:
            data += struct.pack("<Q", inputs.whole() & (1 << 64) - 1)
        elif kind == 2:
            data += bytes([inputs.random.randrange(256)])
        elif kind == 3:
            data += inputs.text().encode(errors="surrogatepass")[:40] + b"\n"
    return data + b"."


_STATES: list[tuple[str, Any]] = [
    ("torch", "torch.float32"),
    ("size", [2, 3]),
    ("slice", [0, 2, None]),
    ("frozenset", [1]),
    ("ordered", [["a", 1]]),
    ("bytes", "x"),
    ("stack", None),
    ("error", "text"),
    ("tensor", ["torch.float32", [2], "12345678"]),
    ("array", ["<i8", [1], "12345678"]),
    ("number", ["<i8", [], "12345678"]),
    (f"{_Plain.__module__}.{_Plain.__qualname__}", {"name": "plan", "parts": []}),
]


class _Marked:
    pass


def _entries(inputs: Inputs) -> bytes:
    """Write entries as the plugin does, with contents that it does not write."""
    marks = [_Marked() for _ in range(inputs.random.choice([1, 1, 2, 5]))]
    made: dict[int, Any] = {}
    for mark in marks:
        key, state = inputs.random.choice(_STATES)
        found = inputs.changed(state) if inputs.chance(0.7) else inputs.value()
        made[id(mark)] = (inputs.text() if inputs.chance(0.1) else key), _as_object(inputs, found)

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return made.get(id(obj))

    file = io.BytesIO()
    Pickler(file, protocol=4).dump(marks)
    return file.getvalue()


def _as_object(inputs: Inputs, value: Any) -> Any:
    """Turn a value of JSON into one of Python, of other types here and there."""
    if isinstance(value, dict):
        return {str(key): _as_object(inputs, each) for key, each in value.items()}
    if isinstance(value, list):
        found = [_as_object(inputs, each) for each in value]
        return tuple(found) if inputs.chance(0.6) else found
    if isinstance(value, str):
        text = str(value)[:100_000]
        return text.encode(errors="replace") if inputs.chance(0.5) else text.encode(errors="replace").decode()
    return value


def _take_object(data: bytes) -> None:
    _DATA.read(data)


_SHARD = ShardSpec(name="w", shape=(4, 3), blocks=(Block(((0, 2), (0, 3)), Strided(0, (3, 1))),))
_BUCKET = Bucket("0", 8, (BucketEntry(_SHARD, 2),))


def _make_parts(inputs: Inputs) -> list[Any]:
    """Make what ranks send of a map, with a part of it replaced: of such objects only the classes are known."""
    return [[(_BUCKET,)], _with_another(inputs, [(_BUCKET,), (_BUCKET, _BUCKET)])]


def _with_another(inputs: Inputs, value: Any) -> Any:
    if inputs.chance(0.2):
        return _as_object(inputs, inputs.value())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        name = inputs.random.choice([field.name for field in dataclasses.fields(value)])
        object.__setattr__(changed, name, _with_another(inputs, getattr(value, name)))
        return changed
    if isinstance(value, list | tuple) and value:
        at = inputs.random.randrange(len(value))
        return type(value)([*value[:at], _with_another(inputs, value[at]), *value[at + 1 :]])
    return _as_object(inputs, inputs.value())


def _take_length(length: int) -> None:
    """Take the memory for an object of a length, as torch does."""
    with _BoundedMemory(3):
        buffer = torch.empty(length, dtype=torch.uint8)
        buffer.resize_(length)


# --- what answers where a store should be ---


def _make_answers(inputs: Inputs) -> list[bytes | None]:
    """Make what a listener answers to each message; None for the answer to a ping, which says again what it got.

    To no request that reads a length: torch's client takes as much memory as the keeper of a store says.
    """
    if inputs.chance(0.01):
        return [b""] * 9  # it never answers
    kind = inputs.random.randrange(3)
    return [inputs.garbage() or b"x", *([] if kind else [inputs.garbage()])] if kind < 2 else [None, b"\x00", b"\x07"]


class _Listener:
    """Answers what it is told to, and then closes the connection."""

    def __init__(self, answers: Sequence[bytes | None]) -> None:
        self._answers = answers
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._answer, args=(self._socket.accept()[0],), daemon=True).start()

    def _answer(self, connected: socket.socket) -> None:
        with contextlib.suppress(OSError), connected:
            for answer in self._answers:
                if not (got := connected.recv(1 << 16)):
                    return
                while answer is None and len(got) < 10:
                    got += connected.recv(1 << 16)
                connected.sendall(got[6:10] if answer is None else answer)

    def close(self) -> None:
        """Listen no more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _take_doctor(answers: list[bytes | None]) -> None:
    listener = _Listener(answers)
    try:
        _require_lines(ask_store.test_rendezvous(f"127.0.0.1:{listener.port}", 0.02)[0])
    finally:
        listener.close()


def _take_start(answers: list[bytes | None]) -> None:
    """Start as rank 1, where something else listens."""
    listener = _Listener(answers)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(listener.port), LOCAL_RANK="1")
    try:
        meeting_store.open_store(1, 2, 0.02)
    finally:
        listener.close()


# --- files and words that the other site's owner gives ---

_SITE = """name = "edge"
address = "10.8.0.1"
master = "10.8.0.1"
ports = [29511]
mtu = 1420
[[peer]]
public_key = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
address = "10.8.0.2"
endpoint = "198.51.100.7:51820"
"""


def _make_site(inputs: Inputs) -> bytes:
    lines = _SITE.splitlines()
    for _ in range(inputs.random.choice([1, 1, 2])):
        at = inputs.random.randrange(len(lines))
        name, _, value = lines[at].partition(" = ")
        kind = inputs.random.randrange(5)
        if kind == 0:
            lines[at] = f"{name} = {json.dumps(inputs.text())}"
        elif kind == 1:
            lines[at] = f"{name} = {inputs.number()}"
        elif kind == 2:
            lines[at] = f"{name} = {'[' * inputs.random.choice([1, 70, 3000])}{value}"
        elif kind == 3:
            lines.insert(at, f"{json.dumps(inputs.text())} = {value}")
        else:
            lines[at] = f"{name} = {json.dumps(value.strip(chr(34)) + inputs.text())}"
    data = "\n".join(lines).encode(errors="surrogatepass")
    return inputs.damaged(data) if inputs.chance(0.4) else data


def _take_site(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "site.toml"
        path.write_bytes(data)
        read_site(path)


def _pair(first: Callable[[Inputs], Any], second: Callable[[Inputs], Any]) -> Callable[[Inputs], Any]:
    return lambda inputs: (first(inputs), second(inputs))


def _counter(inputs: Inputs) -> bytes:
    return inputs.counter() if inputs.chance(0.2) else b"0"


ENTRIES: list[Entry] = [
    Entry(
        name="a statement of a check",
        places=[f"{_HEALTH}/startup.py:_Check._read_post"],
        make=lambda inputs: inputs.post(_STATEMENT, _ERROR),
        take=lambda post: _settle({"1": post, "farewell": b"1"}, 0),
    ),
    Entry(
        name="a verdict of a check",
        places=[f"{_HEALTH}/startup.py:_Check._read_verdict"],
        make=lambda inputs: inputs.post(_VERDICT),
        take=lambda post: _settle({"verdict": post}, 1),
        may_exit=True,  # rank 1's timeout is short here: reading a long post may outlast it on a busy machine
    ),
    Entry(
        name="who is missing at a check, and the counters",
        places=[
            *(f"{_HEALTH}/startup.py:_Check.{name}" for name in ("_exchange", "_read_verdict.whom")),
            *(f"{_HEALTH}/store.py:{name}" for name in ("open_round", "count")),
            *(f"{_HEALTH}/startup_waiting.py:{name}" for name in ("await_readers", "tell_read")),
        ],
        make=_pair(lambda inputs: inputs.word("1, 2 and 3 more"), lambda inputs: inputs.counter()),
        take=lambda given: (
            _settle({"missing": given[0], "farewell": given[1]}, 1)
            if given[1][:1] in b"0123"
            else _settle({}, 1, {"rounds of 1": given[1]})
        ),
        may_exit=True,  # as above
    ),
    Entry(
        name="the board of the monitors",
        places=[
            f"{_HEALTH}/store.py:Notices.of",
            f"{_HEALTH}/store.py:Board.read",
            f"{_HEALTH}/store.py:Board._change",
        ],
        make=lambda inputs: inputs.post(_NOTICES),
        take=_take_board,
    ),
    Entry(
        name="where ranks stand",
        places=[f"{_HEALTH}/monitor.py:LivenessCheck._last_answer", f"{_HEALTH}/position.py:load_standing"],
        make=lambda inputs: inputs.word("1", "7", "") + b" " + inputs.post(_STANDING),
        take=_take_standings,
    ),
    Entry(
        name="who stands still in a save",
        places=[f"{_HEALTH}/monitor.py:Together._reason", f"{_HEALTH}/monitor.py:Together._read"],
        make=lambda inputs: (
            inputs.random.choice([b"2", b"1000", b"-1", b"99999999", str(inputs.whole()).encode()]),
            inputs.counter(),
            inputs.word("yes", ""),
        ),
        take=_take_suspects,
    ),
    Entry(
        name="the counters of the monitors",
        places=[
            f"{_HEALTH}/monitor.py:Monitor.__init__",
            *(f"{_HEALTH}/monitor.py:Monitor.{name}" for name in ("_leave_others", "_find_absent.has_left")),
            *(
                f"{_HEALTH}/monitor.py:Monitor.{name}"
                for name in ("_watch_others", "_say_farewell", "_await_farewells")
            ),
            *(f"{_HEALTH}/monitor.py:LivenessCheck.{name}" for name in ("answer", "absent")),
            f"{_HEALTH}/monitor.py:Together.beat",
        ],
        make=_make_counters,
        take=_take_counters,
    ),
    Entry(
        name="the name of the monitors' part",
        places=[f"{_HEALTH}/store.py:connect_again"],
        make=lambda inputs: inputs.word("monitor 01234567-0123-0123-0123-0123456789ab"),
        take=_take_name,
    ),
    Entry(
        name="the name of the run",
        places=[f"{_HEALTH}/store.py:name_run"],
        make=lambda inputs: inputs.word("0123456789abcdef0123456789abcdef"),
        take=_take_run,
    ),
    Entry(
        name="attempts in the launcher's store",
        places=[
            f"{_HEALTH}/meeting_store.py:agree_on_attempt",
            f"{_HEALTH}/meeting_store.py:_Table.enter",
            *(f"{_HEALTH}/meeting_store.py:_Table.{name}" for name in ("open", "_newest", "_take")),
        ],
        make=_make_attempt,
        take=_take_attempt,
    ),
    Entry(
        name="the port of an attempt's own store",
        places=[f"{_HEALTH}/meeting_store.py:open_own_store"],
        make=lambda inputs: inputs.post(29500),
        take=_take_port,
    ),
    Entry(
        name="how many ranks a node has",
        places=[f"{_HEALTH}/store.py:gather_node_sizes"],
        make=lambda inputs: inputs.post(2),
        take=_take_nodes,
    ),
    Entry(
        name="a reading of rank 0's clock",
        places=[f"{_HEALTH}/store.py:estimate_offset", f"{_HEALTH}/store.py:_ask"],
        make=_pair(lambda inputs: inputs.post(12.5), _counter),
        take=_take_clock,
    ),
    Entry(
        name="the sizes of the vocabulary",
        places=["patches/training/global_vars.py:_read_sizes"],
        make=lambda inputs: inputs.post([50257, 50304]),
        take=_take_sizes,
    ),
    *_reported(
        "costs of an order", _take_costs, _REPORT, _COSTS, [f"{_STEP}/schedule_runner.py:ScheduleRunner._combine"]
    ),
    *_reported(
        "the time of steps",
        _take_step_time,
        {"step_ms": {"0": 1.0}},
        [2.0, 3.0],
        [f"{_STEP}/step_times.py:StepTimes.end", f"{_STEP}/step_times.py:read_shared"],
    ),
    *_reported(
        "times of transports",
        _take_transports,
        {"0->1": {"rank0": 1.0, "sliced": 2.0}},
        {"0->1": {"rank0": 1.0, "sliced": 2.0}},
        [f"{_STEP}/communicator.py:try_strategies", f"{_STEP}/communicator.py:_read_times"],
    ),
    *_reported("sums of a step", _take_timing, _LINE, _SUMS, [f"{_STEP}/step_times.py:Timing.report"]),
    *_reported(
        "a checkpoint that is passed over",
        _take_problem,
        {"iter_0000004 is damaged": {}},
        "iter_0000004 is damaged",
        ["patches/training/choose_checkpoint.py:_agreed"],
    ),
    *_reported(
        "names of checkpoints",
        _take_names,
        {"0": {"iter_0000004": 0.0}, "1": {"release": 0.0}},
        [["iter_0000004"], ["release"]],
        ["patches/training/choose_checkpoint.py:_of_all"],
    ),
    *_reported(
        "layers that stay whole",
        _take_whole_layers,
        {"whole": {"stage 0: linear_qkv": 1.0}},
        "stage 0: linear_qkv",
        [f"{_STEP}/schedule_runner.py:ScheduleRunner.settle_whole"],
    ),
    *_reported(
        "names of layers",
        _take_adapters,
        {"layers": {"0": 1.0, "linear_qkv": 2.0}, "targets": {"linear_qkv": 1.0}},
        "",
        ["vtp_plugin/adapters.py:targets_of_chunks"],
    ),
    Entry(
        name="a card",
        places=[f"{_ELASTIC}/cards.py:_cards", f"{_ELASTIC}/cards.py:settle_seats"],
        make=lambda inputs: inputs.post(_CARD),
        take=_take_card,
    ),
    Entry(
        name="seats",
        places=[f"{_ELASTIC}/cards.py:settle_seats"],
        make=_pair(lambda inputs: inputs.post(_SEATS, _SEATS, _ENDED), _counter),
        take=_take_seats,
    ),
    Entry(
        name="what a spare rank reads",
        places=[f"{_ELASTIC}/join.py:SpareRank.{name}" for name in ("wait", "let_go", "leave")],
        make=_make_spare,
        take=_take_spare,
    ),
    Entry(
        name="files beside a checkpoint",
        places=[
            f"{_ELASTIC}/progress.py:read_last",
            f"{_ELASTIC}/progress.py:_read_starts",
            f"{_ELASTIC}/failed_cards.py:_read",
            "vtp_plugin/checkpoint/save/saving.py:_holder",
            "vtp_plugin/checkpoint/format/site_part.py:read_part",
        ],
        make=_make_beside,
        take=_take_beside,
    ),
    Entry(
        name="the header of a tensor",
        places=["vtp_plugin/runtime/comm/transfers.py:Headers.read"],
        make=_make_header,
        take=_take_header,
    ),
    Entry(
        name="the header of a bridge",
        places=["vtp_plugin/runtime/comm/transfers.py:Headers.read"],
        make=_make_bridge_header,
        take=_take_header,
    ),
    Entry(
        name="lengths of packed samples",
        places=[f"{_STEP}/companion_tensors.py:packed_rows"],
        make=lambda inputs: inputs.wholes(9, [0, 2, 5, 8, 8, 8, 8, 8, 8]),
        take=_take_lengths,
    ),
    Entry(
        name="sizes of pictures",
        places=["patches/mindspeed/two_rings.py:grids"],
        make=lambda inputs: inputs.wholes(48, [1, 4, 4] * 2 + [0] * 42),
        take=_take_pictures,
    ),
    Entry(
        name="positions of tokens",
        places=["patches/mindspeed/multimodal.py:positions"],
        make=lambda inputs: inputs.wholes(16, [0, 1, 2, 3] * 3 + [1, 1, 1, 0]),
        take=_take_positions,
    ),
    Entry(name="an object", places=["patches/site_objects.py:_read"], make=_object_bytes, take=_take_object),
    Entry(
        name="the length of an object",
        places=["patches/site_objects.py:_bounded"],
        make=lambda inputs: inputs.whole(),
        take=_take_length,
    ),
    Entry(
        name="parts of the map of a checkpoint",
        places=["patches/core/dist_checkpointing/serialization.py:_write"],
        make=_make_parts,
        take=_text_of,
    ),
    Entry(
        name="what answers where doctor looks for a store",
        places=[
            *(f"{_HEALTH}/ask_store.py:{name}" for name in ("test_rendezvous", "_ask_store.ask")),
            f"{_HEALTH}/meeting_store.py:attach",
        ],
        make=_make_answers,
        take=_take_doctor,
    ),
    Entry(
        name="what answers where a rank looks for a store",
        places=[f"{_HEALTH}/meeting_store.py:_is_reachable", f"{_HEALTH}/meeting_store.py:attach"],
        make=_make_answers,
        take=_take_start,
        may_exit=True,  # a store that is stopped is left so, with a line
    ),
    Entry(
        name="a site's file for the link",
        places=["vtp_plugin/link/site_file.py:read_site"],
        make=_make_site,
        take=_take_site,
    ),
]
