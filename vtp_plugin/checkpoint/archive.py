"""What ``torch.save`` has written: an archive with a pickle, and uncompressed beside it the elements of each tensor."""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from vtp_plugin.checkpoint.cuts import row_major
from vtp_plugin.checkpoint.inert import Inert, Reference, load_inert

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
_LOCAL_HEADER: Final = struct.Struct("<26xHH")
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of a file that belong together.

    Attributes:
        file: its name in the checkpoint.
        offset: of the first byte.
        length: how many; None for all of the file.
        path: the keys that lead to a tensor inside the object that is stored there; empty where it is the tensor.
    """

    file: str
    offset: int = 0
    length: int | None = None
    path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Payload:
    """Where the elements of a tensor lie, one after another.

    Attributes:
        file: the file.
        offset: of the first element, in bytes.
        dtype: as torch calls it.
        shape: of the tensor.
    """

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]


class DamagedError(Exception):
    """An archive cannot be read; the text says why."""


class _Slice(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: io.BufferedReader, extent: Extent) -> None:
        self._file, self._start, self._at = file, extent.offset, 0
        size = os.fstat(file.fileno()).st_size
        self._length = size - extent.offset if extent.length is None else extent.length
        if size < extent.offset + self._length:
            raise DamagedError(f"is cut off, with {size} of {extent.offset + self._length} bytes")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence])
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(self._length - self._at, 0)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data


@contextmanager
def _opened(folder: Path, extent: Extent) -> Iterator[zipfile.ZipFile]:
    """Open an archive; whatever a damaged one makes the reader raise is one error."""
    try:
        with (folder / extent.file).open("rb") as file, zipfile.ZipFile(_Slice(file, extent)) as archive:
            yield archive
    except DamagedError:
        raise
    except FileNotFoundError:
        raise DamagedError("is missing") from None
    except Exception as error:  # pickles and archives raise what they like
        raise DamagedError(f"is damaged at byte {extent.offset} ({error})") from None


def load_object(folder: Path, extent: Extent) -> Any:
    """Read an object; classes in it are inert, tensors of one element are numbers.

    Raises:
        DamagedError: it cannot be read.
    """
    with _opened(folder, extent) as archive:
        return _with_numbers(load_inert(archive.read(_entry(archive, "data.pkl"))), archive)


def find_payload(folder: Path, extent: Extent) -> Payload:
    """Find the elements of a tensor, or of one inside an object.

    Raises:
        DamagedError: it cannot be read, or is no tensor whose elements lie in order.
    """
    with _opened(folder, extent) as archive:
        stored = load_inert(archive.read(_entry(archive, "data.pkl")))
        told = dict(_tensors(stored)).get(extent.path) if extent.path else _tensor(stored)
        if told is None:
            raise DamagedError(f"holds no tensor at byte {extent.offset}")
        reference, begin, shape, strides, dtype = told
        in_order = zip(shape, strides, row_major(shape), strict=True)
        if math.prod(shape) and any(length > 1 and stride != right for length, stride, right in in_order):
            raise DamagedError(f"holds a tensor whose elements do not lie in order at byte {extent.offset}")
        entry = archive.getinfo(_entry(archive, f"data/{reference[2]}"))
        if entry.compress_type != zipfile.ZIP_STORED:
            raise DamagedError(f"is compressed at byte {extent.offset}")
        start = _start(archive, entry) + extent.offset + begin * itemsize(dtype)
        return Payload(folder / extent.file, start, dtype, shape)


def tensors_inside(folder: Path, extent: Extent) -> Iterator[tuple[Extent, str, tuple[int, ...]]]:
    """Yield the tensors inside an object: where each lies, its type and its shape. No elements are read.

    Raises:
        DamagedError: it cannot be read.
    """
    with _opened(folder, extent) as archive:
        stored = load_inert(archive.read(_entry(archive, "data.pkl")))
    for path, (_, _, shape, _, dtype) in _tensors(stored):
        yield replace(extent, path=path), dtype, shape


def check_archive(folder: Path, extent: Extent) -> str | None:
    """Read all of an archive; say what is wrong with it, or None."""
    try:
        with _opened(folder, extent) as archive:
            load_inert(archive.read(_entry(archive, "data.pkl")))
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
    with _opened(folder, extent) as archive:
        return {entry.filename: archive.read(entry) for entry in archive.infolist()}


def write_archive(entries: Mapping[str, bytes]) -> bytes:
    """Make an archive of entries, as ``torch.load`` reads it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # without the time, so that it is the same each time
    return file.getvalue()


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


def _entry(archive: zipfile.ZipFile, name: str) -> str:
    """Return the name of an entry with the folder that all entries of an archive lie in."""
    top = archive.namelist()[0].partition("/")[0]
    return f"{top}/{name}"


def _start(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> int:
    """Return where the bytes of an entry begin; only the header before them says how long it is."""
    file = archive.fp
    assert file is not None
    file.seek(entry.header_offset)
    name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return entry.header_offset + _LOCAL_HEADER.size + name + extra


_Told = tuple[Any, int, tuple[int, ...], tuple[int, ...], str]


def _tensors(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], _Told]]:
    """Yield all tensors in lists and dictionaries, with the keys that lead to each."""
    if (told := _tensor(value)) is not None:
        yield path, told
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _tensors(each, (*path, str(index)))
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors(each, (*path, _said(key)))


def _said(key: Any) -> str:
    """Write a key as the writer's Python would.

    >>> _said((0, "a"))
    '(0, a)'
    """
    if isinstance(key, tuple):
        return f"({', '.join(map(_said, key))})"
    return ".".join(key.origin) if isinstance(key, type) and issubclass(key, Inert) else str(key)


def _tensor(value: Any) -> _Told | None:
    """Tell of a tensor where its elements are kept, from which on, its shape, strides and type; None if it is none."""
    if isinstance(value, Inert) and value.name == "torch._utils._rebuild_parameter":
        value = value.args[0]
    if not isinstance(value, Inert) or value.name not in _REBUILD or not isinstance(value.args[0], Reference):
        return None
    reference, begin, shape, strides, *rest = value.args
    kind = reference.words[1].origin[1]
    # The newer function is for types that have no storage of their own, and says which.
    dtype = rest[2].origin[1] if value.name == _REBUILD[1] else _STORAGES.get(kind, kind)
    return reference.words, int(begin), tuple(shape), tuple(strides), str(dtype)


_FORMATS: Final = {"float32": "f", "float64": "d", "int32": "i", "int64": "q", "int16": "h", "uint8": "B"}


def _with_numbers(value: Any, archive: zipfile.ZipFile) -> Any:
    """Put the number in the place of each tensor of one element, in lists and dictionaries."""
    if isinstance(value, dict):
        read: dict[Any, Any] = value
        return {key: _with_numbers(each, archive) for key, each in read.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_numbers(each, archive) for each in value)
    told = _tensor(value)
    if told is None or math.prod(told[2]) != 1 or told[4] not in _FORMATS:
        return value
    data = archive.read(_entry(archive, f"data/{told[0][2]}"))
    return struct.unpack_from(f"<{_FORMATS[told[4]]}", data, told[1] * itemsize(told[4]))[0]
