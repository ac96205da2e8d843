"""Move modules and rename what they define, in everything that names them: ``scripts/moves.toml`` lists what.

    python scripts/move.py                  in this tree: files, imports, dotted names, paths, classes, functions, ids
    python scripts/move.py --prove OLD      compare this tree with a checkout from before the moves
    MOVES=scripts/rooms.toml python scripts/move.py         another table: here files that are to be joined

A branch from before the moves is brought behind them by running the script in it; where the moves were made already,
nothing changes; then ``ruff check --fix .`` and ``ruff format .`` put imports in order. The
proof is ``scripts/prove_moves.py``'s. It all stays in the tree until the release.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

sys.path.insert(0, str(Path(__file__).resolve().parent))
from merge import Part, joined
from prove_moves import Comparison

ROOT = Path(__file__).resolve().parent.parent
TABLE = os.environ.get("MOVES", "scripts/moves.toml")
PLUGIN = "vtp_plugin"
TESTS = "tests"
_PATCHES = f"{PLUGIN}.patches."
_QUOTES = ("'", '"', "`")
_CODE = (PLUGIN, "patches", "tests", "benchmarks", "examples", "scripts")
# Tables of moves and histories stay as they were written; pictures and results are made anew.
_LEFT = (
    "scripts/moves.toml",
    "scripts/rooms.toml",
    "scripts/merge.py",
    "scripts/move.py",
    "scripts/prove_moves.py",
    "tests/surface_gone.json",
    "CHANGELOG.md",
)
_LEFT_SUFFIXES = (".svg", ".json", ".png", ".whl")
# Here B1 is a backward and S1 a trap, or the old ids stand on purpose.
_NO_RECORDS = (
    *(
        "docs/how/patches.md",
        "docs/development/u-shape-traps.md",
        "tests/unit/runtime/test_grad_sync.py",
        "rankings.py",
        "u_shape.py",
    ),
)
_DOTTED = re.compile(rf"(?<![\w./])(?:{PLUGIN}|{TESTS})(?:\.[a-z_]\w*)+")
_EXAMPLE_IMPORT = re.compile(rf">>> from ({PLUGIN}[\w.]*) import (.+)")
# In what is no Python file, such as a patch.
_IMPORT = re.compile(rf"\bfrom ((?:{PLUGIN}|{TESTS})[\w.]*) import (\w+)$", re.MULTILINE)
# As the registry of records names the modules of patches.
_OF_PATCHES = re.compile(r'(?<=")(?:core|training|hosts|mindspeed)(?:\.\w+)+(?=")')
_PATH = re.compile(rf"(?<![\w./-])((?:[ab]/)?(?:{PLUGIN}|{TESTS})/)?((?:[a-z_]\w*/)*[a-z_]\w*(?:\.py\b)?)(?![\w.])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """A module that is joined from others.

    Attributes:
        doc: its docstring.
        parts: dotted names of what it is joined from.
    """

    doc: str
    parts: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What moves.

    Attributes:
        modules: dotted names before and after, of modules and of whole packages.
        names: of a module, by its name after the moves: what is renamed in it.
        exports: of a module, by its name before: what it imports, as (module, name).
        records: ids of records before and after.
        merges: what is joined from several modules, by the name of the joined one.
    """

    modules: Mapping[str, str]
    names: Mapping[str, Mapping[str, str]]
    exports: Mapping[str, Mapping[str, tuple[str, str]]]
    records: Mapping[str, str]
    merges: Mapping[str, Merge]

    def module(self, dotted: str) -> str:
        """Give the new name of a module: its own, or that of the package around it."""
        head, tail = dotted, ""
        while head:
            if head in self.modules:
                return self.modules[head] + tail
            head, _, last = head.rpartition(".")
            tail = f".{last}{tail}"
        return dotted

    def name(self, module: str, name: str) -> str:
        """Give the new name of what a module defines, or imports."""
        # A package that imports one of its modules seems to have it from itself.
        while (source := self.exports.get(module, {}).get(name)) and source != (module, name):
            module, name = source
        # What two parts of a joined module call alike is renamed in one of them, by its name before.
        return self.names.get(module, {}).get(name) or self.names.get(self.module(module), {}).get(name, name)

    def imported(self, module: str, name: str) -> tuple[str, str, bool]:
        """Give what an import of a name becomes: module and name, and whether the name is that of a module."""
        whole = f"{module}.{name}"
        moved = self.module(whole)
        # A package may export a function that is called as one of its modules.
        is_exported = name in self.exports.get(module, {})
        if not is_exported and (path_of(whole).is_file() or path_of(moved).is_file()):
            home, _, leaf = moved.rpartition(".")
            return home, leaf, True
        return self.module(module), self.name(module, name), False

    def text(self, text: str) -> str:
        """Rename dotted names and paths in a text."""
        text = _OF_PATCHES.sub(lambda found: self.module(f"{_PATCHES}{found[0]}").removeprefix(_PATCHES), text)
        text = _IMPORT.sub(self._import, text)
        return _PATH.sub(self._path, _DOTTED.sub(lambda found: self.module(found[0]), text))

    def _import(self, found: re.Match[str]) -> str:
        home, name, _ = self.imported(found[1], found[2])
        return f"from {home} import {name}"

    def ids(self, text: str) -> str:
        """Rename ids of records in a text; in prose they then stand in backticks."""
        if not self.records:
            return text
        words = "|".join(sorted(self.records, key=len, reverse=True))

        def new(found: re.Match[str]) -> str:
            before, after = text[: found.start()], text[found.end() :]
            is_bare = before.endswith("patch ") or (before[-1:] in _QUOTES and after[:1] in _QUOTES)
            return self.records[found[0]] if is_bare else f"`{self.records[found[0]]}`"

        return re.sub(rf"(?<![\w/-])(?:{words})(?![\w/-])", new, text)

    def _path(self, found: re.Match[str]) -> str:
        folder, path = found[1] or "", found[2]
        # A path may begin below the plugin's folder, or that of the tests.
        for top in (folder.split("/")[-2],) if folder else (PLUGIN, TESTS)[: 1 + ("/" in path)]:
            old = f"{top}." + path.removesuffix(".py").replace("/", ".")
            new = self.module(old)
            is_known = folder or (path.endswith(".py") and (path_of(old).is_file() or path_of(new).is_file()))
            if new != old and is_known:
                return folder + new.removeprefix(f"{top}.").replace(".", "/") + path[len(path.removesuffix(".py")) :]
        return found[0]


def path_of(dotted: str, *, is_package: bool | None = None) -> Path:
    """Give the file of a module; whether it is a package is seen in the tree, if it is not said."""
    pieces = dotted.split(".")
    path = ROOT.joinpath(*(pieces[1:] if pieces[1:2] == ["patches"] else pieces))
    return path / "__init__.py" if (path.is_dir() if is_package is None else is_package) else path.with_suffix(".py")


def sources(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield every file of Python code, and the dotted name of its module."""
    for path in sorted(path for folder in _CODE for path in (root / folder).rglob("*.py")):
        relative = path.relative_to(root)
        if relative.parts[:2] != (PLUGIN, "patches") and str(relative) not in _LEFT:
            dotted = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            yield path, f"{PLUGIN}.{dotted}" if relative.parts[0] == "patches" else dotted


def read_moves(root: Path) -> Moves:
    """Read the table, and what modules of a tree import."""
    table: dict[str, Any] = tomllib.loads((ROOT / TABLE).read_text())
    names: dict[str, dict[str, str]] = {}
    for old, new in table.get("names", {}).items():
        module, _, name = old.rpartition(".")
        names.setdefault(_whole(module), {})[name] = new
    exports: dict[str, dict[str, tuple[str, str]]] = {}
    for path, dotted in sources(root):
        for node in _from_imports(ast.parse(path.read_text())):
            exports.setdefault(dotted, {}).update({a.asname or a.name: (str(node.module), a.name) for a in node.names})
    modules = {_whole(old): _whole(new) for old, new in table.get("modules", {}).items()}
    merges = {
        _whole(new): Merge(doc=each["doc"], parts=[*map(_whole, each["parts"])])
        for new, each in table.get("merges", {}).items()
    }
    modules |= {part: new for new, merge in merges.items() for part in merge.parts}
    return Moves(modules=modules, names=names, exports=exports, records=table.get("records", {}), merges=merges)


def _whole(name: str) -> str:
    """Give the dotted name of what the table names: below the plugin, but for tests."""
    return name if name.startswith(f"{TESTS}.") else f"{PLUGIN}.{name}"


def _from_imports(tree: ast.AST) -> list[ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module and not node.level]


def _is_ours(node: ast.ImportFrom) -> bool:
    return str(node.module).partition(".")[0] in (PLUGIN, TESTS)


class Names:
    """What is called otherwise in one file.

    Args:
        dotted: the module's name before.
        text: the file's.
        tree: its syntax tree.
        moves: the table.

    Attributes:
        renamed: names before and after.
        modules: modules that the file imports from packages, by their names after, or under which it imports them.
        kept: names of modules that the file goes on to use for them.
    """

    def __init__(self, dotted: str, text: str, tree: ast.AST, moves: Moves) -> None:
        self.moves = moves
        self.renamed = {**moves.names.get(moves.module(dotted), {}), **moves.names.get(dotted, {})}
        self.modules: dict[str, str] = {}
        self.kept: set[str] = set()
        self._before: dict[str, str] = {}
        own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        for node in _from_imports(tree):
            for alias in node.names:
                home, new, is_module = moves.imported(str(node.module), alias.name)
                if is_module:
                    self._before[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if is_module and alias.asname is None and new != alias.name and new in own:
                    # The file has something else of that name.
                    self.kept.add(alias.name)
                    self.modules[alias.name] = f"{home}.{new}"
                    continue
                if is_module:
                    self.modules[alias.asname or new] = f"{home}.{new}"
                if alias.asname is None and new != alias.name:
                    self.renamed[alias.name] = new
        for module, found in _EXAMPLE_IMPORT.findall(text):
            for name in re.findall(r"\w+", found):
                if (new := moves.name(module, name)) != name:
                    self.renamed[name] = new

    def of_attribute(self, owner: str, name: str) -> str:
        """Give the new name of an attribute of a module that the file imports."""
        module = self.modules.get(self.renamed.get(owner, owner))
        if (renamed := self.moves.names.get(self._before.get(owner, ""), {}).get(name)) is not None:
            return renamed
        return name if module is None else self.moves.names.get(module, {}).get(name, name)


def rewrite(text: str, dotted: str, moves: Moves) -> str:
    """Give the text of a file after the moves."""
    tree = ast.parse(text)
    names = Names(dotted, text, tree, moves)
    text = _rename_tokens(text, names)
    lines = text.splitlines(keepends=True)
    for node in sorted(_from_imports(tree), key=lambda node: -node.lineno):
        given = [(str(node.module), alias.name) for alias in node.names]
        found = [moves.imported(*one)[:2] for one in given]
        if not _is_ours(node) or found == given:
            continue
        ends = (lines[node.lineno - 1], lines[(node.end_lineno or node.lineno) - 1])
        comment = max(line.partition("  #")[2].rstrip() for line in ends)
        by_home: dict[str, list[str]] = {}
        for (home, name), alias in zip(found, node.names, strict=True):
            local = alias.asname or (alias.name if alias.name in names.kept else None)
            by_home.setdefault(home, []).append(f"{name} as {local}" if local else name)
        lines[node.lineno - 1 : node.end_lineno] = [
            f"{' ' * node.col_offset}from {home} import {', '.join(listed)}" + (f"  #{comment}\n" if comment else "\n")
            for home, listed in by_home.items()
        ]
    return moves.text(_rename_words("".join(lines), names))


def _rename_tokens(text: str, names: Names) -> str:
    lines = text.splitlines(keepends=True)
    tokens = [*tokenize.generate_tokens(io.StringIO(text).readline)]
    for place in range(len(tokens) - 1, -1, -1):
        token = tokens[place]
        if token.type != tokenize.NAME:
            continue
        new = _new_name(tokens, place, names)
        (row, start), (_, end) = token.start, token.end
        lines[row - 1] = lines[row - 1][:start] + new + lines[row - 1][end:]
    return "".join(lines)


def _new_name(tokens: list[tokenize.TokenInfo], place: int, names: Names) -> str:
    name = tokens[place].string
    if place and tokens[place - 1].string == ".":
        is_of_name = tokens[place - 2].type == tokenize.NAME and tokens[place - 3].string != "."
        return names.of_attribute(tokens[place - 2].string, name) if is_of_name else name
    if name in names.renamed and tokens[place + 1].string == "=" and _is_in_call(tokens, place):
        return name
    return names.renamed.get(name, name)


def _is_in_call(tokens: list[tokenize.TokenInfo], place: int) -> bool:
    """Tell whether ``name =`` gives an argument its value."""
    before = place - 1
    while tokens[before].type in (tokenize.NL, tokenize.COMMENT):
        before -= 1
    return tokens[before].string in ("(", ",")


def _rename_words(text: str, names: Names) -> str:
    """Rename what documentation quotes, and examples in it."""
    for old, new in names.renamed.items():
        text = re.sub(rf"(?<=^__all__)( = [\[(][^\])]*\"){old}(?=\")", rf"\g<1>{new}", text, flags=re.M)
        text = re.sub(rf"(?<=`)((?:~?\.?)(?:\w+\.)*){old}(?=[.`(\[])", rf"\g<1>{new}", text)
    lines = text.splitlines(keepends=True)
    is_example = False
    for place, line in enumerate(lines):
        bare = line.strip()
        is_example = bare.startswith(">>>") or (is_example and bare != "" and not bare.endswith('"""'))
        if is_example:
            for old, new in names.renamed.items():
                end = r"(?![\w=])" if old[0].isupper() else r"(?=[(,]|$)"
                line = re.sub(rf"(?<![\w.'\"]){old}{end}", new, line)
            lines[place] = line
    return "".join(lines)


def move() -> None:
    """Move and rename in this tree."""
    moves = read_moves(ROOT)
    known = [*sources(ROOT)]
    texts = {path: rewrite(path.read_text(), dotted, moves) for path, dotted in known}
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split():
        path = ROOT / name
        if path not in texts and name not in _LEFT and not path.is_symlink() and path.suffix not in _LEFT_SUFFIXES:
            texts[path] = moves.text(path.read_text())
    for path, moved in texts.items():
        text = moved if str(path).endswith(_NO_RECORDS) else moves.ids(moved)
        if path.read_text() != text:
            path.write_text(text)
    problems: list[str] = []
    in_merges: set[str] = set()
    for new, merge in moves.merges.items():
        paths = {part: path for part in merge.parts for path, dotted in known if dotted == part}
        if {*paths} != {*merge.parts}:
            continue  # it was joined already
        in_merges.update(paths)
        text, found = joined(new, merge.doc, [Part(part, path.read_text()) for part, path in paths.items()])
        problems += found
        after = path_of(new, is_package=False)
        after.parent.mkdir(parents=True, exist_ok=True)
        if not after.exists():
            subprocess.check_call(["git", "mv", str(next(iter(paths.values()))), str(after)], cwd=ROOT)
        for path in paths.values():
            if path != after and path.exists():
                subprocess.check_call(["git", "rm", "-qf", str(path)], cwd=ROOT)
        after.write_text(text)
    if problems:
        print(*problems, sep="\n")
    for path, dotted in known:
        if dotted not in in_merges and (new := moves.module(dotted)) != dotted:
            after = path_of(new, is_package=path.name == "__init__.py")
            after.parent.mkdir(parents=True, exist_ok=True)
            subprocess.check_call(["git", "mv", str(path), str(after)], cwd=ROOT)


def main() -> None:
    """Move, or prove."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prove", type=Path, metavar="OLD", help="a checkout from before the moves")
    old = parser.parse_args().prove
    if old is None:
        move()
    else:
        sys.exit(prove(old))


def prove(old: Path) -> int:
    """Compare the trees, print what differs and give the exit code."""
    moves = read_moves(old)
    before: dict[str, dict[str, Path]] = {}
    for path, dotted in sources(old):
        before.setdefault(moves.module(dotted), {})[dotted] = path
    after = {dotted: path for path, dotted in sources(ROOT)}
    problems = [f"only before: {dotted}" for dotted in sorted(before.keys() - after.keys())]
    problems += [f"only now: {dotted}" for dotted in sorted(after.keys() - before.keys())]
    for dotted in sorted(before.keys() & after.keys()):
        problems += Comparison(moves).of(before[dotted], dotted, after[dotted])
    print("\n".join([*problems, f"{len(before.keys() & after.keys())} files compared, {len(problems)} differences"]))
    return int(bool(problems))


if __name__ == "__main__":
    main()
