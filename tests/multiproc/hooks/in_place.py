"""How hooks take the place of functions of Megatron, torch and the plugin, for as long as their process lives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Facts = dict[str, Any]
Hook = Callable[..., Callable[[], None] | None]


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Have a function called instead: it gets the one before it, and then the arguments."""

    def put(call: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def instead(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        setattr(owner, name, instead)

    return put


def before(owner: Any, name: str) -> Callable[[Callable[..., object]], None]:
    """Have a function called with the same arguments before each call."""

    def put(act: Callable[..., object]) -> None:
        @around(owner, name)
        def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            act(*args, **kwargs)
            return original(*args, **kwargs)

    return put


def after(owner: Any, name: str) -> Callable[[Callable[..., object]], None]:
    """Have a function called after each call, with its result and the arguments."""

    def put(act: Callable[..., object]) -> None:
        @around(owner, name)
        def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            act(result, *args, **kwargs)
            return result

    return put
