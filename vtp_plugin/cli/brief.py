"""``run --brief``: a few lines on the terminal; all else that the ranks of a node print goes into one file.

The file descriptors 1 and 2 themselves lead there, so what C libraries and child processes print goes there, too. Each
line is in the file when it is written: a run that is killed leaves it whole. What other ranks of the node have said is
looked up at the end of the file, where it is if they have said it at the same time.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import io
import logging
import os
import re
import socket
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, ClassVar, TextIO

from vtp_plugin.errors import ConfigError
from vtp_plugin.runtime.health.redaction import describe_error
from vtp_plugin.util import log
from vtp_plugin.util.text import one_line, plain

_NUM_LAST, _END_BYTES = 20, 1 << 20
_NUM_KEPT, _NUM_TRIES = 1000, 50
_NUM_MADE_UP = 8  # letters with which tempfile makes a folder's name
_LINE_BUFFERED = 1  # _IOLBF of the C libraries of Linux
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_ERROR = re.compile(rb"\[vtp(?: rank \d+)?\] error: ")


def file_name(environment: Mapping[str, str], host: str) -> str:
    """Name the file of a node: one name for all ranks that one launcher starts there, whenever it restarts them.

    Args:
        environment: variables of this process.
        host: name of the node.

    >>> file_name({"RANK": "1", "TORCHELASTIC_ERROR_FILE": "/tmp/x/none_ab12cd34/attempt_0/1/error.json"}, "n3")
    'vtp-run-n3-ab12cd34.log'
    """
    error_file = Path(environment.get("TORCHELASTIC_ERROR_FILE", ""))
    launcher = os.getppid() if "RANK" in environment else os.getpid()
    return f"vtp-run-{host}-{error_file.parent.parent.parent.name[-_NUM_MADE_UP:] or launcher}.log"


def begin(environment: Mapping[str, str] = os.environ) -> None:
    """Lead all that this process prints into the file of its node, but for what a run with ``--brief`` shows.

    Args:
        environment: variables of this process.

    Raises:
        ConfigError: the file cannot be written.
    """
    path = Path.cwd() / file_name(environment, socket.gethostname())
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise ConfigError(f"--brief: {error.strerror}: {path}; start in a folder that can be written") from None
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    handler = BriefHandler(path, os.dup(1), os.dup(2))
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        library = ctypes.CDLL(None)
        library.setvbuf(ctypes.c_void_p.in_dll(library, "stdout"), None, _LINE_BUFFERED, ctypes.c_size_t(0))
    log.install(handler=handler)
    warnings.showwarning = handler.show_warning
    sys.excepthook = _with_line(sys.excepthook)
    if environment.get("LOCAL_RANK", "0") == "0":
        handler.to_terminal(f"all else that this node prints goes into {path}")


def _with_line(before: _Hook) -> _Hook:
    """Make an exception hook that says the error in a line of the plugin's, too, behind its traceback."""

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        log.error(describe_error(error))

    return report


class BriefHandler(log.Handler):
    """Writes all records to the file; each warning and the first error of the node's ranks to the terminal, too.

    Args:
        path: path of the file.
        output: file descriptor of the terminal that standard output was.
        errors: file descriptor of the terminal that standard error was.
    """

    is_brief: ClassVar[bool] = True

    def __init__(self, path: Path, output: int, errors: int) -> None:
        super().__init__()
        self._path, self._output, self._errors = path, output, errors
        self._begin = self._size()  # what is before that may be of an earlier attempt
        self._said: deque[str] = deque(maxlen=_NUM_KEPT)  # warnings of this process

    def to_terminal(self, text: str) -> None:
        """Write a text to the terminal."""
        log.write_at_once(self._output, f"{plain(text)}\n")

    def show_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Show a warning of Python's as ``warnings.showwarning`` does, but as one of the plugin's."""
        self._warn(f"{category.__name__}: {message}", f" ({filename}:{lineno})")

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        if record.levelno < logging.WARNING:
            super().emit(record)
        elif record.levelno < logging.ERROR:
            self._warn(record.getMessage())
        elif self._is_new(log.format_record(logging.ERROR, record.getMessage(), rank=self.rank), _ERROR, self._begin):
            if sys.stderr is sys.__stderr__:
                self._show_end()
            else:  # torch's exception hook collects a traceback there, which comes when the hook returns
                atexit.register(self._show_end)

    def _warn(self, text: str, where: str = "") -> None:
        text = one_line(text)  # not cut into lines, which would depend on the width of the rank's number
        written = re.escape(text.encode(errors="backslashreplace"))
        known = re.compile(rb"\[vtp(?: rank \d+)?\] warning: %b(?: \(.*:\d+\))?\n" % written)
        line = log.format_record(logging.WARNING, f"{text}{where}", rank=self.rank, width=sys.maxsize)
        if text in self._said:
            log.write_at_once(2, line)
        else:
            self._said.append(text)
            self._is_new(line, known)

    def _is_new(self, line: str, known: re.Pattern[bytes], begin: int = 0) -> bool:
        """Write a line to the file and, unless a line there is known, to the terminal; tell whether that was done.

        Args:
            line: what is written.
            known: begins a line with which a rank of this node has said it.
            begin: from where on such a line counts.
        """
        is_new = True
        with contextlib.suppress(OSError), self._path.open("ab+") as file:
            _lock(file)
            file.seek(max(begin, self._size() - _END_BYTES))
            is_new = not any(map(known.match, file))
            log.write_at_once(2, line)
        if is_new:
            log.write_at_once(self._errors, line)
        return is_new

    def _size(self) -> int:
        return self._path.stat().st_size

    def _show_end(self) -> None:
        """Write the last lines of the file to the terminal."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(max(0, self._size() - _END_BYTES))
            lines = [plain(line.decode(errors="replace").rstrip("\n")) for line in deque(file, maxlen=_NUM_LAST)]
            log.write_at_once(self._errors, "\n".join([f"the last lines of {self._path}:", *lines, ""]))


def _lock(file: IO[bytes]) -> None:
    """Wait until no other rank of the node looks and writes, for a second at most: it may have been stopped."""
    for _ in range(_NUM_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(1.0 / _NUM_TRIES)
        except OSError:  # some network file systems have no locks
            return
