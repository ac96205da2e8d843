"""Finds the places of the sources that read what another site can choose: posts, objects, messages, files, sockets.

A place is ``path:function``. What is found is not all that is read by name; tests/unit/runtime/test_attacker.py says of
each place which attack covers it, or why none is needed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("vtp_plugin", "patches")
_POSTS = {"read_post", "read_number", "read_text", "require_word", "parse_post", "shown"}
# Functions that read what others have written, by their module.
_READERS = {
    "vtp_plugin.runtime.health.store": _POSTS | {"count", "open_round", "name_run"},
    "vtp_plugin.runtime.step.step_times": {"read_shared", "share_reports"},
    "vtp_plugin.runtime.health.position": {"load_standing"},
    "vtp_plugin.util.typed_json": {"read_typed"},
}
_SHARES = {"share_reports", "_share_reports", "_share_lines", "share_lines"}
_OF_STORES = {"compare_set", "multi_get", "list_keys", "get_num_keys", "num_keys", "queue_pop"}
_STORES = re.compile(r"(^|\.|_)(store|posts|part|nodes|topic|watched)$|part_of\(|PrefixStore\(")
_MESSAGES = {"irecv", "recv", "recv_object_list", "all_gather_object", "gather_object", "broadcast_object_list"}
_MESSAGES |= {"scatter_object_list", "exchange_loaded_objects_gather_object"}
_CALLS = {"Companion", "TCPStore", "create_connection", "accept", "close_objects", "_BoundedMemory"}
_FILES = {"read_toml", "read_toml_by", "read_json", "read_bytes"}
_FILES_IN = ("vtp_plugin/elastic/", "vtp_plugin/link/")


def find_places(root: Path = ROOT) -> dict[str, list[str]]:
    """Find the places, each with what it calls, in the order of the sources.

    Args:
        root: folder of the repository.

    Raises:
        LookupError: a reader is no longer where this file says, so that nobody would look for it.
    """
    for module, names in _READERS.items():
        defined = ast.walk(ast.parse((root / module.replace(".", "/")).with_suffix(".py").read_text()))
        if gone := names - {node.name for node in defined if isinstance(node, ast.FunctionDef)}:
            raise LookupError(f"{module} defines no {', '.join(sorted(gone))}; see _READERS")
    found: dict[str, list[str]] = {}
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            name = str(path.relative_to(root))
            if not name.startswith("vtp_plugin/patches/"):  # a link to the other folder
                for place, call in places_in(path.read_text(), name):
                    found.setdefault(f"{name}:{place}", []).append(call)
    return found


def places_in(source: str, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the functions of one source that read, and what they call.

    Args:
        source: text of a module.
        name: its path in the repository.

    >>> list(places_in("class A:\\n    def f(self, store):\\n        return store.get('x')"))
    [('A.f', 'store.get')]
    """
    tree = ast.parse(source)
    readers = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.name in _READERS.get(node.module, ())
    }
    yield from _calls(tree, "", readers | _own_readers(name), has_files=name.startswith(_FILES_IN))


def _own_readers(name: str) -> set[str]:
    return _READERS.get(name.removesuffix(".py").replace("/", "."), set())


def _calls(node: ast.AST, place: str, readers: set[str], *, has_files: bool) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inner = place
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{place}.{child.name}".lstrip(".")
        if (call := _reading(child, readers, has_files=has_files)) is not None:
            yield place, call
        yield from _calls(child, inner, readers, has_files=has_files)


def _reading(node: ast.AST, readers: set[str], *, has_files: bool) -> str | None:
    """Name what a node reads, if it does."""
    if isinstance(node, ast.Attribute) and node.attr in _MESSAGES and _ends_in(node.value, "dist", "distributed"):
        return ast.unparse(node)
    if not isinstance(node, ast.Call):
        return None
    function, text = node.func, ast.unparse(node.func)
    if isinstance(function, ast.Name):
        is_file = has_files and function.id in _FILES
        return text if function.id in readers | _CALLS | _SHARES | (_MESSAGES - {"recv"}) or is_file else None
    if not isinstance(function, ast.Attribute):
        return None
    owner = ast.unparse(function.value)
    is_store = _STORES.search(owner) is not None
    if function.attr in _SHARES | _OF_STORES | _CALLS:
        return text
    if function.attr == "recv" and owner not in ("dist", "torch.distributed"):
        return text
    if function.attr == "add" and len(node.args) == 2:
        return text
    if function.attr in ("get", "check", "wait") and is_store:
        return text
    if function.attr == "read" and "plain_data" in owner.lower():
        return text
    return text if function.attr == "decode" and owner.endswith("codec") else None


def _ends_in(node: ast.AST, *names: str) -> bool:
    return ast.unparse(node).rpartition(".")[2] in names
