"""What the ranks tell each other of errors and arguments, seen in the store itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from vtp_plugin.config import VtpConfig
from vtp_plugin.config.flag import parse_size_list
from vtp_plugin.config.resolve import merge
from vtp_plugin.errors import ConfigError, LayoutError, PeerError
from vtp_plugin.runtime.comm.transfers import Audit
from vtp_plugin.runtime.health.redaction import Redaction
from vtp_plugin.runtime.health.startup import Agreement
from vtp_plugin.runtime.health.store import Topic
from vtp_plugin.util.text import said_of_attributes

SECRET, FOLDER = "4711, 4712", "/home/me/data"
EDGE, CLOUD = Redaction(site="edge"), Redaction(site="cloud")


class Recorded:
    """A store that can be read whole afterwards: its server, and a connection for each rank."""

    def __init__(self) -> None:
        self.server = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        host, port = self.server.host, self.server.port
        self.clients = [dist.TCPStore(host, port, wait_for_workers=False) for _ in range(3)]

    def content(self) -> dict[str, str]:
        """Give all keys and values; skips the test where torch has no such function."""
        if not hasattr(self.server, "list_keys"):
            pytest.skip("this torch does not list the keys of a store")
        return {key: self.server.get(key).decode() for key in self.server.list_keys()}


def settle(
    store: Recorded, prepare: Mapping[int, Callable[[], Mapping[str, object]]], redactions: Mapping[int, Redaction]
) -> list[BaseException | None]:
    """Run a check on three ranks; return what each raised."""

    def on_rank(rank: int) -> BaseException | None:
        try:
            agreement = Agreement(
                store.clients[rank], rank=rank, world_size=3, timeout_s=lambda: 60.0, redaction=lambda: redactions[rank]
            )
            agreement.settle("check", prepare[rank])
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(on_rank, range(3)))


def fails(error: BaseException) -> Callable[[], Mapping[str, object]]:
    def prepare() -> Mapping[str, object]:
        raise error

    return prepare


BETWEEN = {0: EDGE, 1: CLOUD, 2: CLOUD}


@pytest.mark.parametrize("kind", [ValueError, ConfigError, PeerError])
def test_the_text_of_an_error_stays_at_its_site(kind: type[Exception]) -> None:
    store = Recorded()
    error = kind(f"sample {SECRET} in {FOLDER}")
    raised = settle(store, {0: fails(error), 1: dict, 2: dict}, BETWEEN)
    assert SECRET not in str(store.content()) and FOLDER not in str(store.content())
    assert SECRET in str(raised[0]) and FOLDER in str(raised[0]), "the rank itself reads all"
    for other in raised[1:]:
        assert str(other).startswith(f"rank 0: {kind.__name__} at site edge, whose text stays there"), other


def test_a_bare_assertion_shows_no_line_of_the_source() -> None:
    def prepare() -> Mapping[str, object]:
        tokens = [4711, 4712]
        assert tokens == []  # a secret comparison
        return {}

    store = Recorded()
    settle(store, {0: prepare, 1: dict, 2: dict}, BETWEEN)
    assert "secret comparison" not in str(store.content())


def test_what_the_plugin_says_of_its_layout_flags_crosses() -> None:
    store = Recorded()
    raised = settle(store, {0: lambda: {"x": parse_size_list("1,x")}, 1: dict, 2: dict}, BETWEEN)
    assert len({str(error) for error in raised}) == 1
    assert "vtp_size_list '1,x' has the entry 'x'" in str(raised[1])


def test_a_path_in_a_layout_flag_stays() -> None:
    store = Recorded()
    raised = settle(store, {0: lambda: {"x": parse_size_list(FOLDER)}, 1: dict, 2: dict}, BETWEEN)
    assert FOLDER not in str(store.content())
    assert str(raised[1]).startswith("rank 0: LayoutError at site edge")


def test_messages_of_the_plugin_with_paths_stay(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as unwritable:
        Audit(str(tmp_path / "file" / "audit.jsonl"), 0)
    with pytest.raises(ConfigError) as twice:
        merge(VtpConfig(audit="/one"), {"audit": "/other"})
    for error in (unwritable.value, twice.value):
        assert "/" not in EDGE.describe(error).replace("/ ", "")
        assert "/" in str(error)


@pytest.mark.parametrize("sharing", [False, True])
def test_values_are_compared_by_digests_between_sites(sharing: bool) -> None:
    store = Recorded()
    edge = Redaction(site="edge", is_opted_in=sharing)
    folders = (FOLDER, "x", "x")
    raised = settle(store, {r: lambda r=r: {"--my-folder": folders[r]} for r in range(3)}, {**BETWEEN, 0: edge})
    assert (FOLDER in str(store.content())) == sharing
    assert "ranks disagree: --my-folder is " in str(raised[1]) and str(raised[1]).endswith("; here --my-folder is x")
    assert (FOLDER in str(raised[1])) == sharing
    assert FOLDER in str(raised[0])


def test_lists_that_differ_are_both_named_between_sites() -> None:
    store = Recorded()
    lists = ["1,2", "1,4", "1,4"]
    raised = settle(store, {r: lambda r=r: {"vtp_size_list": lists[r]} for r in range(3)}, BETWEEN)
    assert {str(error) for error in raised} == {
        "ranks disagree: vtp_size_list is 1,2 on rank 0 and 1,4 on rank 1, 2; start every rank with the same command "
        "line and the same versions"
    }


def test_within_one_site_all_read_all() -> None:
    store = Recorded()
    one = Redaction(is_one_site=True)
    raised = settle(store, {0: fails(ValueError(SECRET)), 1: dict, 2: dict}, dict.fromkeys(range(3), one))
    assert {str(error) for error in raised} == {f"rank 0: ValueError: {SECRET}"}


def test_nothing_else_is_put_into_the_store() -> None:
    store = Recorded()
    settle(store, {0: fails(LayoutError("x")), 1: dict, 2: dict}, BETWEEN)
    topics = "|".join(topic.key for topic in Topic)
    # Torch's own keys, of a store that counts its clients, begin with "init".
    assert all(re.match(rf"(/?({topics})/)|/?init", key) for key in store.content()), store.content().keys()


def test_every_part_of_the_store_is_a_topic() -> None:
    """The plugin's code opens parts of the store in one module only, and so by topics of the closed list."""
    root = Path(__file__).resolve().parents[3]
    allowed = {"store.py", "startup.py", "meeting_store.py", "redaction.py"}
    allowed |= {"certify_workers.py"}  # which starts runs of its own, in a store that no run of a user's is in
    for path in [*(root / "vtp_plugin").glob("**/*.py"), *(root / "patches").glob("**/*.py")]:
        if path.name not in allowed:
            assert "PrefixStore(" not in path.read_text(), path
            assert not re.search(r"\b(ranks\.)?store\.set\(", path.read_text()) or path.name == "monitor.py", path
    said = said_of_attributes(Topic)
    assert all(said[topic.name].endswith(".") for topic in Topic)
