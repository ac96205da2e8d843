"""Names are taken once; a list of records writes nothing."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.rules.import_rules import ROOT, circles, sources

SOURCES = dict(sources())
TREES = {module: ast.parse(source) for module, source in SOURCES.items()}
Function = ast.FunctionDef | ast.AsyncFunctionDef
RECORDS = re.compile(r"(^|_)records?(_at)?$")


def test_no_file_and_no_public_class_has_the_name_of_another() -> None:
    """But where it is Megatron's: patches mirror its paths, and may hold two modules of one name."""
    files = Counter(module.rpartition(".")[2] for module in SOURCES if not module.endswith("__init__"))
    mirrored = re.compile(r"vtp_plugin\.patches\.(core|training)\.")
    ours = {module.rpartition(".")[2] for module in SOURCES if not mirrored.match(module)}
    assert [name for name, number in files.items() if number > 1 and name in ours - {"__init__"}] == []
    classes = Counter(node.name for tree in TREES.values() for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, number in classes.items() if number > 1 and not name.startswith("_")] == []


def test_a_package_says_which_modules_it_has() -> None:
    """What its docstring names in snake case is one of them, or something that they define, or Megatron's."""
    of_megatron = {"batch_p2p_comm", "validate_args"}
    for init in sorted((ROOT / "vtp_plugin").rglob("__init__.py")):
        text = (ast.get_docstring(ast.parse(init.read_text())) or "").partition("Words:")[0]
        known = of_megatron | {path.stem for path in init.parent.iterdir()}
        for path in init.parent.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                known.add(node.arg if isinstance(node, ast.arg) else str(getattr(node, "name", "")))
        named = re.findall(r"``([a-z]+_\w+)``", text)
        assert [name for name in named if name not in known] == [], init


def test_no_modules_need_each_other() -> None:
    benchmarks = ((f"benchmarks.{path.stem}", path.read_text()) for path in (ROOT / "benchmarks").glob("*.py"))
    assert circles(SOURCES.items()) == circles(benchmarks) == []


@pytest.mark.parametrize("module", [name for name in TREES if name.startswith("vtp_plugin.patches.")])
def test_a_list_of_records_writes_nothing(module: str) -> None:
    """It may be made for another Megatron, for a document, or for an apply that fails."""
    for name, node in _functions(TREES[module]):
        if RECORDS.search(name):
            assert not [*_writes(node)], name


def test_nobody_assigns_to_the_session() -> None:
    """What it knows is told to it, so that a start leaves nothing behind that its state does not know of."""
    found = [
        f"{module}: {ast.unparse(node)}"
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and re.search(r"(^|[._])session(\.|$)", ast.unparse(node.value))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("body", "written"),
    [
        ("session.x = 1", ["session.x"]),
        ("session.x += 1", ["session.x"]),
        ("session.table['x'] = 1", ["session.table['x']"]),
        ("for session.x in (): pass", ["session.x"]),
        ("session.list.append(1)", ["session.list.append"]),
        ("own = {}; own['x'] = 1", []),
        ("own = (); own += session.x; refuse(own)", []),
    ],
)
def test_what_writes_is_found(body: str, written: list[str]) -> None:
    (function,) = ast.parse(f"def records(session):\n    {body}").body
    assert isinstance(function, Function)
    assert [*_writes(function)] == written


def _writes(function: Function) -> Iterator[str]:
    """Name what a function writes that is not its own: attributes, entries, and calls made for their effect alone."""
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name | ast.Attribute | ast.Subscript)]
    own = {node.id for node in names if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in names:
        if isinstance(node.ctx, ast.Store | ast.Del) and not isinstance(node, ast.Name) and _root(node) not in own:
            yield ast.unparse(node)
    for node in ast.walk(function):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            if isinstance(called, ast.Attribute) and _root(called) not in own:
                yield ast.unparse(called)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return ast.unparse(node)


def _functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, Function]]:
    """Yield functions and methods with their names, those inside classes as `Class.method`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield within + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{within}{node.name}.")
