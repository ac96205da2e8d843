"""What ends before the plugin is installed: an older Python, and one without a package, get one line."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rules.import_rules import ROOT
from vtp_plugin.can_start import why_not

# As `python -m vtp_plugin doctor` does, in a Python that is said to be another.
START = """
import runpy
import sys
if {version}:
    sys.version_info = {version} + ("final", 0)
else:
    sys.modules["packaging"] = None
sys.argv = {argv}
runpy.run_module("vtp_plugin", run_name="__main__")
"""
OLD = "Python 3.9 is too old; vtp_plugin needs 3.10 or newer; start it with such a Python"


def started(version: tuple[int, ...], *argv: str) -> subprocess.CompletedProcess[str]:
    """Start the plugin; without a version in this one, without `packaging`."""
    command = [sys.executable, "-c", START.format(version=version, argv=[*argv])]
    return subprocess.run(command, cwd=ROOT, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("argv", [("-m", "doctor"), ("/somewhere/bin/vtp", "plan")])
def test_a_command_is_one_line(argv: tuple[str, ...]) -> None:
    old, bare = started((3, 9, 2), *argv), started((), *argv)
    assert (old.returncode, old.stdout, old.stderr) == (2, "", f"vtp_plugin: error: {OLD}\n")
    assert (bare.returncode, bare.stdout, bare.stderr.count("\n")) == (2, "", 1)
    assert bare.stderr.startswith("vtp_plugin: error: packaging cannot be imported (")
    assert bare.stderr.endswith("); vtp_plugin needs it; pip install packaging\n")


def test_an_import_fails_with_the_same_line() -> None:
    """A program that imports the plugin is not ended by it."""
    done = started((3, 9, 2), "train.py")
    assert done.returncode == 1 and done.stderr.endswith(f"ImportError: {OLD}\n")


def test_this_python_starts_it() -> None:
    assert why_not(sys.version_info[:2]) == "" and why_not((3, 10)) == "" and why_not((4, 0)) == ""
    assert why_not((3, 6)) == OLD.replace("3.9", "3.6")


@pytest.mark.parametrize("name", ["__init__.py", "__main__.py", "can_start.py"])
def test_an_older_python_comes_as_far_as_the_line(name: str) -> None:
    """It compiles what stands before; `annotations` of the future are newer than Python 3.6."""
    source = (Path(ROOT) / "vtp_plugin" / name).read_text()
    tree = ast.parse(source, feature_version=(3, 7))
    assert not any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
    assert not any(isinstance(node, (ast.NamedExpr, ast.Match)) for node in ast.walk(tree))
    if name == "__init__.py":
        imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert imported[0] == "vtp_plugin.can_start"
