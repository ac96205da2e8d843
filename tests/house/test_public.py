"""docs/reference/public.md lists what the code exports, and the changelog has the version that the code has."""

from __future__ import annotations

import argparse
import importlib
import re
from datetime import date

import pytest

import vtp_plugin
from tests.rules.import_rules import ROOT
from vtp_plugin import errors
from vtp_plugin.checkpoint.format import index, shard_map, site_part
from vtp_plugin.checkpoint.hf import hf_model
from vtp_plugin.checkpoint.save import saving
from vtp_plugin.cli.main import _parser
from vtp_plugin.elastic import failed_cards, progress

PAGE = (ROOT / "docs/reference/public.md").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
GROUPS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits")


def section(heading: str) -> str:
    """Return the text below a heading of the page."""
    _, found, rest = PAGE.partition(f"\n## {heading}\n")
    assert found, heading
    return rest.partition("\n## ")[0]


def listed() -> dict[str, list[str]]:
    """Return the names that the page lists, by module."""
    rows = re.findall(r"^\| `(vtp_plugin[\w.]*)` \| (.+) \|$", section("Names to import"), re.MULTILINE)
    return {module: re.findall(r"`(\w+)`", names) for module, names in rows}


def exported(module: str) -> set[str]:
    """Return what a module exports: what it says so, or else its errors, or what it answers to."""
    found = importlib.import_module(module)
    if found is errors:  # its functions are the plugin's own
        return {name for name, value in vars(errors).items() if isinstance(value, type)} & {
            kind.__name__ for kind in (errors.VtpError, *_below(errors.VtpError))
        }
    return set(getattr(found, "__all__", None) or dir(found))


def _below(kind: type) -> list[type]:
    return [each for child in kind.__subclasses__() for each in (child, *_below(child))]


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the commands of a parser by their names."""
    (action,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(action.choices)


@pytest.mark.parametrize("module", listed())
def test_the_names_are_what_the_module_exports(module: str) -> None:
    names = listed()[module]
    assert len(names) == len(set(names))
    assert set(names) == exported(module)


def test_the_modules_are_those_for_users() -> None:
    assert set(listed()) == {"vtp_plugin", *(f"vtp_plugin.{n}" for n in ("adapters", "bridge", "errors", "functional"))}


def test_commands_are_listed() -> None:
    top = commands(_parser())
    names = [*top, *commands(top["checkpoint"])]
    assert [name for name in names if f"`{name}`" not in section("Flags, keywords and commands")] == []


def test_files_are_listed() -> None:
    names = {
        *(index.MANIFEST, shard_map.MAP, site_part.PART, hf_model.NOTE, saving.LOCK),
        *(failed_cards.MEMORY, progress.FAILED_STARTS, progress.MARKER, progress.PROGRESS),
    }
    assert set(re.findall(r"`(vtp_\w+\.\w+)`", section("Files"))) == names


def test_the_changelog_has_a_dated_entry_for_this_version() -> None:
    releases = re.findall(r"^## (?!Unreleased$)(.+)$", CHANGELOG, re.MULTILINE)
    versions = [re.fullmatch(r"(\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)", release) for release in releases]
    assert all(versions), releases
    assert versions[0] is not None and versions[0][1] == vtp_plugin.__version__
    dates = [date.fromisoformat(found[2]) for found in versions if found]
    assert dates == sorted(dates, reverse=True)


def test_the_changelog_is_in_groups_and_short() -> None:
    for release in re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1:]:
        groups = re.findall(r"^### (.+)$", release, re.MULTILINE)
        assert groups == [group for group in GROUPS if group in groups], release.splitlines()[0]
        assert len(release.split()) < 800, f"{release.splitlines()[0]} takes more than three minutes to read"
