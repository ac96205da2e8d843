"""A hash over bytes of a file: of all of it, or of a part. Its text begins with the name of its algorithm.

xxHash (XXH3, 128 bits) is several times faster than a disk, so it does not slow a save down; the package ``xxhash`` has
it. Where that is missing, the sum CRC-32 of the standard library takes its place. Both find every single flipped bit;
neither is meant against somebody who changes a file on purpose.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any, Final, Protocol

from vtp_plugin.checkpoint.format.entries import Extent
from vtp_plugin.util.untrusted_files import open_file

try:
    import xxhash
except ImportError:  # an image of a vendor, to which nothing was added
    xxhash = None

_READ_BYTES: Final = 1 << 20


class Digest(Protocol):
    """Takes bytes, one part after another."""

    def update(self, data: Any, /) -> None:
        """Take the next bytes."""
        ...

    def hexdigest(self) -> str:
        """Return the hash of what was taken so far, in hexadecimal digits."""
        ...


class Crc32:
    """The sum that zip files have.

    >>> digest = Crc32()
    >>> digest.update(b"123456789")
    >>> digest.hexdigest()
    'cbf43926'
    """

    def __init__(self) -> None:
        self._sum = 0

    def update(self, data: Any, /) -> None:
        """Take the next bytes."""
        self._sum = zlib.crc32(data, self._sum)

    def hexdigest(self) -> str:
        """Return the sum."""
        return f"{self._sum:08x}"


ALGORITHMS: Final[dict[str, Callable[[], Digest]]] = {
    **({} if xxhash is None else {"xxh3_128": xxhash.xxh3_128}),
    "crc32": Crc32,
}
"""What this process can compute, the best first."""


class Hashing:
    """Makes a hash, whose text names its algorithm.

    Args:
        algorithm: name of the algorithm in :data:`ALGORITHMS`; the best one if it is left out.

    >>> hashing = Hashing("crc32")
    >>> hashing.update(b"123456789")
    >>> str(hashing)
    'crc32:cbf43926'
    """

    def __init__(self, algorithm: str | None = None) -> None:
        self._algorithm = algorithm or next(iter(ALGORITHMS))
        self._digest = ALGORITHMS[self._algorithm]()
        self.update = self._digest.update

    def __str__(self) -> str:
        return f"{self._algorithm}:{self._digest.hexdigest()}"


def algorithm_of(digest: str) -> str:
    """Return the name of the algorithm that made a hash.

    >>> algorithm_of("crc32:cbf43926")
    'crc32'
    """
    return digest.partition(":")[0]


def digest_of(
    folder: Path, extent: Extent, algorithm: str | None = None, on_read: Callable[[int], None] = lambda _: None
) -> str:
    """Read bytes of a file and return their hash.

    Args:
        folder: folder of the checkpoint.
        extent: the file in it, and which of its bytes; those behind its end are left out.
        algorithm: name of the algorithm in :data:`ALGORITHMS`; the best one if it is left out.
        on_read: called with a number of bytes, whenever so many more have been read.

    Raises:
        OSError: the file cannot be read.
    """
    hashing = Hashing(algorithm)
    with open_file(folder / extent.file) as file:
        hash_bytes(hashing, file, extent.offset, extent.length, on_read)
    return str(hashing)


def hash_bytes(
    hashing: Hashing, file: FileIO, offset: int, length: int | None, on_read: Callable[[int], None] = lambda _: None
) -> None:
    """Read bytes of a file into a hash.

    Args:
        hashing: the hash that takes the bytes.
        file: the file.
        offset: offset of the first byte in the file.
        length: number of bytes; None for all that follow. Those behind the file's end are left out.
        on_read: called with a number of bytes, whenever so many more have been read.

    Raises:
        OSError: the file cannot be read.
    """
    buffer, left = memoryview(bytearray(_READ_BYTES if length is None else min(length, _READ_BYTES))), length
    file.seek(offset)
    while left is None or left > 0:
        count = file.readinto(buffer if left is None else buffer[:left])
        if not count:
            break
        hashing.update(buffer[:count])
        on_read(count)
        left = None if left is None else left - count
