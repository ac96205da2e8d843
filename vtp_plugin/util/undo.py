"""Assignments that can be undone: how the plugin changes objects of other packages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

ABSENT: Final = object()
"""The content of a place that does not exist; putting it deletes the place."""


class Slot(Protocol):
    """Something that holds an object: it can be read and written."""

    @property
    def key(self) -> tuple[int, object]:
        """Equal for equal places."""
        ...

    def get(self) -> object:
        """Return the object that the place holds, or `ABSENT`."""
        ...

    def put(self, value: Any) -> None:
        """Make the place hold an object."""
        ...


@dataclass(frozen=True, slots=True)
class Name:
    """An attribute of a module, class or object; inherited attributes do not count."""

    owner: Any
    name: str

    @property
    def key(self) -> tuple[int, object]:
        """As of every place."""
        return id(self.owner), self.name

    def get(self) -> object:
        """As of every place."""
        return namespace(self.owner).get(self.name, ABSENT)

    def put(self, value: Any) -> None:
        """As of every place; `ABSENT` deletes the attribute."""
        if value is ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


@dataclass(frozen=True, slots=True)
class Item:
    """An entry of a dictionary.

    >>> table = {}
    >>> Item(table, "a").put(1), Item(table, "a").get(), Item(table, "b").get() is ABSENT
    (None, 1, True)
    >>> Item(table, "a").put(ABSENT), table
    (None, {})
    """

    table: MutableMapping[Any, Any]
    name: Any

    @property
    def key(self) -> tuple[int, object]:
        """As of every place."""
        return id(self.table), self.name

    def get(self) -> object:
        """As of every place."""
        return self.table.get(self.name, ABSENT)

    def put(self, value: Any) -> None:
        """As of every place; `ABSENT` deletes the entry."""
        if value is ABSENT:
            del self.table[self.name]
        else:
            self.table[self.name] = value


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """An assignment that was made; `old` is `ABSENT` if the place did not exist."""

    place: Slot
    old: object
    new: object

    def undo(self) -> None:
        """Put the old object back, unless somebody else has assigned another one meanwhile."""
        if self.place.get() is self.new:
            self.place.put(self.old)


@contextmanager
def replaced(owner: object, **values: object) -> Iterator[None]:
    """Give attributes of an object other values inside a ``with`` block.

    >>> class Owner:
    ...     size = 1
    >>> one = Owner()
    >>> with replaced(one, size=2, name="a"):
    ...     one.size, one.name
    (2, 'a')
    >>> vars(one)
    {}
    """
    undo = UndoStack()
    try:
        for name, value in values.items():
            undo.set(owner, name, value)
        yield
    finally:
        undo.undo()


class UndoStack:
    """Makes assignments, and puts the very same objects back in reverse order.

    Attributes are read from ``__dict__``, not by ``getattr``: on a class that would unwrap static methods and find
    inherited attributes, and writing those back would not give the original class.

    >>> class Owner:
    ...     size = 1
    >>> undo = UndoStack()
    >>> undo.set(Owner, "size", 2)
    >>> undo.set(Owner, "name", "a")
    >>> undo.undo()
    >>> Owner.size, hasattr(Owner, "name"), len(undo)
    (1, False, 0)
    """

    def __init__(self) -> None:
        self._changes: list[Change] = []

    def __len__(self) -> int:
        return len(self._changes)

    def put(self, place: Slot, value: object) -> None:
        """Make a place hold an object, and remember what it held."""
        old = place.get()
        place.put(value)
        self._changes.append(Change(place, old, value))

    def set(self, owner: object, name: str, value: object) -> None:
        """Make ``owner.name`` be an object, and remember what it was."""
        self.put(Name(owner, name), value)

    @contextmanager
    def during(self, place: Slot, value: object) -> Iterator[None]:
        """Make a place hold an object inside a ``with`` block; blocks may end in any order, also after :meth:`undo`."""
        self.put(place, value)
        change = self._changes[-1]
        try:
            yield
        finally:
            if change in self._changes:
                self._changes.remove(change)
                change.undo()

    def undo(self) -> None:
        """Undo every assignment, the last one first, and forget them."""
        while self._changes:
            self._changes.pop().undo()


def namespace(owner: Any) -> Mapping[str, Any]:
    """Return the attributes of an object, without inherited ones, and without running its code."""
    # vars() and isinstance() would make importlib's lazy modules load.
    return object.__getattribute__(owner, "__dict__")
