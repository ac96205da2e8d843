"""`forked-save-worker`, CPU only: the process that saves checkpoints in the background.

`checkpoint-timeout/async-save`: waiting for it has an end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session


@replaces(
    "megatron.training.async_utils:init_persistent_async_worker",
    id="forked-save-worker",
    when=Moment.CPU,
    unneeded={
        "<0.17": "it starts the process without arguments; on CPUs 0.12 saves in the background without that process"
    },
    aliases=("megatron.training.initialize:init_persistent_async_worker",),
)
def _start(original: Callable[..., None], rank: int, mp_mode: str = "spawn", **kwargs: Any) -> None:
    """Run `init_persistent_async_worker`, which then forks this process, whatever was asked for.

    Why: a newly started process divides by the number of CUDA devices, 0, and ends; the training then waits for it for
    ever. A fork knows the stand-in device.

    Remove when: with `cpu-rng-tracker`.
    """
    original(rank, mp_mode="fork", **kwargs)


@replaces(
    "megatron.training.async_utils:maybe_finalize_async_save",
    id="checkpoint-timeout/async-save",
    when=Moment.LIST,
    aliases=("megatron.training.training:maybe_finalize_async_save",),
)
def _finalize(session: Session, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Run `maybe_finalize_async_save`, watched.

    Why: its ranks wait for each other, and for processes that write, without a limit.

    Remove when: with `checkpoint-timeout`.
    """
    with session.ranks.together("the end of a save in the background"):
        original(*args, **kwargs)
