"""Pins: the patches were written against the Megatron that is installed, and a change of it is named."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from scripts.make_pins import installed_records
from vtp_plugin.host.patching import PatchRecord
from vtp_plugin.host.patching.pins import changed_targets, pin_of, pins_of, read_pins
from vtp_plugin.host.patching.record import Replacement
from vtp_plugin.host.versions import HOSTS, family_of, find_host
from vtp_plugin.patches.hosts import load_host
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.patches.registry import PINS, declared_at

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
    records, version = installed_records(), find_host()[1].version
    found = pins_of(record.target for record in records)
    pins = read_pins(PINS)
    assert version in pins, f"no pins for {version}; run scripts/make_pins.py once the tests pass with it"
    assert changed_targets(pins, version, found) == ()
    assert {record.target for record in records if isinstance(record, PatchRecord)} <= found.keys()
    # Without megatron.training, which some wheels lack, a part of them.
    assert found.items() <= pins[version].items()


def test_every_family_has_pins() -> None:
    assert {host.name for version in read_pins(PINS) if (host := family_of(version))} == {host.name for host in HOSTS}


# Of torch, so that no pin of Megatron says what it is.
INHERITED = {
    "megatron.core.dist_checkpointing.strategies.torch:MCoreLoadPlanner.load_bytes",
    "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.finish",
}


@pytest.mark.needs("records_of_0_19")
@pytest.mark.parametrize("version", sorted(read_pins(PINS)))
def test_every_record_is_pinned_with_every_pinned_version(version: str) -> None:
    """A record whose target a version does not have would end each run with it, and no test has all versions."""
    pinned, family = read_pins(PINS)[version], family_of(version)
    assert family is not None
    host = load_host(family.name)
    moments = [moment for moment in Moment if host.can("bridges") or moment is not Moment.BRIDGES]
    found = [record.at(version) for moment in moments for record in declared_at(moment, host)]
    targets = {
        record.target
        for record in found
        if isinstance(record, Replacement) and record.fits(version) and record.module.startswith("megatron.core")
    }
    assert sorted(targets - pinned.keys() - INHERITED) == []


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
    (target, pin), *rest = pins_of(record.target for record in installed_records()).items()
    known = {"0.18": {}, "0.19.2": {target: pin[::-1], **dict(rest)}}
    assert changed_targets(known, "0.19.2", {target: pin, **dict(rest)}) == (f"{target} is not as in 0.19.2",)
    # Where a version has no pins, the newest one that has some is compared.
    assert changed_targets(known, "0.19.3", {target: pin, **dict(rest)}) == (f"{target} is not as in 0.19.2",)
