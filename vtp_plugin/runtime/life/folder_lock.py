"""One run in a folder of checkpoints: a lock that the system takes back when its process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from vtp_plugin.errors import ConfigError
from vtp_plugin.ground import log
from vtp_plugin.runtime.life.waiting import poll

LOCK = "vtp_lock.json"
"""The name of the file."""
# File systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class FolderLock:
    """A lock that this process holds until it ends.

    A process that stands on another machine than its file system's server loses it with its connection. The lock is
    one of the process: no child inherits it, such as a data loader that outlives its rank.

    Args:
        folder: of checkpoints; it is made.
        environment: the launcher's variables, which name the run.
        limit_s: how long an earlier attempt of this run may take to end.

    Raises:
        ConfigError: another run holds it; the text names that run.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], limit_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / LOCK).open("a+", encoding="utf-8")
        if not poll(self._is_taken, limit_s, pause_s=0.2):
            self._file.seek(0)
            found = self._file.read()
            self._file.close()
            raise ConfigError(
                f"the folder of --save belongs to another run, {_describe(found)}; each would overwrite the other's "
                "checkpoints: give another folder, or end that run",
                is_final=False,
            )
        self._file.truncate(0)
        since = datetime.fromtimestamp(time.time()).isoformat(" ", "seconds")
        own = {"run": environment.get("TORCHELASTIC_RUN_ID", "?"), "host": socket.gethostname()}
        json.dump({**own, "process": os.getpid(), "since": since}, self._file)
        self._file.flush()

    def _is_taken(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                return False
            log.warning(f"{self._file.name} cannot be locked ({error.strerror}); nobody notices a second run there")
        return True

    def release(self) -> None:
        """Let another run take the folder; idempotent."""
        self._file.close()


def _describe(text: str) -> str:
    """Name a run by what it wrote.

    >>> _describe('{"run": "r1", "host": "n2", "process": 7, "since": "2026-01-01 00:00:00"}')
    'r1 (process 7 on n2, since 2026-01-01 00:00:00)'
    >>> _describe("")
    'which wrote no name'
    """
    try:
        found = json.loads(text)
        return f"{found['run']} (process {found['process']} on {found['host']}, since {found['since']})"
    except (ValueError, KeyError, TypeError):
        return "which wrote no name"
