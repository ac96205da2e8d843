"""Keeps when the lanes that need fetched trees last ran, and on what; says so below every run of whole grids."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import subprocess
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.hosts import ROOT

KEPT = ROOT / "tests" / "mindspeed" / "lanes.json"
TREES = {
    "MindSpeed-LLM": ("VTP_MINDSPEED_LLM", "VTP_MINDSPEED", "VTP_MEGATRON_LM"),
    "MindSpeed-MM": ("VTP_MINDSPEED_MM", "VTP_MINDSPEED", "VTP_MEGATRON_LM"),
}
"""By lane, the variables that name its trees."""


def lane_of(test: str) -> str:
    """Name the lane that a test belongs to; "" if it needs no tree.

    >>> lane_of("tests/mindspeed/test_lane.py::test_u_shape"), lane_of("tests/mindspeed/test_fake.py::test_a")
    ('MindSpeed-LLM', '')
    """
    name = Path(test.partition("::")[0]).name
    if not name.startswith(("test_lane", "test_mm_")):
        return ""
    return "MindSpeed-MM" if name.startswith("test_mm_") else "MindSpeed-LLM"


def identify(tree: Path) -> str:
    """Return the commit of a tree, or a digest of its Python sources where it is no clone."""
    asked = subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "--show-toplevel", "HEAD"], capture_output=True, text=True
    )
    top, _, commit = asked.stdout.strip().partition("\n")
    if commit and Path(top) == tree.resolve():
        return commit[:12]
    digest = hashlib.sha256()
    for path in sorted(tree.rglob("*.py")):
        digest.update(f"{path.relative_to(tree)}\0".encode() + path.read_bytes())
    return f"sources {digest.hexdigest()[:12]}"


def line_of(lane: str, kept: dict[str, dict[str, object]]) -> str:
    """Say in one line when a lane last ran.

    >>> line_of("MindSpeed-MM", {})
    'MindSpeed-MM: no run is on record; see make test-lanes'
    >>> line_of("MindSpeed-LLM", {"MindSpeed-LLM": {"date": "2026-11-29", "commit": "1a2b", "tests": {"passed": 3}}})
    "MindSpeed-LLM: last ran {'date': '2026-11-29', 'commit': '1a2b', 'tests': {'passed': 3}}"
    """
    return f"{lane}: last ran {kept[lane]}" if lane in kept else f"{lane}: no run is on record; see make test-lanes"


class Lanes:
    """A plugin of pytest: counts what came of the tests of each lane.

    Args:
        marks: of the tests that were chosen.
        is_whole: no test was chosen by its name.
    """

    def __init__(self, marks: str, *, is_whole: bool) -> None:
        self._marks, self._is_whole = marks, is_whole
        self.outcomes: dict[str, Counter[str]] = {lane: Counter() for lane in TREES}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test of a lane that ran, or failed before it could."""
        lane = lane_of(report.nodeid)
        if lane and not report.skipped and (report.when == "call" or report.failed):
            self.outcomes[lane][report.outcome] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Keep what ran in this session with all its trees; say of every lane when it last ran."""
        kept = json.loads(KEPT.read_text())
        for lane, outcomes in self.outcomes.items():
            trees = {name: os.environ.get(name, "") for name in TREES[lane]}
            if outcomes and self._is_whole and all(trees.values()):
                commit = subprocess.run(
                    ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
                )
                kept[lane] = {
                    "date": datetime.date.today().isoformat(),
                    "commit": commit.stdout.strip(),
                    "marked": self._marks or "any",
                    "tests": dict(sorted(outcomes.items())),
                    "trees": {name: identify(Path(path)) for name, path in trees.items()},
                    "python": platform.python_version(),
                    "torch": version("torch"),
                }
                KEPT.write_text(json.dumps(kept, indent=1) + "\n")
            terminalreporter.write_line(line_of(lane, kept))


def pytest_configure(config: pytest.Config) -> None:
    """Count where the reports of all workers come together, in runs that may have tests of a lane."""
    if not hasattr(config, "workerinput") and "not full" not in config.option.markexpr:
        is_whole = not config.option.keyword and not any("::" in place for place in config.args)
        config.pluginmanager.register(Lanes(config.option.markexpr, is_whole=is_whole))
