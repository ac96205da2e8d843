"""Add the installed Megatron to patches/pins.json: digests of the sources that the patches were written against.

Run it once the patches were read against a version, and its tests pass; for a host without ``megatron.training`` in its
wheel, with the path of a Megatron-LM tree in ``PYTHONPATH``. ``--mindspeed-mm TREE --mindspeed TREE`` writes those of
MindSpeed-MM and MindSpeed instead, ``--swift FOLDER --mcore-bridge FOLDER`` those of ms-swift and mcore-bridge in a
folder of installed packages.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    from vtp_plugin.host.patching import Record
    from vtp_plugin.host.patching.pins import Pins


def installed_records() -> Sequence[Record]:
    """Return all records for the Megatron that is installed, as far as it has their modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, about packages that it can do without
        from vtp_plugin.host.versions import find_host
        from vtp_plugin.patches.hosts import load_host
        from vtp_plugin.patches.patch_set import Moment
        from vtp_plugin.patches.registry import declared_at

        family, megatron = find_host()
        host = load_host(family.name)
        moments = [moment for moment in Moment if host.can("bridges") or moment is not Moment.BRIDGES]
        records = host.placed(record for moment in moments for record in declared_at(moment, host))
        return [record for record in records if record.fits(megatron.version) and _has_module(record.module)]


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it is absent
        return False


def main() -> None:
    """Write the file anew; other versions keep their pins."""
    parser = argparse.ArgumentParser(description=__doc__)
    for package in ("mindspeed-mm", "mindspeed", "swift", "mcore-bridge"):
        parser.add_argument(f"--{package}", type=Path, metavar="TREE", help="a tree of this package")
    options = vars(parser.parse_args())
    if any(options.values()):
        _write_trees({package: tree for package, tree in options.items() if tree is not None})
    else:
        _write_installed()


def _write_trees(trees: Mapping[str, Path]) -> None:
    from vtp_plugin.host.patching.pins import pins_in
    from vtp_plugin.patches.mindspeed import known_mm
    from vtp_plugin.patches.swift import known_swift

    for known in (known_mm, known_swift):
        own = {name: tree for name, tree in trees.items() if name in known.TARGETS}
        if own:
            _add(known.PINS, {known.WRITTEN_FOR[name]: pins_in(own[name], known.TARGETS[name]) for name in own})


def _write_installed() -> None:
    from vtp_plugin.host.patching.pins import pins_of
    from vtp_plugin.host.versions import find_host
    from vtp_plugin.patches.registry import PINS

    _add(PINS, {find_host()[1].version: pins_of(record.target for record in installed_records())})


def _add(path: Path, found: Pins) -> None:
    from vtp_plugin.host.patching.pins import read_pins

    pins = {**(read_pins(path) if path.exists() else {}), **found}
    path.write_text(json.dumps(pins, indent=1, sort_keys=True) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
