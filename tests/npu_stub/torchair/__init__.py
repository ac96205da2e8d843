"""Stands for torchair, which registers MindSpeed's operators for graphs; nothing is registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchair import ge as ge


def register_fx_node_ge_converter(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """Return a decorator that changes nothing."""
    return lambda converter: converter
