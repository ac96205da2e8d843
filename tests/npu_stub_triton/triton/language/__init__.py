"""Stands for triton.language: names for annotations."""

from __future__ import annotations

from typing import Any


class _Permissive(type):
    """Gives what kernels look up in parts of the language, such as ``tl.math.exp2``."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class constexpr(metaclass=_Permissive):
    """A value that is known when a kernel is compiled."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return constexpr
