"""`jit-warmup`, CPU only: the warm-up of fused functions must not move the generator that weights are drawn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.platform.cpu import CpuPlatform


@replaces("megatron.training.initialize:_warmup_jit_function", id="jit-warmup", when=Moment.CPU)
def _warm_up(platform: CpuPlatform, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Run `_warmup_jit_function` on the device's generator; the host's stays where it is.

    Why: it applies dropout on the device; on CPU that moved the CPU's generator by an amount that depends on the
    tensor-parallel size, and weights differed between layouts.

    Remove when: with `cpu-rng-tracker`.
    """
    with platform.device_random():
        original(*args, **kwargs)
