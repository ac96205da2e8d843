"""Keeps how long each test took, by the clock and on processors, in the file that `make slowest` reads."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pool import TIMES

_USED = "processor_s"
_LONG_S = 0.5


def processor_seconds(root: int) -> float:
    """Return the seconds that a process and all below it have taken of processors, with those that have ended."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            parents[int(entry.name)] = int(words[1])
            ticks[int(entry.name)] = sum(map(int, words[11:15]))
    below = {root}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return sum(ticks.get(process, 0) for process in below) / os.sysconf("SC_CLK_TCK")


class Times:
    """A plugin of pytest. A worker of xdist measures; the process that has started it keeps and writes.

    Args:
        is_worker: whether this is a worker.
    """

    def __init__(self, *, is_worker: bool) -> None:
        self._is_worker = is_worker
        self._begin_s, self._used_s = 0.0, 0.0
        self._kept: dict[str, dict[str, float]] = {}

    def pytest_sessionstart(self) -> None:
        """Forget the jobs of the last run."""
        if not self._is_worker:
            path = Path(f"{os.environ[TIMES]}.jobs")
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """A test begins."""
        self._begin_s = time.monotonic()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        """Note what a long test has taken of processors; what short ones before it took counts as its own."""
        yield
        if time.monotonic() - self._begin_s > _LONG_S:
            used_s = processor_seconds(os.getpid())
            # Those below others that have ended may be missing.
            item.user_properties.append((_USED, max(0.0, used_s - self._used_s)))
            self._used_s = used_s

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what a part of a test took."""
        entry = self._kept.setdefault(report.nodeid, {"clock_s": 0.0, _USED: 0.0})
        entry["clock_s"] += report.duration
        if report.when == "teardown":
            entry[_USED] += sum(float(value) for name, value in report.user_properties if name == _USED)

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        if self._kept and not self._is_worker:
            Path(os.environ[TIMES]).write_text(json.dumps(self._kept, indent=0))
