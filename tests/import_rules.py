"""The rules of which part of the plugin may import what, as functions on source text.

python -m tests.import_rules        the parts, and which imports which, counted
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# A part (a package or module right below vtp_plugin) may import itself and the parts of lower layers, never its own
# layer's other parts. `__init__` is what `import vtp_plugin` binds.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors"}),
    frozenset({"ground"}),
    frozenset({"hosts"}),
    frozenset({"layout", "patching", "platform"}),
    frozenset({"boundary", "checkpoint", "footprint", "published", "schedule"}),
    frozenset({"config"}),
    frozenset({"cluster", "options", "pictures", "trace"}),
    frozenset({"search"}),
    frozenset({"fit", "offline", "runtime"}),
    frozenset({"session"}),
    frozenset({"patches"}),
    frozenset({"api"}),
    frozenset({"adapters", "bridge", "functional"}),
    frozenset({"__init__"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
# The rooms of a part, and its modules beside them: each may import itself and those of lower layers. What has no entry
# here, such as the part's `__init__`, comes after all of them.
ROOMS: dict[str, tuple[frozenset[str], ...]] = {
    "boundary": (
        frozenset({"cargo", "spread"}),
        frozenset({"memory", "plan", "side"}),
        frozenset({"bridge_end", "portions", "strategies"}),
        frozenset({"check", "header"}),
        frozenset({"channel_spec"}),
        frozenset({"bridge_spec", "pipeline", "tied"}),
    ),
    "schedule": (
        frozenset({"order"}),
        frozenset({"proof"}),
        frozenset({"cost"}),
        frozenset({"make"}),
    ),
    "options": (
        frozenset({"context"}),
        frozenset({"checks", "derived", "flags", "table"}),
        frozenset({"run_checks"}),
    ),
    "hosts": (
        frozenset({"ranges"}),
        frozenset({"capability", "family"}),
        frozenset({"table"}),
        frozenset({"lookup"}),
        frozenset({"find"}),
    ),
    "runtime": (
        frozenset({"life", "stored_optimizer"}),
        frozenset({"wire"}),
        frozenset({"bridges"}),
        frozenset({"step"}),
    ),
}
# What a pure part may import besides the standard library: packages without dependencies that it can do without.
SMALL_PACKAGES = {"checkpoint": ("xxhash",)}
# Parts that need nothing but the standard library, so that plans can be made and checked without torch.
PURE_PARTS = frozenset(
    {
        "cluster",
        "errors",
        "ground",
        "hosts",
        "config",
        "layout",
        "boundary",
        "checkpoint",
        "footprint",
        "published",
        "schedule",
        "options",
        "fit",
        "pictures",
        "search",
        "trace",
    }
)


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

    >>> broken_rules("vtp_plugin.layout.grid", "import torch")
    ['vtp_plugin.layout.grid:1: layout is pure and may import only the standard library, not torch']
    """
    part = _part(module)
    if _layer(part) is None:
        return [f"{module}: {part!r} has no layer; add it to LAYERS in {Path(__file__).name}"]
    imports = list(_imports(module, ast.parse(source)))
    lines = [line for item in imports for line in (*_broken_by(part, item), *_broken_in_part(module, item))]
    return [f"{module}:{line}" for line in lines]


def circles(modules: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the modules that need each other, by imports of any kind: also inside functions, or for types alone.

    Args:
        modules: dotted names and sources, as :func:`sources` yields them.

    >>> circles([("a", "import b"), ("b", "def f(): from c import x"), ("c", "from a import y"), ("d", "import a")])
    [['a', 'b', 'c']]
    """
    texts = {name.removesuffix(".__init__"): (name, source) for name, source in modules}
    needed = {name: _modules_needed(*text, texts.keys()) - {name} for name, text in texts.items()}
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
    texts = {name.removesuffix(".__init__"): (name, source) for name, source in modules}
    pairs = ((_part(name), _part(other)) for name, text in texts.items() for other in _modules_needed(*text, texts))
    return dict(sorted(Counter(pair for pair in pairs if pair[0] != pair[1]).items()))


def _modules_needed(name: str, source: str, known: Collection[str]) -> set[str]:
    needed: set[str] = set()
    for item in _imports(name, ast.parse(source)):
        parts = {f"{item.module}.{each}" for each in item.names} & set(known)
        # What is no module of its own is defined in the package.
        is_all = item.names and len(parts) == len(item.names)
        needed |= parts if is_all else parts | ({item.module} & set(known))
    return needed


def _reached(start: str, needed: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        new = needed[left.pop()] - found
        found |= new
        left += new
    return found


def _broken_by(part: str, item: Import) -> Iterator[str]:
    top = item.module.partition(".")[0]
    if top == "vtp_plugin":
        for target in _targets(item):
            if not _may_import(part, target):
                yield f"{item.line}: {part} may import only lower layers, not {target}"
    elif part in PURE_PARTS and top not in {*sys.stdlib_module_names, *SMALL_PACKAGES.get(part, ())}:
        yield f"{item.line}: {part} is pure and may import only the standard library, not {top}"
    elif top == "megatron" and part != "patches":
        yield f"{item.line}: only patches may import megatron, not {part}"


def _broken_in_part(module: str, item: Import) -> Iterator[str]:
    """Yield a line where a room of a part imports a room that is not below it."""
    part, room = _part(module), _room(module)
    layer = _room_layer(part, room)
    if layer is None or _part(item.module) != part:
        return
    # `from vtp_plugin.schedule import order` names the room behind the import.
    targets = {_room(item.module)} if item.module.count(".") > 1 else {*item.names} or {"__init__"}
    for target in sorted(targets - {room}):
        target_layer = _room_layer(part, target)
        if target_layer is None or target_layer >= layer:
            yield f"{item.line}: {part}.{room} may import only lower rooms, not {part}.{target}"


def _room_layer(part: str, room: str) -> int | None:
    return next((index for index, rooms in enumerate(ROOMS.get(part, ())) if room in rooms), None)


def _room(module: str) -> str:
    """Return the room, or the module beside the rooms, that a dotted module of a part belongs to."""
    pieces = module.split(".")
    return pieces[2] if len(pieces) > 2 else "__init__"


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
