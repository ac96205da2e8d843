"""P5, CPU only: the warm-up of fused functions must not move the generator that weights are drawn from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vtp_plugin.patching import PatchRecord
from vtp_plugin.platform.cpu import CpuPlatform


def records(platform: CpuPlatform) -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="P5",
            target="megatron.training.initialize:_warmup_jit_function",
            build=functools.partial(_warm_up, platform),
            why="it drops out on the device; on CPU that moved the host's generator by an amount that depends on the "
            "tensor-parallel size, and weights differed between layouts",
            versions=">=0.19,<0.20",
            remove_when="with P2",
        ),
    )


def _warm_up(platform: CpuPlatform, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _warmup_jit_function(*args: Any, **kwargs: Any) -> None:
        with platform.device_random():
            original(*args, **kwargs)

    return _warmup_jit_function
