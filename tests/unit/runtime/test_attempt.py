"""Ranks of one attempt meet, whatever an earlier attempt has left in a store that the launcher keeps."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from tests.support.pace import pace
from vtp_plugin.errors import PeerError
from vtp_plugin.runtime.health.meeting_store import agree_on_attempt, open_own_store
from vtp_plugin.runtime.health.store import Topic, part_of

HOST = "127.0.0.1"


def agree(store: dist.Store, ranks: list[int], world_size: int, timeout_s: float = 30.0) -> list[object]:
    """Let ranks agree, each in a thread; of one that fails the error's text."""

    def run(rank: int) -> object:
        try:
            return agree_on_attempt(store, rank=rank, world_size=world_size, timeout_s=timeout_s)
        except PeerError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks))


def test_each_attempt_has_a_name_of_its_own() -> None:
    store = dist.HashStore()
    assert agree(store, [0, 1, 2], 3) == ["1", "1", "1"]
    assert agree(store, [2, 1, 0], 3) == ["2", "2", "2"]
    keys = store.num_keys()
    for _ in range(3):
        agree(store, [0, 1, 2], 3)
    assert store.num_keys() == keys
    assert agree(store, [0], 1) == ["6"]


def test_a_rank_that_comes_before_the_others_of_its_attempt_waits_for_them() -> None:
    """It sees only the attempt before, which was whole, broken off by its rank 0, or of another size."""
    store = dist.HashStore()
    agree(store, [0, 1], 2)
    with ThreadPoolExecutor(3) as pool:
        early = pool.submit(agree, store, [1], 2)
        time.sleep(0.3)
        assert not early.done()
        assert agree(store, [0], 2) == ["2"] and early.result() == ["2"]
        # A rank 0 that was killed: its attempt has a free seat, which rank 1 takes, and leaves for the next attempt.
        table = part_of(store, Topic.ATTEMPTS)
        table.set("newest", f"[{table.add('count', 1)}, 2]")
        early = pool.submit(agree, store, [1], 2)
        time.sleep(0.3)
        assert table.check(["3 seat 1"]) and not early.done()
        assert agree(store, [0], 2) == ["4"] and early.result() == ["4"]
        early = pool.submit(agree, store, [2, 1], 3)
        time.sleep(0.3)
        assert agree(store, [0], 3) == ["5"] and early.result() == ["5", "5"]


def test_a_missing_rank_is_named_and_its_attempt_is_over() -> None:
    store = dist.HashStore()
    first, second = agree(store, [0, 1], 3, timeout_s=1.0)
    assert first == second and "for rank 2 at start: no answer; it did not start" in str(first)
    (late,) = agree(store, [2], 3, timeout_s=0.5)
    assert "for rank 0 at start: no answer" in str(late)
    assert agree(store, [0, 2, 1], 3) == ["2"] * 3


SOURCE = """
import sys
from vtp_plugin.runtime.health.meeting_store import open_store
from vtp_plugin.runtime.health.startup import Agreement
rank = int(sys.argv[1])
store = open_store(rank, 2, 60.0)
Agreement(store, rank=rank, world_size=2, timeout_s=lambda: 60.0).settle("check", lambda: {"value": sys.argv[2]})
print("met", flush=True)
"""


def test_an_attempt_that_ended_without_a_reason_is_no_post() -> None:
    """Else its error had no text."""
    store = dist.HashStore()
    table = part_of(store, Topic.ATTEMPTS)
    table.set("newest", "[1, 2]")
    table.set("1 is", "")
    (error,) = agree(store, [1], 2)
    assert "the post attempts/1 is in the store is empty" in str(error)


def test_ranks_with_different_restart_counts_meet() -> None:
    """As after the return of an agent; what the attempt before has posted is not read."""
    server = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    env = {**os.environ, "MASTER_ADDR": HOST, "MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env["WORLD_SIZE"] = "2"
    for counts, value in ((("0", "0"), "1,1"), (("1", "0"), "2,1")):
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", SOURCE, str(rank), value],
                env={**env, "TORCHELASTIC_RESTART_COUNT": count},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, count in enumerate(counts)
        ]
        assert [rank.communicate(timeout=120 * pace())[0] for rank in ranks] == ["met\n"] * 2


def test_a_store_of_the_attempt_alone() -> None:
    """Torch reads nothing in it that an earlier attempt has left in the launcher's store."""
    launcher = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    launcher.set("left behind", "1")
    environments = [{"MASTER_ADDR": HOST, "MASTER_PORT": str(launcher.port), "WORLD_SIZE": "2"} for _ in range(2)]
    store = dist.PrefixStore("vtp/1", launcher)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda rank: open_own_store(store, rank, environments[rank], 30.0), (0, 1))
    one.set("key", "value")
    assert other.get("key") == b"value"
    (port,) = {env["MASTER_PORT"] for env in environments}
    assert port != str(launcher.port)
    assert not dist.TCPStore(HOST, int(port), is_master=False, wait_for_workers=False).check(["left behind"])
    assert {env["TORCHELASTIC_USE_AGENT_STORE"] for env in environments} == {"False"}


def test_a_rank_0_that_does_not_open_the_store_is_named() -> None:
    with pytest.raises(PeerError, match="for rank 0 to open the store of this attempt: no answer"):
        open_own_store(dist.HashStore(), 1, {"MASTER_ADDR": HOST}, 0.3)
