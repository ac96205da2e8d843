"""An undo stack for attribute replacements."""

from __future__ import annotations

from typing import Final


class _Absent:
    """Marks an attribute that the owner did not have itself (a class may still inherit it)."""


_ABSENT: Final = _Absent()


class UndoStack:
    """Sets attributes and puts back the very same objects in reverse order.

    ``vars(owner)`` is read instead of ``getattr``: on a class, ``getattr`` would bind static methods and copy inherited
    attributes down, and restoring those would not give the original class.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[object, str, object]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def set(self, owner: object, name: str, value: object) -> None:
        """Replace ``owner.name`` by ``value`` and remember what was there."""
        original = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._entries.append((owner, name, original))

    def undo(self) -> None:
        """Restore every replaced attribute, last one first, and forget them."""
        while self._entries:
            owner, name, original = self._entries.pop()
            if isinstance(original, _Absent):
                delattr(owner, name)
            else:
                setattr(owner, name, original)
