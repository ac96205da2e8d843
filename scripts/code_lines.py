"""Count what the house weighs: code lines, without comments, docstrings and blank lines, tokens, and lines of data.

    python scripts/code_lines.py [REVISION [REVISION]]

By wing, of the working tree or of a revision; of two revisions also the difference. Sources are counted as they are
formatted, at a line length of 120. Data is TOML and JSON, wherever it lies: what replaces code is counted, too.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
_LENGTH = "line-length = 120"


@dataclass(slots=True)
class Weight:
    """What a wing weighs.

    Attributes:
        files: number of Python files.
        code: number of their code lines.
        tokens: number of their tokens.
        data: number of lines of TOML and JSON.
    """

    files: int = 0
    code: int = 0
    tokens: int = 0
    data: int = 0


def count(source: str) -> tuple[int, int]:
    r"""Count the code lines and the tokens of a source.

    >>> count("'Says.'\n\n# why\nx = [\n    1,\n]\n\ndef f():\n    'Does.'\n    return x  # so\n")
    (5, 13)
    """
    lines: set[int] = set()
    num_tokens = 0
    words = {line for begin, end in _prose(ast.parse(source)) for line in range(begin, end + 1)}
    for token in tokenize.tokenize(io.BytesIO(source.encode()).readline):
        if token.type not in _NO_CODE and token.start[0] not in words:
            lines.update(range(token.start[0], token.end[0] + 1))
            num_tokens += 1
    return len(lines), num_tokens


def _prose(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """Yield the first and the last line of each docstring, those of attributes included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.end_lineno or node.lineno


def wing_of(path: str) -> str:
    """Name the wing of a file: its first folder, of the package its first two.

    >>> wing_of("vtp_plugin/plan/layout/layer_lists.py"), wing_of("tests/unit/a.py"), wing_of("vtp_plugin/api.py")
    ('vtp_plugin/plan', 'tests', 'vtp_plugin')
    """
    folders = path.split("/")[:-1]
    return "/".join(folders[: 2 if folders[:1] == ["vtp_plugin"] else 1]) or "."


def files_of(revision: str | None) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each source and each file of data that git knows.

    Args:
        revision: a commit; None for the working tree.
    """
    kinds = (".py", ".toml", ".json")
    if revision is None:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for path in listed.splitlines():
            if path.endswith(kinds) and (ROOT / path).is_file():
                yield path, (ROOT / path).read_text()
        return
    packed = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(kinds):
                found = archive.extractfile(member)
                assert found is not None
                yield member.name, found.read().decode()


def weigh(revision: str | None) -> Mapping[str, Weight]:
    """Weigh each wing."""
    weights: defaultdict[str, Weight] = defaultdict(Weight)
    for path, text in files_of(revision):
        if path == "pyproject.toml" and _LENGTH not in text:
            raise SystemExit(f"pyproject.toml has no {_LENGTH!r}: lines of another length cannot be compared")
        weight = weights[wing_of(path)]
        if path.endswith(".py"):
            lines, tokens = count(text)
            weight.files, weight.code, weight.tokens = weight.files + 1, weight.code + lines, weight.tokens + tokens
        else:
            weight.data += len(text.splitlines())
    product = Weight()
    for name, weight in weights.items():
        if name.partition("/")[0] in ("vtp_plugin", "patches"):
            for field in Weight.__slots__:
                setattr(product, field, getattr(product, field) + getattr(weight, field))
    return {**dict(sorted(weights.items())), "the product": product}


def table(before: Mapping[str, Weight] | None, now: Mapping[str, Weight]) -> list[str]:
    """Return the table; with an earlier one the difference stands behind each number."""
    lines = [f"{'files':>12}{'code lines':>18}{'tokens':>20}{'data lines':>18}  wing"]
    names: set[str] = {*now, *(before or ())}
    for name in sorted(names, key=lambda name: (name == "the product", name)):
        own, cells = now.get(name, Weight()), []
        for field, width in zip(Weight.__slots__, (12, 18, 20, 18), strict=True):
            number = getattr(own, field)
            more = f" ({number - getattr(before.get(name, Weight()), field):+d})" if before is not None else ""
            cells.append(f"{number:d}{more}".rjust(width))
        lines.append(f"{''.join(cells)}  {name}")
    return lines


if __name__ == "__main__":
    revisions = sys.argv[1:3]
    earlier = weigh(revisions[0]) if len(revisions) == 2 else None
    print(*table(earlier, weigh(revisions[-1] if revisions else None)), sep="\n")
