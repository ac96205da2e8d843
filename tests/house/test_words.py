"""The pages on the architecture say what the code says, and each package explains its own words."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.rules.import_rules import ROOT, sources

PAGES = {
    path.stem: path
    for path in (ROOT / "docs").rglob("*.md")
    if path.stem in ("architecture", "glossary", "internals", "extending")
}
FOLDERS = ("vtp_plugin", "patches", "tests", "docs", "benchmarks", "examples", "scripts")
CITATION = re.compile(rf"docs/\w+/({'|'.join(PAGES)})\.md, (?:contract (\d+)|([a-z][a-z ]*[a-z]))")
# Packages, each with words of its own; where each package of a package has a list, the outer one has none.
ROOMY = ("plan", "report", "runtime", "tune")
PACKAGES = [
    path.parent
    for path in sorted((ROOT / "vtp_plugin").glob("*/__init__.py"))
    if path.parent.name not in ("patches", *ROOMY)
] + [path.parent for name in ROOMY for path in sorted((ROOT / "vtp_plugin" / name).glob("*/__init__.py"))]
# Sections whose names in code are looked up, by their page; these are Megatron's.
WAYS = (
    ("internals", "The path of one microbatch"),
    ("internals", "The path of one gradient"),
    ("internals", "When a rank dies"),
    ("internals", "When devices are lost"),
    ("extending", "How to add"),
)
MEGATRONS = {"forward_step"}
# What documents and messages do not say, and the word of the field that they say in its place. Flags, keys and names of
# files stay as they are, and so does code in documents.
FIELD_WORDS = {
    r"\b(go|goes|going|gone|went) on\b": "continue; of a run from a checkpoint: resume",
    r"\banew\b": "again; of a run: restart from scratch",
    r"\ba hand\b": "automatically",
    r"\b(computed?|computes|computing)( (it|them|all|that))? again\b": "recompute",
    r"(?<!lost-)\bcards?\b": "GPU where it is one, else device",
    r"\b(gradient|gradients'|replicas?'?) sums?\b": "gradient all-reduce, reduce-scatter",
    r"\bsums? (of|over) (the |its |their |all )?(gradients|replicas|experts)\b": "gradient all-reduce, reduce-scatter",
    r"\bswap(s|ped)? (their |its |the )?parts\b": "all-gather",
    r"\brefus(e|es|ed|al|als|ing)\b": "not supported; of a wrong value or a file: reject",
    r"\b(any|another|fitted|uniform|unequal|equal|new|old|every|each|which|that) lists?\b": "layout, or TP sizes",
    r"\blists? (that fit|fits?|(is|are|was|were) (fitted|loaded)|loads?)\b": "layout, or TP sizes",
    r"\bhosts?\b(?! (memory|name)|:PORT)": "Megatron version; of a machine: node",
    r"\bcargo\b": "payload",
    r"\bplanted\b": "injected",
    r"\bleft out of\b": "excluded from",
    r"\bwriter rank\b": "the rank that writes logs",
    r"\bstretch(es)?\b": "span",
}


def texts() -> Iterator[tuple[Path, str]]:
    """Yield every file of text that the project writes by hand, but for its history and this file."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".sh")]
    for path in (*files, ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        if path != Path(__file__) and path.is_file():
            yield path, path.read_text(encoding="utf-8")


def documents() -> Iterator[tuple[str, str]]:
    """Yield the prose of every document that users read, without code and without the targets of links."""
    for path in sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"))):
        if path.name != "CHANGELOG.md":  # history
            text = re.sub(r"^(```|~~~).*?^\1|^    .*?$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
            yield str(path.relative_to(ROOT)), re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)


def messages() -> Iterator[tuple[str, str]]:
    """Yield the texts that the product prints: strings with a space that are neither docstrings nor patterns."""
    for module, source in sources():
        tree = ast.parse(source)
        patterns = {
            argument
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "re.compile"
            for argument in node.args
        }
        docstrings = {
            node.value
            for parent in ast.walk(tree)
            if isinstance(parent, ast.Module | ast.ClassDef | ast.FunctionDef)
            for node in parent.body
            if isinstance(node, ast.Expr)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or node in docstrings | patterns or not isinstance(node.value, str):
                continue
            if " " in node.value:
                yield f"{module}:{node.lineno}", re.sub(r"`[^`]*`", "", node.value)


@pytest.mark.parametrize("texts", [documents, messages], ids=lambda texts: texts.__name__)
def test_words_are_those_of_the_field(texts: Callable[[], Iterator[tuple[str, str]]]) -> None:
    wrong = [
        f"{where}: {found[0]!r}: {instead}"
        for where, text in texts()
        for own, instead in FIELD_WORDS.items()
        for found in re.finditer(own, re.sub(r"\s+", " ", text), re.IGNORECASE)
    ]
    assert wrong == [], f"{len(wrong)} private words"


def section(page: str, heading: str) -> str:
    """Return the text below a heading of a page, to the next one of its level."""
    found = re.search(rf"^(#+) {heading}\n(.*?)(?=^\1 |\Z)", PAGES[page].read_text(), re.MULTILINE | re.DOTALL)
    assert found, heading
    return found[2]


@cache
def names_in_code() -> frozenset[str]:
    """Every name that the product defines; methods also as Class.method, inherited ones not."""
    names: set[str] = set()
    for _, source in sources():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.add(node.name)
            if isinstance(node, ast.ClassDef):
                names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(names)


def test_the_glossary_says_each_term_once() -> None:
    rows = [
        line.strip("|").split("|") for line in section("glossary", "Glossary").splitlines() if line.startswith("|")
    ][2:]
    terms = [row[0] for row in rows]
    assert terms
    assert len(set(terms)) == len(terms)
    assert all(len(row) == 3 and all(row) for row in rows)


def own_words(package: Path) -> list[str]:
    """Return the words that a package explains at its beginning."""
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    _, found, text = docstring.partition("\nWords:\n")
    return re.findall(r"^    ([a-z][a-z -]*): \S", text, re.MULTILINE) if found else []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_package_begins_with_its_own_words(package: Path) -> None:
    words = own_words(package)
    shared = {
        line.strip("|").split("|")[0].strip() for line in section("glossary", "Glossary").splitlines() if "|" in line
    }
    text = " ".join(path.read_text() for path in package.rglob("*.py") if path != package / "__init__.py").lower()
    assert 2 <= len(words) <= 8
    assert not shared & set(words), "docs/reference/glossary.md explains it for all"
    assert [word for word in words if word not in text] == []


def test_headings_and_contracts_that_are_cited_exist() -> None:
    headings = {
        name: {heading.lower() for heading in re.findall(r"^##? (.+)$", page.read_text(), re.MULTILINE)}
        for name, page in PAGES.items()
    }
    numbers = {"internals": set(re.findall(r"^(\d+)\. ", section("internals", "Contracts"), re.MULTILINE))}
    cited = 0
    for path, text in texts():
        # A citation may go over the end of a line.
        for page, number, heading in CITATION.findall(re.sub(r"\s*\n[\s#]*", " ", text)):
            cited += 1
            known = numbers.get(page, set[str]()) if number else headings[page]
            assert (number or heading) in known, f"{path.name}: docs/{page}.md has no {number or heading}"
    assert cited >= 3


@pytest.mark.parametrize(("page", "heading"), WAYS)
def test_names_in_the_documents_are_those_of_the_code(page: str, heading: str) -> None:
    named = re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?)`", section(page, heading))
    named = [name for name in named if not name.endswith((".py", ".md", ".toml"))]
    assert named
    assert [name for name in named if name not in names_in_code() | MEGATRONS] == []
