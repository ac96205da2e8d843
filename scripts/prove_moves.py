"""Proves that moves changed no meaning: ``python scripts/move.py --prove OLD`` compares a tree with one from before."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from merge import defined_by, for_typing, globals_of, is_text, names_now

if TYPE_CHECKING:
    from move import Moves

# Whether a class opens it, whose names its functions do not see, and its names, imported ones with their place.
Scope = tuple[bool, Mapping[str, str | None]]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Resolve(Protocol):
    """Says where a global name is defined, as ``module:name`` after the moves."""

    def __call__(self, place: str, /) -> str: ...


@dataclass(frozen=True, slots=True)
class Side:
    """One of two trees that are compared.

    Attributes:
        names: what each global name of the module stands for.
        resolve: gives the place after the moves.
    """

    names: Mapping[str, str]
    resolve: Resolve

    def what(self, name: str, scopes: Sequence[Scope]) -> str:
        """Tell what a name stands for: a local, a builtin, or a definition of a module."""
        for depth, (is_class, scope) in enumerate(reversed(scopes)):
            if name in scope and not (is_class and depth):
                return self.resolve(place) if (place := scope[name]) else "local"
        return self.resolve(self.names[name]) if name in self.names else f"builtin {name}"


class Comparison:
    """Compares modules before and after moves.

    A name may be another one if it stands for the same definition, a text may differ where it names what moved, and
    imports may stand elsewhere.

    Args:
        moves: the table.
    """

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        pairs = {(old, new) for names in moves.names.values() for old, new in names.items()}
        leaves = {(old.rpartition(".")[2], new.rpartition(".")[2]) for old, new in moves.modules.items()}
        self._pairs = pairs | leaves

    def of(self, parts: Mapping[str, Path], dotted: str, path: Path) -> Iterator[str]:
        """Yield what differs between one or more modules and the one that they became.

        Args:
            parts: the files before, by their dotted names.
            dotted: the module's name now.
            path: its file now.
        """
        after = ast.parse(path.read_text())
        before = {part: ast.parse(file.read_text()) for part, file in parts.items()}
        yield from (f"{path}: {problem}" for problem in self._of_trees(before, dotted, after))

    def _of_trees(self, before: Mapping[str, ast.Module], dotted: str, after: ast.Module) -> Iterator[str]:
        now = Side(globals_of(after, dotted), lambda place: place.removeprefix("="))
        bodies = {part: [*_statements(tree, keeps_text=len(before) == 1)] for part, tree in before.items()}
        there = [*_statements(after, keeps_text=len(before) == 1)]
        starts = dict.fromkeys(before, 0) if len(before) == 1 else self._starts(bodies, there)
        yield from (f"{part}: nothing of it is there" for part in before.keys() - starts.keys())
        owners: dict[str, str] = {}
        for part, body in bodies.items():
            for name in {self._moves.name(part, name) for node in body for name in defined_by(node)}:
                if owners.setdefault(name, part) != part:
                    yield f"{name} is defined by {owners[name]} and by {part}"
        taken = [0] * len(there)
        for part, start in starts.items():
            was, body = Side(globals_of(before[part], part), self._after), bodies[part]
            found = there[start : start + len(body)]
            for place in range(start, start + len(found)):
                taken[place] += 1
            if len(before) == 1 and len(body) != len(there):
                yield f"{len(body)} statements, now {len(there)}"
            for old, new in zip(body, found, strict=False):
                yield from self._differ(old, new, was, now, [], [])
            missing = {name for name in was.names if _is_at_run(before[part], name)} - {
                name for name in now.names if _is_at_run(after, name)
            }
            used = {node.id for node in ast.walk(before[part]) if isinstance(node, ast.Name)}
            renamed = {self._after(was.names[name]).rpartition(":")[2] for name in missing & used} - now.names.keys()
            yield from (f"{name} is no longer there at run time" for name in sorted(renamed))
        yield from (
            f"line {there[place].lineno}: stands for {count} statements of before"
            for place, count in enumerate(taken)
            if count != 1
        )
        yield from _too_early(after, dotted)
        imported = [
            {each for tree in trees for each in self._imports(tree, dotted, is_old=place == 0)}
            for place, trees in enumerate([before.values(), [after]])
        ]
        if imported[0] != imported[1]:
            yield f"imports {imported[0] ^ imported[1]}"

    def _starts(self, bodies: Mapping[str, Sequence[ast.stmt]], there: Sequence[ast.stmt]) -> dict[str, int]:
        """Find where the statements of each part begin: at what its first definition defines."""
        by_name = {name: place for place, node in enumerate(there) for name in defined_by(node)}
        found: dict[str, int] = {}
        for part, body in bodies.items():
            for place, node in enumerate(body):
                names = [self._moves.name(part, name) for name in defined_by(node)]
                if names and names[0] in by_name:
                    found[part] = by_name[names[0]] - place
                    break
        return found

    def _after(self, place: str) -> str:
        """Give the place of a definition after the moves."""
        module, _, name = place.removeprefix("=").partition(":")
        if not name or module.partition(".")[0] not in ("vtp_plugin", "tests"):
            return place.removeprefix("=")
        if place.startswith("="):
            return f"{self._moves.module(module)}:{self._moves.name(module, name)}"
        home, name, _ = self._moves.imported(module, name)
        return f"{home}:{name}"

    def _imports(self, tree: ast.AST, dotted: str, *, is_old: bool) -> Iterator[str]:
        for node in ast.walk(tree):
            if not _is_ours(node):
                continue
            for alias in node.names:
                home, name = (
                    self._moves.imported(str(node.module), alias.name)[:2] if is_old else (node.module, alias.name)
                )
                if home != dotted:
                    yield f"{home}.{name}"

    def _differ(
        self, old: object, new: object, was: Side, now: Side, old_scopes: list[Scope], new_scopes: list[Scope]
    ) -> Iterator[str]:
        if isinstance(old, ast.AST) and isinstance(new, ast.AST):
            if type(old) is not type(new):
                yield f"line {getattr(new, 'lineno', '?')}: {type(old).__name__}, now {type(new).__name__}"
                return
            if isinstance(old, ast.Name) and isinstance(new, ast.Name):
                meanings = was.what(old.id, old_scopes), now.what(new.id, new_scopes)
                if meanings[0] != meanings[1]:
                    yield f"line {new.lineno}: {old.id} was {meanings[0]}, now {new.id} is {meanings[1]}"
            inner = ([*old_scopes, *_scope(old)], [*new_scopes, *_scope(new)])
            for name in old._fields:
                yield from self._differ(getattr(old, name, None), getattr(new, name, None), was, now, *inner)
        elif isinstance(old, list) and isinstance(new, list):
            ours, theirs = ([node for node in nodes if not _is_ours(node)] for nodes in (old, new))
            if len(ours) != len(theirs):
                yield f"{len(ours)} nodes, now {len(theirs)}: {[ast.dump(each)[:80] for each in theirs[:2]]}"
                return
            for one, other in zip(ours, theirs, strict=True):
                yield from self._differ(one, other, was, now, old_scopes, new_scopes)
        elif old != new and not (isinstance(old, str) and isinstance(new, str) and self._is_explained(old, new)):
            yield f"{old!r}, now {new!r}"

    def _is_explained(self, old: str, new: str) -> bool:
        words = [re.findall(r"\w+", text) for text in (self._moves.ids(self._moves.text(old)), new)]
        return len(words[0]) == len(words[1]) and all(
            one == other or (one, other) in self._pairs for one, other in zip(*words, strict=True)
        )


def _is_ours(node: Any) -> bool:
    is_from = isinstance(node, ast.ImportFrom) and not node.level
    return is_from and str(node.module).partition(".")[0] in ("vtp_plugin", "tests")


def _statements(tree: ast.Module, *, keeps_text: bool) -> Iterator[ast.stmt]:
    """Yield the module-level statements but imports, and the module's documentation if parts are joined."""
    for place, node in enumerate(tree.body):
        is_import = isinstance(node, ast.Import | ast.ImportFrom) or for_typing(node)
        if not is_import and (keeps_text or place or not is_text(node)):
            yield node


def _is_at_run(tree: ast.Module, name: str) -> bool:
    """Tell whether a global name exists while the module runs, not for annotations alone."""
    typed = {
        alias.asname or alias.name
        for node in tree.body
        for inner in for_typing(node)
        for alias in getattr(inner, "names", [])
    }
    plain = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    return name not in typed or name in plain


def _too_early(tree: ast.Module, dotted: str) -> Iterator[str]:
    """Yield what module-level statements use before it is defined."""
    defined: set[str] = set()
    own = {name for name, place in globals_of(tree, dotted).items() if place.startswith("=")}
    for node in tree.body:
        defined |= {*defined_by(node)}
        defined |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        yield from (f"line {node.lineno}: uses {name} too early" for name in {*names_now(node)} & own - defined)


def _scope(node: ast.AST) -> list[Scope]:
    """Return the scope that a node opens: its names, and for imported ones what they stand for."""
    if not isinstance(node, (*_FUNCTIONS, *_COMPREHENSIONS, ast.ClassDef)):
        return []
    found: dict[str, str | None] = {}
    if isinstance(node, _FUNCTIONS):
        found.update({arg.arg: None for arg in ast.walk(node.args) if isinstance(arg, ast.arg)})
    for inner in _within(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            found[inner.id] = None
        elif (
            isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            or isinstance(inner, ast.ExceptHandler)
            and inner.name
        ):
            found[inner.name] = None
        elif isinstance(inner, ast.ImportFrom):
            found.update({(alias.asname or alias.name): f"{inner.module}:{alias.name}" for alias in inner.names})
        elif isinstance(inner, ast.Import):
            found.update({alias.asname or alias.name.partition(".")[0]: f"{alias.name}:" for alias in inner.names})
    return [(isinstance(node, ast.ClassDef), found)]


def _within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, and those that open others, but not what is in these."""
    for inner in ast.iter_child_nodes(node):
        yield inner
        if not isinstance(inner, (*_FUNCTIONS, *_COMPREHENSIONS, ast.ClassDef)):
            yield from _within(inner)
