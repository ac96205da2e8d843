"""The plugin's log: every message goes through the logger ``vtp_plugin`` of the standard library.

Many ranks write into one terminal. So a record is one write to standard error, each line names its rank, lines are at
most :data:`WIDTH` columns wide, and few ranks show INFO: rank 0 and, with several sites, the first rank of each site.
An error is always a single line, however long: people search logs for it.

If a script configures the logger ``vtp_plugin`` before ``apply()``, its configuration stays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import ClassVar

from vtp_plugin.util.text import plain

WIDTH = 160
"""Most columns of a line of the log; errors and longer words may be wider."""

_NAME = "vtp_plugin"


def debug(text: str) -> None:
    """Log a detail; with ``--vtp-log-level DEBUG`` every rank shows its details."""
    logging.getLogger(_NAME).debug(plain(text))


def info(text: str) -> None:
    """Log what concerns the whole run; only reporting ranks show it, see :func:`set_reporter`."""
    logging.getLogger(_NAME).info(plain(text))


def warning(text: str) -> None:
    """Log what a user should look at; every rank that calls shows it."""
    logging.getLogger(_NAME).warning(plain(text))


def error(text: str) -> None:
    """Log why this rank ends, as one line and one write; shown even if the log was never set up."""
    logger = logging.getLogger(_NAME)
    if logger.handlers:
        logger.error(plain(text))
    else:
        _write(format_record(logging.ERROR, text, rank=launched_rank()))


def to_terminal(text: str, rank: int | None = None) -> None:
    """Write to the terminal of a run with ``--brief``, which shows little else; do nothing in other runs.

    Args:
        text: what is written.
        rank: the only rank that does; None for each that calls.
    """
    if (handler := _handler()) is not None and (rank is None or handler.rank in (None, rank)):
        handler.to_terminal(text)


def is_brief() -> bool:
    """Tell whether this is a run with ``--brief``."""
    handler = _handler()
    return handler is not None and handler.is_brief


def install(level: str = "INFO", handler: Handler | None = None) -> Callable[[], None]:
    """Show the plugin's records, and return the function that puts the logger back as it was.

    Until :func:`set_reporter` is called, rank 0 reports; a process without a launcher counts as rank 0.

    Args:
        level: least level that is shown.
        handler: what shows them; None for one that writes them to standard error.
    """
    logger = logging.getLogger(_NAME)
    if logger.handlers:
        return lambda: None
    handler = handler or Handler()
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    # Megatron gives the root logger a handler, which would print each line again.
    logger.propagate = False
    logger.setLevel(level)

    def uninstall() -> None:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before

    return uninstall


def set_level(level: str) -> None:
    """Change the least level that is shown, unless the script configured the logger."""
    if _handler() is not None:
        logging.getLogger(_NAME).setLevel(level)


def set_reporter(*, rank: int, is_reporter: bool) -> None:
    """Set this rank and whether it shows INFO, once the layout is known."""
    if (handler := _handler()) is not None:
        handler.rank, handler.is_reporter = rank, is_reporter


def launched_rank() -> int | None:
    """Return the rank that the launcher gave this process; None without a launcher."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else None


def format_record(level: int, text: str, *, rank: int | None, width: int = WIDTH) -> str:
    r"""Return the lines of a record, each with the rank and cut to the width; an error is one line.

    Characters that a terminal would obey are written out: names of files and texts of other ranks may hold any.

    >>> format_record(logging.INFO, "two\nlines", rank=3)
    '[vtp rank 3] two\n[vtp rank 3] lines\n'
    >>> format_record(logging.ERROR, "why\nand where\x1b[2J", rank=None)
    '[vtp] error: why and where\\x1b[2J\n'
    """
    text = plain(text)
    prefix = "[vtp] " if rank is None else f"[vtp rank {rank}] "
    if level >= logging.ERROR:
        return f"{prefix}error: {' '.join(text.split())}\n"
    if level >= logging.WARNING:
        text = f"warning: {text}"
    lines = (piece for line in text.splitlines() for piece in wrap(line, width - len(prefix)))
    return "".join(f"{prefix}{line}\n" for line in lines)


def wrap(line: str, width: int = WIDTH) -> list[str]:
    """Cut a line between words, and indent later pieces by four more columns. Long words stay whole.

    >>> wrap("  one two three", 10)
    ['  one two', '      three']
    >>> wrap("give --vtp-size-list", 10)
    ['give', '    --vtp-size-list']
    """
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        drop_whitespace=True,
    ) or [""]


def wrap_command(words: list[str], width: int = WIDTH - 40) -> str:
    r"""Write flags as lines that a shell reads as one command: each but the last ends in a backslash.

    >>> print(wrap_command(["--flag", "a=1,2,3", "b=4,5,6"], width=17))
    --flag a=1,2,3 \
        b=4,5,6
    """
    return " \\\n".join(wrap(" ".join(words), width - 2))


class Handler(logging.Handler):
    """Writes each record at once.

    Attributes:
        rank: this rank; None without a launcher.
        is_reporter: whether it shows INFO.
    """

    is_brief: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.rank = launched_rank()
        self.is_reporter = self.rank in (None, 0)

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop INFO on ranks that do not report, unless details are shown."""
        shows_details = logging.getLogger(_NAME).isEnabledFor(logging.DEBUG)
        return record.levelno != logging.INFO or self.is_reporter or shows_details

    def to_terminal(self, text: str) -> None:
        """Write what a run with ``--brief`` shows; nothing in another one, which shows everything."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record's lines."""
        _write(format_record(record.levelno, record.getMessage(), rank=self.rank))


def _handler() -> Handler | None:
    """Return the plugin's handler; None if the script configured the logger."""
    return next((handler for handler in logging.getLogger(_NAME).handlers if isinstance(handler, Handler)), None)


def _write(text: str) -> None:
    """Write to standard error in one call, so that lines of two ranks do not mix.

    If ``sys.stderr`` was replaced, the main thread writes into the replacement: torch's exception hook collects a
    traceback there, and the plugin's line belongs behind it. Another thread must not: its line would end up inside.
    """
    stream = sys.stderr
    if stream is not sys.__stderr__ and threading.current_thread() is threading.main_thread():
        stream.write(text)
        stream.flush()
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()
    write_at_once(2, text)


def write_at_once(descriptor: int, text: str) -> None:
    """Write to a file descriptor in one call; a terminal that is gone must not end a run."""
    with contextlib.suppress(OSError):
        os.write(descriptor, text.encode(errors="backslashreplace"))
