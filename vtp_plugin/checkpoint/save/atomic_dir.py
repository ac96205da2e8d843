"""A checkpoint is whole or not there: pieces that are checked, folders that appear at once, the newest.

The key that an edge draws its own layers from, as a file that only its owner can read.

Beside checkpoints it lies in a folder of its own that only its owner can enter: MindSpeed-LLM gives every file under
``--save`` the mode 0640 after each save.

Writes a folder atomically: beside its place, synced, then moved there, so it is there as a whole or not at all.

Code that makes a checkpoint without Megatron uses :func:`whole_folder`.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final

from vtp_plugin.checkpoint.format.checkpoint_files import broken_beside, is_read_in_pieces, load_object
from vtp_plugin.checkpoint.format.contents import Contents
from vtp_plugin.checkpoint.format.index import (
    MANIFEST,
    DamagedError,
    Extent,
    Hashing,
    Manifest,
    algorithm_of,
    dump_manifest,
    hash_bytes,
    load_manifest,
    make_manifest,
    problem_unless,
    problems_of_pieces,
)
from vtp_plugin.checkpoint.format.resolver import TRACKER
from vtp_plugin.errors import ConfigError
from vtp_plugin.util.typed_json import open_file

_PLACE: Final = "vtp_edge_key"
EDGE_KEY: Final = f"{_PLACE}/key"
"""Where the file lies in the folder of the edge's checkpoints."""
HAS_EDGE_KEY: Final = "vtp_has_edge_key"
"""The stored argument of a run whose edge has a key."""
SITE_ARGUMENTS: Final = ("vtp_edge_seed", HAS_EDGE_KEY)
"""Arguments that only the edge's site knows; the first may be a path."""
NEW_KEY_BYTES: Final = 32
"""How long a key is that a run draws itself: 256 bits."""
_LEAST_BYTES, _MOST_BYTES = 16, 4096
_OTHERS: Final = 0o077


def read_edge_key(file: Path, named_by: str) -> bytes:
    """Read a key that a user has made.

    Args:
        file: the file.
        named_by: what named it, for the error; no error shows a byte of the key.

    Raises:
        ConfigError: it is missing, no regular file, readable by others, too short or too long.
    """
    return _read(file, named_by, file, 0o600)


def read_kept_key(folder: Path, named_by: str) -> bytes:
    """Read the key that a run has put into a folder of checkpoints.

    Raises:
        ConfigError: as :func:`read_edge_key`; of others the mode of the key's own folder says whether they can read it.
    """
    file = folder / EDGE_KEY
    return _read(file, named_by, file.parent, 0o700)


def _read(file: Path, named_by: str, guard: Path, mode_of_owner: int) -> bytes:
    """Read a key; the mode of the file itself, or of its folder, must keep others out."""
    try:
        with open_file(file) as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode if guard == file else guard.stat().st_mode)
            key = opened.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{named_by}: {file} cannot be read ({error.strerror}); it holds the key of the edge's layers; "
            f"{_how_to_make(file)}"
        ) from None
    if mode & _OTHERS:
        raise ConfigError(
            f"{named_by}: {guard} has mode {mode:04o}, so others can read the key of the edge's layers; "
            f"chmod {mode_of_owner:o} {guard}"
        )
    if not _LEAST_BYTES <= len(key) <= _MOST_BYTES:
        length = f"more than {_MOST_BYTES}" if len(key) > _MOST_BYTES else len(key)
        raise ConfigError(
            f"{named_by}: {file} has {length} bytes; a key has {_LEAST_BYTES} to {_MOST_BYTES}; {_how_to_make(file)}"
        )
    return key


def require_same_key(key: bytes, named_by: str, folder: Path) -> None:
    """Refuse a key beside which a folder of checkpoints has another one.

    Args:
        key: the key that the user gave.
        named_by: what named it, for the error.
        folder: folder of checkpoints.

    Raises:
        ConfigError: it has another one.
    """
    file = folder / EDGE_KEY
    if file.exists() and read_kept_key(folder, "--load") != key:
        raise ConfigError(
            f"{named_by} holds another key than {file}, from which the edge of this checkpoint was drawn; leave "
            "the flag out to resume with that one, or load another folder"
        )


def _how_to_make(file: Path) -> str:
    return f"to make one: (umask 077; head -c {NEW_KEY_BYTES} /dev/urandom > {file})"


def write_edge_key(folder: Path, key: bytes) -> None:
    """Put a key into a folder of checkpoints, unless it is there; afterwards the file is the old or the new one.

    Raises:
        OSError: it cannot be written.
    """
    file = folder / EDGE_KEY
    try:
        if read_kept_key(folder, "") == key:
            return
    except ConfigError:
        pass  # what is there is no key of ours
    place = file.parent
    if place.is_symlink() or not place.is_dir():
        place.unlink(missing_ok=True)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    place.chmod(0o700)
    partial = place / f".{file.name}-{uuid.uuid4().hex}"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(key)
            opened.flush()
            os.fsync(opened.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


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


HAS_MANIFEST: Final = "vtp_has_manifest"
"""Megatron's argument that is stored with a checkpoint if there is a manifest beside it."""


def problem_of(
    checkpoint: Path, share: Callable[[Manifest], Callable[[str], bool]] = lambda _: lambda _: True
) -> str | None:
    """Say what is wrong with a checkpoint, or None; all pieces of some of its files are read.

    Args:
        checkpoint: folder of the checkpoint.
        share: called with the manifest, gives a function that tells by name whether a file that is read in pieces is
            read here.
    """
    if not checkpoint.is_dir():
        return f"{checkpoint} is missing"
    try:
        manifest = load_manifest(checkpoint)
    except ConfigError as error:
        return str(error).partition(";")[0]
    if (problem := broken_beside(checkpoint, manifest)) is not None:
        return problem
    if manifest is None:
        return problem_without_manifest(checkpoint, arguments_of(checkpoint))
    own = share(manifest)
    pieces = manifest.of_files([name for name in manifest.sizes if is_read_in_pieces(name) and own(name)])
    return next(iter(problems_of_pieces(checkpoint, pieces)), None)


def problem_without_manifest(checkpoint: Path, stored: Mapping[str, Any]) -> str | None:
    """Say that a manifest is missing, if the arguments that are stored with a checkpoint say that there is one."""
    if not stored.get(HAS_MANIFEST) or (checkpoint / MANIFEST).exists():
        return None
    return f"{checkpoint / MANIFEST} is missing, with which this checkpoint was saved"


def arguments_of(checkpoint: Path) -> Mapping[str, Any]:
    """Read the arguments of the run that saved a checkpoint; empty where they are not stored, or cannot be read."""
    try:
        first = min(checkpoint.glob("mp_rank_*/model_optim_rng.pt"), default=None)
        if first is None:
            return Contents(checkpoint).arguments
        stored = load_object(first.parent, Extent(first.name))
        return getattr(stored["args"], "state", None) or {}
    except (ConfigError, DamagedError, LookupError, TypeError):
        return {}


def share_out(manifest: Manifest, rank: int, world_size: int) -> Callable[[str], bool]:
    """Share the files of a checkpoint out among the ranks, so that each reads about as many bytes.

    >>> manifest = Manifest({"a": 5, "b": 3, "c": 1}, {})
    >>> [[name for name in "abc" if share_out(manifest, rank, 2)(name)] for rank in range(2)]
    [['a'], ['b', 'c']]
    """
    loads = [0] * world_size
    own: set[str] = set()
    for name, size in sorted(manifest.sizes.items(), key=lambda item: (-item[1], item[0])):
        least = loads.index(min(loads))
        loads[least] += size
        if least == rank:
            own.add(name)
    return own.__contains__


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
