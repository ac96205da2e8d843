"""P8: kernels of families before 0.19, which only CUDA can compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vtp_plugin.patching import PatchRecord, wrap_with


def kernels_record() -> PatchRecord:
    """Give the record for the CPU."""
    return PatchRecord(
        id="P8",
        target="megatron.legacy.fused_kernels:load",
        build=wrap_with(_load),
        why="start-up calls nvcc to find out its version, also where no fused kernel is asked for",
        remove_when="Megatron 0.16 is no longer supported",
    )


def _load(original: Callable[[Any], None], args: Any) -> None:
    """Replace `load` by nothing: on CPU no fused kernel is used."""
