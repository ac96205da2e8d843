"""A stranger, or the other site, posts to the store: one line that names the key, and nothing else happens."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from tests.support.hosts import PYTHON_PATH, ROOT
from tests.support.pace import pace
from vtp_plugin.config import VtpConfig
from vtp_plugin.elastic.cards import Outcome, RankCard, settle_seats
from vtp_plugin.elastic.coordinator import Coordinator
from vtp_plugin.errors import ConfigError, PeerError
from vtp_plugin.runtime.health.meeting_store import agree_on_attempt
from vtp_plugin.runtime.health.monitor import LivenessCheck, Monitor, Together
from vtp_plugin.runtime.health.redaction import Redaction
from vtp_plugin.runtime.health.startup import Agreement
from vtp_plugin.runtime.health.store import (
    Board,
    Round,
    Topic,
    connect_again,
    estimate_offset,
    gather_node_sizes,
    part_of,
)
from vtp_plugin.runtime.step.step_times import Report, read_shared, share_reports
from vtp_plugin.session.ranks import AllRanks
from vtp_plugin.tune.fit.constraints import Constraints
from vtp_plugin.tune.fit.fit_layout import Chosen

TIMEOUT_S = 2.0 * pace()
HOST, SECRET = "127.0.0.1", "r-secret"
SUSPECTS: list[Any] = [b"1", b"x", b"\xff", b"-3", b"999999999999"]
GARBAGE: list[Any] = [
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b"nothing",
    b"",
    b"7",
    b'{"a": 1e999}',
    b'"' + b"x" * (9 << 20) + b'"',
]
BETWEEN = {0: Redaction(site="edge"), 1: Redaction(site="cloud")}
ONE_SITE = dict.fromkeys(range(2), Redaction(is_one_site=True))


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def posts_of_monitors(store: dist.Store) -> dist.Store:
    """What a stranger finds, who can read the random name."""
    return Round(part_of(connect_again(store), Topic.WATCH), 1).posts


class Watched:
    """Two monitors over a store; "ending" is an entry in a list."""

    def __init__(self, store: dist.Store) -> None:
        self.ended: list[int] = []
        ends: Any = {"timeout_s": TIMEOUT_S, "exit_process": self.ended.append}
        self.monitors = [Monitor(connect_again(store), rank=rank, world_size=2, **ends) for rank in range(2)]
        for monitor in self.monitors:
            monitor.start()

    def wait(self) -> None:
        deadline_s = time.monotonic() + 60.0
        while len(self.ended) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert self.ended == [1, 1]

    def close(self) -> None:
        for monitor in self.monitors:
            monitor._stopping.set()
            monitor._timer_ends.set()
            monitor._helper.end()
            for thread in monitor._threads:
                thread.join(60.0)


@pytest.fixture
def watched(store: dist.TCPStore) -> Iterator[Watched]:
    both = Watched(store)
    yield both
    both.close()


@pytest.mark.parametrize(
    "post",
    [b"\xff\xfe", b"[" * 100_000, b'{"num_calls": "x"}', b'{"leaver": {"rank": 1}}', b'{"failure": ["x"]}', b"[]"],
)
def test_a_board_that_no_rank_wrote_ends_all_with_one_line(
    store: dist.TCPStore, watched: Watched, post: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    begin_s = time.monotonic()
    posts_of_monitors(store).set("board", post)
    watched.wait()
    assert time.monotonic() - begin_s < TIMEOUT_S
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2, lines
    assert all(
        "the post monitor/board in the store " in line and "let nobody else reach MASTER_PORT" in line for line in lines
    )


def test_what_others_post_is_one_plain_line_of_a_bounded_length(
    store: dist.TCPStore, watched: Watched, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "rank 1 failed: \x1b]0;owned\x07\x1b[2J\x9b2J\u202e\r\nforged [vtp rank 0] error: " + "y" * 50_000
    posts_of_monitors(store).set("board", json.dumps({"failure": text}))
    watched.wait()
    err = capfd.readouterr().err
    lines = err.splitlines()
    assert len(lines) == 2 and all(len(line) < 2300 for line in lines), lines
    assert all(character.isprintable() for line in lines for character in line), ascii(err[:300])
    assert all(line.startswith("[vtp rank ") and "rank 1 failed: \\x1b]0;owned\\x07" in line for line in lines)
    assert all(" ... (cut)" in line for line in lines)


def test_a_board_of_bytes_that_look_like_one_is_changed_in_no_endless_round() -> None:
    """Shown as text, its escape is right; in the store it never is what a rank has read."""
    store = dist.HashStore()
    store.set("board", cast(Any, b'{"num_calls": 1, "failure": "\\\xff"}'))
    board = Board(store)
    assert board.read().failure and board.call_all() == 0
    assert "is no UTF-8" in str(board._change(lambda now: replace(now, num_calls=9)).failure)


def test_a_board_is_read_in_no_endless_round() -> None:
    store = dist.HashStore()
    store.set("board", cast(Any, b"\xff"))
    board = Board(store)
    assert "is '\\\\xff', which is no JSON" in str(board.read().failure)
    assert board.call_all() == 0 and "no JSON" in board.post("own")


def test_a_failure_of_this_rank_stays_its_own() -> None:
    """Its text is cut and cleaned in the store; it is no failure of another rank for that."""
    board, text = Board(dist.HashStore()), "a\x1b" + "b" * 5000
    assert board.post(text) == text == board.post(text)
    assert board.post("other") == board.read().failure != text


@pytest.mark.parametrize(
    "post", [b"1 \xff", b"1 {}", b"99999999999999999999 {}", b"", b'1 {"text": "x", "peers": [7]}', b"1 " + b"[" * 9999]
)
def test_an_answer_that_no_rank_gave_counts_as_none(post: Any) -> None:
    store = dist.HashStore()
    roll_call = LivenessCheck(store, Board(store), 0, 2)
    store.set("here/1", post)
    assert roll_call.standing(1) is None


def test_peers_that_come_a_million_times_are_not_asked_for() -> None:
    store = dist.HashStore()
    check = LivenessCheck(store, Board(store), 0, 2)
    for peers, is_sound in (([0, 1], True), ([0, 0, 0], False), ([2], False)):
        store.set("here/1", "1 " + json.dumps({"text": "waits", "peers": peers}))
        assert (check.standing(1) is not None) is is_sound


def test_a_counter_without_a_number_is_one_line(store: dist.TCPStore) -> None:
    """Torch's server closes the connection of who counts there."""
    part_of(store, Topic.REPORTS).set("rounds of 0", "x")
    with pytest.raises(PeerError, match="the store cannot count 'rounds of 0'"):
        share_reports(connect_only(store), {}, str, rank=0, world_size=1, timeout_s=20.0)
    part_of(store, Topic.ATTEMPTS).set("count", "x")
    with pytest.raises(PeerError, match="the store cannot count 'count'"):
        agree_on_attempt(connect_only(store), rank=0, world_size=2, timeout_s=20.0)


def connect_only(store: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore(HOST, store.port, is_master=False, wait_for_workers=False)


def test_rank_0_does_not_clear_an_attempt_of_a_million_ranks() -> None:
    """It would delete a key for each."""
    store = dist.HashStore()
    part_of(store, Topic.ATTEMPTS).set("newest", "[1, 1048576]")
    with pytest.raises(PeerError, match="is attempt 1 of 1048576 ranks, which is none"):
        agree_on_attempt(store, rank=0, world_size=2, timeout_s=20.0)


def test_suspects_that_nobody_named_are_not_waited_for() -> None:
    store = dist.HashStore()
    together = Together(store, 0, 0.0, time.monotonic)
    store.add("suspects", 1 << 40)
    for number, post in enumerate(SUSPECTS, start=1):
        store.set(f"suspect {number}", post)
    store.set("still/1", "yes")
    begin_s = time.monotonic()
    assert together._reason() == "rank 1 does nothing, and the others wait"
    assert time.monotonic() - begin_s < 5.0 * pace()


def on_ranks(action: Callable[[int], object]) -> list[Any]:
    def call(rank: int) -> object:
        try:
            return action(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(call, range(2)))


def settle(
    stores: Mapping[int, dist.Store],
    prepare: Mapping[int, Callable[[], Mapping[str, object]]],
    redactions: Mapping[int, Redaction] = ONE_SITE,
) -> list[Any]:
    """Run the check "start" on two ranks; return what each raised."""

    def action(rank: int) -> object:
        given: Any = {"rank": rank, "world_size": 2, "timeout_s": lambda: 20.0, "redaction": lambda: redactions[rank]}
        return Agreement(stores[rank], **given).settle("start", prepare[rank])

    return on_ranks(action)


def checks(store: dist.Store) -> dist.Store:
    """Where the first check "start" of a run posts."""
    return Round(dist.PrefixStore("start", part_of(store, Topic.CHECKS)), 1).posts


@pytest.mark.parametrize("post", [*GARBAGE, b"{}", b'{"says": 1}', b'{"error": "x", "is_final": "yes"}'])
def test_a_statement_that_no_rank_made_ends_all_with_one_line(post: Any) -> None:
    store = dist.HashStore()

    def coordinator(rank: int) -> object:
        if rank == 1:
            checks(store).set("1", post)
            return None
        given: Any = {"rank": 0, "world_size": 2, "timeout_s": lambda: 3.0}
        return Agreement(store, **given).settle("start", dict)

    error = on_ranks(coordinator)[0]
    assert isinstance(error, ConfigError) and not error.is_final
    assert str(error).startswith("rank 1: the post agree/start/1 in the store "), error
    assert len(str(error)) < 500 and str(error).isprintable()


@pytest.mark.parametrize("post", [*GARBAGE, b'{"text": 1}', b'{"text": "x", "more": 1}'])
def test_a_verdict_that_nobody_gave_is_one_line(post: Any) -> None:
    store = dist.HashStore()
    checks(store).set("verdict", post)
    with pytest.raises(PeerError, match="the post agree/start/verdict in the store ") as caught:
        Agreement(store, rank=1, world_size=2, timeout_s=lambda: 20.0).settle("start", dict)
    assert len(str(caught.value)) < 500 and str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("redaction", "own", "is_final"),
    [
        (Redaction(site="cloud"), None, False),
        (Redaction(site="cloud"), OSError("disk"), False),
        (Redaction(site="cloud"), ConfigError("--x 1; wrong; leave it out"), True),
        (Redaction(site="cloud", is_opted_in=True), None, False),
        (Redaction(names_one_site=True), None, True),
        (Redaction(is_one_site=True), None, True),
    ],
)
def test_the_other_site_does_not_say_that_no_restart_cures(
    redaction: Redaction, own: Exception | None, is_final: bool
) -> None:
    """That is what ``vtp_stopped.txt`` is written for, which keeps every later start from going on."""
    store = dist.HashStore()
    text = "rank 0: \x1b[2Jgone for good" + "x" * 5000
    checks(store).set("verdict", json.dumps({"text": text, "is_final": True}))

    def prepare() -> Mapping[str, object]:
        if own is not None:
            raise own
        return {}

    given: Any = {"rank": 1, "world_size": 2, "timeout_s": lambda: 20.0, "redaction": lambda: redaction}
    with pytest.raises(ConfigError, match=r"rank 0: \\x1b\[2Jgone for good") as caught:
        Agreement(store, **given).settle("start", prepare)
    assert caught.value.is_final is is_final
    assert len(str(caught.value)) < 2200 and (own is None or str(own) in str(caught.value))


def fails(error: Exception) -> Mapping[str, object]:
    raise error


def test_between_sites_only_an_error_of_its_own_is_final() -> None:
    """Rank 0 judges by what both sites post: neither by a statement nor by an error does one stop the other."""
    mistake = ConfigError("--x 1; wrong; leave it out")
    for prepare, are_final in (
        ({0: lambda: {"a": 1}, 1: lambda: {"a": 2}}, [False, False]),
        ({0: dict, 1: lambda: fails(mistake)}, [False, True]),
        ({0: lambda: fails(mistake), 1: dict}, [True, False]),
    ):
        for redactions in (BETWEEN, ONE_SITE):
            store = dist.HashStore()
            found = settle({0: store, 1: store}, prepare, redactions)
            assert [error.is_final for error in found] == (are_final if redactions is BETWEEN else [True, True])


def test_modules_of_several_sites_keep_their_texts() -> None:
    """Checks of a bridge have ranks of their own, and the same door."""
    ranks = AllRanks(lambda: 20.0, lambda: None)
    ranks.join(dist.HashStore(), 0, 2)
    ranks.set_redaction(Redaction(site="edge"))
    agree: Any = ranks.agreement("bridge", None)
    assert agree is not None
    world = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_rank", world.get_rank)
        patch.setattr(dist, "get_world_size", world.get_world_size)
        among: Any = ranks.agreement("bridge", [0, 1])
        assert among.func.__self__.redaction() is ranks.redaction
        assert not among.func.__self__.redaction().is_full


def card(local_rank: int, **changes: str) -> RankCard:
    values: dict[str, Any] = {"site": "", "kind": "cpu", "why": "", "versions": "1", **changes}
    return RankCard(node="a", local_rank=local_rank, **values)


def not_asked(cards: object) -> Any:
    raise AssertionError


def fit(store: dist.Store, decide: Any, cards: list[RankCard], redactions: Mapping[int, Redaction]) -> list[Any]:
    def action(rank: int) -> object:
        place: Any = {"rank": rank, "world_size": 2, "timeout_s": 20.0, "redaction": redactions[rank]}
        return settle_seats(store, cards[rank], decide, **place)

    return on_ranks(action)


FAILURES = [ConfigError(f"the folder belongs to {SECRET} (process 1 on edge-host-7)"), OSError(f"/home/{SECRET}")]


@pytest.mark.parametrize("raised", FAILURES)
@pytest.mark.parametrize("redactions", [BETWEEN, ONE_SITE])
def test_a_fit_tells_the_other_site_the_type_of_an_error(raised: Exception, redactions: Any) -> None:
    store = dist.HashStore()

    def decide(cards: object) -> Any:
        raise raised

    cards = [card(0, why=f"erring: its test ended with 1 ({SECRET})"), card(1)]
    found = fit(store, decide, cards, redactions)
    posted = b" ".join(part_of(store, Topic.CARDS).get(key) for key in ("0", "1", "seats")).decode()
    is_hidden = redactions is BETWEEN
    assert found[0] is raised and (SECRET in posted) is not is_hidden and (SECRET in str(found[1])) is not is_hidden
    assert "erring" in posted and type(raised).__name__ in (str(found[1]) if is_hidden else type(raised).__name__)
    assert not (is_hidden and getattr(found[1], "is_final", False))


@pytest.mark.parametrize("is_one_site", [True, False])
def test_cards_of_the_other_site_do_not_stop_this_one_for_good(is_one_site: bool) -> None:
    redaction = Redaction(is_one_site=is_one_site, site="edge")
    args = SimpleNamespace(**vars(MODEL), **ALONE)
    coordinator = Coordinator(args=args, config=VtpConfig(size_list="auto", stages=(1, 1)), redaction=redaction)
    for said, text in (
        ({"versions": "2"}, "versions differ between nodes"),
        ({"kind": "cuda"}, "kinds of devices are mixed"),
    ):
        with pytest.raises(ConfigError, match=text) as caught:
            coordinator.decide([card(0), replace(card(1), node="b", **cast(Any, said))])
        assert caught.value.is_final is is_one_site


SEATS: dict[str, Any] = {"seats": {"1": 0}, "chosen": {"sizes": [1], "layers": [2], "num_replicas": 1}}
BAD_SEATS: list[Any] = [
    *GARBAGE,
    json.dumps({**SEATS, "words": ["--load", "/evil"]}).encode(),
    json.dumps({**SEATS, "seats": {"x": 0}}).encode(),
    json.dumps({**SEATS, "seats": [0]}).encode(),
    json.dumps({**SEATS, "chosen": {"sizes": ["1"], "layers": [2], "num_replicas": 1}}).encode(),
    json.dumps({**SEATS, "chosen": {"sizes": [True], "layers": [2], "num_replicas": 1}}).encode(),
    json.dumps({**SEATS, "last": {"iteration": "x"}}).encode(),
    json.dumps({"error": "x", "kind": "SystemExit"}).encode(),
]


@pytest.mark.parametrize("post", BAD_SEATS)
def test_seats_that_rank_0_did_not_give_are_one_line(post: Any) -> None:
    store = dist.HashStore()
    part_of(store, Topic.CARDS).set("seats", post)
    place: Any = {"rank": 1, "world_size": 2, "timeout_s": 20.0, "redaction": ONE_SITE[1]}
    with pytest.raises(PeerError, match="the post cards/seats in the store ") as caught:
        settle_seats(store, card(1), not_asked, **place)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("post", [*GARBAGE, b"{}", json.dumps({**asdict(card(1)), "local_rank": "0"}).encode()])
def test_a_card_that_no_rank_has_ends_the_fit_on_rank_0(post: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vtp_plugin.runtime.health.startup_waiting._FAREWELL_S", 0.1)
    store = dist.HashStore()
    part_of(store, Topic.CARDS).set("1", post)
    place: Any = {"rank": 0, "world_size": 2, "timeout_s": 20.0, "redaction": ONE_SITE[0]}
    with pytest.raises(PeerError, match="the post cards/1 in the store "):
        settle_seats(store, card(0), not_asked, **place)
    assert "the post cards/1 in the store" in part_of(store, Topic.CARDS).get("seats").decode()


MODEL = SimpleNamespace(num_layers=4, micro_batch_size=1, global_batch_size=8, num_attention_heads=12)
ALONE = {"context_parallel_size": 1, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}
GOOD = Chosen(sizes=(2, 1), layers=(3, 1), num_replicas=1)
BAD_LISTS: dict[str, Mapping[str, Any]] = {
    "1 stages, not 2 to 2": {"sizes": (3,), "layers": (4,)},
    "3 ranks are needed, and 2 take part": {"num_ranks": 2},
    "0 ranks are needed": {"num_replicas": 0, "num_ranks": 0},
    "-3 ranks are needed": {"num_replicas": -1, "num_ranks": -3},
    r"its layers are not --num-layers 4": {"layers": (1, 1)},
    "its layers are not": {"layers": (5, -1)},
    "3 parts of layers for 2 stages": {"layers": (1, 2, 1)},
    "num_attention_heads": {"sizes": (5, 1), "num_ranks": 6},
    "its sites are edge,cloud, --vtp-sites is not given": {"sites": ("edge", "cloud")},
    "99 microbatches in flight": {"in_flight": (99,)},
    "--vtp-data-parallel-size is 1": {"num_replicas": 2, "num_ranks": 6},
}


@pytest.mark.parametrize("problem", BAD_LISTS)
def test_a_list_that_this_rank_could_not_have_been_given_is_refused(problem: str) -> None:
    ask = Constraints(args=MODEL, least_stages=2, most_stages=2, num_replicas=1)
    GOOD.require(ask, 3)
    changes = dict(BAD_LISTS[problem])
    num_ranks = changes.pop("num_ranks", 3)
    with pytest.raises(ConfigError, match=problem.replace("num_attention_heads", "attention")) as caught:
        Chosen(**{**asdict(GOOD), **changes}).require(ask, num_ranks)
    assert not caught.value.is_final and "let nobody else reach MASTER_PORT" in str(caught.value)


@pytest.mark.parametrize("seats", [{}, {0: 1}, {0: 0, 1: 0}, {2: 0}, {0: 0, 1: 2}])
def test_seats_are_ranks_without_holes(seats: dict[int, int]) -> None:
    with pytest.raises(PeerError, match="which are no ranks 0, 1"):
        Outcome(seats=seats, chosen=GOOD).require_seats(2)


SCRIPT = "import os, sys\nprint(os.environ['RANK'], sys.argv[1:])\n"
EVIL = ["--load", "/evil", "--save", "/home/victim/.ssh", "--vtp-share-errors", "--trust-remote-code"]


@pytest.mark.parametrize("shape", ["flags", "list"])
def test_no_flag_of_a_rank_comes_out_of_the_store(store: dist.TCPStore, tmp_path: Path, shape: str) -> None:
    """A real rank: a stranger has said who does what before rank 0 could."""
    old = {"why": {}, "lines": [], "sizes": "1", "last": None}
    post = {**SEATS, "words": EVIL, **old} if shape == "flags" else {**SEATS, "last": None}
    part_of(dist.PrefixStore("vtp/0", store), Topic.CARDS).set("seats", json.dumps(post))
    (tmp_path / "script.py").write_text(SCRIPT)
    own = "--num-layers 2 --hidden-size 48 --num-attention-heads 12 --seq-length 64 --micro-batch-size 2 --load own"
    flags = [*own.split(), "--global-batch-size", "8", "--vtp-device", "cpu", "--vtp-timeout-s", str(20 * pace())]
    fitted = ["--vtp-size-list", "auto", "--vtp-stages", "1:1"]
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": HOST, "MASTER_PORT": str(store.port)}
    done = subprocess.run(
        [sys.executable, "-m", "vtp_plugin", "run", str(tmp_path / "script.py"), *flags, *fitted],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **place, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH},
        timeout=120 * pace(),
    )
    assert "evil" not in done.stdout and "share-errors" not in done.stdout, done.stdout
    if shape == "flags":
        assert done.returncode != 0 and not done.stdout
        assert "the post cards/seats in the store has 'lines', which is unknown" in done.stderr, done.stderr
    else:
        assert "0 ['--num-layers', '2'" in done.stdout and "'--load', 'own'" in done.stdout, done
        assert "'--vtp-size-list', '1', '--vtp-force', '--make-vocab-size-divisible-by'" in done.stdout


def test_numbers_of_the_store_are_numbers() -> None:
    for post in GARBAGE[:4] + GARBAGE[5:]:
        store = dist.HashStore()
        part_of(store, Topic.NODES).set("1", post)
        launcher = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        with pytest.raises(PeerError, match="the post nodes/1 in the store "):
            gather_node_sizes(store, launcher, divisor=1, timeout_s=20.0)
        part_of(store, Topic.ATTEMPTS).set("newest", post)
        with pytest.raises(PeerError, match="the post attempts/newest in the store "):
            agree_on_attempt(store, rank=1, world_size=2, timeout_s=20.0)
        clocks = Round(part_of(store, Topic.CLOCKS), 1).posts
        clocks.set("1 hears 0", cast(Any, post if post != b"7" else b"NaN"))
        with pytest.raises(PeerError, match="the post clocks/1 hears 0 in the store "):
            estimate_offset(store, rank=1, world_size=2, timeout_s=20.0)


def test_the_name_of_the_monitors_part_is_one(store: dist.TCPStore) -> None:
    part_of(store, Topic.WATCH).set("name", cast(Any, b"\xff/../agree"))
    with pytest.raises(PeerError, match="the post monitor/name in the store is "):
        connect_again(store)


@pytest.mark.parametrize("post", [*GARBAGE, b'{"a": 1}', b'{"a": {"b": "c"}}', b"{}"])
def test_reports_are_of_their_shape(post: Any) -> None:
    store = dist.HashStore()
    Round(part_of(store, Topic.REPORTS), 1).posts.set("1", post)
    combine: Callable[[Any], str] = lambda reports: str([report["step_ms"]["0"] for report in reports])  # noqa: E731
    own: Report = {"step_ms": {"0": 1.0}}
    with pytest.raises(PeerError, match=r"the post reports/\w+ in the store "):
        share_reports(store, own, combine, rank=0, world_size=2, timeout_s=20.0)
    with pytest.raises(PeerError, match="the post reports/text in the store "):
        read_shared(tuple[float, float], post.decode(errors="replace"))


_NO_HOST: Any = None  # who has one site asks it nothing


def _session_of(store: dist.Store) -> Any:
    ranks = SimpleNamespace(store=store, agree=lambda name, check: check())
    return SimpleNamespace(ranks=ranks, config=SimpleNamespace(has_several_sites=False), parts=SimpleNamespace())


def test_rank_0_removes_no_file_that_the_store_names(tmp_path: Path) -> None:
    from vtp_plugin.patches.training.checkpointing import share_folder

    class Stranger(dist.PrefixStore):
        def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
            return b"../victim"

    victim = tmp_path / "victim"
    victim.touch()
    hash_store: Any = Stranger("", dist.HashStore())
    args = SimpleNamespace(save=str(tmp_path / "save"), ckpt_format="torch_dist", rank=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vtp_plugin.runtime.health.store.part_of", lambda store, topic: store)
        with pytest.raises(PeerError, match="the post folder/run in the store is '../victim'"):
            share_folder(_session_of(hash_store), _NO_HOST, args)
    assert victim.exists() and not (tmp_path / "save").exists()


def test_a_folder_that_rank_0_cannot_make_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vtp_plugin.patches.training.checkpointing import share_folder

    def refuse_to_make(folder: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))

    monkeypatch.setattr("vtp_plugin.patches.training.checkpointing.make_folder", refuse_to_make)
    args = SimpleNamespace(save="../ro/ck", ckpt_format="torch_dist", rank=0)
    with pytest.raises(ConfigError) as caught:
        share_folder(_session_of(dist.HashStore()), _NO_HOST, args)
    assert str(caught.value) == "--save ../ro/ck cannot be written: read-only file system; give another folder"


@pytest.mark.parametrize(("form", "knows_sites"), [("torch_dist", False), ("torch_dcp", True)])
def test_folders_of_sites_that_megatron_cannot_keep_apart_are_refused(
    tmp_path: Path, form: str, knows_sites: bool
) -> None:
    from vtp_plugin.patches.training.checkpointing import share_folder

    session = _session_of(dist.HashStore())
    session.config.has_several_sites = True
    session.planned = SimpleNamespace(reporting_ranks={"edge": 0, "cloud": 1}, site_of=("edge", "cloud").__getitem__)
    host: Any = SimpleNamespace(name="0.16", can=lambda name: knows_sites)
    args = SimpleNamespace(save=str(tmp_path / "cloud"), ckpt_format=form, rank=1)
    with pytest.raises(ConfigError) as caught:
        share_folder(session, host, args)
    said = f"--save differs between the sites, and with --ckpt-format {form} Megatron 0.16 plans a checkpoint over all"
    assert str(caught.value).startswith(said) and caught.value.shared == str(caught.value)
    assert not [*(tmp_path / "cloud").iterdir()]


@pytest.mark.parametrize("post", [*GARBAGE, b"[1]", b"[5, 4]", b"[0, 8]", b"[8, 99999999999]"])
def test_the_vocabulary_of_the_edge_is_two_sizes(post: Any) -> None:
    from vtp_plugin.patches.training.global_vars import _read_sizes

    store = dist.HashStore()
    part_of(store, Topic.VOCABULARY).set("sizes", post)
    with pytest.raises(PeerError, match="the post vocabulary/sizes in the store "):
        _read_sizes(store)


def test_the_store_of_torch_has_no_bound_of_its_own(store: dist.TCPStore) -> None:
    """Why docs/guides/edge-cloud.md says to close its port: what a stranger posts stays; nobody asks who he is."""
    stranger: Any = dist.TCPStore(HOST, store.port, is_master=False, wait_for_workers=False)
    for number in range(3):
        stranger.set(f"anything {number}", bytes(7 << 20))
    assert [len(store.get(f"anything {number}")) for number in range(3)] == [7 << 20] * 3
    limits = [word for word in dir(dist.TCPStore) if re.search("limit|max|auth|password|acl", word, re.IGNORECASE)]
    assert not limits, "torch can bound a store now: use it, and change the document"


def test_a_client_of_torch_believes_the_keeper_of_a_store() -> None:
    """Why docs/how/security.md says who should keep it; so large a length fails at once, and a smaller one does not."""
    with socket.create_server((HOST, 0)) as listener, ThreadPoolExecutor(1) as threads:

        def keep() -> None:
            connected, _ = listener.accept()
            with connected:
                got = b""
                while len(got) < 10:  # a greeting, and a ping that wants its number back
                    got += connected.recv(100)
                connected.sendall(got[6:10])
                connected.recv(100)
                connected.sendall(struct.pack("<Q", 1 << 62))
                connected.recv(100)

        keeping = threads.submit(keep)
        limit: Any = {"timeout": timedelta(seconds=20), "wait_for_workers": False}
        client = dist.TCPStore(HOST, listener.getsockname()[1], is_master=False, **limit)
        with pytest.raises(MemoryError):
            client.compare_set("key", "", "")
        del client
        keeping.result(60.0)


def test_every_read_of_the_store_is_in_a_module_that_checks() -> None:
    """No JSON is read elsewhere, and what a store gives is nowhere decoded."""
    reads = re.compile(r"json\.loads\(|\b(?:posts|_?part|_?store|nodes|topic|watched)\.get\(")
    allowed = {
        "vtp_plugin/runtime/health/store.py": 3,
        "vtp_plugin/runtime/health/monitor.py": 1,  # splits it, and reads both parts by posts.py
        "vtp_plugin/runtime/step/step_times.py": 1,  # hands on JSON, which its callers read by posts.py
        "patches/core/dist_checkpointing/serialization.py": 1,  # no store
    }
    found: dict[str, int] = {}
    for folder in ("vtp_plugin/runtime", "vtp_plugin/session", "patches"):
        for path in sorted((Path(ROOT) / folder).rglob("*.py")):
            number = len(reads.findall(path.read_text()))
            if number and path.name not in ("saving.py", "card_memory.py", "progress.py", "profile.py"):
                found[str(path.relative_to(ROOT))] = number
    assert {name: number for name, number in found.items() if number > allowed.get(name, 0)} == {}


@pytest.mark.parametrize("is_one_site", [True, False])
def test_what_is_wrong_with_a_checkpoint_stays_at_its_site(is_one_site: bool) -> None:
    """Ranks tell each other which checkpoint they pass over, and the reason names a folder."""
    from vtp_plugin.patches.training.choose_checkpoint import _agreed

    posted: list[Any] = []

    def share(own: Any, combine: Callable[[Any], str]) -> str:
        posted.append(own)
        return f"{combine([own])}\x1b[2J"

    redaction = Redaction(is_one_site=is_one_site, site="edge")
    session: Any = SimpleNamespace(ranks=SimpleNamespace(store=object(), share_reports=share, redaction=redaction))
    text = _agreed(session, f"/home/{SECRET}/iter_0000004 is damaged")
    assert (SECRET in str(posted)) is is_one_site is (SECRET in text) and text.endswith("\\x1b[2J")
