"""Where the plugin's sources write into objects of Megatron or torch past the patching engine, as functions on text."""

from __future__ import annotations

import ast
from collections.abc import Iterator

FOREIGN = ("megatron", "torch")
# The engine, and the assignments that it and the CPU platform make and undo.
ENGINE = ("vtp_plugin.host.patching", "vtp_plugin.util.undo")
_MUTATORS = frozenset(
    {"append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update", "__setattr__"}
)


def broken_rules(module: str, source: str) -> list[str]:
    """Return one line for every write of ``source`` into something that it imports from Megatron or torch.

    Also for a method that is set on an object: what patches get from Megatron is not theirs.

    >>> broken_rules("vtp_plugin.patches.x", "from megatron.core import parallel_state as s\\ns._GROUP = None")
    ['vtp_plugin.patches.x:2: writes into megatron.core.parallel_state; make it a PatchRecord or a WriteRecord']
    """
    if any(f"{module}.".startswith(f"{name}.") for name in ENGINE):
        return []
    tree = ast.parse(source)
    names = _foreign_names(tree)
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    lines: set[tuple[int, str]] = set()
    for node in ast.walk(tree):
        for target in _written(node):
            root = _root(target)
            if root in names:
                lines.add((node.lineno, f"writes into {names[root]}"))
            elif _is_function(node, functions) and root not in {"self", "cls"}:
                lines.add((node.lineno, f"sets a function on {ast.unparse(target)}"))
    return [f"{module}:{line}: {what}; make it a PatchRecord or a WriteRecord" for line, what in sorted(lines)]


def _foreign_names(tree: ast.Module) -> dict[str, str]:
    """Return the names that imports, and plain assignments from them, bind to parts of Megatron or torch."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        else:
            continue
        names |= {name: full for name, full in found.items() if full.partition(".")[0] in FOREIGN}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute):
            root = _root(node.value)
            names |= {t.id: names[root] for t in node.targets if isinstance(t, ast.Name) and root in names}
    return names


def _written(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the objects whose attributes or items a node assigns, deletes or changes."""
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Name) and function.id in {"setattr", "delattr"}:
            yield node.args[0]
        elif isinstance(function, ast.Attribute) and function.attr in _MUTATORS:
            yield function.value
        return
    else:
        return
    for target in targets:
        for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
            if isinstance(part, ast.Attribute | ast.Subscript):
                yield part.value


def _root(node: ast.expr) -> str:
    """Return the name that an expression starts from; through ``vars(x)`` and ``getattr(x, ...)`` that is x."""
    while True:
        if isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"vars", "getattr"}:
            node = node.args[0]
        else:
            return node.id if isinstance(node, ast.Name) else ""


def _is_function(node: ast.AST, functions: set[str]) -> bool:
    """Tell whether a node assigns a function of the file, or a lambda, to an attribute."""
    if not isinstance(node, ast.Assign) or not any(isinstance(target, ast.Attribute) for target in node.targets):
        return False
    value = node.value
    return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions)
