"""One run in a folder of checkpoints: a lock that the system takes back when its process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from vtp_plugin.errors import ConfigError
from vtp_plugin.util import log
from vtp_plugin.util.typed_json import read_typed

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
