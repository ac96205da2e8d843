"""A folder appears as a whole: it is written beside its place, and gets its name when all of it is there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vtp_plugin.errors import ConfigError


def require_new(target: Path) -> None:
    """Check that a folder is not there, or empty.

    Raises:
        ConfigError: it holds something.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not empty; nothing is overwritten; give another folder")


@contextmanager
def written_beside(target: Path, identity: str = "") -> Iterator[Path]:
    """Give the folder to write to, and its name to it afterwards; whoever fails leaves nothing behind.

    Args:
        target: the folder that is to be.
        identity: of what is written: what a process that was killed has left of it is there again; without one,
            nothing is.

    Yields:
        A folder beside it, whose name begins with a point.

    Raises:
        ConfigError: the target holds something, or cannot be written.
    """
    require_new(target)
    part = target.parent / f".{target.name}.{identity[:12] or 'new'}.part"
    if part.exists() and not identity:
        shutil.rmtree(part)
    try:
        part.mkdir(parents=True, exist_ok=True)
        yield part
        if target.exists():
            target.rmdir()
        part.rename(target)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise ConfigError(f"{target} cannot be written: {error.strerror}; make room, or give another folder") from error
    except Exception:
        shutil.rmtree(part, ignore_errors=True)
        raise
