"""Benchmarks start in one way, `python -m benchmarks.NAME`, and say what they can do."""

from __future__ import annotations

import re

import pytest

from tests.doc_commands import DOCUMENTS
from tests.hosts import ROOT
from tests.pool import run_code

MAIN = 'if __name__ == "__main__"'
NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if MAIN in path.read_text())
SOURCES = [*DOCUMENTS, ROOT / "Makefile", *(ROOT / "benchmarks").rglob("*.py")]


@pytest.mark.needs("bridges")  # benchmarks.bridge compares with Megatron's
def test_each_starts_and_shows_its_help() -> None:
    """One process starts all; it has imported torch and Megatron."""
    run_code(f"""
import contextlib, io, runpy, sys
for name in {NAMES}:
    sys.argv, said = [name, "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_module(f"benchmarks.{{name}}", run_name="__main__")
    except SystemExit as ended:
        assert ended.code == 0, (name, ended.code)
    else:
        raise AssertionError(f"{{name}} has no --help")
    assert f"python -m benchmarks.{{name}}" in said.getvalue(), said.getvalue()
""")


def test_no_document_starts_one_in_another_way() -> None:
    assert len(NAMES) == 16
    for path in SOURCES:
        others = re.findall(r"(?:python|torchrun)\b[^`\n]*\bbenchmarks/\w+\.py", path.read_text())
        assert not others, f"{path}: {others}"
