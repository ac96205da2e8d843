"""What the plugin defines, the plugin uses, or a benchmark or script: what only tests need belongs to the tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import vtp_plugin
from tests.rules.import_rules import ROOT, sources

# Users, torch or Megatron call what stands in these modules.
OUTER = {
    "vtp_plugin",
    "vtp_plugin.adapters",
    "vtp_plugin.functional",
    "vtp_plugin.functional.p2p",
    "vtp_plugin.functional.handles",
    "vtp_plugin.plan.layout.stage_grid",
    "vtp_plugin.patches.core.models.mimo.comm.colocated_communicator",
    "vtp_plugin.patches.core.pipeline_parallel.bridge_communicator",
}
STAND_INS = ("vtp_plugin.platform.cpu", "vtp_plugin.platform.interface")
CALLED_BY_OTHERS = {
    "commit_tensor": "of a load planner of torch's",
    "find_class": "of an unpickler",
    "get_gtp_ranks": "of Megatron's rank generator",
    "group_count": "of torch's world",
    "load_bytes": "of a load planner of torch's",
    "persistent_id": "of a pickler",
    "persistent_load": "of an unpickler",
    "readable": "of a file",
    "reducer_override": "of a pickler",
    "reset_parameters": "of a linear layer of torch",
    "resolve_tensor": "of a load planner of torch's",
    "seekable": "of a file",
}
DECLARING = {"replaces", "subclasses"}
TEMPLATE = ROOT / "vtp_plugin/report/page/page.html"
OTHER_USERS = [path for folder in ("benchmarks", "examples", "scripts") for path in (ROOT / folder).rglob("*.py")]


def definitions(source: str) -> Iterator[str]:
    """Yield the public functions, classes, methods and constants that a module defines."""
    blocks = [ast.parse(source)]
    blocks += [node for node in blocks[0].body if isinstance(node, ast.ClassDef)]
    for block in blocks:
        for node in block.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def uses(source: str) -> Iterator[str]:
    """Yield every name that is read, also as an attribute or as a word of its own in a text; imports do not count.

    Megatron calls what is declared to stand in for its own.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and any(map(_is_declaration, node.decorator_list)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _is_declaration(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in DECLARING


def unused(texts: dict[str, str], others: Iterable[str] = ()) -> list[str]:
    """List the definitions whose name nobody reads, neither in the texts themselves nor in others."""
    used = {name for source in (*texts.values(), *others) for name in uses(source)}
    return [
        f"{module}: {name}"
        for module, source in texts.items()
        for name in definitions(source)
        if name not in used and not name.startswith("__")
    ]


def test_the_plugin_uses_what_it_defines() -> None:
    texts = {module.removesuffix(".__init__"): source for module, source in sources()}
    in_template = ast.unparse(ast.List([ast.Constant(word) for word in re.findall(r"\w+", TEMPLATE.read_text())]))
    others = [*(path.read_text() for path in OTHER_USERS), in_template]
    found = [line.split(": ") for line in unused(texts, others)]
    known = {*CALLED_BY_OTHERS}
    assert known <= {name for _, name in found}, "an exception that is none"
    known |= {*vtp_plugin.__all__}
    rest = [
        f"{module}: {name}"
        for module, name in found
        if module not in OUTER and not module.startswith(STAND_INS) and name not in known
    ]
    assert not rest, "used by tests only, or by nobody:\n" + "\n".join(rest)


def test_what_nobody_reads_is_found() -> None:
    source = "LIMIT = 1\nclass Box:\n    def lid(self): ...\ndef pack(): return Box\n"
    assert unused({"m": source, "n": "from m import pack\n"}) == ["m: LIMIT", "m: pack", "m: lid"]
    assert unused({"m": source}, ["import m\nm.pack().lid(m.LIMIT)\n"]) == []
