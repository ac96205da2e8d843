"""What the product's messages tell users to do, found in its source, so that a test can do each of it.

Caught four lines on broken indexes of shards that named no rule (3f532c4).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.rules.import_rules import ROOT


def messages(paths: Iterable[str]) -> Iterator[str]:
    """Yield the lines ``value; rule; way out`` of files, and parts of them, with ``{}`` for what is put into them."""
    for path in paths:
        tree = ast.parse((ROOT / path).read_text())
        documented = {id(node.body[0].value) for node in ast.walk(tree) if _has_docstring(node)}  # type: ignore[attr-defined]
        inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and id(node) not in inner):
                text = _text(node)
                if id(node) not in documented and "; " in text:
                    yield text


def files_of(*folders: str) -> list[str]:
    """Return the files of folders of the product, in order."""
    return [str(path.relative_to(ROOT)) for folder in folders for path in sorted(Path(ROOT / folder).rglob("*.py"))]


def matches(skeleton: str, said: str) -> bool:
    """Tell whether a line was made of a skeleton."""
    parts = [re.escape(part) for part in skeleton.split("{}")]
    return re.search(".*?".join(parts), said) is not None


def _has_docstring(node: ast.AST) -> bool:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    assert isinstance(node, ast.JoinedStr)
    return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
