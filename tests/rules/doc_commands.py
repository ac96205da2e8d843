"""Reads the shell commands out of the documents."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "README.zh", "CONTRIBUTING", "SECURITY", "CHANGELOG")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
]
FOLDERS = ("benchmarks", "examples", "scripts", "tests/device")
PROGRAMS = ("torchrun", "vtp", "megatron", "python", "make", "pip", "jq")
_ASSIGNMENT = re.compile(r"[A-Z_]+=.*")
# What stands for the reader's own words.
_PLACEHOLDER = "[Megatron's arguments]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of a document; equal to the same command of another one, such as a translation.

    Attributes:
        source: name of the document.
        variables: environment variables before it.
        words: its words; the first is a program, a script, or a flag where only flags are shown.
    """

    source: str = field(compare=False)
    variables: tuple[str, ...]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.words)


def joined(path: Path) -> str:
    """Return a document's text, with the code of examples taken out."""
    return re.sub(r"```python\n.*?```", "", path.read_text(), flags=re.DOTALL)


def programs_of_the_project() -> list[Path]:
    """Return the scripts that a document may name."""
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def commands(path: Path) -> list[Command]:
    """Return the commands of a document, from indented blocks and from code in the text.

    Raises:
        ValueError: an indented line is none that this reader knows.
    """
    return [*_of_blocks(path), *_of_text(path)]


def _of_blocks(path: Path) -> Iterator[Command]:
    text = re.sub(r"```.*?```", "", joined(path), flags=re.DOTALL).replace("\\\n", " ")
    block = re.findall(r"^    +(\S.*)$", text, re.MULTILINE)
    for line in block:
        shown = re.split(r"\s#|\s{3,}(?=[a-z#])", line)[0].replace(_PLACEHOLDER, "").strip()
        words = () if shown.startswith("{") else tuple(shlex.split(shown))
        variables = tuple(itertools.takewhile(_ASSIGNMENT.fullmatch, words))
        rest = words[len(variables) :]
        if rest and (rest[0] in PROGRAMS or rest[0].startswith(("--", "examples/"))):
            yield Command(source=path.name, variables=variables, words=rest)
        elif not shown.startswith("{"):
            try:
                ast.parse(shown)
            except SyntaxError:
                raise ValueError(f"{path.name}: {line!r} is neither a command nor Python nor JSON") from None


def _of_text(path: Path) -> Iterator[Command]:
    text = re.sub(r"```.*?```|^    .*$", "", joined(path), flags=re.DOTALL | re.MULTILINE)
    return commands_in_code(text, source=path.name)


def commands_in_code(text: str, *, source: str) -> Iterator[Command]:
    """Yield the commands that stand between backticks in a text."""
    for code in re.findall(r"`([^`]+)`", text):
        words = tuple(shlex.split(code)) if code.startswith(tuple(f"{name} " for name in PROGRAMS)) else ()
        if words:
            yield Command(source=source, variables=(), words=words)
