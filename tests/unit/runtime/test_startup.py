"""The start-up check over a real store: every rank is a thread with a connection of its own."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.pace import pace
from vtp_plugin.errors import ConfigError, PeerError
from vtp_plugin.runtime.health.meeting_store import open_store
from vtp_plugin.runtime.health.redaction import describe_error
from vtp_plugin.runtime.health.startup import Agreement, _Check
from vtp_plugin.runtime.health.store import connect_again, gather_node_sizes
from vtp_plugin.session.ranks import AllRanks

HOST = "127.0.0.1"


class Server:
    """A store's server and a connection for each of some ranks; new connections can take seconds on some machines."""

    def __init__(self) -> None:
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self._clones = [connect_again(self._store) for _ in range(6)]
        self.port = self._store.port
        self.test = 0

    @property
    def num_keys(self) -> int:
        """Keys of all tests."""
        return self._store.num_keys()

    def client(self, rank: int) -> dist.Store:
        """Return the rank's connection, with keys of this test's own."""
        return dist.PrefixStore(f"test {self.test}", self._clones[rank])


@pytest.fixture(scope="module")
def one_server() -> Server:
    return Server()


@pytest.fixture
def server(one_server: Server) -> Server:
    one_server.test += 1
    return one_server


def on_ranks(ranks: list[int], action: Callable[[int], object]) -> list[object]:
    """Call on all ranks at once; return results, or what was raised, in the order of the ranks."""

    def call(rank: int) -> object:
        try:
            return action(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(call, ranks))


def check(
    server: Server,
    prepare: Mapping[int, Callable[[], Mapping[str, object]]],
    *,
    world_size: int,
    timeout_s: float = 60.0,
    name: str = "check",
) -> list[object]:
    """Run the agreement on the ranks that ``prepare`` names."""

    def action(rank: int) -> object:
        agreement = Agreement(server.client(rank), rank=rank, world_size=world_size, timeout_s=lambda: timeout_s)
        agreement.settle(name, prepare[rank])
        return "agreed"

    return on_ranks(list(prepare), action)


def says(**statement: object) -> Callable[[], Mapping[str, object]]:
    return lambda: statement


def fails(error: BaseException) -> Callable[[], Mapping[str, object]]:
    def prepare() -> Mapping[str, object]:
        raise error

    return prepare


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_equal_statements(server: Server, world_size: int) -> None:
    begin_s = time.monotonic()
    assert (
        check(server, dict.fromkeys(range(world_size), says(sizes=[1, 2], x=None)), world_size=world_size)
        == ["agreed"] * world_size
    )
    assert time.monotonic() - begin_s < 3.0 * pace()


def test_an_infinite_option_is_a_statement(server: Server) -> None:
    share = float("inf")
    assert check(server, {0: says(share=share), 1: says(share=share)}, world_size=2) == ["agreed"] * 2
    errors = check(server, {0: says(share=share), 1: says(share=0.5)}, world_size=2)
    assert "ranks disagree: share is inf on rank 0 and 0.5 on rank 1" in str(errors[0])


def test_the_same_name_again(server: Server) -> None:
    """A verdict of an earlier round on the same store must not count."""
    assert check(server, dict.fromkeys(range(3), says(x=1)), world_size=3) == ["agreed"] * 3
    num_keys = server.num_keys
    errors = check(server, {0: says(x=1), 1: says(x=1), 2: says(x=2)}, world_size=3)
    assert all(isinstance(error, ConfigError) for error in errors), errors
    assert check(server, dict.fromkeys(range(3), says(x=1)), world_size=3) == ["agreed"] * 3
    assert server.num_keys == num_keys, "the store grows with every check"


def test_one_apply_is_for_one_world() -> None:
    ranks = AllRanks(lambda: 60.0, lambda: None)
    ranks.join(dist.HashStore(), 0, 2)
    ranks.join(dist.HashStore(), 0, 2)
    with pytest.raises(ConfigError, match="is rank 0 of 3 now and was rank 0 of 2"):
        ranks.join(dist.HashStore(), 0, 3)


def test_a_late_reader_finds_the_verdict(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have begun the next check: what rank 2 has to read is still there."""
    read = _Check._read_verdict

    def late(self: _Check, posts: dist.Store, begin_s: float) -> object:
        if self.agreement.rank == 2:
            time.sleep(0.3 * pace())
        return read(self, posts, begin_s)

    def action(rank: int) -> str:
        agreement = Agreement(server.client(rank), rank=rank, world_size=3, timeout_s=lambda: 60.0)
        for number in range(4):
            agreement.settle("check", says(number=number))
        return "agreed"

    monkeypatch.setattr(_Check, "_read_verdict", late)
    num_keys = server.num_keys
    assert on_ranks([0, 1, 2], action) == ["agreed"] * 3
    # A counter for each rank; then the posts of the last check, its verdict and the farewells.
    assert server.num_keys <= num_keys + 3 + 6


@pytest.mark.parametrize("other", [{"sizes": "2,1", "x": 1}, {"sizes": "1,2"}, {"sizes": "1,2", "x": 1, "y": 3}])
def test_differing_statements(server: Server, other: dict[str, object]) -> None:
    errors = check(server, {0: says(sizes="1,2", x=1), 1: says(sizes="1,2", x=1), 2: says(**other)}, world_size=3)
    assert {type(error) for error in errors} == {ConfigError}
    assert len({str(error) for error in errors}) == 1
    assert re.search(
        r"ranks disagree: (sizes is 1,2|x is 1|y is None) on rank 0, 1 and (2,1|None|3) on rank 2;", str(errors[0])
    )


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConfigError("vocab 7 does not divide; pad it"), "rank 1: vocab 7 does not divide; pad it"),
        (AssertionError("only where TP > 1\nsecond line"), "rank 1: AssertionError: only where TP > 1"),
        (SystemExit("no such option"), "rank 1: SystemExit: no such option"),
        (SystemExit(2), "rank 1: SystemExit: 2"),
    ],
)
def test_an_error_on_one_rank(server: Server, error: BaseException, text: str) -> None:
    errors = check(server, {0: says(x=1), 1: fails(error), 2: says(x=1)}, world_size=3)
    assert [(type(e), str(e)) for e in errors] == [(ConfigError, text)] * 3
    assert errors[1].__cause__ is error  # type: ignore[attr-defined]


def test_an_error_on_rank_0(server: Server) -> None:
    errors = check(server, {0: fails(ConfigError("bad; fix")), 1: says(x=1)}, world_size=2)
    assert [str(e) for e in errors] == ["rank 0: bad; fix"] * 2


def test_equal_errors_are_one(server: Server) -> None:
    same, other = ConfigError("same"), ConfigError("other")
    errors = check(server, dict.fromkeys(range(4), fails(same)), world_size=4)
    assert {str(e) for e in errors} == {"same"}
    errors = check(server, {0: fails(same), 1: fails(other), 2: fails(same), 3: says()}, world_size=4)
    assert {str(e) for e in errors} == {"rank 0, 2: same; rank 1: other"}


@pytest.mark.parametrize("missing", [[2], [1, 3]])
def test_missing_ranks_are_named_in_time(server: Server, missing: list[int]) -> None:
    timeout_s = 1.0 * pace()
    present = [rank for rank in range(4) if rank not in missing]
    begin_s = time.monotonic()
    errors = check(server, dict.fromkeys(present, says(x=1)), world_size=4, timeout_s=timeout_s)
    assert time.monotonic() - begin_s < timeout_s + 1.0 * pace()
    shown = ", ".join(str(rank) for rank in missing)
    for error in errors:
        assert isinstance(error, PeerError)
        assert re.match(
            rf"start-up: waited [\d.]+ s for rank {shown} at check: no answer; it did not start", str(error)
        )


def test_a_rank_0_that_comes_late_has_named_the_missing_rank(server: Server) -> None:
    """Rank 1 ends before rank 0 has judged."""

    def late() -> Mapping[str, object]:
        time.sleep(1.0 * pace())
        return {"x": 1}

    for error in check(server, {0: late, 1: says(x=1)}, world_size=3, timeout_s=4.0 * pace()):
        assert isinstance(error, PeerError)
        assert re.match(r"start-up: waited [\d.]+ s for rank 2 at check: no answer; it did not start", str(error))


def test_many_missing_ranks_cost_no_more_than_one(server: Server) -> None:
    begin_s = time.monotonic()
    (error,) = check(server, {0: says(x=1)}, world_size=2000, timeout_s=pace())
    assert "for rank 1, 2, 3, 4, 5, 6, 7, 8 and 1991 more at check" in str(error)
    assert time.monotonic() - begin_s < 3.0 * pace()


def test_rank_0_missing(server: Server) -> None:
    begin_s = time.monotonic()
    errors = check(server, {1: says(x=1), 2: says(x=1)}, world_size=3, timeout_s=pace())
    # Rank 0 keeps the time for others; they wait longer than the timeout, but not for ever.
    assert time.monotonic() - begin_s < 10 * pace()
    for error in errors:
        assert isinstance(error, PeerError)
        assert re.match(r"start-up: waited [\d.]+ s for rank 0 at check: no answer", str(error))


def test_an_error_is_told_although_a_rank_is_missing(server: Server) -> None:
    errors = check(server, {0: says(x=1), 1: fails(ConfigError("bad"))}, world_size=3, timeout_s=pace())
    assert [str(e) for e in errors] == ["rank 1: bad"] * 2


def test_a_rank_that_comes_late_but_in_time(server: Server) -> None:
    def late() -> Mapping[str, object]:
        time.sleep(1.0)
        return {"x": 1}

    assert check(server, {0: late, 1: says(x=1), 2: late}, world_size=3) == ["agreed"] * 3


def test_the_store_ends(server: Server) -> None:
    """Rank 0 keeps the store and dies: its socket closes."""
    source = (
        "import sys, time, torch.distributed as d\n"
        "s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(s.port, flush=True); time.sleep(100)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        store = dist.TCPStore(HOST, int(owner.stdout.readline()), is_master=False, wait_for_workers=False)
        agreement = Agreement(store, rank=1, world_size=2, timeout_s=lambda: 60.0)
        with ThreadPoolExecutor(1) as threads:
            settled = threads.submit(agreement.settle, "check", dict)
            time.sleep(0.5)
            owner.kill()
            with pytest.raises(PeerError, match=r"start-up: waited [\d.]+ s for rank 0 or the launcher, .* broke"):
                settled.result(timeout=60)
    finally:
        owner.kill()
        owner.communicate()


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_other_stores(tmp_path: Path, kind: str) -> None:
    store = dist.HashStore() if kind == "hash" else dist.FileStore(str(tmp_path / "store"), 2)
    store.set_timeout(timedelta(seconds=60))

    def action(rank: int) -> object:
        agreement = Agreement(connect_again(store), rank=rank, world_size=2, timeout_s=lambda: 60.0)
        agreement.settle("check", says(x=1))
        return "agreed"

    assert on_ranks([0, 1], action) == ["agreed"] * 2


class TestOpenStore:
    def test_no_launcher(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MASTER_ADDR", raising=False)
        with pytest.raises(ConfigError, match="MASTER_ADDR is not set; start the script with torchrun"):
            open_store(0, 2, 1.0)

    def test_bad_port(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MASTER_ADDR", HOST)
        monkeypatch.setenv("MASTER_PORT", "abc")
        with pytest.raises(ConfigError, match="MASTER_PORT is 'abc', not a number"):
            open_store(0, 2, 1.0)

    def test_nobody_serves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            monkeypatch.setenv("MASTER_ADDR", HOST)
            monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
            begin_s = time.monotonic()
            with pytest.raises(PeerError, match=r"start-up: waited [\d.]+ s for the store that rank 0 or the launcher"):
                open_store(1, 2, 1.0)
            assert time.monotonic() - begin_s < 4.0 * pace()

    def test_a_server_that_never_answers(self) -> None:
        """As when rank 0 is stopped: the kernel still takes connections. Torch then waits without limit."""
        with socket.socket() as listener:
            listener.bind((HOST, 0))
            listener.listen()
            port = listener.getsockname()[1]
            source = (
                f"import os; os.environ.update(MASTER_ADDR={HOST!r}, MASTER_PORT='{port}')\n"
                "from vtp_plugin.runtime.health.startup import Agreement\n"
                "from vtp_plugin.runtime.health.meeting_store import open_store\n"
                "import time; store = open_store(1, 2, 2.0)\n"
                "Agreement(store, rank=1, world_size=2, timeout_s=lambda: 2.0).settle('check', dict)\n"
            )
            done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=600)
        assert done.returncode == 1
        assert "start-up: waited" in done.stderr

    @pytest.mark.parametrize(
        "call",
        [
            "ranks.AllRanks(lambda: 0.5, lambda: None).agree('start', dict)",
            "cards.settle_seats(store, own, None, rank=1, world_size=2, timeout_s=0.5, redaction=redaction)",
            "cards.settle_seats(store, own, None, rank=0, world_size=2, timeout_s=0.5, redaction=redaction)",
            "join.join_run(own, SimpleNamespace(redaction=redaction), environment=environment, timeout_s=0.5)",
        ],
    )
    def test_a_server_that_stops_later(self, call: str) -> None:
        """A call on its store never returns; the process ends all the same, with a line."""
        source = (
            "import time, torch.distributed as dist\n"
            "from types import SimpleNamespace\n"
            "from vtp_plugin.elastic import cards, join\n"
            "from vtp_plugin.runtime.health.redaction import Redaction\n"
            "from vtp_plugin.session import ranks\n"
            "class Stopped(dist.Store):\n"
            "    def set(self, *_): time.sleep(600)\n"
            "    compare_set = set\n"
            "store, redaction = Stopped(), Redaction()\n"
            "join.open_store = lambda *_: store\n"
            "environment = {'RANK': '1', 'WORLD_SIZE': '2', 'LOCAL_RANK': '0'}\n"
            "own = cards.RankCard(node='a', local_rank=0, site='', kind='cpu', why='', versions='')\n"
            "ranks.AllRanks._joined = lambda _: SimpleNamespace(store=store, rank=1)\n"
            f"{call}\n"
        )
        done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=600)
        assert done.returncode == 1
        assert "start-up: waited" in done.stderr and "Traceback" not in done.stderr

    def test_shared_with_the_launcher(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MASTER_ADDR", HOST)
        monkeypatch.setenv("MASTER_PORT", str(server.port))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        one, other = on_ranks([0, 1], lambda rank: open_store(rank, 2, 30.0))
        assert isinstance(one, dist.Store) and isinstance(other, dist.Store)
        one.set("key", "value")
        assert other.get("key") == b"value"
        # A launcher that starts the ranks again keeps its store; what they wrote before must not count.
        again = on_ranks([1, 0], lambda rank: open_store(rank, 2, 30.0))
        assert not any(isinstance(store, dist.Store) and store.check(["key"]) for store in again)


class TestNodeSizes:
    """``--vtp-size-list auto``: stage k is the launcher's node k."""

    @staticmethod
    def env(node: int, num_local: int, num_nodes: int = 2) -> dict[str, str]:
        return {"GROUP_RANK": str(node), "GROUP_WORLD_SIZE": str(num_nodes), "LOCAL_WORLD_SIZE": str(num_local)}

    def gather(
        self, server: Server, envs: list[dict[str, str]], divisor: int = 1, timeout_s: float = 60.0
    ) -> list[object]:
        return on_ranks(
            list(range(len(envs))),
            lambda i: gather_node_sizes(server.client(i), envs[i], divisor=divisor, timeout_s=timeout_s),
        )

    def test_two_nodes(self, server: Server) -> None:
        envs = [self.env(0, 2), self.env(0, 2), *[self.env(1, 4)] * 4]
        assert self.gather(server, envs, divisor=2) == [(1, 2)] * 6

    @pytest.mark.parametrize("name", ["GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"])
    def test_not_set(self, server: Server, name: str) -> None:
        env = self.env(0, 1)
        del env[name]
        with pytest.raises(ConfigError, match=f"needs the launcher's {name}, which is not set; use torchrun, or give"):
            gather_node_sizes(server.client(0), env, divisor=1, timeout_s=1.0)

    def test_not_dividing(self, server: Server) -> None:
        first, second = self.gather(server, [self.env(0, 3), self.env(1, 4)], divisor=2)
        assert isinstance(first, ConfigError) and "node 0 has 3 ranks, not a multiple of" in str(first)
        assert isinstance(second, ConfigError) and "the number of ranks of node 0 does not fit" in str(second)

    def test_a_node_is_missing(self, server: Server) -> None:
        (error,) = self.gather(server, [self.env(0, 2, num_nodes=3)], timeout_s=1.0)
        assert isinstance(error, PeerError)
        assert re.match(r"start-up: waited [\d.]+ s for node 1, 2: no answer", str(error))


def test_describing_errors() -> None:
    assert describe_error(PeerError("one\ntwo")) == "one"
    assert describe_error(RuntimeError("\n  one \ntwo")) == "RuntimeError: one"
    assert describe_error(KeyboardInterrupt()) == "KeyboardInterrupt"
