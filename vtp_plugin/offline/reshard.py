"""A checkpoint is written again with its optimizer by parameter, piece by piece; what was stopped goes on.

Everything is planned first, in an order that is always the same: which bytes are copied, and of which slabs of whole
parameters the new pieces are. A journal says which of them are written. Who finds one goes on behind the last piece
that is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from vtp_plugin.checkpoint.archive import Extent, check_archive, itemsize
from vtp_plugin.checkpoint.contents import MASTER, Contents, Part
from vtp_plugin.checkpoint.index import INDEX
from vtp_plugin.checkpoint.map_file import MAP
from vtp_plugin.checkpoint.reshardable import COMMON_FILE, is_kept, rewritten_common
from vtp_plugin.checkpoint.whole import partial_of, whole_folder
from vtp_plugin.errors import ConfigError
from vtp_plugin.ground.boxes import Box, box_shape, intersect, volume, whole_box
from vtp_plugin.offline.elements import SLAB_BYTES, Elements, typed

JOURNAL: Final = "vtp_reshard_journal.jsonl"
"""The name of the file that says what is written, while not all is."""
_FILE_BYTES: Final = 1 << 30
_COPY_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class NewPiece:
    """A part of a new tensor, or an object.

    Attributes:
        key: under which it is stored.
        dtype: of its elements; None of an object.
        shape: of the whole tensor.
        box: of it that the piece holds.
        kept: the bytes that it has already; None if it is made of parts.
        parts: what it is made of.
    """

    key: str
    dtype: str | None
    shape: tuple[int, ...]
    box: Box
    kept: Extent | None = None
    parts: tuple[Part, ...] = ()

    @property
    def num_bytes(self) -> int:
        """About what it takes in its file."""
        if self.kept is not None:
            return self.kept.length or 0
        assert self.dtype is not None
        return volume(self.box) * itemsize(self.dtype)


def plan_pieces(contents: Contents, elements: Elements) -> Iterator[NewPiece]:
    """Say of which pieces a checkpoint consists whose optimizer any layout can load.

    Args:
        contents: of the checkpoint as it is.
        elements: of it.
    """
    index = contents.index
    kept = [
        NewPiece(key, tensor.dtype, tensor.shape, box, extent)
        for key, tensor in index.tensors.items()
        if is_kept(contents, key)
        for box, extent in tensor.extents
    ]
    kept += [NewPiece(key, None, (), (), extent) for key, extent in index.objects.items() if is_kept(contents, key)]
    yield from sorted(kept, key=lambda piece: (piece.kept.file, piece.kept.offset) if piece.kept else ("", 0))
    for (state, name), whole in contents.states().items():
        key = f"optimizer.state.{'param' if state == MASTER else state}.{name}"
        parts = whole.parts()
        dtype = elements.dtype(parts[0])
        for box in _pieces_of(whole.shape, itemsize(dtype)):
            own = tuple(part for part in parts if intersect(part.box, box) is not None)
            yield NewPiece(key, dtype, whole.shape, box, parts=own)


def _pieces_of(shape: tuple[int, ...], size: int) -> Iterator[Box]:
    """Cut a whole parameter along its first dimensions into boxes that are small enough."""
    left = [whole_box(shape)]
    while left:
        box = left.pop()
        dim = next((dim for dim, (start, stop) in enumerate(box) if stop - start > 1), None)
        if dim is None or volume(box) * size <= SLAB_BYTES:
            yield box
            continue
        start, stop = box[dim]
        rows = max(1, SLAB_BYTES * (stop - start) // (volume(box) * size))
        cuts = [(at, min(at + rows, stop)) for at in range(start, stop, rows)]
        left += [(*box[:dim], cut, *box[dim + 1 :]) for cut in reversed(cuts)]


class Reshard:
    """Writes one checkpoint.

    Args:
        contents: of the checkpoint as it is.
        target: folder that appears when all of it is written.

    Attributes:
        pieces: what is to be written, in order.
        places: where each of those that are written lies.

    Raises:
        ConfigError: the folder holds something else.
    """

    def __init__(self, contents: Contents, target: Path) -> None:
        self.contents, self._final, self._target = contents, target, partial_of(target)
        self._elements = Elements(contents.folder)
        self.pieces: Sequence[NewPiece] = [*plan_pieces(contents, self._elements)]
        self.places: list[Extent] = []
        self._journal = self._target / JOURNAL
        self._head = {"version": 1, "source": str(contents.folder.resolve()), "sha256": _identity(contents.folder)}

    def __repr__(self) -> str:
        return f"<{len(self.places)} of {len(self.pieces)} pieces in {self._target}>"

    def find_written(self) -> int:
        """Find what an earlier, stopped attempt has written.

        Returns:
            How many bytes, about.

        Raises:
            ConfigError: the folder holds a checkpoint, or part of another one.
        """
        if (self._final / "metadata.json").exists():
            raise ConfigError(f"{self._final} holds a checkpoint; none is overwritten; give another folder with --to")
        if self._final.exists() and any(self._final.iterdir()):
            raise ConfigError(f"{self._final} is not empty; nothing is overwritten; give another folder with --to")
        if not self._journal.exists():
            return 0
        lines = self._journal.read_text().splitlines()
        if not lines or _read_line(lines[0]) != self._head:
            raise ConfigError(
                f"{self._target} holds a part of another checkpoint; only what was begun from {self.contents.folder} "
                "goes on; remove it, or give another folder with --to"
            )
        for piece, line in zip(self.pieces, lines[1:], strict=False):
            place = self._whole(piece, _read_line(line))
            if place is None:
                break
            self.places.append(place)
        return sum(piece.num_bytes for piece in self.pieces[: len(self.places)])

    def _whole(self, piece: NewPiece, line: Any) -> Extent | None:
        """Return where a piece lies, if it lies there as a whole."""
        if not isinstance(line, list) or line[:2] != [piece.key, [start for start, _ in piece.box]]:
            return None
        place = Extent(*line[2:])
        return place if check_archive(self._target, place) is None else None

    def write(self, on_written: Callable[[int], None]) -> None:
        """Write what is missing, then the index.

        Args:
            on_written: called with the bytes of each piece.
        """
        with whole_folder(self._final):
            self._keep_only_written()
            with self._journal.open("a") as journal:
                for piece in self.pieces[len(self.places) :]:
                    place = self._append(lambda file, piece=piece: self._write_piece(piece, file))
                    line = [piece.key, [start for start, _ in piece.box], place.file, place.offset, place.length]
                    journal.write(json.dumps(line) + "\n")
                    journal.flush()
                    self.places.append(place)
                    on_written(piece.num_bytes)
            self._finish()

    def _keep_only_written(self) -> None:
        """Take away what stands behind the last whole piece, in files and in the journal."""
        ends: dict[str, int] = {}
        for place in self.places:
            ends[place.file] = place.offset + (place.length or 0)
        for file in self._target.glob("*.distcp"):
            if file.name in ends:
                os.truncate(file, ends[file.name])
            else:
                file.unlink()
        lines = self._journal.read_text().splitlines()[1 : 1 + len(self.places)] if self._journal.exists() else []
        self._journal.write_text("\n".join([json.dumps(self._head), *lines]) + "\n")

    def _append(self, write: Callable[[BinaryIO], None]) -> Extent:
        """Write behind what was written last, or into a new file if that one is large."""
        number, end = 0, 0
        if self.places:
            last = self.places[-1]
            number, end = int(last.file.split("_")[2]), last.offset + (last.length or 0)
            number += end >= _FILE_BYTES
        name = f"__{number}_0.distcp"
        with (self._target / name).open("ab") as file:
            start = file.tell()
            write(cast(BinaryIO, file))
            return Extent(name, start, file.tell() - start)

    def _write_piece(self, piece: NewPiece, file: BinaryIO) -> None:
        if piece.kept is not None:
            _copy(self.contents.folder, piece.kept, file)
            return
        assert piece.dtype is not None
        found = [(part, box) for part in piece.parts if (box := intersect(part.box, piece.box)) is not None]
        if len(found) == 1:
            made = self._read(piece.dtype, *found[0])
        else:
            made = torch.empty(box_shape(piece.box), dtype=getattr(torch, piece.dtype))
            for part, box in found:
                place = tuple(slice(a - at, b - at) for (a, b), (at, _) in zip(box, piece.box, strict=True))
                made[place] = self._read(piece.dtype, part, box)
        torch.save(made, file)

    def _read(self, dtype: str, part: Part, box: Box) -> torch.Tensor:
        if (found := self._elements.dtype(part)) != dtype:
            raise ConfigError(
                f"{self.contents.folder} holds one parameter's state as {dtype} and as {found}; whole parameters have "
                "one type; load it with the plugin, and save it with --dist-ckpt-optim-fully-reshardable"
            )
        return typed(self._elements.read(part, box), dtype).view(box_shape(box))

    def _finish(self) -> None:
        """Write what all ranks share, the index, and the file that says the format."""
        key, data = rewritten_common(self.contents)
        if key == COMMON_FILE:
            (self._target / COMMON_FILE).write_bytes(data)
        else:
            place = self._append(lambda file: cast(Any, file.write(data)))
            self.pieces, self.places = [*self.pieces, NewPiece(key, None, (), ())], [*self.places, place]
        index = Metadata(dict(_entries(self.pieces)), storage_data=dict(_storage(self.pieces, self.places)))
        (self._target / INDEX).write_bytes(pickle.dumps(index))
        (self._target / "metadata.json").write_bytes((self.contents.folder / "metadata.json").read_bytes())
        self._journal.unlink()


def _entries(pieces: Sequence[NewPiece]) -> Iterator[tuple[str, Any]]:
    """Yield what an index says of every key."""
    tensors: dict[str, TensorStorageMetadata] = {}
    for piece in pieces:
        if piece.dtype is None:
            yield piece.key, BytesStorageMetadata()
            continue
        if piece.key not in tensors:
            properties = TensorProperties(dtype=getattr(torch, piece.dtype))
            tensors[piece.key] = TensorStorageMetadata(properties, torch.Size(piece.shape), [])
        offsets = torch.Size([start for start, _ in piece.box])
        tensors[piece.key].chunks.append(ChunkStorageMetadata(offsets, torch.Size(box_shape(piece.box))))
    yield from tensors.items()


def _storage(pieces: Sequence[NewPiece], places: Sequence[Extent]) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
    """Yield where each piece lies."""
    for piece, place in zip(pieces, places, strict=True):
        offset = None if piece.dtype is None else [start for start, _ in piece.box]
        assert place.length is not None
        yield MetadataIndex(piece.key, offset), _StorageInfo(place.file, place.offset, place.length)


def _copy(folder: Path, extent: Extent, file: BinaryIO) -> None:
    with (folder / extent.file).open("rb") as source:
        source.seek(extent.offset)
        left = extent.length or 0
        while left:
            data = source.read(min(left, _COPY_BYTES))
            if not data:
                raise ConfigError(
                    f"{folder / extent.file} is cut off; without it this checkpoint cannot be read; copy it again"
                )
            file.write(data)
            left -= len(data)


def _identity(folder: Path) -> str:
    """Return what tells a checkpoint from others: a sum over its index, and over its map if it has one."""
    files = [file for file in (folder / INDEX, folder / MAP) if file.exists()]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _read_line(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:  # it was being written
        return None
