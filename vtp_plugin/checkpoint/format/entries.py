"""The archives that ``torch.save`` writes, as files: zip files whose entries are stored as they are."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from vtp_plugin.util.untrusted_files import open_file

_LOCAL_HEADER: Final = struct.Struct("<26xHH")


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of a file that belong together.

    Attributes:
        file: name of the file in the checkpoint.
        offset: offset of the first byte in the file.
        length: number of bytes; None for all of the file.
        path: keys that lead to a tensor inside the object that is stored there; empty where the bytes are the tensor.
    """

    file: str
    offset: int = 0
    length: int | None = None
    path: tuple[str, ...] = ()


class DamagedError(Exception):
    """An archive cannot be read; the text says why."""


class _Slice(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: io.BufferedReader[io.FileIO], extent: Extent) -> None:
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
def opened(folder: Path, extent: Extent) -> Iterator[zipfile.ZipFile]:
    """Open an archive; whatever a damaged one makes the reader raise is one error."""
    try:
        with (
            io.BufferedReader(open_file(folder / extent.file)) as file,
            zipfile.ZipFile(_Slice(file, extent)) as archive,
        ):
            _require_stored(archive, extent)
            yield archive
    except DamagedError:
        raise
    except FileNotFoundError:
        raise DamagedError("is missing") from None
    except OSError as error:
        raise DamagedError(f"cannot be read ({error.strerror or error})") from None
    except Exception as error:  # pickles and archives raise what they like
        raise DamagedError(f"is damaged at byte {extent.offset} ({error})") from None


def read_extent(folder: Path, extent: Extent) -> bytes:
    """Read bytes of a file; those behind its end are left out.

    Raises:
        OSError: it cannot be read.
    """
    with open_file(folder / extent.file) as file:
        file.seek(extent.offset)
        return file.read(-1 if extent.length is None else min(extent.length, os.fstat(file.fileno()).st_size))


def _require_stored(archive: zipfile.ZipFile, extent: Extent) -> None:
    """Refuse what torch does not write, and what would be larger in memory than in the file.

    Raises:
        DamagedError: entries are compressed, lie in each other's bytes, or have one name.
    """
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise DamagedError(f"is compressed at byte {extent.offset}")
    if len(archive.NameToInfo) != len(entries):
        raise DamagedError(f"has two entries of one name at byte {extent.offset}")
    if sum(max(entry.file_size, entry.compress_size) for entry in entries) > _file_of(archive).seek(0, os.SEEK_END):
        raise DamagedError(f"says that it holds more bytes than it has at byte {extent.offset}")


def entry_name(archive: zipfile.ZipFile, name: str) -> str:
    """Return the name of an entry with the folder that all entries of an archive lie in."""
    top = archive.namelist()[0].partition("/")[0]
    return f"{top}/{name}"


def place_of(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, offset: int, length: int) -> int:
    """Return where bytes of an entry lie in the archive, behind the entry's header, whose length only that header has.

    Args:
        archive: the archive.
        entry: an entry of the archive.
        offset: offset of the first byte in the entry.
        length: number of bytes.

    Raises:
        DamagedError: there are fewer.
    """
    file = _file_of(archive)
    file.seek(entry.header_offset)
    name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    place = entry.header_offset + _LOCAL_HEADER.size + name + extra + offset
    if offset + length > entry.file_size or place + length > file.seek(0, os.SEEK_END):
        raise DamagedError("holds fewer elements than its shape says")
    return place


def bytes_of(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, offset: int, length: int) -> bytes:
    """Read bytes of an entry, and no others.

    Raises:
        DamagedError: there are fewer.
    """
    file = _file_of(archive)
    file.seek(place_of(archive, entry, offset, length))
    return file.read(length)


def _file_of(archive: zipfile.ZipFile) -> IO[bytes]:
    assert archive.fp is not None
    return archive.fp


def write_archive(entries: Mapping[str, bytes]) -> bytes:
    """Make an archive of entries, as ``torch.load`` reads it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # without the time, so that it is the same each time
    return file.getvalue()
