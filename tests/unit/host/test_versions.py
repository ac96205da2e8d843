"""The Megatron of a run: its version is that of what an import takes, and one that does not fit is a line."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from tests.rules.import_rules import ROOT
from tests.support import hosts
from tests.support.fake_trees import lay_megatron, lay_torch
from tests.support.hosts import NEEDS, left_out, reason_to_skip, unfitting
from vtp_plugin.errors import PatchError
from vtp_plugin.host.versions import (
    HOSTS,
    Capability,
    MegatronFamily,
    Package,
    family_of,
    find_host,
    find_megatron,
    find_torch,
    host_named,
    problems_of,
    untried,
)
from vtp_plugin.host.versions.known_versions import CAPABILITIES, FACTS

TORCH = Package("2.7.1", Path("torch"))


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as that of the script, in a process that has imported neither torch nor Megatron."""
    for name in [name for name in sys.modules if name.partition(".")[0] in {"torch", "megatron"}]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def problem(version: str | None, python: tuple[int, int] = (3, 12)) -> str:
    megatron = None if version is None else Package(version, Path("megatron/core"))
    return " | ".join(problems_of(TORCH, megatron, python))


@pytest.mark.parametrize("said", ["0.19.2", "0.19.2+1a2b3c", "0.19.2.post1", "0.12.0rc3"])
def test_a_tree_beside_the_script_says_its_version(beside: Path, said: str) -> None:
    core = lay_megatron(beside, said)
    assert find_megatron() == Package(said.partition("+")[0], core)
    assert "megatron.core" not in sys.modules


def test_the_tree_that_is_imported_counts_and_not_one_that_would_be(
    beside: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = lay_megatron(beside, "0.19.1")
    (core / "__init__.py").write_text("")
    __import__("megatron.core")
    try:
        other = tmp_path_factory.mktemp("other")
        lay_megatron(other, "0.12.1")
        monkeypatch.syspath_prepend(str(other))
        assert find_megatron() == Package("0.19.1", core)
    finally:
        del sys.modules["megatron.core"], sys.modules["megatron"]


def test_a_tree_needs_no_installed_distribution(beside: Path) -> None:
    lay_torch(beside, "2.7.1+cpu")
    lay_megatron(beside, "0.19.0")
    assert [found.version for found in (find_torch(), find_megatron()) if found] == ["2.7.1", "0.19.0"]
    assert find_host() == (host_named("0.19"), find_megatron())


@pytest.mark.parametrize(("version", "line"), [("soon", "'soon', which is none"), ("", "'', which is none")])
def test_a_version_that_is_none_is_refused(beside: Path, version: str, line: str) -> None:
    lay_megatron(beside, version)
    with pytest.raises(PatchError, match=line):
        find_megatron()


def test_a_megatron_that_says_no_version_is_refused(beside: Path) -> None:
    (lay_megatron(beside, "0.19.0") / "package_info.py").unlink()
    with pytest.raises(PatchError, match=r"has no package_info\.py"):
        find_megatron()


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("0.12.0", None), ("0.12.1", "0.12"), ("0.12.3", "0.12"), ("0.13.0", None), ("0.14.1", None),
        ("0.15.0rc1", None), ("0.15.3", "0.16"), ("0.16.0", "0.16"), ("0.16.1", "0.16"), ("0.17.0rc0", None),
        ("0.17.1", "0.17"), ("0.18.0", "0.18"), ("0.19.0rc2", None), ("0.19.0", "0.19"), ("0.19.2.post1", "0.19"),
        ("0.20", None), ("1", None),
    ],
)  # fmt: skip
def test_versions_and_their_families(version: str, name: str | None) -> None:
    """Also as the records see them, whose ranges are PEP 440 specifiers."""
    specifiers = pytest.importorskip("packaging.specifiers")
    family = family_of(version)
    assert (None if family is None else family.name) == name
    for host in HOSTS:
        assert specifiers.SpecifierSet(host.versions).contains(version, prereleases=True) == (host is family)


@pytest.mark.parametrize(
    ("version", "expected"), [("0.16.1", True), ("0.18.0", True), ("0.19.2", False), ("0.20.0", False), ("", False)]
)
def test_older_is_what_comes_before_0_19(monkeypatch: pytest.MonkeyPatch, version: str, expected: bool) -> None:
    """A newer family is not older: it trains with our example, too."""
    newer = MegatronFamily(name="0.20", first="0.20", below="0.21", pythons=(), torch="")
    monkeypatch.setattr(hosts, "find_megatron", lambda: Package(version, ROOT) if version else None)
    monkeypatch.setattr(hosts, "family_of", lambda found: newer if found == "0.20.0" else family_of(found))
    assert hosts.is_older() is expected


def test_only_the_newest_is_tried_whole() -> None:
    assert [host.name for host in HOSTS if not untried(host)] == ["0.19"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("0.12", "Megatron 0.12.3 beyond the core grids"),
        ("0.16", "Megatron 0.15 beyond the core grids, and --sft"),
        ("0.17", "--sft, hangs, and the whole grids of options"),
        ("0.18", "--sft, hangs, and the whole grids of options"),
    ],
)
def test_what_is_untried_follows_from_what_was_run(name: str, words: str) -> None:
    assert untried(host_named(name)) == words


def test_capabilities_have_names_ranges_and_something_that_shows_them() -> None:
    """Also: what was run has an end, so that a version to come has nothing that nobody ran."""
    rows = (*CAPABILITIES, *FACTS)
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.versions and all(row.missing) and not any(map(row.is_absent, ("0.19.2", "0.20")))
        path = row.shown_by.partition("::")[0]
        assert (ROOT / path).is_file() or path.startswith("make ")
    following = f"{HOSTS[-1].below}.1"
    assert {row.name for row in rows if row.has(following)} == {"layouts", "worker_without_cuda"}  # facts of Megatron


class Item(NamedTuple):
    """What pytest knows of a test, as far as marks go."""

    nodeid: str
    callspec: SimpleNamespace
    marks: list[pytest.Mark]

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return self.marks


def items(name: str, **options: object) -> list[Item]:
    marks = [pytest.mark.needs(name, **options).mark]
    return [Item(f"test.py::test[{case}]", SimpleNamespace(id=case), marks) for case in ("1,2", "1,2-late", "2,1")]


@pytest.mark.parametrize(
    ("options", "cases"),
    [
        ({}, ["1,2", "1,2-late", "2,1"]),
        ({"cases": ("1,2",)}, ["1,2", "1,2-late"]),
        ({"cases": ("1,2]", "2")}, ["1,2", "2,1"]),
    ],
)
def test_marks_leave_out_what_a_host_has_not(options: dict[str, object], cases: list[str]) -> None:
    found = list(left_out(items("two_rings", **options), "0.18"))
    assert [item.callspec.id for item, _ in found] == cases
    reason = "Megatron 0.18: an encoder in a U (`--vtp-encoder-layer-list`): not supported"
    assert {reason for _, reason in found} == {reason}
    assert not list(left_out(items("two_rings", **options), "0.19")) and not unfitting(items("two_rings", **options))


def test_a_mark_that_fits_no_case_is_found() -> None:
    assert unfitting(items("two_rings", cases=("1,2", "3,1"))) == {"test.py::test[3,1"}
    with pytest.raises(KeyError, match="three_rings"):
        reason_to_skip("three_rings", "0.18")


def test_what_tests_need_is_needed() -> None:
    texts = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    used = {name for text in texts for name in re.findall(r'mark\.needs\(\s*"(\w+)"', text)}
    assert NEEDS.keys() <= used and not NEEDS.keys() & {row.name for row in CAPABILITIES}
    for name in used:
        assert any(not reason_to_skip(name, host.name) for host in HOSTS)


def test_a_range_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="'0.19' is not a version range; write it like"):
        Capability(name="x", what="x", versions=("0.19",), shown_by="x")


def test_every_family_runs_and_no_other_version() -> None:
    assert [problem(version) for version in ("0.12.1", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")] == [""] * 6
    line = problem("0.13.0")
    assert line.startswith("megatron-core 0.13.0 at megatron/core is not supported; ")
    assert "runs with >=0.12.1,<0.13 and >=0.15,<0.17 and >=0.17,<0.18 and >=0.18,<0.19 and >=0.19,<0.20; run: " in line


def test_the_advice_fits_the_running_python() -> None:
    assert "run: pip install 'megatron-core>=0.19,<0.20', or put" in problem(None, (3, 13))
    assert "run: pip install 'megatron-core>=0.15,<0.17', or put" in problem(None, (3, 11))
    assert "run: pip install 'megatron-core>=0.19,<0.20' (in Python 3.12 or 3.13, this is 3.9)" in problem(None, (3, 9))


@pytest.mark.parametrize("version", [None, "2.5.1"])
def test_a_missing_or_old_torch_is_a_line(version: str | None) -> None:
    torch = None if version is None else Package(version, Path("torch"))
    [line] = problems_of(torch, Package("0.19.2", Path("megatron/core")))
    assert "\n" not in line and "run: pip install 'torch>=2.6,<3'" in line
