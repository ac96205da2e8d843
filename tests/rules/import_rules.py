"""The rules of which part of the plugin may import what, as functions on source text.

python -m tests.rules.import_rules        the parts, and which imports which, counted
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

ROOT = Path(__file__).resolve().parents[2]

# A part (a package or module right below vtp_plugin) may import itself and the parts of lower layers, never its own
# layer's other parts. `__init__` is what `import vtp_plugin` binds.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"can_start", "errors"}),
    frozenset({"util"}),
    frozenset({"link", "plan"}),
    frozenset({"trace"}),
    frozenset({"host", "report"}),
    frozenset({"certify", "checkpoint", "leak"}),
    frozenset({"config"}),
    frozenset({"platform", "tune"}),
    frozenset({"runtime"}),
    frozenset({"elastic"}),
    frozenset({"session"}),
    frozenset({"patches"}),
    frozenset({"api"}),
    frozenset({"adapters", "bridge", "edge", "functional"}),
    frozenset({"__init__"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
# The packages and modules of a package: each may import itself and those of lower layers. What has no entry here, such
# as `__init__`, comes after all of them.
INNER_LAYERS: dict[str, tuple[frozenset[str], ...]] = {
    "checkpoint": (
        frozenset({"format", "hf"}),
        frozenset({"save"}),
        frozenset({"load"}),
        frozenset({"tools"}),
    ),
    "host": (
        frozenset({"megatron_flags", "mindspeed", "versions"}),
        frozenset({"patching", "rules"}),
    ),
    "host.rules": (
        frozenset({"rule"}),
        frozenset({"checks", "table"}),
        frozenset({"run_checks"}),
    ),
    "host.versions": (
        frozenset({"known_versions"}),
        frozenset({"find"}),
    ),
    "plan": (
        frozenset({"layout", "model"}),
        frozenset({"boundary", "launch", "memory", "schedule"}),
    ),
    "plan.boundary": (
        frozenset({"endpoint"}),
        frozenset({"boundary_plan"}),
        frozenset({"strategies"}),
        frozenset({"check_boundary", "message_kind"}),
        frozenset({"channel_spec"}),
        frozenset({"bridge_spec"}),
    ),
    "plan.schedule": (
        frozenset({"order"}),
        frozenset({"proof"}),
        frozenset({"cost"}),
        frozenset({"make"}),
    ),
    "report": (frozenset({"page", "pictures"}),),
    "runtime": (
        frozenset({"health"}),
        frozenset({"comm"}),
        frozenset({"bridges"}),
        frozenset({"step"}),
    ),
    "tune": (
        frozenset({"cluster"}),
        frozenset({"search"}),
        frozenset({"fit"}),
    ),
}
# Packages that need nothing but the standard library, so that plans can be made and checked without torch.
PURE_PARTS = frozenset(
    {
        "can_start",
        "certify",
        "checkpoint.format",
        "checkpoint.hf",
        "checkpoint.save",
        "config",
        "errors",
        "host.megatron_flags",
        "host.rules",
        "host.versions",
        "link",
        "plan",
        "report",
        "trace",
        "tune",
        "util",
    }
)
# What they may import besides: packages without dependencies of their own.
SMALL_PACKAGES = {"checkpoint.format": ("xxhash",), "host.versions": ("packaging",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported module: ``names`` is empty for ``import module`` and holds the names of a from-import."""

    line: int
    module: str
    names: tuple[str, ...] = ()


def sources(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Yield ``(dotted module, source text)`` of every file of the plugin, each file once, in sorted order."""
    for path in sorted((root / "vtp_plugin").rglob("*.py")):
        relative = path.relative_to(root)
        if relative.parts[:2] != ("vtp_plugin", "patches"):
            yield _dotted(relative), path.read_text()
    for path in sorted((root / "patches").rglob("*.py")):
        yield _dotted(Path("vtp_plugin") / path.relative_to(root)), path.read_text()


def broken_rules(module: str, source: str) -> list[str]:
    """Return one line for every import of ``source`` that breaks a rule; ``module`` ends in ``.__init__`` for packages.

    >>> broken_rules("vtp_plugin.plan.layout.stage_grid", "import torch")
    ['vtp_plugin.plan.layout.stage_grid:1: plan is pure and may import only the standard library, not torch']
    """
    part = _part(module)
    if _layer(part) is None:
        return [f"{module}: {part!r} has no layer; add it to LAYERS in {Path(__file__).name}"]
    imports = list(_imports(module, ast.parse(source)))
    lines = [line for item in imports for line in (*_broken_by(module, item), *_broken_inside(module, item))]
    return [f"{module}:{line}" for line in lines]


def circles(modules: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the modules that need each other, by imports of any kind: also inside functions, or for types alone.

    Args:
        modules: dotted names and sources, as :func:`sources` yields them.

    >>> circles([("a", "import b"), ("b", "def f(): from c import x"), ("c", "from a import y"), ("d", "import a")])
    [['a', 'b', 'c']]
    """
    needed = _graph(modules)
    reached = {name: _reached(name, needed) for name in needed}
    joined = {tuple(sorted({name, *(other for other in reached[name] if name in reached[other])})) for name in needed}
    return sorted(list(names) for names in joined if len(names) > 1)


def arrows(modules: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Count the modules of one part that another part's modules import.

    Returns:
        Under (who imports, what is imported): how many pairs of modules.

    >>> arrows([("vtp_plugin.a.x", "from vtp_plugin.b import y"), ("vtp_plugin.b.y", "import vtp_plugin.b.z")])
    {('a', 'b'): 1}
    """
    pairs = ((_part(name), _part(other)) for name, others in _graph(modules).items() for other in others)
    return dict(sorted(Counter(pair for pair in pairs if pair[0] != pair[1]).items()))


def loaded_with(starts: Iterable[str], modules: Iterable[tuple[str, str]]) -> set[str]:
    """Return the modules that importing some modules loads: not what functions import, nor what is for types alone.

    >>> sorted(loaded_with(["a"], [("a", "import b.d"), ("b", ""), ("b.d", "def f(): import c"), ("c", "")]))
    ['a', 'b', 'b.d']
    """
    needed = _graph(modules, at_import=True)
    for name in needed:
        # Whoever imports a module imports the packages around it first.
        needed[name] |= {parent for parent in needed if name.startswith(f"{parent}.")} - {"vtp_plugin"}
    return {*starts}.union(*(_reached(start, needed) for start in starts))


def _graph(modules: Iterable[tuple[str, str]], *, at_import: bool = False) -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    texts = {name.removesuffix(".__init__"): (name, source) for name, source in modules}
    return {name: modules_needed(*text, texts.keys(), at_import=at_import) - {name} for name, text in texts.items()}


def modules_needed(name: str, source: str, known: Collection[str], *, at_import: bool = False) -> set[str]:
    needed: set[str] = set()
    tree = ast.parse(source)
    for item in _imports(name, _at_import(tree) if at_import else tree):
        parts = {part for each in item.names if (part := f"{item.module}.{each}") in known}
        # What is no module of its own is defined in the package.
        is_all = item.names and len(parts) == len(item.names)
        needed |= parts if is_all or item.module not in known else parts | {item.module}
    return needed


def _at_import(tree: ast.Module) -> ast.Module:
    """Leave out of a module what its import does not run: bodies of functions, and what is for types alone."""

    class Without(ast.NodeTransformer):
        def visit_FunctionDef(self, _node: ast.FunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)

    return cast("ast.Module", Without().visit(tree))


def _reached(start: str, needed: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        new = needed[left.pop()] - found
        found |= new
        left += new
    return found


def _broken_by(module: str, item: Import) -> Iterator[str]:
    part = _part(module)
    top = item.module.partition(".")[0]
    if top == "vtp_plugin":
        for target in _targets(item):
            if not _may_import(part, target):
                yield f"{item.line}: {part} may import only lower layers, not {target}"
    elif (pure := _pure(module)) and top not in {*sys.stdlib_module_names, *SMALL_PACKAGES.get(pure, ())}:
        yield f"{item.line}: {pure} is pure and may import only the standard library, not {top}"
    elif top == "megatron" and part != "patches":
        yield f"{item.line}: only patches may import megatron, not {part}"


def _pure(module: str) -> str:
    """Return the pure package that a module belongs to; empty if there is none."""
    return next((part for part in sorted(PURE_PARTS) if f"{module}.".startswith(f"vtp_plugin.{part}.")), "")


def _broken_inside(module: str, item: Import) -> Iterator[str]:
    """Yield a line where something in a package imports what is not below it there."""
    for package in INNER_LAYERS:
        own, layer = _inside(package, module)
        if layer is None or not f"{item.module}.".startswith(f"vtp_plugin.{package}."):
            continue
        # `from vtp_plugin.plan.schedule import order` names what is meant behind the import.
        is_package = item.module == f"vtp_plugin.{package}"
        targets = {*item.names} or {"__init__"} if is_package else {_inside(package, item.module)[0]}
        for target in sorted(targets - {own}):
            target_layer = _inside(package, f"vtp_plugin.{package}.{target}")[1]
            if target_layer is None or target_layer >= layer:
                yield f"{item.line}: {package}.{own} may import only lower layers, not {package}.{target}"


def _inside(package: str, module: str) -> tuple[str, int | None]:
    """Return what a module belongs to right below a package, and its layer there; None if it has none."""
    start = f"vtp_plugin.{package}."
    name = module.removeprefix(start).partition(".")[0] if module.startswith(start) else "__init__"
    return name, next((index for index, names in enumerate(INNER_LAYERS[package]) if name in names), None)


def _may_import(part: str, target: str) -> bool:
    if part == target:
        return True
    from_layer, to_layer = _layer(part), _layer(target)
    return from_layer is not None and to_layer is not None and to_layer < from_layer


def _layer(part: str) -> int | None:
    return next((index for index, parts in enumerate(LAYERS) if part in parts), None)


def _part(module: str) -> str:
    """Return the part that a dotted module below ``vtp_plugin`` belongs to."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else "__init__"


def _targets(item: Import) -> set[str]:
    """Return the parts that an import of something below ``vtp_plugin`` reaches."""
    if item.module != "vtp_plugin":
        return {_part(item.module)}
    return {name if _layer(name) is not None else "__init__" for name in item.names}


def _imports(module: str, tree: ast.Module) -> Iterator[Import]:
    """Yield every import, those inside functions and by ``import_module("...")`` or ``__import__("...")`` included.

    After a plain ``import vtp_plugin`` every use of ``vtp_plugin.name`` counts as an import of the name.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(line=node.lineno, module=alias.name)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            yield Import(line=node.lineno, module=_absolute(module, node), names=names)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "vtp_plugin":
            yield Import(line=node.lineno, module="vtp_plugin", names=(node.attr,))
        elif isinstance(node, ast.Call) and (name := _dynamic_import(node)) is not None:
            yield Import(line=node.lineno, module=name)


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if node.level == 0:
        assert node.module is not None
        return node.module
    package = module.split(".")[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def _dynamic_import(node: ast.Call) -> str | None:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    if name not in {"import_module", "__import__"} or not node.args:
        return None
    target = node.args[0]
    return target.value if isinstance(target, ast.Constant) and isinstance(target.value, str) else None


def _dotted(relative: Path) -> str:
    return ".".join(relative.with_suffix("").parts)


def main() -> None:
    """Print the parts, and the arrows between them."""
    modules = list(sources())
    counted = arrows(modules)
    parts = sorted({_part(name) for name, _ in modules})
    packages = [part for part in parts if any(name.startswith(f"vtp_plugin.{part}.") for name, _ in modules)]
    print(f"{len(packages)} packages beside {len(parts) - len(packages)} modules, {len(counted)} arrows")
    for part in parts:
        print(f"{part}: " + ", ".join(f"{other} {number}" for (one, other), number in counted.items() if one == part))


if __name__ == "__main__":
    main()
