"""List what users and tests see of the project, and find what a change has lost of it.

    python scripts/surface.py list [REVISION]       # everything, with the file in which it stands
    python scripts/surface.py compare REVISION      # what REVISION has and the working tree has not

Listed are, without the file, so that what has moved is not lost:

    flag        of any command line
    keyword     argument of a public function of the modules that users import
    import      what users import: module and name
    message     text in the product that is neither a docstring nor a single word, with {} for what is put into it
    name        public class, function, method of the product
    docstring   name of a public thing that has one
    test        test function
    case        one of a list of cases in the tests
    assertion   what an assert or a pytest.raises in the tests says, names without what stands before their dots

What stands several times is lost when it stands less often. ``tests/surface_gone.json`` is a list of reasons:

    why         in a sentence
    gone        what is lost, one by one
    like        patterns of what is lost; each must find something
    becomes     what to replace, pattern by pattern, in what is lost like that, to get what stands for it now: that must
                stand more often than before, or the loss has no reason
    now         what took the place; it must exist

No commit tells of a loss that surprised; it stays for the messages, flags and keywords, which users see.

Patterns are regular expressions; one of ``like`` fits the whole entry. A reason for what is not gone any more is an
error, too.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import functools
import io
import json
import re
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
REASONS = ROOT / "tests" / "surface_gone.json"
PRODUCT = ("vtp_plugin/", "patches/")
PROGRAMS = (*PRODUCT, "examples/", "benchmarks/", "scripts/")
FOR_USERS = ("vtp_plugin/__init__.py", "vtp_plugin/functional/", "vtp_plugin/adapters.py", "vtp_plugin/bridge.py",
             "vtp_plugin/api.py")  # fmt: skip
FLAG = re.compile(r"--[a-z][a-z0-9-]*")
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Entry(NamedTuple):
    """One thing of the surface.

    Attributes:
        kind: as the docstring of this module lists them.
        text: what it is; the same in every file.
        where: file and line, or the test, for readers.
    """

    kind: str
    text: str
    where: str

    @property
    def key(self) -> str:
        """How the file of reasons names it."""
        return f"{self.kind}: {self.text}"


def surface(sources: Mapping[str, str]) -> list[Entry]:
    """List the surface of a tree, given as its Python files.

    >>> tree = {"vtp_plugin/a.py": "def f(x):\\n  raise ValueError(f'{x} is odd; take 2')"}
    >>> [entry.key for entry in surface(tree)]
    ['name: f', 'message: {} is odd; take 2']
    """
    entries: list[Entry] = []
    for path, source in sources.items():
        tree = ast.parse(source)
        if path.startswith("tests/"):
            entries += _of_tests(path, tree)
        if path.startswith(PRODUCT):
            entries += [*_names(path, tree), *_messages(path, tree)]
        if path.startswith(PROGRAMS):
            entries += _flags(path, tree)
        if path.startswith(FOR_USERS):
            entries += _for_users(path, tree)
    return entries


def _public(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Yield the public definitions of a module with their names inside it; those under an ``if`` or ``try``, too."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            if not node.name.startswith("_"):
                yield f"{prefix}{node.name}", node
                if isinstance(node, ast.ClassDef):
                    yield from _public(node.body, f"{prefix}{node.name}.")
        else:
            yield from _public([inner for inner in ast.iter_child_nodes(node) if isinstance(inner, ast.stmt)], prefix)


def _names(path: str, tree: ast.Module) -> Iterator[Entry]:
    for name, node in _public(tree.body):
        yield Entry("name", name, f"{path}:{node.lineno}")
        if ast.get_docstring(node):
            yield Entry("docstring", name, f"{path}:{node.lineno}")


def _messages(path: str, tree: ast.Module) -> Iterator[Entry]:
    passed_over: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            passed_over.update(id(part) for part in node.values)
            for part in node.values:
                if isinstance(part, ast.FormattedValue) and part.format_spec is not None:
                    passed_over.update(id(inner) for inner in ast.walk(part.format_spec))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            passed_over.add(id(node.value))  # a docstring
    for node in ast.walk(tree):
        if id(node) in passed_over:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        text = " ".join(re.sub(r"%[sdr]|%\.\d+f", "{}", text).split())
        if len(re.findall(r"[a-z]{2,}", text)) > 1 and " " in text:
            yield Entry("message", text, f"{path}:{node.lineno}")


def _flags(path: str, tree: ast.Module) -> Iterator[Entry]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = [*node.args, *(word.value for word in node.keywords if word.arg == "name")]
            for value in given:
                if isinstance(value, ast.Constant) and FLAG.fullmatch(str(value.value)):
                    yield Entry("flag", str(value.value), f"{path}:{node.lineno}")
        if isinstance(node, ast.ClassDef) and path.startswith("vtp_plugin/config"):
            yield from _fields(path, node)


def _fields(path: str, options: ast.ClassDef) -> Iterator[Entry]:
    """Yield the flags and keywords that the fields of the options declare by their own names."""
    for node in options.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            field, words = node.target.id, {}
            if isinstance(node.value, ast.Call):
                words = {word.arg: word.value for word in node.value.keywords}
            keyword = words.get("keyword")
            named = str(keyword.value) if isinstance(keyword, ast.Constant) else field
            yield Entry("keyword", f"apply({named})", f"{path}:{node.lineno}")
            if "name" not in words:
                yield Entry("flag", f"--vtp-{field.replace('_', '-')}", f"{path}:{node.lineno}")


def _for_users(path: str, tree: ast.Module) -> Iterator[Entry]:
    module = re.sub(r"\.py$|/__init__\.py$|/(p2p|handles|queries|stand_in)\.py$", "", path).replace("/", ".")
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] in (["__all__"], ["_NAMES"]):
            for name in ast.literal_eval(node.value):
                yield Entry("import", f"{module}.{name}", f"{path}:{node.lineno}")
    for name, node in _public(tree.body):
        if "." not in name:
            yield Entry("import", f"{module}.{name}", f"{path}:{node.lineno}")
        if isinstance(node, Function):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            for argument in every:
                if argument.arg not in ("self", "cls"):
                    yield Entry("keyword", f"{name}({argument.arg})", f"{path}:{argument.lineno}")


def _of_tests(path: str, tree: ast.Module) -> Iterator[Entry]:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id.isupper():
                yield from _cases(path, target.id, node.value)
    for name, function in _functions(tree):
        where = f"{path}:{function.lineno} {name}"
        if name.rpartition(".")[2].startswith("test_"):
            yield Entry("test", name, where)
            for decorator in function.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("parametrize"):
                    for values in decorator.args[1:2]:
                        yield from _cases(path, name, values)
        for node in _own_nodes(function):
            if isinstance(node, ast.Assert):
                yield Entry("assertion", _plain(node.test), where)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.raises":
                yield Entry("assertion", _plain(node), where)


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield f"{prefix}{node.name}", node
            yield from _functions(node, f"{prefix}{node.name}.")
        else:
            yield from _functions(node, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix)


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of the functions in it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function):
            waiting.extend(ast.iter_child_nodes(node))


def _cases(path: str, name: str, values: ast.expr) -> Iterator[Entry]:
    if isinstance(values, ast.List | ast.Tuple | ast.Set):
        each = values.elts
    elif isinstance(values, ast.Dict):
        each = [key for key in values.keys if key is not None]
    else:
        return
    for case in each:
        yield Entry("case", f"{name}[{_plain(case)}]", f"{path}:{case.lineno}")


class _LastNames(ast.NodeTransformer):
    """Leave of every name with dots what stands after the last one: modules and objects get other names."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            inner = inner.value
        return ast.Name(node.attr, ast.Load()) if isinstance(inner, ast.Name) else self.generic_visit(node)  # type: ignore[return-value]


def _plain(node: ast.AST) -> str:
    return ast.unparse(_LastNames().visit(copy.deepcopy(node)))


def lost(before: list[Entry], now: list[Entry]) -> list[Entry]:
    """List what stood more often before; of a thing that is gone, its docstring is not.

    >>> old = surface({"patches/a.py": "def f():\\n  '''Do it.'''\\ndef g():\\n  '''Do it.'''"})
    >>> [entry.key for entry in lost(old, surface({"patches/b.py": "def f(): ..."}))]
    ['docstring: f', 'name: g']
    """
    count = Counter(entry.key for entry in now)
    names = Counter(entry.text for entry in now if entry.kind == "name")
    places: dict[str, list[Entry]] = defaultdict(list)
    for entry in before:
        places[entry.key].append(entry)
    found = []
    for key, entries in places.items():
        first = entries[0]
        expected = min(len(entries), names[first.text]) if first.kind == "docstring" else len(entries)
        if first.kind not in ("test", "assertion", "case", "name", "docstring"):
            expected = min(expected, 1)  # a text or a flag may be written once instead of twice
        if count[key] < expected:
            found.append(_missing(entries, [entry for entry in now if entry.key == key]))
    return found


def _missing(before: list[Entry], now: list[Entry]) -> Entry:
    """Return one of the entries before that has no counterpart now, by the function or file in which it stands."""
    still = {re.sub(r":\d+", "", entry.where).rpartition("/")[2] for entry in now}
    gone = [entry for entry in before if re.sub(r":\d+", "", entry.where).rpartition("/")[2] not in still]
    return (gone or before)[0]


def alike(reason: dict[str, Any], gone: Iterable[str], more: Mapping[str, int]) -> dict[str, set[str]]:
    """List what the patterns of a reason explain; those that find nothing are there, too.

    Args:
        reason: one of the file's.
        gone: the keys of what is lost.
        more: how much more often than before each entry stands now.

    >>> reason = {"like": ["name: .*copy.*", "flag: .*"], "becomes": {"copy": "team"}}
    >>> alike(reason, ["name: copy_of", "name: num_copy"], {"name: team_of": 1})
    {'name: .*copy.*': {'name: copy_of'}, 'flag: .*': set()}
    """
    found: dict[str, set[str]] = {pattern: set() for pattern in reason.get("like", ())}
    for key in gone:
        new = key
        for pattern, replacement in reason.get("becomes", {}).items():
            new = re.sub(pattern, replacement, new)
        for pattern in found:
            if re.fullmatch(pattern, key) and ("becomes" not in reason or more.get(new, 0) > 0):
                found[pattern].add(key)
    return found


def problems(before: list[Entry], now: list[Entry], reasons: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what is lost without a reason, and what is wrong with the reasons."""
    gone = {entry.key: entry for entry in lost(before, now)}
    more = Counter(entry.key for entry in now)
    here = set(more)
    more.subtract(entry.key for entry in before)
    explained: set[str] = set()
    for reason in reasons:
        found = alike(reason, gone, more)
        explained |= {*reason.get("gone", ()), *(key for keys in found.values() for key in keys)}
        yield from (f"explains nothing: {pattern}" for pattern, keys in found.items() if not keys)
        yield from (f"explained, but not gone: {key}" for key in reason.get("gone", ()) if key not in gone)
        yield from (f"said to stand in the place of others, but is not there: {key}"
                    for key in reason.get("now", ()) if key not in here)  # fmt: skip
    kinds = defaultdict(list)
    for entry in now:
        kinds[entry.kind].append(entry.text)
    for key in sorted(gone.keys() - explained, key=lambda key: (gone[key].kind, gone[key].where)):
        entry = gone[key]
        near = difflib.get_close_matches(entry.text, sorted(set(kinds[entry.kind])), n=1, cutoff=0.6)
        yield f"{key}\n    was in {entry.where}" + "".join(f"\n    near:  {text}" for text in near)


@functools.cache
def at_revision(revision: str) -> list[Entry]:
    """List the surface of a revision.

    Raises:
        LookupError: this clone does not have it.
    """
    done = subprocess.run(["git", "archive", revision, "--", "*.py"], cwd=ROOT, capture_output=True)
    if done.returncode:
        raise LookupError(f"revision {revision} is not in this clone: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        files = [member for member in archive.getmembers() if member.isfile()]
        return surface({file.name: archive.extractfile(file).read().decode() for file in files})  # type: ignore[union-attr]


def in_working_tree() -> list[Entry]:
    """List the surface of the files as they are, those that git does not know yet included."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "--", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return surface({name: (ROOT / name).read_text() for name in sorted(set(listed)) if (ROOT / name).is_file()})


def main() -> int:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list").add_argument("revision", nargs="?")
    commands.add_parser("compare").add_argument("revision")
    chosen = parser.parse_args()
    if chosen.command == "list":
        for entry in at_revision(chosen.revision) if chosen.revision else in_working_tree():
            print(f"{entry.key}    [{entry.where}]")
        return 0
    reasons = json.loads(REASONS.read_text()) if REASONS.exists() else []
    before, now = at_revision(chosen.revision), in_working_tree()
    found = list(problems(before, now, reasons))
    print("\n".join(found))
    said = f"{len(found)} lost or wrong since {chosen.revision}; {len(lost(before, now))} gone in all"
    print(f"{said}, for {len(reasons)} reasons", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
