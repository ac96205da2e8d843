"""A save as all ranks make it: the lock of the folder, and what is written.

A checkpoint that Megatron is writing: where its files go meanwhile, and how it is published.

Steps, each on all ranks before the next: what stopped saves have left is cleared away; Megatron writes, into a folder
beside the checkpoint's place, and each rank syncs what it has written; one rank of every folder writes the manifest and
moves the folder to its place; where sites keep parts, all confirm that; then that rank writes the tracker, and what is
no longer kept is removed.
:mod:`vtp_plugin.checkpoint.save.atomic_dir` has the moves.
"""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing.util
import os
import socket
import stat
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from vtp_plugin.checkpoint.format.checkpoint_files import iterations
from vtp_plugin.checkpoint.format.contents import Contents
from vtp_plugin.checkpoint.format.index import Extent, digest_of, dump_manifest, files_of, make_manifest
from vtp_plugin.checkpoint.format.resolver import IN_BUCKETS, TRACKER, read_tracker
from vtp_plugin.checkpoint.format.site_part import PART, SitePart
from vtp_plugin.checkpoint.save.atomic_dir import (
    clear,
    discard,
    finish_folder,
    make_folder,
    partial_of,
    sync,
    tracker_text,
    write_whole,
)
from vtp_plugin.errors import ConfigError, VtpError
from vtp_plugin.util import log
from vtp_plugin.util.typed_json import parse_json, read_text, read_typed

LOCK: Final = "vtp_lock.json"
"""The name of the file."""
LOCK_VARIABLE: Final = "VTP_LOCK"
"""Set in a process that is to be a rank of a fitted run: the token of its locks, before the first one is taken."""
# File systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_SHARE, _MAX_S, _PAUSE_S = 0.3, 20.0, 0.2
_MAX_BYTES = 4096
_SHARED = "the folder of --save belongs to another run; each would overwrite the other's checkpoints; give another one"


def patience_s(timeout_s: float) -> float:
    """Return how long an earlier start of a run, which still has the folder, may take to end.

    Args:
        timeout_s: timeout of the run, in seconds.

    >>> patience_s(600.0), patience_s(10.0)
    (20.0, 3.0)
    """
    return min(_MAX_S, _SHARE * timeout_s)


class FolderLock:
    """A lock that one process of a run holds until it ends; the others of the run see the run's token in the file.

    On a network file system a process loses the lock with its connection to the server. The lock belongs to the
    process: no child inherits it, such as a data loader that outlives its rank.

    Args:
        folder: folder of checkpoints; it is made if it is missing.
        environment: the launcher's variables, which name the run.
        limit_s: seconds that an earlier attempt of this run may take to end.
        token: token of the run, which all its processes know; None for a new one.
        option: option that named the folder, for the error.

    Attributes:
        token: token of the run.

    Raises:
        ConfigError: another run holds it, and the text names that run; or the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        limit_s: float,
        *,
        token: str | None = None,
        option: str = "--save",
    ) -> None:
        self.token = token or uuid.uuid4().hex
        self._path = folder / LOCK
        self._fd: int | None = None
        self._found = ""
        self._run = environment.get("TORCHELASTIC_RUN_ID", "")
        deadline_s = time.monotonic() + limit_s
        try:
            folder.mkdir(parents=True, exist_ok=True)
            while not self._is_ours():
                if time.monotonic() > deadline_s:
                    raise ConfigError(
                        f"{option} {folder} belongs to another run, {_describe(self._found)}; each would overwrite the "
                        "other's checkpoints; give another folder, or end that run",
                        shared=_SHARED,
                        is_final=False,
                    )
                time.sleep(_PAUSE_S)
        except OSError as error:
            if error.errno == errno.ELOOP and self._path.is_symlink():
                what = f"{self._path} is a link; a run writes its name there and follows none; remove it"
                raise ConfigError(what, is_final=False) from None
            raise ConfigError(
                f"{option} {folder} cannot be written ({error.strerror}: {error.filename}); who saves there writes its "
                "name beside the checkpoints; give a folder that can be written",
                is_final=False,
            ) from error

    def _is_ours(self) -> bool:
        """Take the lock, or see that another process of this run has it."""
        # No link is followed, and nothing waits for a reader: what is written must not land elsewhere.
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        has_locks = True
        try:
            self._require_plain(fd)
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            has_locks = error.errno not in _NO_LOCKS
            self._found = os.read(fd, _MAX_BYTES).decode(errors="replace")
            if has_locks or _token_of(self._found) == self.token:
                os.close(fd)
                return _token_of(self._found) == self.token
            log.warning(f"{self._path} cannot be locked ({error.strerror}); nobody notices a second run there")
        except ConfigError:
            os.close(fd)
            raise
        if not self._is_there(fd):
            os.close(fd)
            return False
        # From now on no other descriptor of the file may be closed in this process: that would give the lock back.
        self._fd = fd
        self._write(fd)
        return True

    def _require_plain(self, fd: int) -> None:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise ConfigError(f"{self._path} is no plain file of one name; a run writes its name into it; remove it")

    def _is_there(self, fd: int) -> bool:
        """Tell whether the file that was locked is still the one of its name: who had it may have removed it."""
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self._path, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def _write(self, fd: int) -> None:
        since = datetime.fromtimestamp(time.time()).isoformat(" ", "seconds")
        own = {"run": self._run, "host": socket.gethostname(), "process": os.getpid(), "since": since}
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({**own, "token": self.token}).encode(), 0)
        os.fsync(fd)  # other machines read it

    def release(self, *, removes: bool = False) -> None:
        """Let another run take the folder; idempotent.

        Args:
            removes: take the file away as well.
        """
        fd, self._fd = self._fd, None
        if fd is not None:
            if removes:
                self._path.unlink(missing_ok=True)
            os.close(fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holder:
    """What the process that has the lock wrote: its run, where it is, and the token of the run."""

    run: str
    host: str
    process: int
    since: str
    token: str = ""


def _holder(text: str) -> _Holder | None:
    try:
        return read_typed(_Holder, text)
    except ValueError:
        return None


def _token_of(text: str) -> str:
    holder = _holder(text)
    return "" if holder is None else holder.token


def _describe(text: str) -> str:
    """Name a run by what it wrote.

    >>> _describe('{"run": "r1", "host": "n2", "process": 7, "since": "2026-01-01 00:00:00"}')
    'r1 (process 7 on n2, since 2026-01-01 00:00:00)'
    >>> _describe('{"run": "none", "host": "n2", "process": 7, "since": "2026-01-01 00:00:00"}')
    'process 7 on n2, since 2026-01-01 00:00:00'
    >>> _describe("")
    'which wrote no name'
    """
    if (holder := _holder(text)) is None:
        return "which wrote no name"
    where = f"process {holder.process} on {holder.host}, since {holder.since}"
    # "none" is torchrun's word where a run was given no name.
    return where if holder.run in ("", "none") else f"{holder.run} ({where})"


_CLAIM = "vtp_claim"
# With less room a write has failed for want of it: files are written in buffers of this size at most.
_FULL_BYTES = 1 << 20
# With --ckpt-assume-constant-structure Megatron makes the second of what the first has left, and all others as it.
_NUM_CHECKED = 2


@dataclass(frozen=True, slots=True)
class Kept:
    """Which older checkpoints stay when a new one is there.

    Attributes:
        count: number of the newest checkpoints that stay, the new one among them; None for all.
        interval: the checkpoint before the new one stays only if its iteration is a multiple of this; None for any.
    """

    count: int | None = None
    interval: int | None = None

    def removed(self, found: Iterable[int], whole: Collection[int], new: int, before: int | None) -> list[int]:
        """Say which checkpoints go.

        Args:
            found: iterations of all checkpoints that are there.
            whole: iterations of those that can be loaded; only they count.
            new: the iteration that was saved now, which stays.
            before: iteration that the tracker named until now.

        >>> Kept(count=2).removed([2, 4, 6, 8], {2, 4, 8}, new=8, before=6)
        [2]
        >>> Kept(interval=4).removed([2, 4, 6], {2, 4, 6}, new=6, before=4)
        []
        >>> Kept(interval=4).removed([2, 4], {2, 4}, new=4, before=2)
        [2]
        """
        gone: set[int] = set()
        if self.count is not None:
            newest = sorted({*whole, new}, reverse=True)[: self.count]
            gone |= {number for number in found if number < min(newest)}
        if self.interval is not None and before is not None and before % self.interval:
            gone |= {before}
        return sorted(gone - {new})


@dataclass(slots=True)
class Saving:
    """One checkpoint, from its first file on.

    Attributes:
        final: folder where the checkpoint will be.
        is_by_rank: whether every rank may have a folder of its own, as in the format ``torch``.
        own: this rank's folder in :attr:`partial`, where each rank has one.
        is_in_background: whether Megatron keeps writing when its function has returned.
        part: which part this site keeps of it; None where it is one checkpoint.
        digests: hashes of the pieces that were hashed while they were written.
        afterwards: callbacks to run once others can see the checkpoint.
    """

    final: Path
    is_by_rank: bool
    own: Path | None = None
    is_in_background: bool = False
    part: SitePart | None = None
    digests: dict[Extent, str] = field(default_factory=dict)
    afterwards: list[Callable[[], object]] = field(default_factory=list)

    @property
    def partial(self) -> Path:
        """Where it is written."""
        return partial_of(self.final)

    def begin(self, spared: Collection[Path]) -> None:
        """Clear away what stopped saves have left; others may do so at the same time."""
        make_folder(self.final.parent)
        clear(self.final.parent, spared)

    def sync_own(self, *, is_first: bool) -> None:
        """Sync what this rank has written and nobody else has synced, and hash it where it is stored by rank.

        Args:
            is_first: whether this is rank 0, which writes what all ranks share.
        """
        if not self.is_by_rank:
            if is_first and self.part is not None:
                (self.partial / PART).write_text(self.part.dump())
            # Whoever wrote a piece has synced it, in this process or another: see `atomic-checkpoint/pieces`.
            for name in files_of(self.partial) if is_first else ():
                if not name.endswith(".distcp"):
                    sync(self.partial / name)
            return
        own = self.own
        if own is None or not own.is_dir():
            return
        names = [str(own.relative_to(self.partial) / file) for file in files_of(own)]
        claim = self.partial / f"{_CLAIM}_{own.name}"
        with ThreadPoolExecutor(1) as hashing:  # while the disk writes
            hashed = hashing.submit(self._hash, names, claim) if _claim(claim) else None
            for name in names:
                sync(self.partial / name)
        if hashed is not None:
            hashed.result()  # what cannot be read must not be called saved

    def _hash(self, names: Sequence[str], note: Path) -> None:
        """Hash files, and note that where the rank finds it that publishes them."""
        sizes = [(name, (self.partial / name).stat().st_size) for name in names]
        found = [(name, size, digest_of(self.partial, Extent(name, 0, size))) for name, size in sizes]
        note.write_text(json.dumps(found))

    def read_again(self) -> None:
        """Read the index, and the map, as whoever loads it later.

        Raises:
            ConfigError: they cannot be read.
        """
        try:
            contents = Contents(self.partial)
            if contents.has_map and contents.form in IN_BUCKETS:
                contents.stored()
        except ConfigError as error:
            raise ConfigError(
                f"what was saved for {self.final} cannot be read again: {str(error).partition(';')[0]}; no start "
                "could load it, so the checkpoint before stays the newest; save with --ckpt-format torch"
            ) from None

    def claim(self) -> bool:
        """Tell whether this rank is the one that publishes the folder that it sees; all ask before one does."""
        return _claim(self.partial / _CLAIM)

    def place(self) -> None:
        """Move the checkpoint to its place, whole and synced; nothing names it yet, and nothing older goes."""
        for claim in self.partial.glob(f"{_CLAIM}*"):
            if text := read_text(claim):
                self.digests |= {Extent(name, 0, size): digest for name, size, digest in parse_json(text)}
            claim.unlink()
        finish_folder(self.partial, self.final, dump_manifest(make_manifest(self.partial, self.digests)))

    def note(self, kept: Kept) -> None:
        """Name the checkpoint, which is whole everywhere, in the tracker, and begin to remove what is no longer kept.

        Args:
            kept: which older checkpoints stay.
        """
        folder = self.final.parent
        before = _iteration_of_tracker(folder)
        write_whole(folder / TRACKER, tracker_text(self.final))
        new = _iteration_of_tracker(folder)
        if new is not None and (kept.count, kept.interval) != (None, None):
            gone = kept.removed(iterations(folder), iterations(folder, is_whole=True), new, before)
            paths = [path for number in gone if not (path := folder / f"iter_{number:07d}").is_symlink()]
            threading.Thread(target=lambda: [discard(path) for path in paths]).start()


@contextmanager
def naming_what_failed(folder: Path) -> Iterator[None]:
    """Say why a checkpoint could not be written, where its folder shows that.

    Args:
        folder: folder that holds the checkpoints.

    Raises:
        ConfigError: instead of an error that says less.
    """
    try:
        yield
    except (VtpError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        if problem := _problem_of_writing(folder):
            line = f"a checkpoint in {folder} cannot be written: {problem}; fix that, and resume from the one before"
            raise ConfigError(line) from error
        raise


def _problem_of_writing(folder: Path) -> str:
    try:
        found = os.statvfs(folder)
    except OSError:
        return "the folder is gone"
    if found.f_flag & os.ST_RDONLY:
        return "the file system is read-only"
    # What was half written still takes its room.
    return "the file system is full" if found.f_bavail * found.f_frsize < _FULL_BYTES else ""


def _claim(file: Path) -> bool:
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _iteration_of_tracker(folder: Path) -> int | None:
    try:
        return int(read_tracker(folder) or "")
    except (OSError, ValueError):  # there is none, or it names a release
        return None


class Savings:
    """The checkpoints that are being written, in this process.

    Attributes:
        current: the one that Megatron's function is at, before it returns.
        newest: the one that was written last; None before the first.
        trackers: what stands for the trackers of folders, by the folder; None for one that is hidden.
        copies_tensors: whether a process that shares the tensors of this one writes them while the run continues.
    """

    def __init__(self) -> None:
        self.current: Saving | None = None
        self.newest: Path | None = None
        self.trackers: dict[Path, str | None] = {}
        self.copies_tensors = False
        self._iteration: int | None = None
        self._in_flight: dict[Path, Saving] = {}
        self._locks: dict[Path, FolderLock] = {}
        self._num_checked = 0

    def __repr__(self) -> str:
        return f"<{len(self._in_flight)} checkpoints are being written>"

    @contextmanager
    def call(self, iteration: int) -> Iterator[None]:
        """Know that Megatron's function saves an iteration."""
        self._iteration, self.current = iteration, None
        try:
            yield
        finally:
            self._iteration = None

    def take(self) -> Saving | None:
        """Return the checkpoint that Megatron's function was at, if it is all written; it has returned."""
        saving, self.current = self.current, None
        return None if saving is None or saving.is_in_background else saving

    def lock(self, folder: Path, environment: Mapping[str, str], limit_s: float, token: str | None) -> None:
        """Keep other runs out of a folder until this process ends, or :meth:`unlock`; idempotent.

        Arguments and errors are those of :class:`~vtp_plugin.checkpoint.save.saving.FolderLock`.
        """
        key = folder.resolve()
        if key not in self._locks:
            self._locks[key] = FolderLock(folder, environment, limit_s, token=token)

    def unlock(self) -> None:
        """Let other runs have the folders; idempotent."""
        while self._locks:
            self._locks.popitem()[1].release()

    def is_called_for(self, iteration: int) -> bool:
        """Tell whether Megatron's function is saving that iteration."""
        return self._iteration == iteration

    def begin(self, saving: Saving) -> Saving:
        """Begin to write one."""
        self.current = self._in_flight[saving.partial] = saving
        # What an earlier run has left of the same one goes, too: it may have files that this one does not write.
        saving.begin(self._in_flight.keys() - {saving.partial})
        return saving

    def checks(self, saving: Saving) -> bool:
        """Tell whether one that is written is to be read again: the first, and the second, made of what it has kept."""
        is_checked = not saving.is_by_rank and self._num_checked < _NUM_CHECKED
        self._num_checked += is_checked
        return is_checked

    def find(self, path: str | os.PathLike[str]) -> Saving | None:
        """Return the one that is written into a folder, or that a file belongs to; None if none is."""
        folders = (Path(path), *Path(path).parents)
        return next((self._in_flight[folder] for folder in folders if folder in self._in_flight), None)

    def end(self, saving: Saving) -> None:
        """Forget one, and do what waited for it."""
        del self._in_flight[saving.partial]
        self.newest = saving.final
        self.trackers.pop(saving.final.parent, None)
        for act in saving.afterwards:
            act()

    def tracker(self, folder: Path) -> Path | None:
        """Return a file that stands for the tracker of a folder, which need not exist; None if none does."""
        if folder not in self.trackers:
            return None
        file, text = self.scratch(f"{TRACKER}.{hash(folder)}"), self.trackers[folder]
        if text is not None:
            file.write_text(text)
        return file

    def scratch(self, name: str) -> Path:
        """Return a place for a file of this process, in the folder that multiprocessing makes and removes."""
        # Processes that multiprocessing has started may have their parent's folder.
        file = Path(multiprocessing.util.get_temp_dir()) / f"vtp-{os.getpid()}-{name}"
        file.unlink(missing_ok=True)
        return file
