"""Places that hold an object, besides names: default arguments, and parts of partial objects."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from vtp_plugin.undo import ABSENT


@dataclass(frozen=True, slots=True)
class Default:
    """A default argument: by its position in ``__defaults__`` or by its name in ``__kwdefaults__``.

    >>> def call(f=len, *, g=len): ...
    >>> Default(call, 0).put(max), Default(call, "g").put(min)
    (None, None)
    >>> call.__defaults__, call.__kwdefaults__, Default(call, 1).get() is ABSENT
    ((<built-in function max>,), {'g': <built-in function min>}, True)
    """

    function: Any
    index: int | str

    @property
    def key(self) -> tuple[int, object]:
        """As of every place."""
        return id(self.function), self.index

    def get(self) -> object:
        """As of every place."""
        if isinstance(self.index, str):
            return (self.function.__kwdefaults__ or {}).get(self.index, ABSENT)
        return _item(self.function.__defaults__ or (), self.index)

    def put(self, value: Any) -> None:
        """As of every place."""
        if isinstance(self.index, str):
            self.function.__kwdefaults__ = {**(self.function.__kwdefaults__ or {}), self.index: value}
        else:
            self.function.__defaults__ = _with_item(self.function.__defaults__ or (), self.index, value)


@dataclass(frozen=True, slots=True)
class PartialPart:
    """The function (index None), a positional or a keyword argument of a :func:`functools.partial`.

    >>> call = functools.partial(len, len, key=len)
    >>> for index in (None, 0, "key"):
    ...     PartialPart(call, index).put(max)
    >>> call
    functools.partial(<built-in function max>, <built-in function max>, key=<built-in function max>)
    """

    partial: functools.partial[Any]
    index: int | str | None

    @property
    def key(self) -> tuple[int, object]:
        """As of every place."""
        return id(self.partial), self.index

    def get(self) -> object:
        """As of every place."""
        if self.index is None:
            return self.partial.func
        if isinstance(self.index, str):
            return self.partial.keywords.get(self.index, ABSENT)
        return _item(self.partial.args, self.index)

    def put(self, value: Any) -> None:
        """As of every place."""
        function, args, keywords = self.partial.func, self.partial.args, self.partial.keywords
        if self.index is None:
            function = value
        elif isinstance(self.index, str):
            keywords = {**keywords, self.index: value}
        else:
            args = _with_item(args, self.index, value)
        # Its fields are read-only, but it can be unpickled in place.
        state = function, args, keywords, vars(self.partial)
        self.partial.__setstate__(state)  # pyright: ignore[reportAttributeAccessIssue]


def _item(items: tuple[Any, ...], index: int) -> object:
    return items[index] if index < len(items) else ABSENT


def _with_item(items: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*items[:index], value, *items[index + 1 :])
