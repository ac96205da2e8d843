"""Objects that cross between sites: data, and never code.

Torch sends an object as a pickle, and a pickle names functions that its reader imports and calls. What crosses between
sites names nothing. Plain values are as in any pickle. What torch and Megatron say of tensors and checkpoints is an
entry of a closed table: its key crosses with its values, and the reader looks the key up. All else is an error, on the
rank that would send it and on the one that would read it.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import pickle
import traceback
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, Final, cast

import numpy
import torch

from vtp_plugin.checkpoint.format.safe_pickle import ForbiddenError, Reference, load_safely
from vtp_plugin.errors import ConfigError, PeerError
from vtp_plugin.util.printable import one_line

MOST_BYTES: Final = 16 << 20
"""The longest object of another site that is read, as bytes of its pickle."""

# A pickle may refer to one value many times; each time counts.
_MOST_PARTS: Final = 1 << 20
_MOST_DEPTH: Final = 64
_MOST_CHARACTERS: Final = 1 << 16
_MOST_SHOWN: Final = 80
_ATOMS: Final = (type(None), bool, int, float, bytes)
_PLAIN: Final = frozenset({*_ATOMS, str, list, tuple, dict, set})
# Kinds of numbers, as NumPy names them: neither objects nor texts.
_NUMBERS: Final = "biufc"


class ObjectError(PeerError):
    """An object of another site is not what ranks of this version send."""

    def __init__(self, problem: str) -> None:
        text = (
            f"an object from another site {problem}; between sites plain values cross and no code does; install one "
            "version on both, or ask the owner of the other one what it has sent (docs/guides/edge-cloud.md)"
        )
        super().__init__(text, shared=text)


class PlainData:
    """Writes and reads objects that cross between sites.

    Args:
        classes: of what may cross, the same on all ranks: data classes, enumerations, named tuples, and classes whose
            objects have attributes and nothing more.
        describe: returns what the other site may read of an exception.

    >>> data = PlainData()
    >>> data.read(data.write({"size": torch.Size([2, 3]), "type": torch.bfloat16, "part": slice(0, 2)}))
    {'size': torch.Size([2, 3]), 'type': torch.bfloat16, 'part': slice(0, 2, None)}
    """

    def __init__(self, classes: Iterable[type] = (), describe: Callable[[BaseException], str] = str) -> None:
        self._classes = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in classes}
        self._keys = {kind: key for key, kind in self._classes.items()}
        self._describe = describe

    def write(self, value: Any) -> bytes:
        """Return an object as bytes.

        Raises:
            ConfigError: it holds something that may not cross.
        """
        file = io.BytesIO()
        _Pickler(file, self._entry).dump(value)
        return file.getvalue()

    def read(self, data: bytes) -> Any:
        """Return the object of some bytes.

        Raises:
            ObjectError: the bytes name anything, or hold what no rank sends: code, control characters, too much.
        """
        try:
            return _Reader(self._classes).plain(load_safely(data, lambda module, name: False), 0)
        except ForbiddenError as error:
            raise ObjectError(f"names {one_line(error.name, _MOST_SHOWN)}") from None
        except ObjectError:
            raise
        except Exception as error:  # of whatever kind: these bytes come from outside
            raise ObjectError(f"cannot be read ({type(error).__name__})") from None

    def _entry(self, value: Any) -> tuple[str, Any] | None:
        """Return key and values of what is an entry of the table; None of a plain value."""
        kind: type[Any] = type(value)
        if kind in _PLAIN:
            return None
        if (key := self._keys.get(kind)) is not None:
            return key, value.name if isinstance(value, enum.Enum) else _fields(value)
        if isinstance(value, BaseException):
            return "error", self._describe(value)
        return _entry_of(kind, value)


def _fields(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(cast("tuple[Any, ...]", value))
    if not dataclasses.is_dataclass(value):
        return dict(vars(value))
    names = (field.name for field in dataclasses.fields(value))
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _entry_of(kind: type[Any], value: Any) -> tuple[str, Any] | None:
    if kind in (torch.dtype, torch.layout, torch.memory_format):
        return "torch", str(value)
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
    if isinstance(value, torch.Tensor):
        whole = value.detach().cpu().contiguous()
        return "tensor", (str(whole.dtype), tuple(whole.shape), whole.flatten().view(torch.uint8).numpy().tobytes())
    if isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in _NUMBERS:
        return ("array" if isinstance(value, numpy.ndarray) else "number"), (
            value.dtype.str,
            tuple(value.shape),
            value.tobytes(),
        )
    return None


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, entry: Callable[[Any], tuple[str, Any] | None]) -> None:
        super().__init__(file, protocol=4)
        self._entry = entry

    def persistent_id(self, obj: Any) -> Any:
        return self._entry(obj)

    def reducer_override(self, obj: Any) -> Any:
        kind: type[Any] = obj if isinstance(obj, type) else type(obj)
        raise ConfigError(
            f"an object of {kind.__module__}.{kind.__qualname__} would cross between sites; only plain values, tensors "
            "and what Megatron says of checkpoints do; send numbers, texts and lists of them, or leave --vtp-sites "
            "out if one owner has all machines"
        )


class _Reader:
    """Rebuilds a value that was read without names: its types, its texts and its size are what they may be."""

    def __init__(self, classes: Mapping[str, type]) -> None:
        self._classes = classes
        self._num_parts = 0

    def plain(self, value: Any, depth: int) -> Any:
        self._num_parts += 1
        if self._num_parts > _MOST_PARTS or depth > _MOST_DEPTH:
            raise ObjectError(f"has more than {_MOST_PARTS} parts, or a part below {_MOST_DEPTH} others")
        kind: type[Any] = type(value)
        if kind in _ATOMS:
            return value
        if kind is str:
            return _text(value)
        if kind is dict:
            return {self.plain(key, depth + 1): self.plain(each, depth + 1) for key, each in value.items()}
        if kind in (list, tuple, set):
            return kind(self.plain(each, depth + 1) for each in value)
        if kind is Reference:
            key, state = value.pid
            return self._made(key, self.plain(state, depth + 1))
        raise ObjectError(f"holds a {kind.__name__}")

    def _made(self, key: Any, state: Any) -> Any:
        if (kind := self._classes.get(key)) is not None:
            return kind[state] if issubclass(kind, enum.Enum) else _filled(kind, state)
        if key not in _MAKE:
            raise ObjectError(f"is of the kind '{one_line(str(key), _MOST_SHOWN)}', which is unknown here")
        return _MAKE[key](state)


def _text(text: str) -> str:
    if len(text) > _MOST_CHARACTERS:
        raise ObjectError(f"holds a text of {len(text)} characters; {_MOST_CHARACTERS} at most")
    if not text.isprintable():
        raise ObjectError(f"holds the text '{one_line(text, _MOST_SHOWN)}', with characters that a terminal may obey")
    return text


def _filled(kind: type, state: Any) -> Any:
    """Fill the fields of an object, which runs nothing of its class."""
    if issubclass(kind, tuple):
        return tuple.__new__(kind, state)
    known = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else None
    if unknown := {name for name in state if name.startswith("__") or name not in (known or state)}:
        raise ObjectError(f"has '{one_line(str(min(unknown)), _MOST_SHOWN)}', which is no field of {kind.__name__}")
    made = object.__new__(kind)
    for name, each in state.items():
        object.__setattr__(made, name, each)
    return made


def _tensor(state: Any) -> torch.Tensor:
    dtype, shape, data = _TORCH[state[0]], state[1], state[2]
    if min(shape, default=1) < 0 or prod(shape) * dtype.itemsize != len(data):
        raise ObjectError(f"holds {len(data)} bytes for a tensor of {one_line(str(shape), _MOST_SHOWN)}")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _array(state: Any) -> Any:
    dtype = numpy.dtype(state[0])
    if dtype.kind not in _NUMBERS:
        raise ObjectError(f"holds an array of '{one_line(str(state[0]), _MOST_SHOWN)}'")
    return numpy.frombuffer(state[2], dtype=dtype).reshape(state[1]).copy()


_TORCH: Final[Mapping[str, Any]] = {
    str(value): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format)
}
_MAKE: Final[Mapping[str, Callable[[Any], Any]]] = {
    "torch": lambda name: _TORCH[name],
    "size": torch.Size,
    "slice": lambda state: slice(*state),
    "frozenset": frozenset,
    "ordered": collections.OrderedDict,
    "bytes": io.BytesIO,
    "stack": lambda state: traceback.StackSummary(),
    "error": lambda text: PeerError(str(text), shared=str(text)),
    "tensor": _tensor,
    "array": _array,
    "number": lambda state: _array(state)[()],
}
