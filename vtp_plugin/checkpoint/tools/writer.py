"""Writes a checkpoint of the format ``torch_dist`` piece by piece, in one process, and resumes a stopped attempt.

The pieces are planned first, in an order that is always the same. A journal lists the pieces that are written; an
attempt that finds one resumes behind its last whole piece.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, cast

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

from vtp_plugin.checkpoint.format.archive import check_archive, itemsize
from vtp_plugin.checkpoint.format.checkpoint_files import COMMON_FILE
from vtp_plugin.checkpoint.format.entries import Extent
from vtp_plugin.checkpoint.format.index import INDEX, ORIGINAL
from vtp_plugin.checkpoint.load.elements import SLAB_BYTES, copy_bytes, typed
from vtp_plugin.checkpoint.save.atomic_dir import InParts, partial_of, whole_folder
from vtp_plugin.errors import ConfigError
from vtp_plugin.util.index_boxes import Box, box_shape, intersect, volume, whole_box
from vtp_plugin.util.untrusted_files import MAX_INDEX_BYTES, parse_json, read_text

JOURNAL: Final = "vtp_journal.jsonl"
"""The name of the file that says what is written, while not all is."""
_FILE_BYTES: Final = 1 << 30


class PiecePart(Protocol):
    """A source of elements: a part of a stored tensor, or of a tensor in another format."""

    @property
    def box(self) -> Box:
        """The box of the whole tensor that it is."""
        ...


class Source(Protocol):
    """A reader of elements.

    Attributes:
        folder: folder that it reads.
    """

    folder: Path

    def dtype(self, part: Any) -> str:
        """Return the type of the elements of a part."""
        ...

    def read(self, part: Any, box: Box) -> torch.Tensor:
        """Read a box of the whole tensor, inside that of a part, as bytes."""
        ...


@dataclass(frozen=True, slots=True)
class NewPiece:
    """A part of a new tensor, or an object.

    Attributes:
        key: key under which it is stored.
        dtype: type of its elements; None for an object.
        shape: shape of the whole tensor.
        box: box of the tensor that the piece holds.
        kept: bytes of an old file that it consists of; None if it is made of parts.
        parts: the parts that it is made of.
        data: the bytes of an object that is new.
        aliases: further keys under which the same bytes are found.
        flattened: shape that the whole tensor had before each block of it was made flat; None if it was not.
        read: the box that the piece holds, in that shape.
    """

    key: str
    dtype: str | None
    shape: tuple[int, ...]
    box: Box
    kept: Extent | None = None
    parts: tuple[PiecePart, ...] = ()
    data: bytes = b""
    aliases: tuple[str, ...] = ()
    flattened: tuple[int, ...] | None = None
    read: Box | None = None

    @property
    def num_bytes(self) -> int:
        """Estimated bytes in its file."""
        if self.kept is not None:
            return self.kept.length or 0
        if self.dtype is None:
            return len(self.data)
        return volume(self.box) * itemsize(self.dtype)


def cut_pieces(whole: Box, size: int) -> Iterator[Box]:
    """Cut a box along its first dimensions into boxes that are small enough.

    Args:
        whole: the box.
        size: bytes of an element.

    >>> [*cut_pieces(((1, 2), (0, 4), (0, 2)), 4 << 20)]
    [((1, 2), (0, 1), (0, 2)), ((1, 2), (1, 2), (0, 2)), ((1, 2), (2, 3), (0, 2)), ((1, 2), (3, 4), (0, 2))]
    """
    left = [whole]
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


def read_box(source: Source, parts: Sequence[PiecePart], box: Box, dtype: str) -> torch.Tensor:
    """Read a box of a whole tensor, out of all parts that have some of it.

    Raises:
        ConfigError: parts have elements of different types.
    """
    found = [(part, inner) for part in parts if (inner := intersect(part.box, box)) is not None]
    if len(found) == 1:
        return _read(source, *found[0], dtype)
    made = torch.empty(box_shape(box), dtype=getattr(torch, dtype))
    for part, inner in found:
        place = tuple(slice(a - at, b - at) for (a, b), (at, _) in zip(inner, box, strict=True))
        made[place] = _read(source, part, inner, dtype)
    return made


def _read(source: Source, part: PiecePart, box: Box, dtype: str) -> torch.Tensor:
    if (found := source.dtype(part)) != dtype:
        raise ConfigError(
            f"{source.folder} holds one tensor as {dtype} and as {found}; whole tensors have one type; write it again "
            "with one"
        )
    return typed(source.read(part, box), dtype).view(box_shape(box))


def are_equal(
    source: Source, ours: Sequence[PiecePart], theirs: Sequence[PiecePart], shape: tuple[int, ...], dtype: str
) -> bool:
    """Tell whether two tensors of one shape and type have the same elements to the last bit, read slab by slab."""
    boxes = cut_pieces(whole_box(shape), itemsize(dtype))
    pairs = ([read_box(source, parts, box, dtype).view(torch.uint8) for parts in (ours, theirs)] for box in boxes)
    return all(torch.equal(*pair) for pair in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What is written behind the pieces of a checkpoint.

    Attributes:
        common: what all ranks share, as ``torch.save`` writes it.
        common_key: key under which that is stored, or the name of its file.
        files: contents of the other files, by name.
    """

    common: bytes
    common_key: str = COMMON_FILE
    files: Mapping[str, bytes]


class PieceWriter:
    """Writes one checkpoint.

    Args:
        pieces: what is to be written.
        source: reader of the parts' elements.
        target: folder that appears when all pieces are written.
        identity: text that tells the source from others.

    Attributes:
        pieces: what is to be written, in order.
        places: the bytes of each written piece.
    """

    def __init__(self, pieces: Sequence[NewPiece], source: Source, target: Path, identity: str) -> None:
        self._source, self._final, self._target = source, target, partial_of(target)
        self.pieces: Sequence[NewPiece] = pieces
        self.places: list[Extent] = []
        self._journal = self._target / JOURNAL
        self._head = {"version": 1, "source": str(source.folder.resolve()), "sha256": identity}

    def __repr__(self) -> str:
        return f"<{len(self.places)} of {len(self.pieces)} pieces in {self._target}>"

    def find_written(self) -> int:
        """Find the pieces that an earlier, stopped attempt has written.

        Returns:
            Number of bytes that it has written, about.

        Raises:
            ConfigError: the folder holds a checkpoint, or part of another one.
        """
        if (self._final / "metadata.json").exists():
            raise ConfigError(f"{self._final} holds a checkpoint; none is overwritten; give another folder with --to")
        if self._final.exists() and any(self._final.iterdir()):
            raise ConfigError(f"{self._final} is not empty; nothing is overwritten; give another folder with --to")
        if not self._journal.exists():
            return 0
        lines = self._lines()
        if not lines or _read_line(lines[0]) != self._head:
            raise ConfigError(
                f"{self._target} holds a part of another checkpoint; only one of {self._source.folder} can be resumed; "
                "remove it, or give another folder with --to"
            )
        for piece, line in zip(self.pieces, lines[1:], strict=False):
            place = self._whole(piece, _read_line(line))
            if place is None:
                break
            self.places.append(place)
        return sum(piece.num_bytes for piece in self.pieces[: len(self.places)])

    def _lines(self) -> list[str]:
        return read_text(self._journal, MAX_INDEX_BYTES).splitlines()

    def _whole(self, piece: NewPiece, line: Any) -> Extent | None:
        """Return where a piece lies, if it lies there as a whole."""
        if not isinstance(line, list) or line[:2] != [piece.key, [start for start, _ in piece.box]]:
            return None
        place = Extent(*line[2:])
        is_ours = re.fullmatch(r"__\d{1,9}_0\.distcp", place.file)
        return place if is_ours and check_archive(self._target, place) is None else None

    def write(self, ending: Ending, on_written: Callable[[int], None]) -> None:
        """Write what is missing, then the index.

        Args:
            ending: what comes after all pieces.
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
            self._finish(ending)

    def _keep_only_written(self) -> None:
        """Truncate the files and the journal behind the last whole piece."""
        ends: dict[str, int] = {}
        for place in self.places:
            ends[place.file] = place.offset + (place.length or 0)
        for file in self._target.glob("*.distcp"):
            if file.name in ends:
                os.truncate(file, ends[file.name])
            else:
                file.unlink()
        lines = (
            read_text(self._journal, MAX_INDEX_BYTES).splitlines()[1 : 1 + len(self.places)]
            if self._journal.exists()
            else []
        )
        self._journal.write_text("\n".join([json.dumps(self._head), *lines]) + "\n")

    def _append(self, write: Callable[[BinaryIO], None]) -> Extent:
        """Append to the last file, or begin a new one if that is large."""
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
            copy_bytes(self._source.folder, piece.kept, file)
            return
        if piece.dtype is None:
            file.write(piece.data)
            return
        found = read_box(self._source, piece.parts, piece.read or piece.box, piece.dtype)
        torch.save(found.reshape(box_shape(piece.box)), cast(Any, InParts(file)))

    def _finish(self, ending: Ending) -> None:
        """Write what all ranks share, the index, and the other files."""
        if ending.common_key == COMMON_FILE:
            (self._target / COMMON_FILE).write_bytes(ending.common)
        else:
            place = self._append(lambda file: cast(Any, file.write(ending.common)))
            shared = NewPiece(ending.common_key, None, (), ())
            self.pieces, self.places = [*self.pieces, shared], [*self.places, place]
        index: Any = Metadata(dict(_entries(self.pieces)), storage_data=dict(_storage(self.pieces, self.places)))
        flattened = {piece.key: {ORIGINAL: piece.flattened} for piece in self.pieces if piece.flattened is not None}
        if flattened:
            index.mcore_data = flattened  # as Megatron's subclass has it
        (self._target / INDEX).write_bytes(pickle.dumps(index))
        for name, data in ending.files.items():
            (self._target / name).write_bytes(data)
        self._journal.unlink()


def _entries(pieces: Sequence[NewPiece]) -> Iterator[tuple[str, Any]]:
    """Yield what an index says of every key."""
    tensors: dict[str, TensorStorageMetadata] = {}
    for piece in pieces:
        for key in (piece.key, *piece.aliases):
            if piece.dtype is None:
                yield key, BytesStorageMetadata()
                continue
            if key not in tensors:
                properties = TensorProperties(dtype=getattr(torch, piece.dtype))
                tensors[key] = TensorStorageMetadata(properties, torch.Size(piece.shape), [])
            offsets = torch.Size([start for start, _ in piece.box])
            tensors[key].chunks.append(ChunkStorageMetadata(offsets, torch.Size(box_shape(piece.box))))
    yield from tensors.items()


def _storage(pieces: Sequence[NewPiece], places: Sequence[Extent]) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
    """Yield where each piece lies."""
    for piece, place in zip(pieces, places, strict=True):
        offset = None if piece.dtype is None else [start for start, _ in piece.box]
        assert place.length is not None
        for key in (piece.key, *piece.aliases):
            yield MetadataIndex(key, offset), _StorageInfo(place.file, place.offset, place.length)


def _read_line(line: str) -> Any:
    try:
        return parse_json(line)
    except ValueError:  # it was being written
        return None
