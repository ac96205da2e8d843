"""Reads what ``torch.save`` has written: an archive with a pickle and, uncompressed, the elements of each tensor."""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from vtp_plugin.checkpoint.format.entries import DamagedError, Extent, bytes_of, entry_name, opened, place_of
from vtp_plugin.checkpoint.format.safe_pickle import PickledObject, Reference, load_safely, names_called
from vtp_plugin.checkpoint.format.shard_map import row_major
from vtp_plugin.util.untrusted_files import count

_STORAGES: Final = {
    "BFloat16Storage": "bfloat16",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "ShortStorage": "int16",
}
_REBUILD: Final = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_READ_BYTES: Final = 1 << 20
_VALUES_PER_BYTE: Final = 8


@dataclass(frozen=True, slots=True)
class Payload:
    """Where the elements of a tensor lie, one after another.

    Attributes:
        file: path of the file.
        offset: offset of the first element in the file, in bytes.
        dtype: name of the elements' type, as torch calls it.
        shape: shape of the tensor.
    """

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]


def _read_pickle(archive: zipfile.ZipFile) -> tuple[Any, int]:
    """Read the pickle of an archive; also give the number of values that it may hold, counted at each occurrence.

    A value may occur in many places, and these in many others: so a few bytes could keep a reader busy for ever.
    """
    data = archive.read(entry_name(archive, "data.pkl"))
    return load_safely(data), _VALUES_PER_BYTE * len(data)


class _Budget:
    """Counts values down.

    Args:
        left: number of values that there may be.
    """

    def __init__(self, left: int) -> None:
        self._left = left

    def take(self) -> None:
        """Count one.

        Raises:
            DamagedError: it is one too many.
        """
        self._left -= 1
        if self._left < 0:
            raise DamagedError("holds some values too often")


def load_object(folder: Path, extent: Extent) -> Any:
    """Read an object without importing its classes; tensors of one element become numbers.

    Raises:
        DamagedError: it cannot be read.
    """
    with opened(folder, extent) as archive:
        value, most = _read_pickle(archive)
        return _with_numbers(value, archive, _Budget(most))


def called_names(folder: Path, extent: Extent) -> frozenset[str]:
    """List the classes and functions that torch would call to read an object.

    Raises:
        DamagedError: it cannot be read.
    """
    with opened(folder, extent) as archive:
        return names_called(archive.read(entry_name(archive, "data.pkl")))


def find_payload(folder: Path, extent: Extent) -> Payload:
    """Find the elements of a tensor, or of one inside an object.

    Raises:
        DamagedError: it cannot be read, or is no tensor whose elements lie in order.
    """
    with opened(folder, extent) as archive:
        stored, most = _read_pickle(archive)
        tensor = dict(_tensors(stored, _Budget(most))).get(extent.path) if extent.path else _tensor(stored)
        if tensor is None:
            raise DamagedError(f"holds no tensor at byte {extent.offset}")
        storage, begin, shape, strides, dtype = tensor
        in_order = zip(shape, strides, row_major(shape), strict=True)
        if math.prod(shape) and any(length > 1 and stride != right for length, stride, right in in_order):
            raise DamagedError(f"holds a tensor whose elements do not lie in order at byte {extent.offset}")
        entry = archive.getinfo(entry_name(archive, f"data/{storage}"))
        offset = place_of(archive, entry, begin * itemsize(dtype), math.prod(shape) * itemsize(dtype))
        return Payload(folder / extent.file, offset + extent.offset, dtype, shape)


def tensors_inside(folder: Path, extent: Extent) -> Iterator[tuple[Extent, str, tuple[int, ...]]]:
    """Yield the tensors inside an object: where each lies, its type and its shape. No elements are read.

    Raises:
        DamagedError: it cannot be read.
    """
    with opened(folder, extent) as archive:
        stored, most = _read_pickle(archive)
        found = [*_tensors(stored, _Budget(most))]
    for path, (_, _, shape, _, dtype) in found:
        yield replace(extent, path=path), dtype, shape


def check_archive(folder: Path, extent: Extent) -> str | None:
    """Read all of an archive; say what is wrong with it, or None."""
    try:
        with opened(folder, extent) as archive:
            _read_pickle(archive)
            for entry in archive.infolist():
                with archive.open(entry) as file:
                    while file.read(_READ_BYTES):  # at its end it compares the sum of all bytes
                        pass
    except DamagedError as error:
        return str(error)
    return None


def read_archive(folder: Path, extent: Extent) -> dict[str, bytes]:
    """Read all entries of an archive.

    Raises:
        DamagedError: it cannot be read.
    """
    with opened(folder, extent) as archive:
        return {entry.filename: archive.read(entry) for entry in archive.infolist()}


_ITEMSIZES: Final = {
    "bfloat16": 2,
    "bool": 1,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "int8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "uint8": 1,
}


def itemsize(dtype: str) -> int:
    """Return the bytes of an element.

    >>> itemsize("bfloat16"), itemsize("float8_e4m3fn")
    (2, 1)
    """
    return _ITEMSIZES.get(dtype, 1)  # what is not listed has eight bits


_TensorRef = tuple[str, int, tuple[int, ...], tuple[int, ...], str]


def _tensors(value: Any, budget: _Budget, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], _TensorRef]]:
    """Yield all tensors in lists and dictionaries, with the keys that lead to each."""
    budget.take()
    if (tensor := _tensor(value)) is not None:
        yield path, tensor
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _tensors(each, budget, (*path, str(index)))
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors(each, budget, (*path, _key_text(key)))


def _key_text(key: Any) -> str:
    """Write a key as the writer's Python would.

    >>> _key_text((0, "a"))
    '(0, a)'
    """
    if isinstance(key, tuple):
        return f"({', '.join(map(_key_text, key))})"
    return ".".join(key.origin) if isinstance(key, type) and issubclass(key, PickledObject) else str(key)


def _tensor(value: Any) -> _TensorRef | None:
    """Give a tensor's storage key, offset, shape, strides and type; None if the value is no tensor."""
    if isinstance(value, PickledObject) and value.name == "torch._utils._rebuild_parameter":
        value = value.args[0]
    if not isinstance(value, PickledObject) or value.name not in _REBUILD or not isinstance(value.args[0], Reference):
        return None
    reference, begin, shape, strides, *rest = value.args
    _, kind, storage, *_ = reference.pid
    # The newer function is for types that have no storage of their own, and says which.
    dtype = rest[2].origin[1] if value.name == _REBUILD[1] else _STORAGES.get(kind.origin[1], kind.origin[1])
    if not isinstance(storage, str):
        raise DamagedError("names elements by no text")
    return storage, count(begin), tuple(map(count, shape)), tuple(map(count, strides)), str(dtype)


_FORMATS: Final = {"float32": "f", "float64": "d", "int32": "i", "int64": "q", "int16": "h", "uint8": "B"}


def _with_numbers(value: Any, archive: zipfile.ZipFile, budget: _Budget) -> Any:
    """Replace each tensor of one element by its number, in lists and dictionaries."""
    budget.take()
    if isinstance(value, dict):
        read: dict[Any, Any] = value
        return {key: _with_numbers(each, archive, budget) for key, each in read.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_numbers(each, archive, budget) for each in value)
    tensor = _tensor(value)
    if tensor is None or math.prod(tensor[2]) != 1 or tensor[4] not in _FORMATS:
        return value
    entry = archive.getinfo(entry_name(archive, f"data/{tensor[0]}"))
    (number,) = struct.unpack(
        f"<{_FORMATS[tensor[4]]}", bytes_of(archive, entry, tensor[1] * itemsize(tensor[4]), itemsize(tensor[4]))
    )
    return number
