"""Verifies that a checkpoint holds all that its index promises: files, parts of tensors, the map, every byte."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from vtp_plugin.checkpoint.format.archive import check_archive, find_payload
from vtp_plugin.checkpoint.format.checkpoint_files import COMMON_FILE, problem_of_config
from vtp_plugin.checkpoint.format.contents import Contents
from vtp_plugin.checkpoint.format.entries import DamagedError, Extent
from vtp_plugin.checkpoint.format.index import Index, StoredTensor, read_index
from vtp_plugin.checkpoint.format.manifest import (
    Manifest,
    files_of,
    load_manifest,
    problems_of_pieces,
    problems_of_sizes,
)
from vtp_plugin.checkpoint.format.optimizer_formats import IN_BUCKETS
from vtp_plugin.checkpoint.save.newest import arguments_of, problem_without_manifest
from vtp_plugin.errors import ConfigError
from vtp_plugin.util.index_boxes import box_shape, format_box, overlaps, volume

_COPY: Final = "copy it again, or take another checkpoint"


class Verification:
    """Verifies one checkpoint.

    Args:
        folder: folder of the checkpoint, in any format.

    Attributes:
        folder: folder of the checkpoint.
        manifest: manifest of the checkpoint; None if it has none.
        num_bytes: number of bytes that are read.

    Raises:
        ConfigError: it has no manifest, and its index cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest, self._damage = folder, None, ""
        try:
            self.manifest = load_manifest(folder)
        except ConfigError as error:
            self._damage = str(error)
        self._is_old = any(folder.glob("mp_rank_*"))
        self._index: Index | None = None
        if self._damage:
            self.num_bytes = 0
        elif self.manifest is not None:
            self.num_bytes = self.manifest.num_bytes
        elif self._is_old:
            self.num_bytes = sum((folder / name).stat().st_size for name in files_of(folder))
        else:
            self._index = read_index(folder)
            self.num_bytes = self._index.num_bytes

    def problems(self, on_read: Callable[[int], None]) -> Iterator[str]:
        """Say what is broken in the checkpoint.

        Args:
            on_read: called with a number of bytes, whenever so many more have been read.

        Yields:
            Lines ``value; rule; way out``.
        """
        if self._damage:
            yield self._damage
        elif self.manifest is not None:
            yield from self._compare(self.manifest, on_read)
        else:
            found = problem_without_manifest(self.folder, arguments_of(self.folder))
            yield from () if found is None else (f"{found}; it has the hashes of all files; {_COPY}",)
            yield from self._read(on_read)

    def _compare(self, manifest: Manifest, on_read: Callable[[int], None]) -> Iterator[str]:
        """Compare all files with their hashes; then look whether what is there fits together."""
        texts = (
            *problems_of_sizes(self.folder, manifest),
            *problems_of_pieces(self.folder, manifest, on_read),
        )
        yield from (f"{text}; it must be as it was written; {_COPY}" for text in texts)
        if not manifest.can_check:
            yield from self._read(on_read)
        elif not texts and not self._is_old:
            yield from check_fit(Contents(self.folder))

    def _read(self, on_read: Callable[[int], None]) -> Iterator[str]:
        if not self._is_old:
            yield from check_checkpoint(Contents(self.folder, self._index), on_read)
            return
        for name in files_of(self.folder):
            if name.endswith(".pt") and (problem := check_archive(self.folder, Extent(name))) is not None:
                yield f"{self.folder / name} {problem}; a rank reads it; {_COPY}"
            on_read((self.folder / name).stat().st_size)


def check_checkpoint(contents: Contents, on_read: Callable[[int], None]) -> Iterator[str]:
    """Say what is broken in a checkpoint without a manifest. Everything that its index names is read.

    Args:
        contents: the checkpoint.
        on_read: called with a number of bytes, whenever so many more have been read.

    Yields:
        Lines ``value; rule; way out``.
    """
    yield from check_fit(contents)
    index = contents.index
    sizes = {file: _size(contents.folder / file) for file in sorted({extent.file for _, extent in index.extents()})}
    yield from _check_contents(index, sizes, on_read)
    common = contents.folder / COMMON_FILE
    if common.exists() and (found := check_archive(contents.folder, Extent(COMMON_FILE))):
        yield f"{common} {found}; it holds what all ranks share; {_COPY}"


def check_fit(contents: Contents) -> Iterator[str]:
    """Say what of a checkpoint is missing or inconsistent, without reading the data that its index names.

    Yields:
        Lines ``value; rule; way out``.
    """
    index = contents.index
    if (problem := problem_of_config(contents.folder)) is not None:
        yield f"{problem}; it says in which format the rest is; {_COPY}"
    sizes = {file: _size(contents.folder / file) for file in sorted({extent.file for _, extent in index.extents()})}
    yield from _check_lengths(index, sizes)
    for key, tensor in index.tensors.items():
        yield from (f"{contents.folder}: {key} {problem}; {_COPY}" for problem in _problems_of_cover(tensor))
    if contents.form in IN_BUCKETS and contents.has_map:
        yield from _check_map(contents)


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


def _check_lengths(index: Index, sizes: dict[str, int | None]) -> Iterator[str]:
    """Say which files are missing or too short, one line for each."""
    lacks: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for key, extent in index.extents():
        end = extent.offset + (extent.length or 0)
        if end > (sizes[extent.file] or 0):
            lacks[extent.file].append((end, key))
    for name, found in sorted(lacks.items()):
        end, key = max(found)
        problem = "is missing" if sizes[name] is None else f"is cut off, with {sizes[name]} of {end} bytes"
        rest = f", and {len(found) - 1} more parts," if len(found) > 1 else ""
        yield f"{index.folder / name} {problem}; a part of {key}{rest} must be there; {_COPY}"


def _problems_of_cover(tensor: StoredTensor) -> Iterator[str]:
    """Say whether parts of a tensor lie outside it, overlap, or leave elements out."""
    boxes = [box for box, _ in tensor.extents]
    for box in boxes:
        if any(stop > length for (_, stop), length in zip(box, tensor.shape, strict=True)):
            yield f"{tensor.shape} has a part at {format_box(box)}; none may lie outside"
            return
    pair = next(overlaps(boxes), None) if tensor.shape else None
    if pair is not None:
        yield f"{tensor.shape} is stored twice at {format_box(boxes[pair[1]])}; each element must be stored once"
    elif (count := sum(map(volume, boxes))) != math.prod(tensor.shape):
        yield f"{tensor.shape} is stored in {count} of {math.prod(tensor.shape)} elements; none may be missing"


def _check_map(contents: Contents) -> Iterator[str]:
    try:
        contents.stored()
    except ConfigError as error:
        yield str(error)
        return
    cuts: dict[str, set[tuple[object, ...]]] = {}
    for bucket, tensors in contents.tensors_of_buckets.items():
        cuts[bucket] = {tuple(sorted(box for box, _ in tensor.extents)) for tensor in tensors.values()}
        if len(cuts[bucket]) > 1:
            yield f"{contents.folder}: states of {bucket} are cut in different places; all must be cut alike; {_COPY}"


def _check_contents(index: Index, sizes: dict[str, int | None], on_read: Callable[[int], None]) -> Iterator[str]:
    """Read what lies in files; what lies beyond the end of one was reported before."""
    parts = [
        (key, extent, box, tensor.dtype) for key, tensor in index.tensors.items() for box, extent in tensor.extents
    ]
    parts += [(key, extent, None, "") for key, extent in index.objects.items()]
    for key, extent, box, dtype in sorted(parts, key=lambda part: (part[1].file, part[1].offset)):
        length = extent.length or 0
        if extent.offset + length > (sizes[extent.file] or 0):
            continue
        problem = check_archive(index.folder, extent)
        if problem is None and box is not None:
            problem = _problem_of_tensor(index.folder, extent, box_shape(box), dtype)
        if problem is not None:
            yield f"{index.folder / extent.file} {problem}; a part of {key} lies there; {_COPY}"
        on_read(length)


def _problem_of_tensor(folder: Path, extent: Extent, shape: tuple[int, ...], dtype: str) -> str | None:
    try:
        found = find_payload(folder, extent)
    except DamagedError as error:
        return str(error)
    if (found.shape, found.dtype) == (shape, dtype):
        return None
    return f"holds {found.dtype} {found.shape} at byte {extent.offset}, and {dtype} {shape} is expected"
