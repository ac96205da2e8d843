"""Every `>>>` example of the plugin, of the ordering models and of helpers is run and gives what it shows.

Caught two stale examples in helpers of the tests as soon as it looked there (5521d9f).
"""

from __future__ import annotations

import doctest
import importlib
import io
import re
from types import ModuleType

import pytest

from tests.rules.import_rules import ROOT, sources

pytestmark = pytest.mark.smoke

EXAMPLE = re.compile(r"^ *>>> ", re.MULTILINE)
HELPERS = [
    (f"{folder}.{path.stem}", path.read_text())
    for folder in ("tests.ordering", "tests.rules", "tests.support", "tests.mindspeed", "scripts")
    for path in sorted(ROOT.joinpath(*folder.split(".")).glob("*.py"))
]
MODULES = {name.removesuffix(".__init__"): source for name, source in [*sources(), *HELPERS] if EXAMPLE.search(source)}


def run_examples(module: ModuleType) -> tuple[int, str]:
    """Run all examples of a module; return how many lines were run, and the report of the failures."""
    report = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False)
    for test in doctest.DocTestFinder().find(module):
        runner.run(test, out=report.write)
    return runner.tries, report.getvalue()


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_right(name: str) -> None:
    attempted, report = run_examples(importlib.import_module(name))
    assert not report, report
    # An example at a place where doctest does not look would never be run.
    assert attempted == len(EXAMPLE.findall(MODULES[name]))


def test_pure_packages_have_examples() -> None:
    packages = {name.split(".")[1] for name in MODULES}
    assert {"config", "host", "ordering", "plan", "tune"} <= packages


def test_wrong_example_is_found() -> None:
    module = ModuleType("wrong")
    module.__doc__ = ">>> 1 + 1\n3\n"
    _, report = run_examples(module)
    assert "Expected:\n    3" in report and "Got:\n    2" in report
