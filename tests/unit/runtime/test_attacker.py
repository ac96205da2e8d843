"""An attacker plays the other site: what it may send is generated, for each place that reads it, and tried.

Nothing crashes, hangs or takes memory beyond its bound; what is wrong is one line. See tests/attacker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.attacker.play import DEFAULT_NUMBER, FULL_NUMBER
from tests.rules.read_places import find_places, places_in
from tests.support.hosts import PYTHON_PATH, ROOT

_HEALTH = "vtp_plugin/runtime/health"
_READERS = "the readers: all entries of posts go through them"
_PRESENCE = "only whether a key is there"
_NUMBERS = "numbers in memory of a shape that this rank has planned"
_OBJECTS = "the objects are read by the entry `an object`"
_PORT = "tests/attacker/at_the_port.py"
_CERTIFY = "a check of one owner's machines, beside no run"
NOT_PLAYED: Mapping[str, str] = {
    **{
        f"{_HEALTH}/store.py:{name}": _READERS
        for name in ("parse_post", "read_post", "read_number", "read_text", "require_word")
    },
    f"{_HEALTH}/meeting_store.py:_Table.open.missing": _PRESENCE,
    f"{_HEALTH}/meeting_store.py:_Table.enter.is_whole": _PRESENCE,
    f"{_HEALTH}/startup.py:_Check._post_missing": _PRESENCE,
    f"{_HEALTH}/startup.py:_Check._await_post.is_there": _PRESENCE,
    "vtp_plugin/elastic/cards.py:_cards.missing": _PRESENCE,
    "vtp_plugin/link/run_commands.py:_answers": "one byte, which is not looked at",
    "vtp_plugin/elastic/cards.py:try_card": "this rank's own process writes it",
    "vtp_plugin/elastic/join.py:join_run": "`the name of the run`",
    "vtp_plugin/session/ranks.py:AllRanks.name_run": "`the name of the run`",
    "vtp_plugin/session/ranks.py:AllRanks.share_reports": "hands on; each report has an entry",
    "patches/training/checkpointing.py:lock_folders.lock": "`the name of the run`",
    "patches/training/checkpointing.py:share_folder": "`the name of the run`",
    "vtp_plugin/runtime/comm/collectives.py:_Swapping.__init__": _NUMBERS,
    "vtp_plugin/runtime/comm/transfers.py:Transmission._allocate": _NUMBERS,
    "vtp_plugin/runtime/comm/transfers.py:Transfers.warm_up": _NUMBERS,
    "vtp_plugin/runtime/comm/ping.py:_one_way_s.go_and_return": _NUMBERS,
    "vtp_plugin/runtime/comm/ping.py:_gather_all": "a benchmark of one owner's cluster",
    "vtp_plugin/cli/certify.py:_check": "a report, read as JSON of a declared shape by the reader of all files",
    "vtp_plugin/cli/certify.py:_workers": _CERTIFY,
    "vtp_plugin/cli/certify_workers.py:Workers.run": _CERTIFY,
    "vtp_plugin/cli/certify_workers.py:_Process.answer": _CERTIFY,
    "vtp_plugin/cli/certify_workers.py:Workers.__post_init__": _CERTIFY,
    "patches/activation.py:activate": "turns the reader of objects on",
    "patches/core/dist_checkpointing/serialization.py:_is_by_bucket": "this rank's own state",
    "patches/core/dist_checkpointing/strategies/fully_parallel.py:_load": _OBJECTS,
    "patches/hosts/core_0_12.py:_same_groups": _OBJECTS,
    f"{_HEALTH}/meeting_store.py:_open_server": _PORT,
}
"""Places without an entry of their own, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What came of the inputs.

    Attributes:
        problems: what was wrong, by entry.
        took_s: seconds of processors that each entry took.
        places: places that each entry covers.
    """

    problems: dict[str, list[str]]
    took_s: dict[str, float]
    places: dict[str, list[str]]


def _play(module: str, *words: object) -> Any:
    """Run an attacker in a process of its own, which has everything imported before it forks."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.attacker.{module}", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        timeout=7200,
    )
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def played() -> Played:
    """Play the usual number of inputs, once."""
    found = _play("play", "--number", DEFAULT_NUMBER)
    return Played(**found)


def test_every_place_that_reads_is_played(played: Played) -> None:
    """A new place that reads what others send gets an entry in tests/attacker/entries.py, with a generator."""
    found = set(find_places())
    covered = {place for places in played.places.values() for place in places}
    assert sorted(found - covered - NOT_PLAYED.keys()) == [], "places without an attack"
    assert sorted((covered | NOT_PLAYED.keys()) - found) == [], "places that are gone"
    assert sorted(covered & NOT_PLAYED.keys()) == []


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("def f(store): return store.get('x')", "store.get"),
        ("def f(part): part.wait(['x'])", "part.wait"),
        ("def f(anything): anything.add('x', 0)", "anything.add"),
        ("def f(x): return x.compare_set('a', '', '')", "x.compare_set"),
        ("def f(): dist.all_gather_object(found, own)", "dist.all_gather_object"),
        ("def f(): P2POp(dist.irecv, tensor, 1)", "dist.irecv"),
        ("def f(listener): listener.accept()", "listener.accept"),
        ("from vtp_plugin.util.typed_json import read_typed as r\ndef f(): r(int, x)", "r"),
        ("def f(self): self._codec.decode(x)", "self._codec.decode"),
    ],
)
def test_a_new_place_is_found(source: str, call: str) -> None:
    assert [*places_in(source)] == [("f", call)]


def test_no_input_does_harm(played: Played) -> None:
    assert played.problems == {}


def test_the_port_takes_what_strangers_send() -> None:
    """Before the ranks have met; the run then starts, or ends with one line."""
    assert _play("at_the_port", "--number", DEFAULT_NUMBER)["problems"] == []


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_no_input_of_many_does_harm() -> None:
    found = _play("play", "--number", FULL_NUMBER, "--seed", 1)
    print(json.dumps(found["took_s"], indent=1))
    assert found["problems"] == {}


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_port_takes_much_of_what_strangers_send() -> None:
    assert _play("at_the_port", "--number", FULL_NUMBER, "--seed", 1)["problems"] == []
