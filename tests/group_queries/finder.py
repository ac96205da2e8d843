"""Finds, in Megatron's sources, the functions that read a group's ranks or compare groups, whether a test runs them."""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

_READERS = frozenset({"get_process_group_ranks", "get_global_rank", "get_group_rank"})
_GROUP = re.compile(r"(?:^|[._])(?:group|pg)(?:\(.*\))?$")
_COMPARES = (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)


def callers_in(folder: Path, package: str) -> dict[str, set[str]]:
    """Give the functions of a package that read ranks ("ranks") or compare groups ("identity").

    Args:
        folder: the package's.
        package: its name.
    """
    found: dict[str, set[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        source = path.read_text(encoding="utf-8")
        for name, asks in queries_of(source) if "group" in source or "pg" in source else ():
            found.setdefault(f"{module}:{name}", set()).add(asks)
    return found


def queries_of(source: str) -> Iterator[tuple[str, str]]:
    """Yield the functions of a file that read a group's ranks or compare groups, and which of the two.

    >>> text = "class C:\\n def f(self):\\n  return self.group is other\\ndef g(pg):\\n  get_process_group_ranks(pg)"
    >>> list(queries_of(text))
    [('C.f', 'identity'), ('g', 'ranks')]
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # theirs
        tree = ast.parse(source)
    yield from _walk(tree, ())


def _walk(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _walk(child, (*names, child.name))
            continue
        asks = _asks(child)
        if asks:
            yield ".".join(names) or "<module>", asks
        yield from _walk(child, names)


def _asks(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call):
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        return "ranks" if name in _READERS else None
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], _COMPARES):
        operands = [node.left, *node.comparators]
        is_about_groups = any(_GROUP.search(ast.unparse(one)) for one in operands)
        return "identity" if is_about_groups and not any(map(_is_plain, operands)) else None
    return None


def _is_plain(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant | ast.JoinedStr | ast.Tuple | ast.List)


@functools.cache
def _definitions(path: str) -> list[tuple[int, int, str]]:
    found: list[tuple[int, int, str]] = []

    def walk(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inside = names
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inside = (*names, child.name)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([child.lineno, *(one.lineno for one in child.decorator_list)])
                found.append((first, child.end_lineno or first, ".".join(inside)))
                continue  # what is inside is part of it
            walk(child, inside)

    walk(ast.parse(Path(path).read_text(encoding="utf-8")), ())
    return found


def qualname_at(path: str, line: int) -> str:
    """Give the outermost function of a file that holds a line, with its classes; Python 3.10 does not tell it."""
    return next((name for first, last, name in _definitions(path) if first <= line <= last), "<module>")
