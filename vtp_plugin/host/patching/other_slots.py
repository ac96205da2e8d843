"""Places that hold an object, besides names and entries: default arguments, and parts of partial objects."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from vtp_plugin.util.undo import ABSENT


@dataclass(frozen=True, slots=True)
class Default:
    """The default of an argument that may be given by position; the others are entries of ``__kwdefaults__``.

    >>> def call(f=len): ...
    >>> Default(call, 0).put(max)
    >>> call.__defaults__, Default(call, 1).get() is ABSENT
    ((<built-in function max>,), True)
    """

    function: Any
    index: int

    @property
    def key(self) -> tuple[int, object]:
        """As of every place."""
        return id(self.function), self.index

    def get(self) -> object:
        """As of every place."""
        return _item(self.function.__defaults__ or (), self.index)

    def put(self, value: Any) -> None:
        """As of every place."""
        self.function.__defaults__ = _with_item(self.function.__defaults__ or (), self.index, value)


@dataclass(frozen=True, slots=True)
class PartialPart:
    """The function (index 0) or a positional argument (from 1 on) of a :func:`functools.partial`.

    >>> call = functools.partial(len, len, key=len)
    >>> PartialPart(call, 0).put(max)
    >>> PartialPart(call, 1).put(min)
    >>> call
    functools.partial(<built-in function max>, <built-in function min>, key=<built-in function len>)
    """

    partial: functools.partial[Any]
    index: int

    @property
    def key(self) -> tuple[int, object]:
        """As of every place."""
        return id(self.partial), self.index

    def get(self) -> object:
        """As of every place."""
        return _item((self.partial.func, *self.partial.args), self.index)

    def put(self, value: Any) -> None:
        """As of every place."""
        function, *args = _with_item((self.partial.func, *self.partial.args), self.index, value)
        # Its fields are read-only, but it can be unpickled in place.
        state = function, tuple(args), self.partial.keywords, vars(self.partial)
        self.partial.__setstate__(state)  # pyright: ignore[reportAttributeAccessIssue]


def _item(items: tuple[Any, ...], index: int) -> object:
    return items[index] if index < len(items) else ABSENT


def _with_item(items: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*items[:index], value, *items[index + 1 :])
