"""The plugin's log: all that a run says goes through the logger ``vtp_plugin`` of the standard library.

Many ranks write into one terminal. So a record is one write to standard error, each line says which rank speaks, no
line of a note is wider than :data:`WIDTH` columns, and INFO comes from few ranks: rank 0 and, with several sites, the
first rank of each site. Errors stay one line each, however long: people search logs for them.

Who configures the logger ``vtp_plugin`` before ``apply()`` keeps that configuration: then nothing is set here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import textwrap
import threading
from collections.abc import Callable

WIDTH = 160
"""No line of the log is wider, in columns, but for errors and for words that are longer themselves."""

_NAME = "vtp_plugin"


def debug(text: str) -> None:
    """Log a detail; with ``--vtp-log-level DEBUG`` every rank shows its own."""
    logging.getLogger(_NAME).debug(text)


def info(text: str) -> None:
    """Log what every run says; shown by the ranks that report, see :func:`install`."""
    logging.getLogger(_NAME).info(text)


def warning(text: str) -> None:
    """Log what a user should look at; shown by every rank that calls."""
    logging.getLogger(_NAME).warning(text)


def error(text: str) -> None:
    """Log why this rank ends, as one line and one write; shown even where the log was never set up."""
    logger = logging.getLogger(_NAME)
    if logger.handlers:
        logger.error(text)
    else:
        _write(format_record(logging.ERROR, text, rank=launched_rank()))


def install(level: str = "INFO") -> Callable[[], None]:
    """Let the plugin's records be seen, and return the function that puts the logger back as it was.

    Until :func:`set_reporter` says who reports, rank 0 does; a process that no launcher started is rank 0.

    Args:
        level: least level that is shown.
    """
    logger = logging.getLogger(_NAME)
    if logger.handlers:
        return lambda: None
    handler = _Handler()
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    # Megatron gives the root logger a handler: the line would come twice.
    logger.propagate = False
    logger.setLevel(level)

    def uninstall() -> None:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before

    return uninstall


def set_level(level: str) -> None:
    """Change the least level that is shown, unless somebody else configured the logger."""
    if _own_handler() is not None:
        logging.getLogger(_NAME).setLevel(level)


def set_reporter(*, rank: int, is_reporter: bool) -> None:
    """Say which rank this is and whether it shows INFO, once the layout is known."""
    handler = _own_handler()
    if handler is not None:
        handler.rank, handler.is_reporter = rank, is_reporter


def launched_rank() -> int | None:
    """Return the rank that the launcher gave this process; None without a launcher."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else None


def format_record(level: int, text: str, *, rank: int | None) -> str:
    r"""Give the lines of a record, each with the rank and cut to the width; of an error one line.

    >>> format_record(logging.INFO, "two\nlines", rank=3)
    '[vtp rank 3] two\n[vtp rank 3] lines\n'
    >>> format_record(logging.ERROR, "why\nand where", rank=None)
    '[vtp] error: why and where\n'
    """
    prefix = "[vtp] " if rank is None else f"[vtp rank {rank}] "
    if level >= logging.ERROR:
        return f"{prefix}error: {' '.join(text.split())}\n"
    if level >= logging.WARNING:
        text = f"warning: {text}"
    lines = (piece for line in text.splitlines() for piece in wrap(line, WIDTH - len(prefix)))
    return "".join(f"{prefix}{line}\n" for line in lines)


def wrap(line: str, width: int = WIDTH) -> list[str]:
    """Cut a line between its words; later pieces stand four columns further in. Longer words stay whole.

    >>> wrap("  one two three", 10)
    ['  one two', '      three']
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
    r"""Give flags as text that a shell takes as one command: where a line ends, a backslash stands.

    >>> print(wrap_command(["--flag", "a=1,2,3", "b=4,5,6"], width=17))
    --flag a=1,2,3 \
        b=4,5,6
    """
    return " \\\n".join(wrap(" ".join(words), width - 2))


class _Handler(logging.Handler):
    """Writes each record at once."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = launched_rank()
        self.is_reporter = self.rank in (None, 0)

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep INFO from the ranks that report; all else is the business of the rank that says it."""
        return record.levelno != logging.INFO or self.is_reporter or self._shows_details()

    def emit(self, record: logging.LogRecord) -> None:
        _write(format_record(record.levelno, record.getMessage(), rank=self.rank))

    def _shows_details(self) -> bool:
        return logging.getLogger(_NAME).isEnabledFor(logging.DEBUG)


def _own_handler() -> _Handler | None:
    for handler in logging.getLogger(_NAME).handlers:
        if isinstance(handler, _Handler):
            return handler
    return None


def _write(text: str) -> None:
    """Write to standard error in one call, so that lines of two ranks do not mix.

    The main thread writes into ``sys.stderr`` where that is not the process's own: torch's exception
    hook collects a traceback there, and our line belongs behind it. Other threads must not: they would land in it.
    """
    stream = sys.stderr
    if stream is not sys.__stderr__ and threading.current_thread() is threading.main_thread():
        stream.write(text)
        stream.flush()
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))
