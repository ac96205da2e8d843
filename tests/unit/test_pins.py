"""Pins: the patches were written against the Megatron that is installed, and a change of it is named."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from scripts.make_docs import record_sections
from vtp_plugin.hosts import find_host
from vtp_plugin.patches.registry import PINS
from vtp_plugin.patching import PatchRecord
from vtp_plugin.patching.pins import changed_targets, pin_of, pins_of, read_pins

HOST = """
class Grid:
    def area(self, k=1):
        return k

    @property
    def size(self):
        return 1

def other():
    pass
"""


def test_the_installed_megatron_is_the_pinned_one() -> None:
    records = [record for section in record_sections().values() for record in section]
    found = pins_of(record.target for record in records)
    assert changed_targets(read_pins(PINS), find_host()[1].version, found) == ()
    assert {record.target for record in records if isinstance(record, PatchRecord)} <= found.keys()
    assert read_pins(PINS)[find_host()[1].version] == found


def pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str = "", new: str = "") -> list[str]:
    path = tmp_path / str(len(list(tmp_path.iterdir()))) / "pinned_host.py"
    path.parent.mkdir()
    path.write_text(HOST.replace(old, new) if old else HOST)
    spec = importlib.util.spec_from_file_location("pinned_host", path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "pinned_host", loaded)  # inspect finds the source of a class through it
    spec.loader.exec_module(loaded)
    return [pin_of(value) for value in (loaded.Grid, vars(loaded.Grid)["area"], vars(loaded.Grid)["size"])]


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("return k", "return  k", [True, True, False]),
        ("return k", "return k   \n", [False, False, False]),
        ("k=1", "k=2", [True, True, False]),
        ("return 1", "return -1", [True, False, True]),
        ("other", "another", [False, False, False]),
    ],
)
def test_a_pin_changes_exactly_when_the_source_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, changed: list[bool]
) -> None:
    before = pins(tmp_path, monkeypatch)
    after = pins(tmp_path, monkeypatch, old, new)
    assert [a != b for a, b in zip(before, after, strict=True)] == changed and all(before)


def test_a_changed_target_is_named() -> None:
    (target, pin), *rest = pins_of(record.target for record in record_sections()["With a list of sizes"]).items()
    known = {"0.18": {}, "0.19.2": {target: pin[::-1], **dict(rest)}}
    assert changed_targets(known, "0.19.2", {target: pin, **dict(rest)}) == (f"{target} is not as in 0.19.2",)
    # Where a version has no pins, the newest one that has some is compared.
    assert changed_targets(known, "0.19.3", {target: pin, **dict(rest)}) == (f"{target} is not as in 0.19.2",)
