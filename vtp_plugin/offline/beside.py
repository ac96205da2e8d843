"""What was begun and failed is taken away; what is not a checkpoint appears as a whole, too."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from vtp_plugin.checkpoint.whole import discard, make_folder, partial_of, put_in_place, sync, sync_folders
from vtp_plugin.errors import ConfigError


def require_new(target: Path, but_for: Collection[str] = ()) -> None:
    """Check that a folder is not there, or empty.

    Args:
        target: the folder.
        but_for: names that may be there, from an attempt that was stopped.

    Raises:
        ConfigError: it holds something else.
    """
    if target.exists() and (not target.is_dir() or any(path.name not in but_for for path in target.iterdir())):
        raise ConfigError(f"{target} is not empty; nothing is overwritten; give another folder")


@contextmanager
def undone_if_it_fails(target: Path, undo: Callable[[], None]) -> Iterator[None]:
    """Run what writes a folder; where it fails, take away what it has written.

    A process that is killed takes nothing away.

    Args:
        target: the folder.
        undo: what takes it away.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        undo()
        raise ConfigError(f"{target} cannot be written: {error.strerror}; make room, or give another folder") from error
    except Exception:
        undo()
        raise


@contextmanager
def written_beside(target: Path) -> Iterator[Path]:
    """Give a folder to write to, which gets its name when the block ends well.

    Args:
        target: the folder that is to be.

    Raises:
        ConfigError: it holds something, or cannot be written.
    """
    require_new(target)
    partial = partial_of(target)
    discard(partial)
    with undone_if_it_fails(target, lambda: shutil.rmtree(partial, ignore_errors=True)):
        make_folder(partial)
        yield partial
        for file in partial.iterdir():
            sync(file)
        sync_folders(partial)
        put_in_place(partial, target)
