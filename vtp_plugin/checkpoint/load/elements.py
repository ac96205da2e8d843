"""Reads elements of stored tensors box by box, never a whole tensor at once."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import torch

from vtp_plugin.checkpoint.format.archive import Payload, find_payload, itemsize
from vtp_plugin.checkpoint.format.contents import Part
from vtp_plugin.checkpoint.format.entries import DamagedError, Extent
from vtp_plugin.checkpoint.format.fill import boxes_between
from vtp_plugin.checkpoint.save.atomic_dir import PART_BYTES
from vtp_plugin.errors import ConfigError
from vtp_plugin.util.index_boxes import Box, box_shape
from vtp_plugin.util.untrusted_files import open_file

SLAB_BYTES = 8 << 20
"""How much is read at once."""
_PAYLOADS_KEPT = 4096


def slabs(box: Box, dtype: str) -> Iterator[Box]:
    """Cut a box into boxes that are small enough to be read at once.

    >>> [*slabs(((1, 3), (0, 5)), "float32")]
    [((1, 3), (0, 5))]
    """
    shape = box_shape(box)
    count, limit = math.prod(shape), SLAB_BYTES // itemsize(dtype)
    for first in range(0, count, limit):
        for inner in boxes_between(shape, first, min(count, first + limit)):
            yield tuple((a + start, b + start) for (a, b), (start, _) in zip(inner, box, strict=True))


class Elements:
    """Reads tensors of a checkpoint.

    Args:
        folder: folder of the checkpoint.

    Attributes:
        folder: folder of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: tuple[str, mmap.mmap, torch.Tensor] | None = None
        self._find = lru_cache(_PAYLOADS_KEPT)(self._find_payload)

    def __repr__(self) -> str:
        return f"<elements of {self.folder}>"

    def dtype(self, part: Part) -> str:
        """Return the type of the elements of a part."""
        return self._find(part.extent).dtype

    def read(self, part: Part, box: Box) -> torch.Tensor:
        """Read a box of a whole parameter, out of a part that holds it.

        Args:
            part: the part.
            box: a box inside that of the part, in coordinates of the whole parameter.

        Returns:
            The bytes of the elements, in the order of the whole.

        Raises:
            ConfigError: the file is broken.
        """
        payload = self._find(part.extent)
        size = itemsize(payload.dtype)
        strided, shape = part.strided.at(box, part.box), box_shape(box)
        reach = sum((length - 1) * stride for length, stride in zip(shape, strided.strides, strict=True))
        if strided.offset + reach >= math.prod(payload.shape):
            raise self._broken(part.extent, "holds fewer elements than its index says")
        mapped, data = self._mapped(part.extent.file)
        begin = payload.offset + strided.offset * size
        strides = (*(stride * size for stride in strided.strides), 1)
        found = data.as_strided((*shape, size), strides, begin).reshape(-1).clone()
        _forget(mapped, begin, begin + (reach + 1) * size)
        return found

    def _find_payload(self, extent: Extent) -> Payload:
        try:
            return find_payload(self.folder, extent)
        except DamagedError as error:
            raise self._broken(extent, str(error)) from None

    def _broken(self, extent: Extent, problem: str) -> ConfigError:
        file = self.folder / extent.file
        return ConfigError(f"{file} {problem}; without it this checkpoint cannot be read; copy it again")

    def _mapped(self, name: str) -> tuple[mmap.mmap, torch.Tensor]:
        """Map a file into memory; only what is touched is read."""
        if self._file is None or self._file[0] != name:
            with open_file(self.folder / name) as file:
                # A copy on write, since torch warns of memory that it may not write.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._file = name, mapped, torch.frombuffer(mapped, dtype=torch.uint8)
        return self._file[1], self._file[2]


def copy_bytes(folder: Path, extent: Extent, target: BinaryIO) -> None:
    """Append bytes of a checkpoint's file to another file, whatever they are.

    Raises:
        ConfigError: there are fewer.
    """
    with open_file(folder / extent.file) as source:
        source.seek(extent.offset)
        left = extent.length or 0
        while left:
            data = source.read(min(left, PART_BYTES))
            if not data:
                raise ConfigError(
                    f"{folder / extent.file} is cut off; without it this checkpoint cannot be read; copy it again"
                )
            target.write(data)
            left -= len(data)


def _forget(mapped: mmap.mmap, begin: int, end: int) -> None:
    """Give back the memory of what was read; the system keeps it while it has room."""
    start = begin - begin % mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, start, end - start)


def typed(data: torch.Tensor, dtype: str) -> torch.Tensor:
    """View bytes as elements of a type.

    Raises:
        ConfigError: this torch has no such type.
    """
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"elements have the type {dtype}; torch {torch.__version__} has none; use a newer torch")
    return data.view(found)
