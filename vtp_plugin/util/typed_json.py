"""JSON that somebody else wrote, read as a value of a declared type: nothing of another shape or size gets in."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from vtp_plugin.util.printable import one_line
from vtp_plugin.util.untrusted_files import parse_json

MOST_BYTES = 8 << 20
"""Of a text that is read; torch's store takes no longer value, but for what is appended bit by bit."""
_MOST_NUMBER = 1 << 53  # above it floats are not exact, and no count comes so far
_MOST_SHOWN = 80
_SCALARS = frozenset((bool, int, float, str))

_Kind = TypeVar("_Kind")


class ShapeError(ValueError):
    """A text is not what was to be read; the error says what it is instead."""


def read_typed(kind: type[_Kind], text: str | bytes, *, most_bytes: int = MOST_BYTES) -> _Kind:
    """Read JSON.

    Texts in it become one plain line of at most :data:`~vtp_plugin.util.printable.MOST_CHARACTERS` characters.

    Args:
        kind: ``str``, ``int``, ``float``, ``bool``, a dataclass of such, or of these ``tuple[X, ...]``,
            ``tuple[X, Y]``, ``dict[str, X]``, ``dict[int, X]`` and ``X | None``; ``object`` for anything.
        text: text in UTF-8.
        most_bytes: largest size of the text.

    Raises:
        ShapeError: it is no JSON, too long, or of another shape.

    >>> read_typed(tuple[int, ...], "[1, 2]")
    (1, 2)
    >>> read_typed(dict[int, float], '{"1": true}')
    Traceback (most recent call last):
    ...
    vtp_plugin.util.typed_json.ShapeError: has true at [1], which is no float
    """
    if len(text) > most_bytes:
        raise ShapeError(f"has {len(text)} bytes, more than {most_bytes}")
    try:
        value = parse_json(text)
    except ValueError as error:
        shown = text if isinstance(text, str) else text[: 4 * _MOST_SHOWN].decode(errors="backslashreplace")
        reason = f" ({error})" if not isinstance(error, UnicodeError | json.JSONDecodeError) else ""
        raise ShapeError(f"is {one_line(shown, _MOST_SHOWN)!r}, which is no JSON{reason}") from None
    return _typed(kind, value, ())


def _typed(kind: Any, value: Any, place: tuple[Any, ...]) -> Any:
    if kind in _SCALARS:  # first: a text may hold millions of them
        return _scalar(kind, value, place)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in (object, Any):
        return value
    if origin in (typing.Union, types.UnionType):
        return _one_of(inner, value, place)
    if origin is tuple:
        return _tuple(kind, inner, value, place)
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {
            _typed_key(inner[0], key, place): _typed(inner[1], one, (place, key))
            for key, one in typing.cast("dict[str, Any]", value).items()
        }
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _instance(kind, typing.cast("dict[str, Any]", value), place)
    if kind is type(None) and value is None:
        return None
    raise _wrong(kind, value, place)


def _scalar(kind: Any, value: Any, place: tuple[Any, ...]) -> Any:
    if kind is str and isinstance(value, str):
        return one_line(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST_NUMBER
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and is_number:
        return value
    if kind is float and is_number:
        return float(value)
    raise _wrong(kind, value, place)


def _one_of(kinds: Iterable[Any], value: Any, place: tuple[Any, ...]) -> Any:
    """Read a value of the first type that it has; the error is that of the last one, which says most."""
    *first, last = sorted(kinds, key=lambda kind: kind is not type(None))
    for kind in first:
        try:
            return _typed(kind, value, place)
        except ShapeError:
            continue
    return _typed(last, value, place)


def _tuple(kind: Any, inner: tuple[Any, ...], value: Any, place: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong(kind, value, place)
    values = typing.cast("list[Any]", value)
    kinds = inner[:1] * len(values) if inner[1:] == (...,) else inner
    if len(kinds) != len(values):
        raise ShapeError(f"has {len(values)} entries{_where(place)}, not {len(kinds)}")
    return tuple(_typed(kinds[index], one, (place, index)) for index, one in enumerate(values))


def _typed_key(kind: Any, key: str, place: tuple[Any, ...]) -> Any:
    if kind is str:
        return one_line(key)
    if not (key.isascii() and key.isdecimal() and len(key) < 16):
        raise ShapeError(f"has the key {one_line(key, _MOST_SHOWN)!r}{_where(place)}, which is no number")
    return int(key)


@functools.cache
def _types_of_fields(kind: Any) -> Mapping[str, Any]:
    """Return them by name; it takes a millisecond, and a short text may hold thousands of objects."""
    return typing.get_type_hints(kind)


def _instance(kind: Any, value: dict[str, Any], place: tuple[Any, ...]) -> Any:
    kinds = _types_of_fields(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    missing = dataclasses.MISSING
    needed = [n for n, one in fields.items() if one.default is missing and one.default_factory is missing]
    if unknown := sorted(set(value) - set(fields)):
        raise ShapeError(f"has {one_line(unknown[0], _MOST_SHOWN)!r}{_where(place)}, which is unknown")
    if lacking := [name for name in needed if name not in value]:
        raise ShapeError(f"has no {lacking[0]!r}{_where(place)}")
    return kind(**{name: _typed(kinds[name], one, (place, name)) for name, one in value.items()})


def _wrong(kind: Any, value: Any, place: tuple[Any, ...]) -> ShapeError:
    name = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
    return ShapeError(
        f"has {one_line(json.dumps(value), _MOST_SHOWN)}{_where(place)}, which is no {name.rpartition('.')[2]}"
    )


def _where(place: tuple[Any, ...]) -> str:
    """Say where: a place is empty, or the place around it and the key in there."""
    keys: list[Any] = []
    while place:
        place, key = place
        keys.append(key)
    return f" at {''.join(f'[{one_line(str(key), _MOST_SHOWN)}]' for key in reversed(keys))}" if keys else ""
