"""Reads what comes from outside by declared shapes, and files that somebody else may have written.

Files that others have made: opened only if they are regular files, read up to a limit, parsed to small plain values.

Whoever reads one catches two errors: ``OSError``, the file cannot be read, and ``ValueError``, it does not hold what it
should. No file waits for a writer, takes more memory than its own size calls for, or overflows the stack.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import importlib
import json
import math
import os
import stat
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from vtp_plugin.errors import ConfigError
from vtp_plugin.util.text import one_line, question

MAX_BYTES: Final = 64 << 20
"""How long a file may be that a person writes or reads."""
MAX_INDEX_BYTES: Final = 1 << 30
"""How long a file may be that lists all parts of a checkpoint."""
_MAX_DEPTH: Final = 64
_MAX_INTEGER: Final = 1 << 63
_MAX_NAME_BYTES: Final = 255  # of Linux
_KINDS: Final = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_file(path: Path) -> FileIO:
    """Open a regular file to read it, without buffering; a FIFO or a device is refused, and not waited for.

    Raises:
        OSError: it is not there, cannot be read, or is something else.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'no file')}", str(path))
    return FileIO(descriptor)


def problem_of(path: Path) -> str | None:
    """Say why a file cannot be opened: it is missing, or no regular file; None if it can."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if kind == stat.S_IFREG else f"is {_KINDS.get(kind, 'no file')}"


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a regular file.

    Args:
        path: the file.
        max_bytes: a longer one is refused.

    Raises:
        OSError: it cannot be read, is no regular file, or is too long.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
        return file.readall()


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Do as :func:`read_bytes`, and decode UTF-8.

    Raises:
        OSError: as there.
        ValueError: it is no UTF-8.
    """
    return read_bytes(path, max_bytes).decode()


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """Read a file of JSON.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, or not what :func:`parse_json` takes.
    """
    return parse_json(read_bytes(path, max_bytes))


def parse_json(text: str | bytes) -> Any:
    """Read JSON whose values are small: not nested deep, no integer above 64 bits, no infinite number.

    Raises:
        ValueError: it is something else.

    >>> parse_json('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    >>> for text in ("[" * 100_000, "1" * 30, "[1e999]", "NaN"):
    ...     try:
    ...         parse_json(text)
    ...     except ValueError as error:
    ...         print(error)
    it is nested too deep
    an integer has more than 64 bits
    a number is not finite
    a number is not finite
    """
    try:
        return _small(json.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file of TOML, with the same limits.

    Raises:
        ImportError: this Python has no reader of TOML, and the package tomli is missing.
        OSError: it cannot be read.
        ValueError: it is no TOML, or its values are not small.
    """
    # Python has it from 3.11 on; before, the package tomli is the same.
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        return _small(tomllib.loads(read_text(path)))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


class PathError(ValueError):
    """A file names another one that is not in its folder."""


def inside(folder: Path, name: object) -> Path:
    """Return the path of a file in a folder, by a name that some file gives.

    Args:
        folder: that holds it.
        name: name of the file inside the folder; ``a/b`` if it lies in a folder of it.

    Raises:
        PathError: it is no such name, or a link on the way leads out of the folder.

    >>> str(inside(Path("runs"), "mp_rank_00/a.pt"))
    'runs/mp_rank_00/a.pt'
    >>> for name in ("../a", "/etc/passwd", "a//b", "", 3):
    ...     try:
    ...         inside(Path("runs"), name)
    ...     except ValueError as error:
    ...         print(error)
    '../a' is no name of a file in the folder
    '/etc/passwd' is no name of a file in the folder
    'a//b' is no name of a file in the folder
    '' is no name of a file in the folder
    3 is no name of a file in the folder
    """
    if not isinstance(name, str) or not name.isprintable() or not all(map(_is_plain, name.split("/"))):
        raise PathError(f"{ascii(name)[:100]} is no name of a file in the folder")
    path = folder / name
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise PathError(f"{name} is a link that leads out of the folder")
    return path


def count(value: object) -> int:
    """Take a value that counts something: a whole number that is not negative, and fits into 64 bits.

    Raises:
        ValueError: it is none.

    >>> count(3)
    3
    """
    if type(value) is not int or not 0 <= value < _MAX_INTEGER:
        raise ValueError(
            f"{ascii(value)[:40] if isinstance(value, str | int | float) else type(value).__name__} is no count"
        )
    return value


def _is_plain(part: str) -> bool:
    return part not in ("", ".", "..") and len(part.encode()) <= _MAX_NAME_BYTES


def _small(value: Any) -> Any:
    """Give a value back if it is small."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += each.values()
            elif isinstance(each, list):
                below += each
            elif isinstance(each, int) and abs(each) >= _MAX_INTEGER:
                raise ValueError("an integer has more than 64 bits")
            elif isinstance(each, float) and not math.isfinite(each):
                raise ValueError("a number is not finite")
        if not below:
            return value
        level = below
    raise ValueError("it is nested too deep")


MOST_BYTES = 8 << 20
"""Of a text that is read; torch's store takes no longer value, but for what is appended bit by bit."""
_MOST_NUMBER = 1 << 53  # above it floats are not exact, and no count comes so far
_MOST_SHOWN = 80
_SCALARS = frozenset((bool, int, float, str))

_Kind = TypeVar("_Kind")


class ShapeError(ValueError):
    """A text is not what was to be read; the error says what it is instead."""


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """How a file calls a field of a dataclass: ``Annotated[X, Key("name")]``.

    Attributes:
        name: the name; empty for a field that no file has.
        is_needed: whether the file must have it, even if the field has a default.
    """

    name: str
    is_needed: bool = False


def plain_text(value: object) -> str:
    """Take any text, as it is.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, str):
        raise ValueError("must be text")
    return value


def whole_number(least: int, most: int = _MAX_INTEGER) -> Callable[[object], int]:
    """Return what takes a whole number from `least` to `most`, and raises a ValueError for all else.

    >>> whole_number(1)(3)
    3
    """

    def take(value: object) -> int:
        if type(value) is not int or not least <= value <= most:
            to = "on" if most == _MAX_INTEGER else f"to {most}"
            raise ValueError(f"must be a whole number from {least} {to}")
        return value

    return take


def positive_number(value: object) -> float:
    """Take a number from 0 on.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ValueError("must be a number from 0 on")
    return float(value)


PlainText = Annotated[str, plain_text]
Count = Annotated[int, whole_number(1)]
Number = Annotated[float, positive_number]


def read_typed(kind: type[_Kind], text: str | bytes) -> _Kind:
    """Read JSON.

    Texts in it become one plain line of at most :data:`~vtp_plugin.util.text.MOST_CHARACTERS` characters.

    Args:
        kind: ``str``, ``int``, ``float``, ``bool``, ``Literal`` of texts, a dataclass of such, or of these
            ``tuple[X, ...]``, ``tuple[X, Y]``, ``dict[str, X]``, ``dict[int, X]`` and ``X | None``; ``object`` for
            anything. ``Annotated[X, f, g]`` is what ``g`` makes of what ``f`` makes of the value; each raises a
            ValueError that says what it must be.
        text: text in UTF-8, of at most :data:`MOST_BYTES`.

    Raises:
        ShapeError: it is no JSON, too long, or of another shape.

    >>> read_typed(tuple[int, ...], "[1, 2]")
    (1, 2)
    >>> read_typed(dict[int, float], '{"1": true}')
    Traceback (most recent call last):
    ...
    vtp_plugin.util.typed_json.ShapeError: has true at [1], which is no float
    """
    if len(text) > MOST_BYTES:
        raise ShapeError(f"has {len(text)} bytes, more than {MOST_BYTES}")
    try:
        value = parse_json(text)
    except ValueError as error:
        shown = text if isinstance(text, str) else text[: 4 * _MOST_SHOWN].decode(errors="backslashreplace")
        reason = f" ({error})" if not isinstance(error, UnicodeError | json.JSONDecodeError) else ""
        raise ShapeError(f"is {one_line(shown, _MOST_SHOWN)!r}, which is no JSON{reason}") from None
    return _typed(kind, value, ())


def read_toml_by(read: Callable[[dict[str, Any]], _Kind], path: Path, way_out: str = "") -> _Kind:
    """Read a file of TOML that a user has written.

    Args:
        read: makes the result of the outermost table, as with :func:`as_typed`.
        path: path of the file.
        way_out: what to do if it cannot be read, or is no TOML.

    Raises:
        ConfigError: it cannot be read, is no TOML, or has another shape.
    """
    try:
        return read(read_toml(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}{way_out}") from None
    except (ConfigError, ShapeError) as error:
        raise ConfigError(f"{path}{' ' if isinstance(error, ShapeError) else ': '}{one_line(str(error))}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no TOML: {error}{way_out}") from None


def as_typed(kind: type[_Kind], value: object, *at: str) -> _Kind:
    """Read a plain value, see :func:`read_typed`.

    Args:
        kind: its declared shape.
        value: the value.
        at: keys by which it was reached, for the error.

    Raises:
        ShapeError: it has another shape.

    >>> as_typed(dict[str, Count], {"tp": 0}, "cards", "old")
    Traceback (most recent call last):
    ...
    vtp_plugin.util.typed_json.ShapeError: has 0 at [cards][old][tp], which must be a whole number from 1 on
    """
    return _typed(kind, value, functools.reduce(lambda place, key: (place, key), at, ()))


def _typed(kind: Any, value: Any, place: tuple[Any, ...]) -> Any:
    if kind in _SCALARS:  # first: a text may hold millions of them
        return _scalar(kind, value, place)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in (object, Any):
        return value
    if origin in (typing.Union, types.UnionType):
        return _one_of(inner, value, place)
    if origin is Annotated:
        return _annotated(inner, value, place)
    if origin is Literal:
        if not isinstance(value, str) or value not in inner:
            raise ShapeError(f"has {_shown(value)}{_where(place)}, which is none of {', '.join(inner)}")
        return value
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


def _annotated(inner: tuple[Any, ...], value: Any, place: tuple[Any, ...]) -> Any:
    reads = [one for one in inner[1:] if not isinstance(one, Key)]
    if not reads:
        return _typed(inner[0], value, place)
    try:
        return functools.reduce(lambda found, read: read(found), reads, value)
    except ValueError as error:
        raise ShapeError(f"has {_shown(value)}{_where(place)}, which {error}") from None


def _typed_key(kind: Any, key: str, place: tuple[Any, ...]) -> Any:
    if kind in (str, PlainText):
        return one_line(key) if kind is str else key
    if not (key.isascii() and key.isdecimal() and len(key) < 16):
        raise ShapeError(f"has the key {one_line(key, _MOST_SHOWN)!r}{_where(place)}, which is no number")
    return int(key)


@functools.cache
def _fields_of(kind: Any) -> Mapping[str, tuple[str, Any, bool]]:
    """Return name, type and whether it is needed of each field by its key; that takes a millisecond."""
    found: dict[str, tuple[str, Any, bool]] = {}
    kinds, missing = typing.get_type_hints(kind, include_extras=True), dataclasses.MISSING
    for one in dataclasses.fields(kind):
        keys = [each for each in typing.get_args(kinds[one.name]) if isinstance(each, Key)]
        key = keys[0] if keys else Key(one.name)
        if key.name:
            is_needed = key.is_needed or (one.default is missing and one.default_factory is missing)
            found[key.name] = one.name, kinds[one.name], is_needed
    return found


def _instance(kind: Any, value: dict[str, Any], place: tuple[Any, ...]) -> Any:
    fields = _fields_of(kind)
    if unknown := sorted(set(value) - set(fields)):
        name = one_line(unknown[0], _MOST_SHOWN)
        raise ShapeError(f"has {name!r}{_where(place)}, which is unknown{question(name, fields)}")
    if lacking := [key for key, (_, _, is_needed) in fields.items() if is_needed and key not in value]:
        raise ShapeError(f"has no {lacking[0]!r}{_where(place)}")
    return kind(**{fields[key][0]: _typed(fields[key][1], one, (place, key)) for key, one in value.items()})


def _wrong(kind: Any, value: Any, place: tuple[Any, ...]) -> ShapeError:
    name = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
    return ShapeError(f"has {_shown(value)}{_where(place)}, which is no {name.rpartition('.')[2]}")


def _shown(value: Any) -> str:
    return one_line(json.dumps(value, default=str), _MOST_SHOWN)  # TOML has dates


def _where(place: tuple[Any, ...]) -> str:
    """Say where: a place is empty, or the place around it and the key in there."""
    keys: list[Any] = []
    while place:
        place, key = place
        keys.append(key)
    return f" at {''.join(f'[{one_line(str(key), _MOST_SHOWN)}]' for key in reversed(keys))}" if keys else ""
