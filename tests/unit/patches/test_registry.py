"""Every record that a module of patches declares is reached at its moment."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path

import pytest

import vtp_plugin.patches
from vtp_plugin.host.patching import declared
from vtp_plugin.patches.registry import MODULES

NAMES = sorted({name for names in MODULES.values() for name in names})
FOLDER = Path(vtp_plugin.patches.__path__[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_module_is_listed_for_the_moments_of_its_records(name: str) -> None:
    """Else they would never be applied, and nobody would say so."""
    with contextlib.suppress(ImportError):  # of MindSpeed, where there is none
        records = declared(importlib.import_module(f"vtp_plugin.patches.{name}"))
        assert [record.id for record in records if name not in MODULES[record.when]] == []
        assert [record.id for record in records if not record.why] == []  # neither it nor its function says why


def test_a_module_with_records_is_listed() -> None:
    """Those of a family are listed by the family, and those of MindSpeed by what finds it."""
    found = {
        ".".join(file.relative_to(FOLDER).with_suffix("").parts)
        for file in FOLDER.rglob("*.py")
        if "\n@replaces(" in file.read_text() or "= Written(" in file.read_text()
    }
    found = {name.removesuffix(".__init__") for name in found if name.partition(".")[0] not in ("hosts", "mindspeed")}
    assert found - {*NAMES} == set()
