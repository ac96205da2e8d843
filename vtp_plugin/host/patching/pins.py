"""Pins: digests of the sources that patches replace, so that a changed host is seen.

A pin file is JSON: version of the host -> target -> digest. ``scripts/make_pins.py`` adds the installed version. A
changed target is a reason to look whether its patch still fits, not an error. What others have patched already is
digested from its files, as it was written.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from vtp_plugin.host.patching.record import functions, resolve_target
from vtp_plugin.util.typed_json import read_json

Pins = Mapping[str, Mapping[str, str]]
"""Version -> target -> digest."""


def pin_of(value: Any) -> str:
    """Digest the source text of a function, class or descriptor; of anything else return the empty string.

    Blank lines, trailing blanks and the indentation of the whole definition do not count; comments do. A wrapper made
    with :func:`functools.wraps` has the digest of the function that it wraps.

    >>> len(pin_of(textwrap.dedent)), pin_of(textwrap.dedent) == pin_of(textwrap.indent), pin_of(3)
    (16, False, '')
    """
    try:
        sources = [textwrap.dedent(inspect.getsource(function).expandtabs()) for function in functions(value)]
    except (OSError, TypeError):
        return ""
    return _digest(sources)


def _digest(sources: Iterable[str]) -> str:
    lines = (line.rstrip() for source in sources for line in source.splitlines())
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).hexdigest()[:16]


def pins_of(targets: Iterable[str]) -> dict[str, str]:
    """Digest the installed targets that the host defines itself.

    Raises:
        LookupError: A target does not exist.
    """
    values = {target: resolve_target(target).value for target in targets}
    homes = {target: str(getattr(functions(value)[0], "__module__", "")) for target, value in values.items()}
    pins = {target: pin_of(value) for target, value in values.items() if homes[target].startswith("megatron.")}
    return {target: pin for target, pin in sorted(pins.items()) if pin}


def pins_in(root: Path, targets: Iterable[str]) -> dict[str, str]:
    """Digest targets of a tree by its files; nothing of it is imported.

    Args:
        root: folder on the path of imports.
        targets: such as ``"package.module:Class.method"``.

    Returns:
        Those that the tree has.
    """
    found: dict[str, str] = {}
    by_module: dict[str, list[str]] = {}
    for target in targets:
        by_module.setdefault(target.partition(":")[0], []).append(target)
    for module, wanted in sorted(by_module.items()):
        path = root.joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not path.is_file():
            continue
        source = path.read_text(encoding="utf-8")
        lines, tree = source.expandtabs().splitlines(), ast.parse(source)
        for target in sorted(wanted):
            node = _defined(tree, target.partition(":")[2])
            if node is not None:
                first = min(part.lineno for part in (node, *node.decorator_list))
                found[target] = _digest([textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]))])
    return found


def missing_in_files(package: str, known: str, root: Path, targets: Iterable[str]) -> Iterator[str]:
    """Say what a package does not have of what is replaced or relied on.

    Args:
        package: its name.
        known: the version that has it, such as ``"MindSpeed-MM 26.1.0"``.
        root: folder on the path of imports in which it lies.
        targets: such as ``"package.module:Class.method"``.

    Yields:
        A line ``value; rule; way out``; none if all are there.
    """
    wanted = {*targets}
    missing = sorted(wanted - set(pins_in(root, wanted)))
    if missing:
        rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        yield (
            f"{package} in {root} has no {missing[0]}{rest}; it is of another version than {known}, which the plugin "
            "was written for; check that out"
        )


def _defined(tree: ast.Module, name: str) -> ast.ClassDef | ast.FunctionDef | None:
    """Find a function, class or method by its dotted name; of several the last one counts, as for Python."""
    node: ast.Module | ast.ClassDef | ast.FunctionDef = tree
    for part in name.split("."):
        inner = [each for each in node.body if isinstance(each, ast.ClassDef | ast.FunctionDef) and each.name == part]
        if not inner:
            return None
        node = inner[-1]
    return node if not isinstance(node, ast.Module) else None


def read_pins(path: Path) -> Pins:
    """Read a pin file."""
    return read_json(path)


def changed_targets(pins: Pins, version: str, found: Mapping[str, str]) -> tuple[str, ...]:
    """Name the targets that have changed since the patches were written.

    Args:
        pins: Content of a pin file: the versions that may be compared with the installed one.
        version: Version of the installed host; without pins for it, the newest version with pins counts.
        found: The digests of what is installed, as from :func:`pins_of`.

    Returns:
        A clause for each target; none without pins.

    >>> changed_targets({"1.9": {"a:f": "0", "a:g": "1"}}, "1.10", {"a:f": "0", "a:g": "2", "a:h": "3"})
    ('a:g is not as in 1.9', 'a:h has no pin for 1.9')
    """
    if not pins:
        return ()
    base = version if version in pins else max(pins, key=Version)
    known = pins[base]
    return tuple(
        f"{target} is not as in {base}" if target in known else f"{target} has no pin for {base}"
        for target, pin in found.items()
        if known.get(target) != pin
    )
