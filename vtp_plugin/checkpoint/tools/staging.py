"""What the tools add to :mod:`vtp_plugin.checkpoint.save.atomic_dir`: signals, locks, and errors of one line."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from vtp_plugin.checkpoint.save.atomic_dir import discard, partial_of, remover, whole_folder
from vtp_plugin.checkpoint.save.folder_lock import FolderLock
from vtp_plugin.errors import ConfigError, VtpError

_STOPPING: Final = (signal.SIGINT, signal.SIGTERM)


def require_new(target: Path, but_for: Collection[str] = ()) -> None:
    """Check that a folder is not there, or empty.

    Args:
        target: the folder.
        but_for: names of files that may be there, from an attempt that was stopped.

    Raises:
        ConfigError: it holds something else.
    """
    if target.exists() and (not target.is_dir() or any(path.name not in but_for for path in target.iterdir())):
        raise ConfigError(f"{target} is not empty; nothing is overwritten; give another folder")


@contextmanager
def writing_to(target: Path, undo: Callable[[], None] | None = None) -> Iterator[None]:
    """Run code that writes a folder; if it fails, or Ctrl-C or SIGTERM stops it, raise an error of one line.

    A process that is killed removes nothing.

    Args:
        target: the folder.
        undo: removes what was written; None where the next attempt resumes it.

    Raises:
        ConfigError: it cannot be written, or the process was told to stop.
    """
    left = (
        "nothing half-written is left; start the command again" if undo else "start the command again, and it resumes"
    )
    room = "make room, or give another folder" if undo else "make room, and start the command again: it resumes"
    with _stopped_once() as signals:
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            if undo is not None:
                undo()
            if signals:
                raise ConfigError(f"{target} was not written to its end: stopped by a signal; {left}") from None
            if (cause := _failed_write(error)) is not None:
                raise ConfigError(f"{target} cannot be written: {cause.strerror}; {room}") from error
            raise


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Keep runs that save out of a folder of checkpoints while one is written there.

    Args:
        folder: the folder that ``--to`` names.

    Raises:
        ConfigError: a run has it, or it cannot be written.
    """
    lock = FolderLock(folder, {"TORCHELASTIC_RUN_ID": "a checkpoint tool"}, 0.0, option="--to")
    try:
        yield
    finally:
        lock.release(removes=True)


def _failed_write(error: BaseException | None) -> OSError | None:
    """Return the system's error, also where torch has wrapped it in another one."""
    while error is not None and not isinstance(error, VtpError):
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def _stopped_once() -> Iterator[list[int]]:
    """Treat SIGTERM as Ctrl-C, and ignore further signals during the clean-up.

    Yields:
        A list that gets the signal that came: torch turns an interrupt of its writing into another error.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def stop(number: int, _: Any) -> None:
        came.append(number)
        for each in _STOPPING:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    heard = (number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN)
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def written_beside(target: Path) -> Iterator[Path]:
    """Give a folder to write to, which is moved to its place when the block ends well.

    Args:
        target: the folder's place.

    Raises:
        ConfigError: it holds something, or cannot be written.
    """
    require_new(target)
    undo = remover(target, partial_of(target))
    discard(partial_of(target))
    with writing_to(target, undo), whole_folder(target, is_checkpoint=False) as partial:
        yield partial
