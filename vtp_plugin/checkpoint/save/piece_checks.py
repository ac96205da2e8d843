"""Checks pieces while they are read: the bytes that a reader gets are hashed on their way."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from vtp_plugin.checkpoint.format.digest import Hashing, algorithm_of, hash_bytes
from vtp_plugin.checkpoint.format.entries import Extent
from vtp_plugin.checkpoint.format.manifest import Manifest, problem_unless
from vtp_plugin.errors import ConfigError
from vtp_plugin.util.untrusted_files import open_file

_GAP_BYTES: Final = 1 << 16
_PART_BYTES: Final = 1 << 20


class PieceChecks:
    """A context that checks the pieces read inside it, and raises at its end if one has changed.

    It may be entered again, for more pieces; each is checked once.

    Args:
        folder: folder of the checkpoint.
        manifest: manifest of the checkpoint.
        way_out: returns what to do about a checkpoint that cannot be loaded.

    Raises:
        ConfigError: at the end of the block, instead of any other error.
    """

    def __init__(self, folder: Path, manifest: Manifest, way_out: Callable[[Path], str]) -> None:
        self._folder, self._manifest, self._way_out = folder, manifest, way_out
        self._begun: set[Extent] = set()
        self._open: _Check | None = None
        self._problems: list[str] = []

    def __enter__(self) -> PieceChecks:
        return self

    def watch(self, file: Any, extent: Extent) -> Any:
        """Check a piece, once.

        Args:
            file: the file object that reads the piece from its beginning.
            extent: the bytes of the piece.

        Returns:
            The file object to read instead; ``file`` itself for a piece that was watched before.
        """
        known = extent
        if known not in self._manifest.digests:  # it was hashed with all of its file
            known = Extent(extent.file, 0, self._manifest.sizes.get(extent.file, 0))
        if known in self._begun:
            return file
        self._finish()
        self._begun.add(known)
        if known not in self._manifest.digests:
            self._problems.append(f"{self._folder / extent.file} is not in the manifest")
            return file
        self._open = _Check(self._folder, known, self._manifest.digests[known])
        return _Watched(file, self._open, extent.offset)

    def _finish(self) -> None:
        """End the check of the piece that is read now: no other one is read before it is."""
        if self._open is not None:
            self._problems += self._open.problems()
            self._open = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish()
        for problem in self._problems:
            raise ConfigError(
                f"{problem}; without it this checkpoint cannot be loaded; {self._way_out(self._folder)}"
            ) from error


class _Check:
    """Hashes a piece from beginning to end, in whatever order it is read; it reads itself what a reader skips."""

    def __init__(self, folder: Path, extent: Extent, wanted: str) -> None:
        self._folder, self._extent, self._wanted = folder, extent, wanted
        self._hashing, self._at = Hashing(algorithm_of(wanted)), extent.offset
        self._file: io.FileIO | None = None

    def saw(self, offset: int, data: memoryview) -> None:
        """Take bytes that were read at an offset of the file; those that lie far ahead are read again later."""
        if 0 < offset - self._at <= _GAP_BYTES:
            self._read_up_to(offset)
        if offset <= self._at < offset + len(data):
            self._hashing.update(data[self._at - offset :])
            self._at = offset + len(data)

    def _read_up_to(self, end: int) -> None:
        if self._file is None:
            self._file = open_file(self._folder / self._extent.file)
        hash_bytes(self._hashing, self._file, self._at, end - self._at)
        self._at = end

    def problems(self) -> Iterable[str]:
        """Say whether the piece has changed; the check ends."""
        return problem_unless(self._folder, self._extent, self._wanted, self._whole_hash)

    def _whole_hash(self) -> str:
        try:
            self._read_up_to(self._extent.offset + (self._extent.length or 0))
        finally:
            if self._file is not None:
                self._file.close()
        return str(self._hashing)


class _Watched(io.RawIOBase):
    """A file that shows to a check what is read from it."""

    def __init__(self, file: Any, check: _Check, offset: int) -> None:
        self._file, self._check, self._offset = file, check, offset

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any, /) -> int:
        whole, count = memoryview(buffer).cast("B"), 0
        at = self._offset + self._file.tell()
        # In parts, so that the hash finds them in the processor's cache.
        while count < len(whole) and (read := self._file.readinto(whole[count : count + _PART_BYTES])):
            self._check.saw(at + count, whole[count : count + read])
            count += read
        return count

    def read(self, size: int | None = -1, /) -> bytes:
        at = self._offset + self._file.tell()
        data = self._file.read(-1 if size is None else size)
        self._check.saw(at, memoryview(data))
        return data
