"""Before a script starts: cards are tried, ranks tell what they have, one layout is made for all, spare ranks wait."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from vtp_plugin.config import VtpConfig
from vtp_plugin.elastic.cards import FAULT_FILE_VARIABLE, Outcome, RankCard, settle_seats, try_card
from vtp_plugin.elastic.coordinator import Coordinator, group_by_node
from vtp_plugin.elastic.join import SpareRank, join_run
from vtp_plugin.errors import ConfigError, LayoutError, PeerError, ShortageError
from vtp_plugin.runtime.health.redaction import Redaction
from vtp_plugin.runtime.health.store import Board, Round, Topic, connect_again, part_of
from vtp_plugin.tune.fit.fit_layout import Chosen, layer_flags, without

ONE_SITE = Redaction(is_one_site=True)


def card(node: str, local_rank: int, **changes: str) -> RankCard:
    values: dict[str, Any] = {"site": "", "kind": "cpu", "why": "", "versions": "1", **changes}
    return RankCard(node=node, local_rank=local_rank, **values)


def test_a_fault_file_plays_bad_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = tmp_path / "faults"
    faults.write_text("a 1 absent\na 2 hanging\n")
    monkeypatch.setenv(FAULT_FILE_VARIABLE, str(faults))
    assert try_card("cpu", "a", 0, 20.0) == ("cpu", "")
    assert try_card("cpu", "a", 1, 20.0) == ("cpu", "absent: by the fault file")
    assert try_card("cpu", "a", 2, 0.5) == ("", "hanging: no answer within 0.5 s")
    assert try_card("cpu", "b", 1, 20.0) == ("cpu", "")
    faults.write_text("a 0\n")  # a line that ends the try stands for a card that takes its process with it
    kind, why = try_card("cpu", "a", 0, 20.0)
    assert kind == "" and why.startswith("erring: its test ended with 1 (IndexError")


def test_ranks_of_a_machine_are_a_node_by_local_rank() -> None:
    cards = [card("b", 1), card("a", 0), card("b", 0), card("a", 1, why="absent", kind="")]
    nodes, numbers = group_by_node(cards)
    assert {node.name: node.num_cards for node in nodes} == {"a": 1, "b": 2}
    assert numbers == {"b": [2, 0], "a": [1]}


@pytest.mark.parametrize(
    ("cards", "text"),
    [
        ([card("a", 0), card("a", 0)], "two ranks on a have the same local rank"),
        ([card("a", 0), card("b", 0, versions="2")], "versions differ between nodes: 1 on a and 2 on b"),
        ([card("a", 0, site="edge"), card("a", 1)], "ranks on a name the sites , edge"),
        ([card("a", 0), card("a", 1, kind="cuda")], "kinds of devices are mixed on a: cpu, cuda"),
    ],
)
def test_ranks_that_contradict_each_other_are_refused(cards: list[RankCard], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        group_by_node(cards)


def not_asked(*_: Any) -> Any:
    raise AssertionError


CHOSEN = Chosen(sizes=(2,), layers=(4,), num_replicas=1)


def settle(decide: Any, redaction: Redaction = ONE_SITE, cards: Any = None) -> list[Any]:
    found: list[Any] = [None, None]
    store = dist.HashStore()
    own = cards or [card("a", 0), card("a", 1)]

    def rank(number: int) -> None:
        place: Any = {"rank": number, "world_size": 2, "timeout_s": 20.0, "redaction": redaction}
        try:
            found[number] = settle_seats(store, own[number], decide, **place)
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_one_rank_decides_for_all() -> None:
    def decide(cards: Any) -> Outcome:
        return Outcome(seats={one.local_rank: 1 - one.local_rank for one in cards}, chosen=CHOSEN)

    assert settle(decide) == [Outcome(seats={0: 1, 1: 0}, chosen=CHOSEN)] * 2


def test_all_ranks_end_with_one_line() -> None:
    for raised in (ConfigError("nothing fits"), LayoutError("it"), ShortageError("bring a card")):

        def decide(cards: object, error: ConfigError = raised) -> Any:
            raise error

        for found in settle(decide):
            assert str(found) == str(raised) and found.is_final is raised.is_final
            assert isinstance(found, ShortageError) is isinstance(raised, ShortageError)


def test_seats_that_end_without_a_reason_are_no_post() -> None:
    """Else their error had no text."""
    store = dist.HashStore()
    part_of(store, Topic.CARDS).set("seats", '{"error": "", "kind": "ShortageError", "is_final": true}')
    place: Any = {"rank": 1, "world_size": 2, "timeout_s": 20.0, "redaction": ONE_SITE}
    with pytest.raises(PeerError, match="/seats in the store has an error without a text"):
        settle_seats(store, card("a", 1), lambda cards: pytest.fail("rank 0 decides"), **place)


@pytest.mark.parametrize(
    ("rank", "text"),
    [
        (0, r"start-up: waited 0\.\d s for the device of rank 1: no answer$"),
        (1, r"start-up: waited 0\.5 s for rank 0 to choose the layout: no answer; look for a rank 0 that ended$"),
    ],
)
def test_a_rank_that_does_not_come_is_named(rank: int, text: str) -> None:
    with pytest.raises(PeerError, match=text):
        place: Any = {"rank": rank, "world_size": 2, "timeout_s": 0.5, "redaction": ONE_SITE}
        settle_seats(dist.HashStore(), card("a", rank), not_asked, **place)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_a_seat_needs_what_a_launcher_says(name: str) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    coordinator = Coordinator(args=None, config=VtpConfig())
    with pytest.raises(ConfigError, match=f"needs the launcher's {name}, which is not set; use torchrun"):
        join_run(card("a", 0), coordinator, environment={**place, name: ""}, timeout_s=1.0)


def test_a_spare_rank_learns_how_the_run_ended() -> None:
    store = dist.HashStore()
    spare_rank = SpareRank(store, num_ranks=2, timeout_s=20.0)
    spare_rank.leave()
    spare_rank.leave()
    assert spare_rank.wait() is None


def test_a_spare_rank_ends_with_a_run_that_fails(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"))
    watched = Round(part_of(connect_again(store), Topic.WATCH), 1).posts
    Board(watched).post("rank 1 does not answer")
    assert SpareRank(store, num_ranks=2, timeout_s=20.0).wait() == "rank 1 does not answer"


def test_a_spare_rank_is_patient_until_the_run_shows_life(tmp_path: Path) -> None:
    """Ranks may take longer to start than they may later be silent."""
    store = dist.FileStore(str(tmp_path / "store"))
    spare_rank = SpareRank(store, num_ranks=2, timeout_s=0.5)
    with ThreadPoolExecutor(1) as threads:
        end = threads.submit(spare_rank.wait)
        assert not wait([end], timeout=2.5).done
        Round(part_of(connect_again(store), Topic.WATCH), 1).posts.add("life/0", 1)
        assert end.result(timeout=60) == "rank 0 showed no sign of life for 0 s"


def test_flags_are_replaced_in_both_spellings() -> None:
    words = ["--vtp-stages=1:2", "--lr", "1", "--vtp-size-list", "auto", "--bf16"]
    assert without(words, ["--vtp-stages", "--vtp-size-list"]) == ["--lr", "1", "--bf16"]
    found = layer_flags((3, 2, 1), 0)
    assert found == ("--decoder-first-pipeline-num-layers", "3", "--decoder-last-pipeline-num-layers", "1")
