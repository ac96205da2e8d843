"""Files fit in a head and functions on a screen; what is data may be longer."""

from __future__ import annotations

import ast

import pytest

from tests.import_rules import sources

MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60  # without its docstring
DATA = {"vtp_plugin.options.table.rows"}
SOURCES = dict(sources())


@pytest.mark.parametrize("module", sorted(SOURCES.keys() - DATA))
def test_files_and_functions_are_short(module: str) -> None:
    source = SOURCES[module]
    assert len(source.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert _num_lines(node) <= MAX_FUNCTION_LINES, f"{node.name}, line {node.lineno}"


def test_what_counts_as_data_exists() -> None:
    assert SOURCES.keys() >= DATA


def _num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    docstring = ast.get_docstring(node, clean=False)
    return node.end_lineno - node.lineno + 1 - (len(docstring.splitlines()) if docstring else 0)  # type: ignore[operator]
