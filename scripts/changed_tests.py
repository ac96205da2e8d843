"""Print the files of tests that a change can reach, for `make test-changed`: scripts/changed_tests.py [COMMIT].

Changed is what differs from a commit, by default from the last one, with files that git does not know yet. A test is
reached if it imports a changed module, itself or through others, functions and names in texts included. What brings all
parts together, such as ``apply()``, is not followed: :data:`SPINE` stands for the runs behind it. So this is for the
hand; `make test` runs all.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.rules.import_rules import ROOT, modules_needed

FOLDERS = ("vtp_plugin", "patches", "tests", "scripts", "benchmarks", "examples")
SPINE = (
    "tests/multiproc/layouts/test_host_grid.py",
    "tests/multiproc/training/test_training.py",
    "tests/house/test_doctests.py",
    "tests/house/test_imports.py",
)
"""Files of tests that are always run."""
_LOOK_AT_ALL_FILES = {"tests/house/", "tests/unit/project/"}
_COMMANDS = "tests/unit/cli/"  # calls all commands by one function
_ALL = (
    *("vtp_plugin", "vtp_plugin.api", "vtp_plugin.cli.main"),
    *("tests.multiproc.jobs.script_job", "tests.support.pool_preload"),
)
_MODULE = re.compile(r"\w+(?:\.\w+)+")


def graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the modules that each module names, in imports and in texts, but for those that ``apply()`` brings in.

    Args:
        sources: sources by dotted names.

    >>> graph({"a.x": "import a.y", "a.y": "f('a.z:function')", "a.z": ""})
    {'a.x': {'a.y'}, 'a.y': {'a.z'}, 'a.z': set()}
    """
    return {
        name: set() if _is_all(name) else modules_needed(name, source, sources) | _in_texts(source, sources)
        for name, source in sources.items()
    }


def _is_all(name: str) -> bool:
    return name in _ALL or name.startswith("vtp_plugin.patches")


def _in_texts(source: str, known: Collection[str]) -> set[str]:
    texts = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    named = (_MODULE.match(text) for text in texts if isinstance(text, str))
    return {found[0] for found in named if found and found[0] in known}


def reaching(changed: Collection[str], needed: Mapping[str, Collection[str]]) -> set[str]:
    """Return the modules that reach a changed one, those included.

    >>> sorted(reaching({"c"}, {"a": {"b"}, "b": {"c"}, "c": set(), "d": {"a"}, "e": {"f"}}))
    ['a', 'b', 'c', 'd']
    """
    found = set(changed)
    while new := {name for name, others in needed.items() if name not in found and not found.isdisjoint(others)}:
        found |= new
    return found


def changed_files(commit: str) -> list[str]:
    """Return the files that differ from a commit, or are new; deleted ones are not there."""
    commands = (
        ["git", "diff", "--name-only", "--diff-filter=d", commit],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    done = [subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True) for words in commands]
    return [line for each in done for line in each.stdout.splitlines()]


def _modules() -> Iterator[tuple[str, Path]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.is_symlink() and "__pycache__" not in path.parts:
                words = path.relative_to(ROOT).with_suffix("").parts
                name = ".".join(words if words[0] != "patches" else ("vtp_plugin", *words))
                yield name.removesuffix(".__init__"), path


class House:
    """The modules of the repository, read once."""

    def __init__(self) -> None:
        self.paths = dict(_modules())
        self.sources = {name: path.read_text() for name, path in self.paths.items()}
        self.needed = graph(self.sources)

    def reached_by(self, files: Collection[str]) -> list[str]:
        """Return the files of tests that changed files reach, and the spine."""
        names = {str(path.relative_to(ROOT)): name for name, path in self.paths.items()}
        changed = {names[file] for file in files if file in names}
        # Whoever reads another file, such as a table, has its name in a text. Messages name documents.
        others = {Path(file).name for file in files if file not in names and not file.endswith(".md")}
        changed |= {name for name, source in self.sources.items() if any(other in source for other in others)}
        reached = reaching(changed, self.needed)
        found = {str(path.relative_to(ROOT)) for name, path in self.paths.items() if name in reached and _is_test(path)}
        folders = {_COMMANDS} if any(name.startswith("vtp_plugin.cli.") for name in reached) else set[str]()
        return sorted({*found, *SPINE, *folders, *(_LOOK_AT_ALL_FILES if files else ())})


def _is_test(path: Path) -> bool:
    return path.name.startswith("test_")


def main() -> int:
    """Print them in one line."""
    print(*House().reached_by(changed_files(sys.argv[1] if len(sys.argv) > 1 else "HEAD")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
