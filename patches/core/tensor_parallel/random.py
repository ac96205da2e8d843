"""`cpu-rng-tracker`, CPU only: what is drawn inside the tracker's fork comes from the tracker's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.platform.cpu import CpuPlatform


@replaces("megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork", id="cpu-rng-tracker", when=Moment.CPU)
@contextmanager
def _fork(
    platform: CpuPlatform, original: Callable[..., AbstractContextManager[None]], *args: Any, **kwargs: Any
) -> Iterator[None]:
    """Enter `fork`, which switches the device's generator, then let the host draw from that generator.

    Why: on CPU, dropout and weight initialisation draw from torch's default generator, while the tracker switches the
    device's; without this, tensor-parallel ranks would draw equal shards.

    Remove when: Megatron's tracker knows the CPU.

    `fork` itself sees the host's as torch's default one: it warns where that has moved.
    """
    with platform.host_random(), original(*args, **kwargs), platform.device_random():
        yield
