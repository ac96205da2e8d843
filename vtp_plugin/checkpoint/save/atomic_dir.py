"""Writes a folder atomically: beside its place, synced, then moved there, so it is there as a whole or not at all.

Code that makes a checkpoint without Megatron uses :func:`whole_folder`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from vtp_plugin.checkpoint.format.manifest import MANIFEST, dump_manifest, make_manifest
from vtp_plugin.checkpoint.format.resolver import TRACKER

PARTIAL: Final = "partial_"
"""What the name of a folder begins with while it is written; nothing that looks for ``iter_*`` finds it."""
_REMOVED: Final = f"{PARTIAL}removed_"
# What saves leave. A tool may be writing another folder beside the checkpoints of a run.
_LEFT: Final = re.compile(rf"{PARTIAL}(removed_.*|iter_\d+|release|{re.escape(TRACKER)})")
_EXCHANGE: Final = 2  # RENAME_EXCHANGE of Linux
PART_BYTES: Final = 1 << 20
"""How much is written at a time: ext4 of Linux 6.18 takes 8 MiB in one write five times slower than in eight."""


def partial_of(final: Path) -> Path:
    """Return where a folder is written until it is whole.

    >>> str(partial_of(Path("runs/iter_0000100")))
    'runs/partial_iter_0000100'
    """
    return final.with_name(f"{PARTIAL}{final.name}")


def final_of(path: str) -> str:
    """Return where a file will be that is now written beside its place.

    >>> final_of("runs/partial_iter_0000100/mp_rank_00/model.pt"), final_of("runs/iter_0000100")
    ('runs/iter_0000100/mp_rank_00/model.pt', 'runs/iter_0000100')
    """
    return "/".join(part.removeprefix(PARTIAL) for part in path.split("/"))


class InParts:
    """A file that is only written, in parts that are small enough for the system to take them fast.

    Args:
        stream: takes the parts.
        on_part: called with each part, before it is written.

    >>> import io
    >>> found = []
    >>> InParts(io.BytesIO(), lambda part: found.append(len(part))).write(bytes(3 << 19)), found
    (1572864, [1048576, 524288])
    """

    def __init__(self, stream: BinaryIO, on_part: Callable[[memoryview], None] = lambda _: None) -> None:
        self._stream, self._on_part = stream, on_part
        self.tell, self.flush = stream.tell, stream.flush

    def write(self, data: Any) -> int:
        """Write bytes; return how many."""
        whole = memoryview(data).cast("B")
        for start in range(0, len(whole), PART_BYTES):
            part = whole[start : start + PART_BYTES]
            self._on_part(part)
            self._stream.write(part)
        return len(whole)


def sync(path: Path) -> None:
    """Wait until the disk has what was written into a file, or the names in a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, so that they outlive a loss of power."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def write_whole(file: Path, text: str) -> None:
    """Replace a file atomically: afterwards it is the old or the new one, whatever happens in between."""
    partial = file.with_name(f"{PARTIAL}{file.name}")
    _write_synced(partial, text)
    partial.replace(file)
    sync(file.parent)


def _write_synced(file: Path, text: str) -> None:
    with file.open("w") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())


def sync_folders(folder: Path) -> None:
    """Wait until the disk has the names of all files in a folder, and in those in it."""
    for inner in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(inner)


def put_in_place(partial: Path, final: Path) -> None:
    """Move a folder to its place, in one step.

    What is there is exchanged with it, and then removed. A file system that cannot exchange two folders (NFS) has
    neither for a moment.
    """
    if not final.exists():
        partial.rename(final)
    elif not _exchange(partial, final):
        removed = final.with_name(f"{_REMOVED}{uuid.uuid4().hex}")
        final.rename(removed)
        partial.rename(final)
    sync(final.parent)
    discard(partial)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change names; False where that cannot be done."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here = -100  # AT_FDCWD: relative paths begin in the working directory
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), _EXCHANGE) == 0


def discard(path: Path) -> None:
    """Remove a file or a folder if it is there; a folder is renamed first: a rest of it is never taken for a whole."""
    removed = path.with_name(f"{_REMOVED}{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):
        if path.is_file():
            path.unlink()
            return
        path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def clear(folder: Path, spared: Collection[Path] = ()) -> None:
    """Remove what saves that were stopped have left in a folder.

    Args:
        folder: folder that holds the checkpoints.
        spared: what is being written, and stays.
    """
    for path in folder.glob(f"{PARTIAL}*"):
        if path not in spared and _LEFT.fullmatch(path.name):
            discard(path)


def remover(target: Path, *parts: Path) -> Callable[[], None]:
    """Return a function that removes what a failed attempt to write a folder leaves.

    Args:
        target: the folder. If it is there already, it stays; if not, it goes, with the parents made for it that are
            empty.
        parts: what else goes, the first one first.
    """
    new = [folder for folder in (target, *target.parents) if not folder.exists()]

    def remove() -> None:
        for path in (*parts, *new[:1]):
            with contextlib.suppress(OSError):
                discard(path)
        for folder in new[1:]:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()

    return remove


@contextlib.contextmanager
def whole_folder(final: Path, *, is_checkpoint: bool = True) -> Iterator[Path]:
    """Give a folder to write into; it appears when the block ends well.

    What an earlier attempt has left there is found there again: remove it, or resume it.

    Args:
        final: where the folder will be, such as ``DIR/iter_0000100``; what is there is replaced at the end.
        is_checkpoint: whether it gets a manifest, and the tracker in ``DIR`` will name it.
    """
    partial = partial_of(final)
    make_folder(final.parent)
    partial.mkdir(exist_ok=True)
    yield partial
    for file in partial.rglob("*"):
        if file.is_file():
            sync(file)
    finish_folder(partial, final, dump_manifest(make_manifest(partial)) if is_checkpoint else None)
    if is_checkpoint:
        write_whole(final.parent / TRACKER, tracker_text(final))


def finish_folder(partial: Path, final: Path, manifest: str | None) -> None:
    """Write the manifest, if it gets one, into a folder whose files are synced, and move it to its place."""
    if manifest is not None:
        _write_synced(partial / MANIFEST, manifest)
    sync_folders(partial)
    put_in_place(partial, final)


def tracker_text(final: Path) -> str:
    """Return what the tracker says of a checkpoint.

    >>> tracker_text(Path("iter_0000100")), tracker_text(Path("iter_0000000")), tracker_text(Path("release"))
    ('100', '0', 'release')
    """
    name = final.name.removeprefix("iter_")
    return str(int(name)) if name.isdecimal() else name
