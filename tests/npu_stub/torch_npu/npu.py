"""Stands for torch.npu: what is not written here, ``torch.cuda`` answers, which the CPU platform maps onto the CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

mstx = SimpleNamespace(
    mark=lambda *args, **kwargs: None, range_start=lambda *args, **kwargs: 0, range_end=lambda *args, **kwargs: None
)


def is_available() -> bool:
    """Tell that there is no NPU, so that the CPU platform may be chosen."""
    return False


def device_count() -> int:
    """Return the number of NPUs."""
    return 0


def _lazy_call(call: Callable[[], None], **kwargs: Any) -> None:
    """Call at once: the device is always initialised."""
    call()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(torch.cuda, name)
