"""Writes weights: files of safetensors, staged folders.

Writes a checkpoint of the format ``torch_dist`` piece by piece, in one process, and resumes a stopped attempt.

The pieces are planned first, in an order that is always the same. A journal lists the pieces that are written; an
attempt that finds one resumes behind its last whole piece.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import pickle
import re
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

from vtp_plugin.checkpoint.format.checkpoint_files import COMMON_FILE, check_archive, itemsize
from vtp_plugin.checkpoint.format.index import INDEX, ORIGINAL, Extent
from vtp_plugin.checkpoint.hf.read_config import file_of
from vtp_plugin.checkpoint.hf.tensor_rows import TensorShare
from vtp_plugin.checkpoint.load.stored_optimizer import SLAB_BYTES, copy_bytes, typed
from vtp_plugin.checkpoint.save.atomic_dir import InParts, discard, partial_of, remover, whole_folder
from vtp_plugin.checkpoint.save.saving import FolderLock
from vtp_plugin.errors import ConfigError, VtpError
from vtp_plugin.util.index_boxes import Box, box_shape, intersect, volume, whole_box
from vtp_plugin.util.typed_json import MAX_INDEX_BYTES, open_file, parse_json, read_json, read_text

_STOPPING: Final = (signal.SIGINT, signal.SIGTERM)


def require_new(target: Path, but_for: Collection[str] = ()) -> None:
    """Check that a folder is not there, or empty.

    Args:
        target: the folder.
        but_for: names of files that may be there, from an attempt that was stopped.

    Raises:
        ConfigError: it holds something else.
    """
    if target.exists() and (not target.is_dir() or any(path.name not in but_for for path in target.iterdir())):
        raise ConfigError(f"{target} is not empty; nothing is overwritten; give another folder")


@contextmanager
def writing_to(target: Path, undo: Callable[[], None] | None = None) -> Iterator[None]:
    """Run code that writes a folder; if it fails, or Ctrl-C or SIGTERM stops it, raise an error of one line.

    A process that is killed removes nothing.

    Args:
        target: the folder.
        undo: removes what was written; None where the next attempt resumes it.

    Raises:
        ConfigError: it cannot be written, or the process was told to stop.
    """
    left = (
        "nothing half-written is left; start the command again" if undo else "start the command again, and it resumes"
    )
    room = "make room, or give another folder" if undo else "make room, and start the command again: it resumes"
    with _stopped_once() as signals:
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            if undo is not None:
                undo()
            if signals:
                raise ConfigError(f"{target} was not written to its end: stopped by a signal; {left}") from None
            if (cause := _failed_write(error)) is not None:
                raise ConfigError(f"{target} cannot be written: {cause.strerror}; {room}") from error
            raise


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Keep runs that save out of a folder of checkpoints while one is written there.

    Args:
        folder: the folder that ``--to`` names.

    Raises:
        ConfigError: a run has it, or it cannot be written.
    """
    lock = FolderLock(folder, {"TORCHELASTIC_RUN_ID": "a checkpoint tool"}, 0.0, option="--to")
    try:
        yield
    finally:
        lock.release(removes=True)


def _failed_write(error: BaseException | None) -> OSError | None:
    """Return the system's error, also where torch has wrapped it in another one."""
    while error is not None and not isinstance(error, VtpError):
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def _stopped_once() -> Iterator[list[int]]:
    """Treat SIGTERM as Ctrl-C, and ignore further signals during the clean-up.

    Yields:
        A list that gets the signal that came: torch turns an interrupt of its writing into another error.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def stop(number: int, _: Any) -> None:
        came.append(number)
        for each in _STOPPING:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    heard = (number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN)
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def written_beside(target: Path) -> Iterator[Path]:
    """Give a folder to write to, which is moved to its place when the block ends well.

    Args:
        target: the folder's place.

    Raises:
        ConfigError: it holds something, or cannot be written.
    """
    require_new(target)
    undo = remover(target, partial_of(target))
    discard(partial_of(target))
    with writing_to(target, undo), whole_folder(target, is_checkpoint=False) as partial:
        yield partial


HF_INDEX: Final = "model.safetensors.index.json"
"""The name of the file that says which tensor lies in which file."""
SINGLE: Final = "model.safetensors"
"""The name of the only file of a small model."""
_DTYPES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_ENDINGS: Final = (".safetensors", ".safetensors.index.json")
# Mistral puts its own format beside that of transformers, which passes over it as well.
_OF_MISTRAL: Final = "consolidated"
_WAY_OUT: Final = "download it again"
_TWO_SETS: Final = "move what does not belong to the model out of the folder"


class Shards:
    """The tensors of a published model.

    Args:
        folder: folder of the model.
        single: name of the file that holds all tensors where there is no index.

    Attributes:
        folder: folder of the model.

    Raises:
        ConfigError: there are none, or two sets of them; a file is missing or damaged, or the package safetensors is.
    """

    def __init__(self, folder: Path, *, single: str = SINGLE) -> None:
        self.folder, self._single = folder, single
        listed = self._listed()
        files = {name: self._open(name) for name in (dict.fromkeys(listed.values()) if listed else (single,))}
        places: dict[str, str] = {}
        for file, opened in files.items():
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                if name in places:
                    raise ConfigError(
                        f"{folder}: {places[name]} and {file} hold {name}; a model has it once; {_TWO_SETS}"
                    )
                places[name] = file
        for name, file in listed.items():
            if places.get(name) != file:
                raise ConfigError(
                    f"{folder / HF_INDEX} names {name}, and {file} does not hold it; both must say the same; {_WAY_OUT}"
                )
        for name in places.keys() - listed.keys() if listed else ():
            raise ConfigError(
                f"{folder}: {places[name]} holds {name}, and {HF_INDEX} does not name it there; "
                f"both must say the same; {_WAY_OUT}"
            )
        self._tensors = {name: (files[file], name) for name, file in places.items()}

    def __repr__(self) -> str:
        return f"<{len(self._tensors)} tensors of {self.folder}>"

    def _listed(self) -> dict[str, str]:
        """Return the file of every tensor, as the index says it; nothing where there is a single file.

        Raises:
            ConfigError: no file, or more than one set of them.
        """
        found = sorted(path.name for path in self.folder.iterdir() if path.name.endswith(_ENDINGS))
        found = [name for name in found if not name.startswith(_OF_MISTRAL)]
        listed = self._read_index() if HF_INDEX in found else {}
        if not listed and self._single not in found:
            others = f", but {found[0]}" if found else ""
            raise ConfigError(
                f"{self.folder} holds neither {self._single} nor {HF_INDEX}{others}; tensors are read from these; "
                "download them, or save the model with transformers, which writes them"
            )
        first = HF_INDEX if listed else self._single
        others = [name for name in found if name not in {first, *listed.values()}]
        if others:
            raise ConfigError(
                f"{self.folder} holds {first} and {others[0]}, which may be another set of weights; one of them is "
                f"imported, and transformers may take the other; {_TWO_SETS}"
            )
        return listed

    def _read_index(self) -> dict[str, str]:
        """Read which file holds which tensor."""
        index = file_of(self.folder, HF_INDEX)
        try:
            listed = read_json(index)["weight_map"]
            if not listed or not all(isinstance(file, str) for file in listed.values()):
                raise ValueError("its weight_map names no files")
        except OSError as error:
            raise ConfigError(
                f"{index} cannot be read: {error.strerror}; it says where every tensor lies; {_WAY_OUT}"
            ) from None
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index} is damaged ({error}); it says where every tensor lies; {_WAY_OUT}") from None
        return listed

    def _open(self, name: str) -> Any:
        file = file_of(self.folder, name)
        try:
            open_file(file).close()
        except FileNotFoundError:
            raise ConfigError(f"{file} is missing; {HF_INDEX} names it; {_WAY_OUT}") from None
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}; it holds weights; {_WAY_OUT}") from None
        try:
            safetensors = importlib.import_module("safetensors")
        except ImportError:
            raise ConfigError(
                f"{file} cannot be read; that needs the package safetensors; pip install 'vtp-plugin[hf]'"
            ) from None
        try:
            return safetensors.safe_open(file, "pt")
        except (safetensors.SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is damaged ({error}); it holds weights; {_WAY_OUT}") from None

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename tensors as the model's class calls them.

        Args:
            names: names in the files, by the new names.
        """
        self._tensors = {name: self._tensors[stored] for name, stored in names.items()}

    def put(self, name: str, tensor: torch.Tensor, *, instead_of: str) -> None:
        """Hold a tensor that was made of another one, which is held no longer unless others are made of it, too."""
        self._tensors[name] = (_Held(tensor, self._slice(instead_of).get_dtype()), self.stored_name(instead_of))

    def whole(self, name: str) -> torch.Tensor:
        """Read a tensor at once."""
        return self._slice(name)[:]

    def drop(self, names: Iterable[str]) -> None:
        """Hold some tensors no longer."""
        for name in names:
            del self._tensors[name]

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return [*self._tensors]

    def stored_name(self, name: str) -> str:
        """Return the name that a tensor has in its file."""
        return self._tensors[name][1]

    def _slice(self, name: str) -> Any:
        file, stored = self._tensors[name]
        return file.get_slice(stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype_of(self, name: str) -> str:
        """Return the type of a tensor's elements, as torch calls it.

        Raises:
            ConfigError: weights of such a type are quantised.
        """
        found = self._slice(name).get_dtype()
        if found not in _DTYPES:
            raise ConfigError(
                f"{self.folder}: {name} has the type {found}; weights are {', '.join(_DTYPES)}, and quantised ones are "
                "not read; take the model that was quantised"
            )
        return _DTYPES[found]

    def dtype(self, part: TensorShare) -> str:
        """Return the type of the elements of a share."""
        return self.dtype_of(part.name)

    def read(self, part: TensorShare, box: Box) -> torch.Tensor:
        """Read a box of a Megatron tensor out of a share.

        Returns:
            The bytes of the elements, in the order of the Megatron tensor.
        """
        rows, *rest = (slice(start, stop) for start, stop in part.hf_box(box))
        found: torch.Tensor = self._slice(part.name)[(rows, *rest) if rest else rows]
        return found.contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor in memory, read as one of a file."""

    tensor: torch.Tensor
    dtype: str

    def get_slice(self, _name: str) -> _Held:
        return self

    def get_shape(self) -> list[int]:
        return [*self.tensor.shape]

    def get_dtype(self) -> str:
        return self.dtype

    def __getitem__(self, place: Any) -> torch.Tensor:
        return self.tensor[place]


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor that is to be written.

    Attributes:
        name: name of the tensor.
        dtype: name of its elements' type, as torch calls it.
        shape: shape of the tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * itemsize(self.dtype)


def index_text(files: Mapping[str, Sequence[NewTensor]]) -> str:
    """Write the index of several files."""
    total = sum(tensor.num_bytes for held in files.values() for tensor in held)
    places = {tensor.name: file for file, held in files.items() for tensor in held}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}, indent=2) + "\n"


def bytes_of(elements: torch.Tensor) -> memoryview:
    """Give the bytes of a tensor without the package numpy; they are as long there as the tensor is."""
    length = elements.numel() * elements.element_size()
    array = (ctypes.c_ubyte * length).from_address(elements.data_ptr())
    array.owner = elements  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def write_header(file: BinaryIO, tensors: Iterable[NewTensor]) -> None:
    """Write what stands before the elements: the length of a JSON object, and the object.

    Follows the format as https://github.com/huggingface/safetensors describes it; its own writer holds all tensors of a
    file in memory.
    """
    codes = {name: code for code, name in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": codes[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def is_writable(dtype: str) -> bool:
    """Tell whether a published model has weights of a type."""
    return dtype in _DTYPES.values()


def known_types() -> Iterator[str]:
    """Yield the types that weights may have."""
    yield from _DTYPES.values()


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
        final: folder that appears when all pieces are written.
    """

    def __init__(self, pieces: Sequence[NewPiece], source: Source, target: Path, identity: str) -> None:
        self._source, self.final, self._target = source, target, partial_of(target)
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
        if (self.final / "metadata.json").exists():
            raise ConfigError(f"{self.final} holds a checkpoint; none is overwritten; give another folder with --to")
        if self.final.exists() and any(self.final.iterdir()):
            raise ConfigError(f"{self.final} is not empty; nothing is overwritten; give another folder with --to")
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
        with whole_folder(self.final):
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
