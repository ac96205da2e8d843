"""Benchmarks start in one way, `python -m benchmarks.NAME`, and say what they can do."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks.turns import in_turn
from tests.rules.doc_commands import DOCUMENTS
from tests.support.hosts import ROOT
from tests.support.pool import run_code

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
    assert len(NAMES) == 25
    for path in SOURCES:
        others = re.findall(r"(?:python|torchrun)\b[^`\n]*\bbenchmarks/\w+\.py", path.read_text())
        assert not others, f"{path}: {others}"


IN_TURN = """
import sys
from benchmarks.turns import measure_in_turn
own, log, _, address = sys.argv[1:]
numbers = iter(range(10))
def measure():
    with open(log, "a") as file:
        file.write(own)
    return {"figure": float(own) + next(numbers)}
measure_in_turn(address, measure)
"""


def test_two_programs_measure_in_turn(tmp_path: Path) -> None:
    programs = [(ROOT, [sys.executable, "-c", IN_TURN, own, str(tmp_path / "log")]) for own in ("1", "5")]
    assert in_turn(programs, 3) == [{"figure": 2.0}, {"figure": 6.0}]
    assert (tmp_path / "log").read_text() == "155115"


def test_a_program_that_fails_is_named_with_what_it_said() -> None:
    with pytest.raises(SystemExit, match=r"no such thing(.|\n)*") as failed:
        in_turn([(ROOT, [sys.executable, "-c", "import sys; sys.exit('no such thing')"])], 1)
    assert "did not get ready" in str(failed.value)


def test_a_program_that_fails_in_its_turn_is_named_with_what_it_said(tmp_path: Path) -> None:
    failing = IN_TURN.replace(
        "    with open", '    if own == "5":\n        sys.exit("the disk is full")\n    with open'
    )
    programs = [(ROOT, [sys.executable, "-c", failing, own, str(tmp_path / "log")]) for own in ("1", "5")]
    with pytest.raises(SystemExit, match=r"ended while it measured:(.|\n)*the disk is full"):
        in_turn(programs, 2)
