"""Apply, report and revert replacements of a host package's objects, driven by records.

What is reached: the target itself and every name in a loaded module of the host package that holds the same object.
What is not: default arguments, closures, :func:`functools.partial` objects, class attributes and instances that took
the original before, and names in other packages (the user's script among them). So apply before the host is used.
"""

from __future__ import annotations

from vtp_plugin.patching.engine import AppliedPatches, apply_records
from vtp_plugin.patching.record import PatchRecord, PatchStatus, format_status

__all__ = ["AppliedPatches", "PatchRecord", "PatchStatus", "apply_records", "format_status"]
