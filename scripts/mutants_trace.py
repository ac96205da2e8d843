"""Note which functions of the plugin each test enters, and which lines any test runs, in every process of the tests.

``scripts/mutants.py measure`` copies this file as ``sitecustomize.py`` to the root of a copy of the repository, which
is on the path of every process that a test starts. Python 3.12 and later (``sys.monitoring``, PEP 669).
"""

from __future__ import annotations

import os
import sys
from types import CodeType
from typing import Any

_TEST = "PYTEST_CURRENT_TEST"  # pytest sets it, tests/support/pool.py hands it to its workers
_FOLDER = "VTP_MUTANTS_TRACE"  # one file per process is written there
_ROOT = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PARTS = (_ROOT + "vtp_plugin" + os.sep, _ROOT + "patches" + os.sep)


class _Trace:
    """Writes a line at the first event of its kind, since a test may end its processes at any time."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._test = _name(os.environ.get(_TEST, ""))
        self._forget()

    def start(self) -> None:
        monitoring = sys.monitoring
        events = monitoring.events
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "mutants")
        monitoring.register_callback(monitoring.COVERAGE_ID, events.PY_START, self._on_start)
        monitoring.register_callback(monitoring.COVERAGE_ID, events.LINE, self._on_line)
        monitoring.set_events(monitoring.COVERAGE_ID, events.PY_START | events.LINE)
        os.register_at_fork(after_in_child=self._forget)
        sys.addaudithook(self._on_audit)

    def _forget(self) -> None:
        """Begin a file of this process's own."""
        self._file = None
        self._functions: set[tuple[str, CodeType]] = set()
        self._lines: set[tuple[CodeType, int]] = set()

    def _on_audit(self, event: str, args: tuple[Any, ...]) -> None:
        # os.environ[...] = ... is what says that the next test has begun.
        if event == "os.putenv" and args[0] in (_TEST, _TEST.encode()):
            name = _name(os.fsdecode(args[1]))
            if name != self._test:
                self._test = name
                sys.monitoring.restart_events()

    def _on_start(self, code: CodeType, _offset: int) -> Any:
        if code.co_filename.startswith(_PARTS) and (key := (self._test, code)) not in self._functions:
            self._functions.add(key)
            self._write(f"F\t{self._test}\t{_path(code)}\t{code.co_qualname}\n")
        return sys.monitoring.DISABLE

    def _on_line(self, code: CodeType, line: int) -> Any:
        if code.co_filename.startswith(_PARTS) and (key := (code, line)) not in self._lines:
            self._lines.add(key)
            self._write(f"L\t{_path(code)}\t{line}\n")
        return sys.monitoring.DISABLE

    def _write(self, text: str) -> None:
        if self._file is None:
            self._file = os.open(
                os.path.join(self._folder, f"{os.getpid()}-{os.urandom(4).hex()}"),
                os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
            )
        os.write(self._file, text.encode())


def _name(value: str) -> str:
    """Cut what pytest adds.

    >>> _name("tests/unit/cli/test_cli.py::test_plan[1 2] (call)")
    'tests/unit/cli/test_cli.py::test_plan[1 2]'
    """
    return value.rpartition(" (")[0]


def _path(code: CodeType) -> str:
    path = os.path.realpath(code.co_filename)[len(_ROOT) :]
    return path


if folder := os.environ.get(_FOLDER):
    _Trace(folder).start()
