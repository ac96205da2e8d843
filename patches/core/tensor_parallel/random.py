"""P2, CPU only: what is drawn inside the tracker's fork comes from the tracker's state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from vtp_plugin.patching import PatchRecord
from vtp_plugin.platform.cpu import CpuPlatform


def records(platform: CpuPlatform) -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="P2",
            target="megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork",
            build=functools.partial(_fork, platform),
            why="on CPU, dropout and weight initialisation draw from torch's default generator, while the tracker "
            "switches the device's; without this, tensor-parallel ranks would draw equal shards",
            versions=">=0.19,<0.20",
            remove_when="Megatron's tracker knows the CPU",
        ),
    )


def _fork(
    platform: CpuPlatform, original: Callable[..., AbstractContextManager[None]]
) -> Callable[..., AbstractContextManager[None]]:
    @functools.wraps(original)
    @contextmanager
    def fork(self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with original(self, *args, **kwargs), platform.device_random():
            yield

    return fork
