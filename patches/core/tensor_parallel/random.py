"""P2, CPU only: what is drawn inside the tracker's fork comes from the tracker's state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from vtp_plugin.patching import PatchRecord


def records() -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="P2",
            target="megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork",
            build=_fork,
            why="on CPU, dropout and weight initialisation draw from torch's default generator, while the tracker "
            "switches the device's; without this, tensor-parallel ranks would draw equal shards",
            versions=">=0.19,<0.20",
            remove_when="Megatron's tracker knows the CPU",
        ),
    )


def _fork(original: Callable[..., AbstractContextManager[None]]) -> Callable[..., AbstractContextManager[None]]:
    @functools.wraps(original)
    @contextmanager
    def fork(self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with original(self, *args, **kwargs):
            host_state = torch.get_rng_state()
            torch.set_rng_state(torch.cuda.get_rng_state())
            try:
                yield
            finally:
                torch.cuda.set_rng_state(torch.get_rng_state())
                torch.set_rng_state(host_state)

    return fork
