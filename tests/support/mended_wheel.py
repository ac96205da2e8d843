"""What a family's wheel needs to train at all, also without the plugin, such as 0.12 with the distributed optimizer."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from vtp_plugin.host.patching import AppliedPatches, apply_records, declared
from vtp_plugin.host.versions import find_host


def mend_wheel() -> AppliedPatches:
    """Apply the records that only this family of Megatron needs on any platform."""
    from vtp_plugin.patches.hosts import load_host
    from vtp_plugin.patches.patch_set import Moment

    family, megatron = find_host()
    found = [record for name in load_host(family.name).modules for record in declared(sys.modules[name])]
    return apply_records([record.bound({}) for record in found if record.when is Moment.PLATFORM], megatron.version)


def move_what_the_cpu_drew() -> None:
    """Do for stock Megatron on a device what `cpu-initialization` does for a list; see there.

    Process-wide, for a process that ends.
    """
    builders: Any = importlib.import_module("megatron.training.models.dist_utils")
    original = builders._wrap_with_mp_wrapper

    def moved(chunks: list[Any], *args: Any) -> list[Any]:
        return original([chunk.cuda() for chunk in chunks], *args)

    builders._wrap_with_mp_wrapper = moved
