"""What the page on troubleshooting quotes of the plugin, the plugin says."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.rules.doc_commands import PROGRAMS
from tests.rules.import_rules import ROOT, sources

PAGE = ROOT / "docs" / "guides" / "troubleshooting.md"
_VARIABLE = "\0"


@cache
def said() -> str:
    """Return every text of the product, a line for each; what varies in it is one character."""
    lines: list[str] = []
    for _, source in sources():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else _VARIABLE for part in node.values)
                lines.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                lines.append(node.value)
    return "\n".join(" ".join(line.split()) for line in lines)


def quoted() -> list[str]:
    """Return the messages of the page: code with a space that is neither a command nor flags nor Python."""
    text = re.sub(r"^    .*$", "", PAGE.read_text(), flags=re.MULTILINE)
    found = (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text))
    other = (*(f"{name} " for name in PROGRAMS), "-", "plan ", "if ", "1 2")
    return [code for code in found if " " in code and not code.startswith(other)]


@pytest.mark.parametrize("message", quoted())
def test_a_message_that_is_quoted_is_one_of_the_product(message: str) -> None:
    """Dots stand for what varies, and for what comes before or after."""
    pieces = [piece.strip() for piece in message.split("...")]
    words = [piece for piece in pieces if re.search(r"\w", piece)]
    assert words
    between = "[^\n]*"
    assert re.search(between.join(re.escape(piece) for piece in words), said()), message


def test_the_reader_finds_messages() -> None:
    assert len(quoted()) > 25
