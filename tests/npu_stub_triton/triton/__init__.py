"""Stands for triton, which MindSpeed's branch for 0.16 imports and which looks for a driver: no kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__version__ = "0"


class Config:
    """A configuration of a kernel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.kwargs = kwargs


def jit(function: Any = None, **options: Any) -> Any:
    """Return the function, or a decorator that does."""
    return function if callable(function) else lambda decorated: decorated


def autotune(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """Return a decorator that changes nothing."""
    return lambda decorated: decorated


heuristics = autotune


def cdiv(a: int, b: int) -> int:
    """Divide and round up."""
    return -(-a // b)
