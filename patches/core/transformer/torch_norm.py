"""P3, CPU only: the plain norm under sequence parallelism."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from vtp_plugin.patching import PatchRecord


def records() -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="P3",
            target="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            build=_new,
            why="it refuses sequence parallelism, and the norms that do not need a GPU; a norm acts on single rows, so "
            "all it takes is the mark by which Megatron sums the weights' gradients over the stage",
            versions=">=0.19,<0.20",
            remove_when="WrappedTorchNorm supports sequence parallelism",
        ),
    )


def _new(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __new__(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        plain_config = copy.copy(config)
        plain_config.sequence_parallel = False
        norm = original(cls, plain_config, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return __new__
