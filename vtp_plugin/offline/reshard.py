"""A checkpoint is written again with its optimizer by parameter, so that any layout can load it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from vtp_plugin.checkpoint.archive import itemsize
from vtp_plugin.checkpoint.contents import MASTER, Contents
from vtp_plugin.checkpoint.index import INDEX
from vtp_plugin.checkpoint.map_file import MAP
from vtp_plugin.checkpoint.reshardable import is_kept, rewritten_common
from vtp_plugin.ground.boxes import intersect, whole_box
from vtp_plugin.offline.elements import Elements
from vtp_plugin.offline.writer import Ending, NewPiece, PieceWriter, cut_pieces


def reshard(contents: Contents, target: Path) -> tuple[PieceWriter, Ending]:
    """Plan how a checkpoint is written again.

    Args:
        contents: of the checkpoint as it is.
        target: folder to write to.

    Returns:
        What writes it, and what it ends with.
    """
    elements = Elements(contents.folder)
    writer = PieceWriter([*plan_pieces(contents, elements)], elements, target, _identity(contents.folder))
    key, common = rewritten_common(contents)
    files = {"metadata.json": (contents.folder / "metadata.json").read_bytes()}
    return writer, Ending(common=common, common_key=key, files=files)


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
        for box in cut_pieces(whole_box(whole.shape), itemsize(dtype)):
            own = tuple(part for part in parts if intersect(part.box, box) is not None)
            yield NewPiece(key, dtype, whole.shape, box, parts=own)


def _identity(folder: Path) -> str:
    """Return what tells a checkpoint from others: a sum over its index, and over its map if it has one."""
    files = [file for file in (folder / INDEX, folder / MAP) if file.exists()]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
