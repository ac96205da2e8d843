"""Rewrites a checkpoint with its optimizer stored by parameter, so that any layout can load it.

Where parameters are stored in blocks, as Megatron 0.12 reads them, each block is flat, and stands in a grid: of a whole
parameter of shape ``(2, 3, 4)``, two layers of 12 elements, ``(2, 1, 1, 12)`` is stored.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from vtp_plugin.checkpoint.format.checkpoint_files import itemsize, problem_of_config
from vtp_plugin.checkpoint.format.contents import MASTER, Contents, Whole
from vtp_plugin.checkpoint.format.index import INDEX
from vtp_plugin.checkpoint.format.resolver import BY_BLOCK
from vtp_plugin.checkpoint.format.shard_map import MAP, Strided, row_major
from vtp_plugin.checkpoint.hf.hf_model import ASIDE, NOTE
from vtp_plugin.checkpoint.load.stored_optimizer import Elements
from vtp_plugin.checkpoint.tools.verify import is_kept, rewritten_common
from vtp_plugin.checkpoint.tools.writer import Ending, NewPiece, PieceWriter, cut_pieces
from vtp_plugin.errors import ConfigError
from vtp_plugin.util.index_boxes import Box, intersect, volume, whole_box
from vtp_plugin.util.typed_json import MAX_INDEX_BYTES, problem_of, read_bytes


def plan_rewrite(contents: Contents, target: Path, form: str | None) -> tuple[PieceWriter, Ending]:
    """Plan how a checkpoint is rewritten.

    Args:
        contents: the checkpoint as it is.
        target: folder of the new checkpoint.
        form: format that the optimizer gets; if it has that already, it is copied.

    Returns:
        The writer of its pieces, and what it writes behind them.
    """
    elements = Elements(contents.folder)
    identity = f"{_identity(contents.folder)} {form}"
    writer = PieceWriter([*plan_pieces(contents, elements, form)], elements, target, identity)
    key, common = rewritten_common(contents, form)
    if (problem := problem_of_config(contents.folder)) is not None:
        raise ConfigError(f"{problem}; it says in which format the rest is; copy it again")
    # An import stays one: which model it is goes with it.
    names = ("metadata.json", *(name for name in (NOTE, ASIDE) if (contents.folder / name).is_file()))
    files = {name: read_bytes(contents.folder / name) for name in names}
    return writer, Ending(common=common, common_key=key, files=files)


def plan_pieces(contents: Contents, elements: Elements, form: str | None) -> Iterator[NewPiece]:
    """Yield the pieces of the new checkpoint.

    Args:
        contents: the checkpoint as it is.
        elements: reader of its elements.
        form: format that the optimizer gets.
    """
    index = contents.index
    kept = [
        NewPiece(key, tensor.dtype, tensor.shape, box, extent, flattened=tensor.flattened)
        for key, tensor in index.tensors.items()
        if is_kept(contents, key, form)
        for box, extent in tensor.extents
    ]
    objects = ((key, extent) for key, extent in index.objects.items() if is_kept(contents, key, form))
    kept += [NewPiece(key, None, (), (), extent) for key, extent in objects]
    yield from sorted(kept, key=lambda piece: (piece.kept.file, piece.kept.offset) if piece.kept else ("", 0))
    for (state, name), whole in contents.states().items() if form != contents.form else ():
        if form == BY_BLOCK:
            key = f"{whole.chain}optimizer.state.{'fp32_param' if state == MASTER else state}.{name}"
            blocks = _block_shape(whole.shape, [box for box, _ in index.tensors[name].extents])
            yield from _flat_pieces(key, whole, elements, blocks)
        else:
            key = f"optimizer.state.{'param' if state == MASTER else state}.{name}"
            yield from _pieces(key, whole, elements)


def _pieces(key: str, whole: Whole, elements: Elements) -> Iterator[NewPiece]:
    parts = whole.parts()
    dtype = elements.dtype(parts[0])
    for box in cut_pieces(whole_box(whole.shape), itemsize(dtype)):
        own = tuple(part for part in parts if intersect(part.box, box) is not None)
        yield NewPiece(key, dtype, whole.shape, box, parts=own)


def _flat_pieces(key: str, whole: Whole, elements: Elements, lengths: tuple[int, ...]) -> Iterator[NewPiece]:
    """Yield pieces of flat blocks, all of the same lengths."""
    parts = whole.parts()
    dtype = elements.dtype(parts[0])
    grid = tuple(total // length for total, length in zip(whole.shape, lengths, strict=True))
    shape = (*grid, math.prod(lengths))
    place = Strided(0, row_major(lengths))
    for corner in itertools.product(*map(range, grid)):
        block = tuple((at * length, (at + 1) * length) for at, length in zip(corner, lengths, strict=True))
        for box in cut_pieces(block, itemsize(dtype)):
            # Pieces are cut along their first dimensions, so each is one range of its block.
            first = place.at(box, block).offset
            flat = (*((at, at + 1) for at in corner), (first, first + volume(box)))
            own = tuple(part for part in parts if intersect(part.box, box) is not None)
            yield NewPiece(key, dtype, shape, flat, parts=own, read=box, flattened=whole.shape)


def _block_shape(shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[int, ...]:
    """Return the lengths of blocks that all ranks can read: those of the longest part of a weight that a rank stored.

    So a block holds one layer, and one expert, and of a gated layer only rows of the gate or only others: Megatron
    reads no block twice.

    >>> _block_shape((2, 4, 3), [((0, 1), (0, 4), (0, 3)), ((1, 2), (0, 2), (0, 3)), ((1, 2), (2, 4), (0, 3))])
    (1, 4, 3)
    """
    longest = [max(stop - start for start, stop in sides) for sides in zip(*boxes, strict=True)]
    return tuple(own if total % own == 0 else total for total, own in zip(shape, longest, strict=True))


def _identity(folder: Path) -> str:
    """Return what tells a checkpoint from others: a sum over its index, and over its map if it has one."""
    files = [file for file in (folder / INDEX, folder / MAP) if os.path.lexists(file)]
    for file in files:
        if (problem := problem_of(file)) is not None:
            raise ConfigError(f"{file} {problem}; without it this checkpoint cannot be read; copy it again")
    return hashlib.sha256(b"".join(read_bytes(file, MAX_INDEX_BYTES) for file in files)).hexdigest()
