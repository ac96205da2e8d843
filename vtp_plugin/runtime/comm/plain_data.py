"""Objects that cross between sites: data, and never code.

Torch sends an object as a pickle, and a pickle names functions that its reader imports and calls. What crosses between
sites is no pickle, and names nothing: each part is a byte that says what it is, and then its value or its parts. Plain
values are written as they are. What torch and Megatron say of tensors and checkpoints is an entry of a closed table:
its key crosses with its values, and the reader looks the key up. All else is an error, on the rank that would send it
and on the one that would read it.

Nothing refers to a value that was read before, but for texts, which cannot change: so an object that occurs twice
arrives twice, and whoever sends one byte causes no more than one part. Before anything is made, what it will take is
subtracted from :data:`MOST_MADE`. Writer and reader count alike, so what can be written can be read.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import struct
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy
import torch

from vtp_plugin.errors import ConfigError, PeerError
from vtp_plugin.util.text import one_line

MOST_BYTES: Final = 32 << 20
"""The longest object of another site that is read, as it crosses."""
MOST_MADE: Final = 512 << 20
"""So many bytes of memory at most an object of another site takes here, with all its parts."""

_MOST_DEPTH: Final = 64
_MOST_CHARACTERS: Final = 1 << 16
_MOST_INT_BYTES: Final = 33
_MOST_DIMENSIONS: Final = 32
_MOST_ALIKE: Final = 16
_MOST_SHOWN: Final = 80

# What a part is. Numbers from `_ENTRY` on are kinds of the table of entries, from `_INT` on lengths of integers, from
# `_SMALL` on integers themselves.
_BEGIN: Final = b"vtp\x01"
_NONE, _TRUE, _FALSE, _FLOAT, _BYTES, _TEXT, _WIDE, _AGAIN, _LIST, _TUPLE, _DICT, _SET, _RECORD = range(13)
_ENTRY, _INT, _SMALL = 0x20, 0x40, 0x80
# What parts take in memory at most, their place in a container included (measured by test_plain_data.py).
_PLACE, _NUMBER, _TEXT_COST, _CONTAINER, _PAIR, _OBJECT, _FIELD, _BUFFER = 24, 56, 96, 96, 192, 160, 24, 1024
_PLAIN_TYPES: Final = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
_NUMPY: Final[Mapping[str, Any]] = {dtype.str: dtype for dtype in map(numpy.dtype, _PLAIN_TYPES)}
# Of other types, such as quantized, complex and sparse ones, torch makes tensors that can end the process.
_TORCH: Final[Mapping[str, Any]] = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        *(*_PLAIN_TYPES, "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("strided", "contiguous_format", "preserve_format", "channels_last"),
    )
}
_IS_INT: Final = (int, numpy.integer)
# What may stand for a type in fields: a size is also written as a tuple, and numbers as those of NumPy.
_WIDER: Final[Mapping[Any, Any]] = {int: _IS_INT, float: (int, float, numpy.number), torch.Size: tuple[int, ...]}


class ObjectError(PeerError):
    """An object of another site is not what ranks of this version send."""

    def __init__(self, problem: str) -> None:
        text = (
            f"an object from another site {problem}; between sites plain values cross and no code does; install one "
            "version on both, or ask the owner of the other one what it has sent (docs/guides/edge-cloud.md)"
        )
        super().__init__(text, shared=text)


class _Unfit(Exception):
    """What is written or read breaks a rule; its text says which."""


class _Nothing:
    """Stands for a field that an object has not."""


class PlainData:
    """Writes and reads objects that cross between sites.

    Args:
        classes: of what may cross, the same on all ranks: data classes, enumerations, named tuples, and classes whose
            objects have attributes and nothing more.
        describe: returns what the other site may read of an exception.
        fields: types of attributes that a class does not say, or functions that tell whether a value may be there, by
            module and name of the class.

    >>> data = PlainData()
    >>> data.read(data.write({"size": torch.Size([2, 3]), "type": torch.bfloat16, "part": slice(0, 2)}))
    {'size': torch.Size([2, 3]), 'type': torch.bfloat16, 'part': slice(0, 2, None)}
    """

    def __init__(
        self,
        classes: Iterable[type] = (),
        describe: Callable[[BaseException], str] = str,
        fields: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._classes = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in classes}
        self._keys = {kind: key for key, kind in self._classes.items()}
        self._describe = describe
        self._fields = fields or {}
        self._records: dict[str, _Record] = {}

    def write(self, value: Any) -> bytes:
        """Return an object as bytes.

        Raises:
            ConfigError: it holds something that may not cross, or that the other site would not read.
        """
        try:
            return _Writer(self).written(value)
        except _Unfit as error:
            raise ConfigError(
                f"an object that would cross between sites {error}; the other site rejects it; send less at once and "
                "texts of one line, or leave --vtp-sites out if one owner has all machines"
            ) from None

    def read(self, data: bytes) -> Any:
        """Return the object of some bytes.

        Raises:
            ObjectError: they hold what no rank sends: code, control characters, too much.
        """
        try:
            return _Reader(self, data).whole()
        except _Unfit as error:
            raise ObjectError(str(error)) from None
        except Exception as error:  # of whatever kind: these bytes come from outside
            raise ObjectError(f"cannot be read ({type(error).__name__})") from None

    def record(self, key: str) -> _Record:
        """Return what is known of a class, by its module and name; for writer and reader."""
        if key not in self._records:
            if key not in self._classes:
                raise _Unfit(f"is of the kind '{one_line(key, _MOST_SHOWN)}', which is unknown here")
            self._records[key] = _Record.of(self._classes[key], self._fields.get(key))
        return self._records[key]

    def entry(self, value: Any) -> tuple[str, Any]:
        """Return key and values of what is no plain value; for the writer."""
        kind: type[Any] = type(value)
        if (key := self._keys.get(kind)) is not None:
            return key, self.record(key).values(value)
        if isinstance(value, BaseException):
            return "error", one_line(self._describe(value))
        if (entry := _entry_of(kind, value)) is not None:
            return entry
        kind = value if isinstance(value, type) else kind
        raise ConfigError(
            f"an object of {kind.__module__}.{kind.__qualname__} would cross between sites; only plain values, numbers "
            "and tensors of plain types, and what Megatron says of checkpoints do; send numbers, texts and lists of "
            "them, or leave --vtp-sites out if one owner has all machines"
        )


@dataclasses.dataclass(frozen=True)
class _Record:
    """A class of the table: its fields, in their order, and what may be in each."""

    kind: type
    names: tuple[str, ...]
    fits: tuple[Callable[[Any], bool], ...]

    @classmethod
    def of(cls, kind: type, fields: Mapping[str, Any] | None) -> _Record:
        if issubclass(kind, enum.Enum):
            return cls(kind, ("name",), (_fits(str),))
        hints = {**typing.get_type_hints(kind), **(fields or {})}
        if dataclasses.is_dataclass(kind):
            none = {field.name for field in dataclasses.fields(kind) if field.default is None}
            hints = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
            hints = {name: hint | None if name in none else hint for name, hint in hints.items()}
        return cls(kind, tuple(hints), tuple(map(_fits, hints.values())))

    def values(self, value: Any) -> list[Any]:
        """Return what is in the fields of an object; for the writer."""
        return self.checked([getattr(value, name, _Nothing()) for name in self.names])

    def checked(self, values: list[Any]) -> list[Any]:
        """Refuse what would be an error of whoever uses the object."""
        for name, fits, value in zip(self.names, self.fits, values, strict=True):
            if not fits(value):
                raise _Unfit(f"has '{type(value).__name__.strip('_')}' as {name} of {self.kind.__name__}")
        return values

    def require_names(self, names: Any) -> None:
        """Compare the fields that the other site's class has."""
        if names != self.names:
            raise _Unfit(f"has other fields of {self.kind.__name__} than {', '.join(self.names)}")

    def filled(self, values: list[Any]) -> Any:
        """Fill the fields of an object, which runs nothing of its class."""
        self.checked(values)
        if issubclass(self.kind, enum.Enum):
            return self.kind[values[0]]
        if issubclass(self.kind, tuple):
            return tuple.__new__(self.kind, values)
        made = object.__new__(self.kind)
        for name, each in zip(self.names, values, strict=True):
            object.__setattr__(made, name, each)
        return made


def _fits(hint: Any) -> Callable[[Any], bool]:
    """Return a function that tells whether a value is of a type, as annotations write it.

    >>> [_fits(tuple[int, ...] | None)(value) for value in (None, (1, 2), torch.Size([3]), [1], ("a",))]
    [True, True, True, False, False]
    """
    if isinstance(hint, types.FunctionType):
        return hint
    hint = _WIDER.get(hint, hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, tuple):
        return lambda value: isinstance(value, hint)
    if origin in (typing.Union, types.UnionType):
        choices = tuple(map(_fits, args))
        return lambda value: any(fits(value) for fits in choices)
    kind: Any = hint if origin is None else origin
    if not isinstance(kind, type) or kind in (object, Any):
        return lambda value: not isinstance(value, _Nothing)
    if not args:
        return lambda value: isinstance(value, kind)
    if issubclass(kind, Mapping):
        of_key, of_value = map(_fits, args)
        return lambda value: isinstance(value, kind) and all(of_key(a) and of_value(b) for a, b in value.items())
    if issubclass(kind, tuple) and args[-1] is not ...:
        parts = tuple(map(_fits, args))
        return lambda value: (
            isinstance(value, kind)
            and len(value) == len(parts)
            and all(f(a) for f, a in zip(parts, value, strict=True))
        )
    of_each = _fits(args[0])
    return lambda value: isinstance(value, kind) and all(map(of_each, value))


def _entry_of(kind: type[Any], value: Any) -> tuple[str, Any] | None:
    if kind in (torch.dtype, torch.layout, torch.memory_format):
        return ("torch", str(value)) if str(value) in _TORCH else None
    if kind is torch.Size:
        return "size", tuple(value)
    if kind is slice:
        return "slice", (value.start, value.stop, value.step)
    if kind is frozenset:
        return "frozenset", list(value)
    if kind is collections.OrderedDict:
        return "ordered", list(value.items())
    if kind is io.BytesIO:
        return "bytes", value.getvalue()
    if kind is traceback.StackSummary:
        return "stack", None  # its lines stay at home
    if kind in (torch.Tensor, torch.nn.Parameter) and str(value.dtype) in _TORCH and _has_values(value):
        # Before it is copied: a tensor may be much longer than its memory.
        _require_length(value.shape, value.dtype.itemsize)
        whole = value.detach().cpu().contiguous().resolve_neg()
        return "tensor", (str(whole.dtype), tuple(whole.shape), whole.flatten().view(torch.uint8).numpy().tobytes())
    if (kind is numpy.ndarray or isinstance(value, numpy.generic)) and value.dtype.str in _NUMPY:
        _require_length(value.shape, value.dtype.itemsize)
        name = "array" if kind is numpy.ndarray else "number"
        return name, (value.dtype.str, tuple(value.shape), value.tobytes())
    return None


def _has_values(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


class _Counted:
    """Counts what is made of an object, whether it is written or read."""

    def __init__(self) -> None:
        self._left = MOST_MADE

    def charge(self, num_bytes: int) -> None:
        self._left -= num_bytes
        if self._left < 0:
            raise _Unfit(f"takes more than {MOST_MADE >> 20} MiB of memory with all its parts")


class _Writer(_Counted):
    """Writes one object.

    Args:
        data: what may cross.
    """

    def __init__(self, data: PlainData) -> None:
        super().__init__()
        self._data = data
        self._out = bytearray(_BEGIN)
        self._texts: dict[str, int] = {}
        self._known: dict[str, int] = {}

    def written(self, value: Any) -> bytes:
        self._part(value, 0)
        self._require_short()
        return bytes(self._out)

    def _part(self, value: Any, depth: int) -> None:
        _require_depth(depth)
        self.charge(_PLACE)
        kind: type[Any] = type(value)
        if kind is int:
            self._int(value)
        elif kind is str:
            self._text(value)
        elif value is None or kind is bool:
            self._out.append(_NONE if value is None else _TRUE if value else _FALSE)
        elif kind is float:
            self.charge(_NUMBER)
            self._out.append(_FLOAT)
            self._out += struct.pack("<d", value)
        elif kind is bytes:
            self.charge(_CONTAINER + len(value))
            self._open(_BYTES, len(value))
            self._out += value
            self._require_short()
        elif kind in _CONTAINERS:
            self._open(_CONTAINERS[kind], len(value))
            self.charge(_container(_CONTAINERS[kind], len(value)))
            if kind is dict or kind is set:
                _require_spread(value)
            for each in value:
                self._part(each, depth + 1)
            for each in value.values() if kind is dict else ():
                self._part(each, depth + 1)
        else:
            self._entry(*self._data.entry(value), depth + 1)

    def _entry(self, key: str, state: Any, depth: int) -> None:
        if key in _MAKE:
            self._out.append(_ENTRY + _KEYS.index(key))
            self._part(state, depth)
            self.charge(_cost(key, state))
            return
        self._open(_RECORD, self._known.setdefault(key, new := len(self._known)))
        if new < len(self._known):
            self._part(key, depth)
            self._part(self._data.record(key).names, depth)
        self.charge(_OBJECT + _FIELD * len(state))
        for each in state:
            self._part(each, depth)

    def _open(self, tag: int, number: int) -> None:
        self._out.append(tag)
        while number > 127:
            self._out.append(number & 127 | 128)
            number >>= 7
        self._out.append(number)

    def _int(self, value: int) -> None:
        if 0 <= value < 128:
            self._out.append(_SMALL + value)
            return
        length = value.bit_length() // 8 + 1
        if length > _MOST_INT_BYTES:
            raise _Unfit(f"holds an integer of {value.bit_length()} bits; {_MOST_INT_BYTES * 8 - 1} at most")
        self.charge(_NUMBER + length)
        self._out.append(_INT + length)
        self._out += value.to_bytes(length, "little", signed=True)

    def _text(self, value: str) -> None:
        if (place := self._texts.get(value)) is not None:
            self._open(_AGAIN, place)
            return
        _require_text(value)
        self._texts[value] = len(self._texts)
        data = value.encode("ascii" if value.isascii() else "utf-32-le")
        self.charge(_TEXT_COST + len(data))
        self._open(_TEXT if value.isascii() else _WIDE, len(data))
        self._out += data

    def _require_short(self) -> None:
        if len(self._out) > MOST_BYTES:
            raise _Unfit(f"is more than {MOST_BYTES} bytes long")


class _Reader(_Counted):
    """Reads one object; each part that it makes has a byte at least, and is counted before it is made.

    Args:
        data: what may cross.
        read: the object as it came.
    """

    def __init__(self, data: PlainData, read: bytes) -> None:
        super().__init__()
        if len(read) > MOST_BYTES:
            raise _Unfit(f"is {len(read)} bytes long; {MOST_BYTES} at most")
        if not read.startswith(_BEGIN):
            raise _Unfit("is a pickle, or of another version" if read[:1] == b"\x80" else "is none of this version")
        self._data = data
        self._read = read
        self._at = len(_BEGIN)
        self._texts: list[str] = []
        self._known: list[_Record] = []

    def whole(self) -> Any:
        value = self._part(0)
        if self._at != len(self._read):
            raise _Unfit(f"has {len(self._read) - self._at} bytes behind its end")
        return value

    def _part(self, depth: int) -> Any:
        _require_depth(depth)
        self.charge(_PLACE)
        tag = self._read[self._at]
        self._at += 1
        if tag >= _SMALL:
            return tag - _SMALL
        if tag > _INT:
            if (length := tag - _INT) > _MOST_INT_BYTES:
                raise _Unfit(f"holds an integer of {length} bytes; {_MOST_INT_BYTES} at most")
            self.charge(_NUMBER + length)
            return int.from_bytes(self._take(length), "little", signed=True)
        if tag == _AGAIN:
            return self._texts[self._number()]
        if tag == _RECORD:
            return self._record(depth + 1)
        if tag in _FIXED:
            return _FIXED[tag]
        if tag >= _ENTRY:
            state = self._part(depth + 1)
            self.charge(_cost(_KEYS[tag - _ENTRY], state))
            return _MAKE[_KEYS[tag - _ENTRY]](state)
        if tag == _FLOAT:
            self.charge(_NUMBER)
            return struct.unpack("<d", self._take(8))[0]
        length = self._number()
        if length > len(self._read) - self._at:  # each part has a byte at least
            raise _Unfit(f"has {len(self._read) - self._at} bytes for a part that says {length}")
        if tag == _BYTES:
            self.charge(_CONTAINER + length)
            return self._take(length)
        if tag in (_TEXT, _WIDE):
            return self._text(tag, length)
        self.charge(_container(tag, length))
        parts = [self._part(depth + 1) for _ in range(length)]
        if tag in (_LIST, _TUPLE):
            return parts if tag == _LIST else tuple(parts)
        if tag == _SET:
            return _hashed(parts, set)
        if tag == _DICT:
            return _hashed(parts, lambda keys: {key: self._part(depth + 1) for key in keys})
        raise _Unfit(f"has a part of the kind {tag}, which is unknown here")

    def _text(self, tag: int, length: int) -> str:
        self.charge(_TEXT_COST + length)
        text = self._take(length).decode("ascii" if tag == _TEXT else "utf-32-le")
        self._texts.append(_require_text(text))
        return text

    def _record(self, depth: int) -> Any:
        number = self._number()
        if number == len(self._known):
            record = self._data.record(self._part(depth))
            record.require_names(self._part(depth))
            self._known.append(record)
        record = self._known[number]
        self.charge(_OBJECT + _FIELD * len(record.names))
        return record.filled([self._part(depth) for _ in record.names])

    def _number(self) -> int:
        number = shift = 0
        while shift < 63:
            byte = self._read[self._at]
            self._at += 1
            number |= (byte & 127) << shift
            if byte < 128:
                return number
            shift += 7
        raise _Unfit("has a length of more than 63 bits")

    def _take(self, length: int) -> bytes:
        self._at += length
        if self._at > len(self._read):
            raise _Unfit("ends before its last part")
        return self._read[self._at - length : self._at]


def _require_depth(depth: int) -> None:
    if depth > _MOST_DEPTH:
        raise _Unfit(f"has a part below {_MOST_DEPTH} others")


def _require_text(text: str) -> str:
    if len(text) > _MOST_CHARACTERS:
        raise _Unfit(f"holds a text of {len(text)} characters; {_MOST_CHARACTERS} at most")
    if not text.isprintable():
        raise _Unfit(f"holds the text '{one_line(text, _MOST_SHOWN)}', with characters that a terminal may obey")
    return text


def _require_spread(keys: Iterable[Any]) -> None:
    """Refuse keys of which many have one hash, such as multiples of 2^61-1: each is compared with all others."""
    if max(collections.Counter(map(hash, keys)).values(), default=0) > _MOST_ALIKE:
        raise _Unfit(f"has more than {_MOST_ALIKE} keys that are found in one place")


def _require_length(shape: Any, itemsize: int) -> int:
    """Return how many bytes a shape has; whoever writes it may have chosen its numbers so that they take long."""
    if len(shape) > _MOST_DIMENSIONS:
        raise _Unfit(f"holds a tensor of {len(shape)} dimensions; {_MOST_DIMENSIONS} at most")
    length = itemsize
    for size in shape:
        # Zeros count as ones here: torch multiplies the others, too.
        length *= max(size, 1) if type(size) is int else 0
        if not length or size < 0 or length > MOST_BYTES:
            raise _Unfit(f"holds a tensor of {one_line(str(tuple(shape)), _MOST_SHOWN)}")
    return 0 if 0 in shape else length


def _hashed(keys: Sequence[Any], make: Callable[[Sequence[Any]], Any]) -> Any:
    """Make a set or a dictionary of keys, each of which there is once."""
    _require_spread(keys)
    made = make(keys)
    if len(made) != len(keys):
        raise _Unfit("has a key twice")
    return made


def _container(tag: int, length: int) -> int:
    """Return what a container takes without its parts."""
    return _CONTAINER + (2 * _CONTAINER + _PAIR * length if tag in (_DICT, _SET) else 0)


def _cost(key: str, state: Any) -> int:
    """Return what an entry takes beside its values."""
    if key in ("tensor", "array", "number"):
        return _BUFFER + len(state[2])
    if key in ("frozenset", "ordered"):
        return 4 * _CONTAINER + 2 * _PAIR * len(state)
    return {"error": _BUFFER, "stack": 2 * _CONTAINER, "bytes": 2 * _CONTAINER}.get(key, 0)


def _checked(types_: Mapping[str, Any], state: Any) -> tuple[Any, tuple[int, ...], bytes]:
    """Return type, shape and bytes of what is made of them."""
    name, shape, data = state
    dtype = types_.get(name)
    if dtype is None or not hasattr(dtype, "itemsize"):
        raise _Unfit(f"holds a tensor of '{one_line(name, _MOST_SHOWN)}'")
    if _require_length(shape, dtype.itemsize) != len(data):
        raise _Unfit(f"holds {len(data)} bytes for a tensor of {one_line(str(shape), _MOST_SHOWN)}")
    if "bool" in str(dtype) and data.strip(b"\0\1"):
        raise _Unfit("holds something else than true and false in a tensor of these")
    return dtype, shape, data


def _tensor(state: Any) -> torch.Tensor:
    dtype, shape, data = _checked(_TORCH, state)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _array(state: Any) -> Any:
    dtype, shape, data = _checked(_NUMPY, state)
    return numpy.frombuffer(data, dtype=dtype).reshape(shape).copy()


_FIXED: Final[Mapping[int, Any]] = {_NONE: None, _TRUE: True, _FALSE: False}
_CONTAINERS: Final[Mapping[type, int]] = {list: _LIST, tuple: _TUPLE, dict: _DICT, set: _SET}
_MAKE: Final[Mapping[str, Callable[[Any], Any]]] = {
    "torch": lambda name: _TORCH[name],
    "size": torch.Size,
    "slice": lambda state: slice(*state),
    "frozenset": lambda state: _hashed(state, frozenset),
    "ordered": lambda state: _hashed([key for key, _ in state], lambda keys: collections.OrderedDict(state)),
    "bytes": io.BytesIO,
    "stack": lambda state: traceback.StackSummary(),
    "error": lambda text: PeerError(str(text), shared=str(text)),
    "tensor": _tensor,
    "array": _array,
    "number": lambda state: _array(state)[()],
}
_KEYS: Final = tuple(_MAKE)
