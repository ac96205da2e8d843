"""The pins of MindSpeed-MM's and MindSpeed's functions against their trees.

Opt-in: ``VTP_MINDSPEED_MM`` and ``VTP_MINDSPEED`` name the trees that the plugin was written against,
``VTP_MINDSPEED_MM_MASTER`` one of MindSpeed-MM's branch master, 57069cd5 or newer.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
from vtp_plugin.host.patching.pins import pins_in, read_pins
from vtp_plugin.patches.mindspeed import known_mm

TREES = {"mindspeed_mm": "VTP_MINDSPEED_MM", "mindspeed": "VTP_MINDSPEED"}


def tree(variable: str) -> Path:
    """Return the path that a variable gives."""
    path = os.environ.get(variable, "")
    if not path:
        pytest.skip(f"no path in {variable}")
    return Path(path)


@pytest.mark.parametrize("package", TREES)
def test_the_trees_are_the_pinned_ones(package: str) -> None:
    targets = known_mm.TARGETS[package]
    assert pins_in(tree(TREES[package]), targets) == read_pins(known_mm.PINS)[known_mm.WRITTEN_FOR[package]]


def test_every_target_has_a_pin() -> None:
    pins = read_pins(known_mm.PINS)
    assert {known_mm.WRITTEN_FOR[package]: set(targets) for package, targets in known_mm.TARGETS.items()} == {
        version: set(found) for version, found in pins.items()
    }


def test_master_changes_nothing_that_is_relied_on_and_a_change_of_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What master does change (docs/guides/mindspeed-mm.md says it) would be named here."""
    master = tree("VTP_MINDSPEED_MM_MASTER")
    shutil.copytree(master / "mindspeed_mm", tmp_path / "mindspeed_mm")
    monkeypatch.setattr(known_mm, "_root", {"mindspeed_mm": tmp_path}.get)
    assert list(known_mm.changes_of_versions()) == [] == list(known_mm.problems_of_versions("0.12.1"))
    script = tmp_path / "mindspeed_mm" / "training.py"
    source = script.read_text()
    script.write_text(source.replace("def train_step(\n", "def train_step(\n    one_more,\n"))
    (line,) = known_mm.changes_of_versions()
    assert line == "mindspeed_mm.training:train_step is not as in MindSpeed-MM 26.1.0"
    script.write_text(source.replace("def train_step(\n", "def train_a_step(\n"))
    (line,) = known_mm.problems_of_versions("0.12.1")
    assert f"mindspeed_mm in {tmp_path} has no mindspeed_mm.training:train_step;" in line
