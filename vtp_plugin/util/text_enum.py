"""Enumerations whose members are texts: what ``enum.StrEnum`` is from Python 3.11 on."""

from __future__ import annotations

from enum import Enum


class TextEnum(str, Enum):
    """Base of enumerations whose members are texts and print as such.

    >>> class Colour(TextEnum):
    ...     RED = "red"
    >>> str(Colour.RED), f"{Colour.RED:>4}", Colour.RED == "red"
    ('red', ' red', True)
    """

    __str__ = str.__str__
    __format__ = str.__format__
