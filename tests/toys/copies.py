"""Copies of the repository with a toy applied, and the recipes that toys follow."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.rules.import_rules import ROOT

FOLDERS = ("benchmarks", "docs", "examples", "patches", "scripts", "tests", "vtp_plugin")
FILES = ("*.md", "LICENSE", "Makefile", "pyproject.toml")
PATCHES = ROOT / "tests" / "toys"
RECIPES = ROOT / "docs/development/extending.md"


class ToyError(Exception):
    """A patch does not fit the tree; says what to do."""


def copy_tree(to: Path) -> None:
    """Copy what a toy may touch, and what tests of it need; compiled modules come along, for speed."""
    to.mkdir(parents=True)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, to / name, symlinks=True)
    for pattern in FILES:
        for path in ROOT.glob(pattern):
            shutil.copy2(path, to / path.name)


def apply(name: str, root: Path, *, as_far_as_it_fits: bool = False) -> None:
    """Apply a toy's patch to a copy.

    Raises:
        ToyError: it does not fit.
    """
    command = ["git", "apply", "-C1", *(["--reject"] if as_far_as_it_fits else []), str(PATCHES / f"{name}.patch")]
    # Not in a repository, even if the copy lies in one: git would leave out what it does not know there.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    if done.returncode and not as_far_as_it_fits:
        raise ToyError(
            f"tests/toys/{name}.patch does not fit any more:\n{done.stderr}renew it: "
            f"`python -m tests.toys.renew unpack {name}` makes a copy with what fits, follow the recipe in "
            f"docs/development/extending.md where it does not, then `python -m tests.toys.renew pack {name}`"
        )


def texts(root: Path) -> Iterator[str]:
    """Yield the files that a toy may touch."""
    for folder in (*FOLDERS, *FILES):
        for path in sorted(root.glob(folder if folder in FILES else f"{folder}/**/*")):
            inner = path.relative_to(root)
            is_left_out = {"__pycache__", "toys"} & set(inner.parts) or path.suffix in (".rej", ".orig", ".png")
            if path.is_file() and not path.is_symlink() and not is_left_out:
                yield inner.as_posix()


def difference(root: Path) -> str:
    """Return what was changed in a copy, as a patch."""
    hunks: list[str] = []
    for name in sorted({*texts(ROOT), *texts(root)}):
        old, new = (path.read_text() if path.is_file() else "" for path in (ROOT / name, root / name))
        if old != new:
            ends = (f"a/{name}" if old else "/dev/null", f"b/{name}" if new else "/dev/null")
            hunks += difflib.unified_diff(old.splitlines(True), new.splitlines(True), *ends)
    return "".join(hunks)


def touched(patch: str) -> set[str]:
    """List the files that a patch changes or makes.

    >>> sorted(touched("--- a/x.py\\n+++ b/x.py\\n@@ -1 +1 @@\\n-a\\n+b\\n--- /dev/null\\n+++ b/y.py\\n"))
    ['x.py', 'y.py']
    """
    return set(re.findall(r"^(?:---|\+\+\+) [ab]/(\S+)$", patch, re.MULTILINE))


def recipes() -> dict[str, list[str]]:
    """Read which files each recipe names, in its order; `x.py` stands for any module, `...` for any folders."""
    sections = [part.partition("\n") for part in RECIPES.read_text().split("\n## ")[1:]]
    return {heading: re.findall(r"^\d+\. `([^`]+)`", part, re.MULTILINE) for heading, _, part in sections}


def unlike(files: set[str], steps: list[str]) -> list[str]:
    """List the steps of a recipe that no file follows, and the files that follow none; each file follows one.

    >>> unlike({"a/b/c.py", "a/y.py"}, ["a/.../x.py", "a/y.py"]), unlike({"a.py"}, ["b.py"])
    ([], ['b.py', 'a.py'])
    """
    left, open_steps = set(files), []
    for step in sorted(steps, key=lambda step: step.endswith("x.py")):  # exact names first
        pattern = re.escape(step).replace(r"\.\.\.", r"\S+")
        pattern = re.sub(r"(?<=/)x\\\.py$", r"[^/]+\\.py", pattern)
        match = next((file for file in sorted(left) if re.fullmatch(pattern, file)), None)
        left -= {match} if match else set()
        open_steps += [] if match else [step]
    return [*open_steps, *sorted(left)]
