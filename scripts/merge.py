"""Join modules to one file, as ``[merges]`` of a table lists them; ``scripts/move.py`` calls it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_FUTURE = "__future__"


@dataclass(slots=True)
class Part:
    """A module that is joined with others, as it reads after all names in it are renamed.

    Attributes:
        name: dotted name before.
        text: its source.
        tree: its syntax tree.
        names: what its names stand for, see :func:`globals_of`.
        own: the names that it defines.
        story: its documentation, if that is more than one line.
    """

    name: str
    text: str
    tree: ast.Module = field(init=False)
    names: dict[str, str] = field(init=False)
    own: set[str] = field(init=False)
    story: str = field(init=False)

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.text)
        self.names = globals_of(self.tree, self.name)
        self.own = {name for name, place in self.names.items() if place.startswith("=")}
        told = ast.get_docstring(self.tree) or ""
        self.story = told if "\n" in told else ""


def joined(new: str, doc: str, parts: Sequence[Part]) -> tuple[str, list[str]]:
    """Join modules to one.

    Args:
        new: its dotted name; the parts' imports from each other name it already.
        doc: the first line of its documentation; the parts' own follows.
        parts: what is joined; what a module-level statement needs comes before it.

    Returns:
        The source, whose imports are not sorted, and what is in the way.
    """
    imports: dict[str, None] = {}
    typing: dict[str, None] = {}
    bodies: list[str] = []
    problems: list[str] = []
    for part in in_order(parts, new):
        if any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in part.tree.body):
            problems.append(f"{part.name} runs as a script, perhaps where nothing of the others can be imported")
        lines = part.text.splitlines(keepends=True)
        body = [*lines]
        for node in part.tree.body:
            if node is part.tree.body[0] and is_text(node):
                _blank(body, node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                imports.update(dict.fromkeys(_of_others(node, lines, new, problems)))
                _blank(body, node)
            elif typed := for_typing(node):
                for inner in typed:
                    typing.update(dict.fromkeys(_of_others(inner, lines, new, problems)))
                _blank(body, node)
        for node in ast.walk(part.tree):
            if isinstance(node, ast.ImportFrom) and node.module == new and node.col_offset:
                problems += [f"{part.name}: renames {a.name} in a function" for a in node.names if a.asname]
                _blank(body, node)
        bodies.append("".join(body).strip("\n"))
    problems += [f"{new}: {text}" for text in collisions(parts, new)]
    stories = [part.story for part in parts if part.story]
    text = "\n\n".join([doc, *stories]) + ("\n" if stories else "")
    head = [f'"""{text}"""\n', "\nfrom __future__ import annotations\n\n", *(f"{line}\n" for line in imports)]
    if typing:
        head += ["\nif TYPE_CHECKING:\n", *(f"    {line}\n" for line in typing)]
    return "".join([*head, "\n\n", "\n\n\n".join(bodies), "\n"]), problems


def is_text(node: ast.stmt) -> bool:
    """Tell whether a statement is a text: a module's documentation."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def for_typing(node: ast.stmt) -> list[ast.stmt]:
    """Return what a module imports for its annotations alone, if the statement is that."""
    return node.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" else []


def _blank(body: list[str], node: ast.stmt) -> None:
    for line in range(node.lineno - 1, node.end_lineno or node.lineno):
        body[line] = ""


def _of_others(node: ast.stmt, lines: Sequence[str], new: str, problems: list[str]) -> Iterator[str]:
    """Yield the imports of a statement, each on a line, but for those from the joined module."""
    comment = lines[node.lineno - 1].partition("  # noqa")[2].rstrip()
    mark = f"  # noqa{comment}" if comment else ""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield f"import {alias.name}{f' as {alias.asname}' if alias.asname else ''}{mark}"
    elif isinstance(node, ast.ImportFrom) and node.module == new:
        problems += [f"{new}: imports {a.name} of itself as {a.asname}" for a in node.names if a.asname]
    elif isinstance(node, ast.ImportFrom) and node.module != _FUTURE:
        for alias in node.names:
            yield f"from {node.module} import {alias.name}{f' as {alias.asname}' if alias.asname else ''}{mark}"
    elif not isinstance(node, ast.ImportFrom):
        problems.append(f"{new}: no import: {ast.unparse(node)[:60]}")


def globals_of(tree: ast.Module, own: str) -> dict[str, str]:
    """Tell what each name of a module stands for: ``"module:name"``, with ``=`` in front if the module defines it."""
    found: dict[str, str] = {}
    for node in _top_level(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or root] = f"{root}:"
        elif isinstance(node, ast.ImportFrom):
            found.update({(a.asname or a.name): f"{node.module}:{a.name}" for a in node.names})
        else:
            found.update({name: f"={own}:{name}" for name in defined_by(node)})
    return found


def defined_by(node: ast.stmt) -> list[str]:
    """List the names that a module-level statement defines; one that imports defines none."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    return [*_assigned(node)]


def _assigned(node: ast.stmt) -> Iterator[str]:
    targets: list[ast.expr] = [*node.targets] if isinstance(node, ast.Assign) else []
    targets += [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For) else []
    targets += [item.optional_vars for item in node.items if item.optional_vars] if isinstance(node, ast.With) else []
    for target in targets:
        yield from (
            name.id for name in ast.walk(target) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        )
    for inner in [*getattr(node, "body", []), *getattr(node, "orelse", [])]:
        yield from _assigned(inner)


def _top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in tree.body:
        yield from for_typing(node) or [node]


def collisions(parts: Sequence[Part], new: str) -> Iterator[str]:
    """Yield the names that stand for different things in two parts, or are defined in two."""
    seen: dict[str, tuple[str, str]] = {}
    home = {name: part.names[name] for part in parts for name in part.own}
    for part in parts:
        for name, place in part.names.items():
            module, _, imported = place.partition(":")
            resolved = home.get(imported, f"{new}:{imported}, which no part defines") if module == new else place
            other, first = seen.setdefault(name, (resolved, part.name))
            if other != resolved:
                yield f"{name} is {other} in {first} and {resolved} in {part.name}"


def needed_at_import(part: Part, new: str) -> set[str]:
    """Return what a part takes from the joined module while it is imported: outside of functions' bodies."""
    taken = {
        alias.asname or alias.name
        for node in part.tree.body
        if isinstance(node, ast.ImportFrom) and node.module == new
        for alias in node.names
    }
    return taken & {name for node in part.tree.body for name in names_now(node)}


def names_now(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement uses when it is carried out: not those in bodies of functions."""
    if isinstance(node, ast.Name):
        yield node.id
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        inner: list[ast.AST] = [*node.args.defaults, *(one for one in node.args.kw_defaults if one is not None)]
        inner += getattr(node, "decorator_list", [])
    else:
        inner = [*ast.iter_child_nodes(node)]
        if isinstance(node, ast.AnnAssign):  # annotations are texts here
            inner = [one for one in (node.target, node.value) if one is not None]
    for one in inner:
        yield from names_now(one)


def in_order(parts: Sequence[Part], new: str) -> list[Part]:
    """Order parts so that what one needs at import stands before it; else as they are listed.

    Raises:
        ValueError: two need each other.
    """
    left, placed = [*parts], list[Part]()
    while left:
        there = {name for part in placed for name in part.own}
        ready = next((part for part in left if needed_at_import(part, new) <= there), None)
        if ready is None:
            raise ValueError(f"{new}: {', '.join(part.name for part in left)} need each other at import")
        placed.append(ready)
        left.remove(ready)
    return placed
