"""The key that an edge draws its own layers from, as a file that only its owner can read.

Beside checkpoints it lies in a folder of its own that only its owner can enter: MindSpeed-LLM gives every file under
``--save`` the mode 0640 after each save.
"""

from __future__ import annotations

import os
import stat
import uuid
from pathlib import Path
from typing import Final

from vtp_plugin.errors import ConfigError
from vtp_plugin.util.untrusted_files import open_file

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
