"""Apply, report and revert replacements of a host package's objects, driven by records.

A replacement reaches the target itself. When records are applied, it also reaches what holds the same object by a name:
the names of loaded modules that know the host, and the class attributes, default arguments and
:func:`functools.partial` objects behind them. It does not reach closures, containers, and attributes of other objects,
nor an original that comes to light later: :func:`unreached` names what a detector finds there when asked.

Words:
    place: what holds an object that a record replaces: a name, an entry, a default argument (``Slot``).
    host: the package that is patched, here Megatron.
    target: what a record replaces or writes (``Target``).
    declaration: a record as data beside the code that uses it; bound to a run, it can be applied (``Declared``).
    replacement: what stands there afterwards.
    pin: digest of a source that a patch was written against.
    unreached: places that still hold the original.
"""

from __future__ import annotations

from vtp_plugin.host.patching.engine import AppliedPatches, apply_records, rebuild, unreached
from vtp_plugin.host.patching.record import (
    AnyRecord,
    Declared,
    PatchRecord,
    PatchStatus,
    Record,
    Replacement,
    WriteRecord,
    Writes,
    Written,
    declared,
    format_status,
    replaces,
    subclasses,
)

__all__ = [
    "AnyRecord",
    "AppliedPatches",
    "Declared",
    "PatchRecord",
    "PatchStatus",
    "Record",
    "Replacement",
    "WriteRecord",
    "Writes",
    "Written",
    "apply_records",
    "declared",
    "format_status",
    "rebuild",
    "replaces",
    "subclasses",
    "unreached",
]
