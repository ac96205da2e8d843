"""P1: the dataset helper of the wheel is compiled already."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

from vtp_plugin.patching import PatchRecord


def records() -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="P1",
            target="megatron.core.datasets.utils:compile_helpers",
            build=_skip_if_compiled,
            why="the wheel ships the compiled helper but no Makefile; start-up calls make and exits",
            versions=">=0.19,<0.20",
            remove_when="Megatron compiles only what is missing",
        ),
    )


def _skip_if_compiled(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return compile_helpers
