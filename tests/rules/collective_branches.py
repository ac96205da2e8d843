"""Finds functions of Megatron in which some ranks may pass by a collective, by their source alone.

Such a function has a branch on a size, a rank, a place in the pipeline, a cache or the like, with a collective inside,
or behind an early end. Calls are followed by the names of functions. What is found need not be wrong:
docs/how/collectives-in-branches.md says of each why it is right, or what became of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_AREAS = (
    "core/dist_checkpointing/**/*.py",
    "core/optimizer/*.py",
    "core/distributed/*.py",
    "core/datasets/*.py",
    *(f"core/{name}.py" for name in ("timers", "utils", "rerun_state_machine", "num_microbatches_calculator")),
    *(f"core/transformer/moe/{name}.py" for name in ("moe_utils", "moe_logging")),
    "core/transformer/multi_token_prediction.py",
    "training/**/*.py",
)
# Refused with unequal stages as a whole, or no more than declarations.
_LEFT_OUT = re.compile(r"fsdp|gpu_sniff|arguments|/config/")
_COLLECTIVES = re.compile(
    r"(all_reduce|all_gather|broadcast|reduce_scatter|all_to_all|scatter_object|gather_object|monitored_barrier"
    r"|isend|irecv|batch_isend_irecv|new_group|_all_gather_base)\w*"
)
_SHORT = ("barrier", "gather", "scatter", "reduce", "send", "recv")
_DECIDES = re.compile(r"rank|size|world|is_pipeline|is_last|stage|cache|stub|coordinator|group|replica|len\(|None")
_ALIKE = re.compile(r"(not )?torch\.distributed\.is_initialized\(\)|(self\.)?(config\.)?timers is not None")
# Names that many classes have, of which most wait for nobody.
_COMMON = re.compile(
    r"__\w+__|step|load|save|forward|backward|get|add|build|wait|start|stop|close|finalize|write|read|(load_)?state_dict"
    r"|log|append|update|reset|train|main|elapsed|print|run|schedule"
)

_Branch = ast.If | ast.While


def find_branches(root: Path) -> dict[str, list[int]]:
    """Find the functions, each as ``file: name``, with the lines of their branches.

    Args:
        root: the folder of the package ``megatron``.
    """
    files = sorted({file for area in _AREAS for file in root.glob(area) if not _LEFT_OUT.search(str(file))})
    functions = [
        (str(file.relative_to(root)), node)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    meeting = _meeting([node for _, node in functions])
    found: dict[str, list[int]] = {}
    followed = _followed(meeting)
    for file, function in functions:
        if function.name not in meeting:
            continue
        for branch in _branches(function.body, followed, False):
            found.setdefault(f"{file}: {function.name}", []).append(branch.lineno)
    return found


def _meeting(functions: Sequence[ast.FunctionDef]) -> set[str]:
    """Give the names of functions that wait for other ranks, directly or in what they call."""
    called: dict[str, set[str]] = {}
    meeting: set[str] = set()
    for function in functions:
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        called.setdefault(function.name, set()).update(map(_name, calls))
        if any(map(_is_collective, calls)):
            meeting.add(function.name)
    while more := {name for name, names in called.items() if name not in meeting and names & _followed(meeting)}:
        meeting |= more
    return meeting


def _followed(names: set[str]) -> set[str]:
    return {name for name in names if not _COMMON.fullmatch(name)}


def _meets(nodes: Iterable[ast.AST], meeting: set[str]) -> bool:
    calls = (call for node in nodes for call in ast.walk(node) if isinstance(call, ast.Call))
    return any(_is_collective(call) or _name(call) in meeting for call in calls)


def _is_collective(call: ast.Call) -> bool:
    if any(each.arg == "barrier" and ast.unparse(each.value) != "False" for each in call.keywords):
        return True
    name = _name(call)
    if not isinstance(call.func, ast.Attribute):
        return _COLLECTIVES.fullmatch(name) is not None
    owner = ast.unparse(call.func.value)
    return "dist" in owner and (name in _SHORT or _COLLECTIVES.fullmatch(name) is not None)


def _name(call: ast.Call) -> str:
    called = call.func
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def _branches(body: Sequence[ast.stmt], meeting: set[str], meets_later: bool) -> Iterator[_Branch]:
    """Yield the branches that some ranks may take, and others not, where they would meet."""
    for index, statement in enumerate(body):
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        later = meets_later or _meets(body[index + 1 :], meeting)
        if isinstance(statement, _Branch) and _parts(statement, meeting, later):
            yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from _branches(getattr(statement, name, []), meeting, later)
        for handler in getattr(statement, "handlers", []):
            yield from _branches(handler.body, meeting, later)


def _parts(branch: _Branch, meeting: set[str], meets_later: bool) -> bool:
    test = ast.unparse(branch.test)
    if not _DECIDES.search(test) or _ALIKE.fullmatch(test):
        return False
    ends = any(isinstance(each, ast.Return | ast.Continue | ast.Break) for each in (*branch.body, *branch.orelse))
    return _meets((*branch.body, *branch.orelse), meeting) or (ends and meets_later)
