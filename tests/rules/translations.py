"""Compares a page with its translation, section by section: headings, text blocks, code, links, figures, quotations."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
# The line at the top of each page that leads to the other one. It belongs to no section.
LANGUAGES = re.compile(r"\[?English\b.* \| ")
BLOCKS = {
    "paragraph_open": "paragraph",
    "list_item_open": "item",
    "tr_open": "row",
    "td_open": "cell",
    "th_open": "cell",
}
UNITS = "us|ms|s|KiB|MiB|GiB|TiB|KB|MB|GB|TB|Kbit|Mbit|Gbit|W|points"
DIGITS = re.compile(rf"(\d+(?:,\d{{3}})*(?:\.\d+)*)(?:\s*({UNITS})(?![A-Za-z]))?")
IMAGE = re.compile(r'<img src="([^"]+)"[^>]* alt="([^"]*)"')
# What a program says, in the quotation marks of either language.
QUOTED = re.compile(r"[\"\u201c]([ -!#-~]*[A-Za-z][ -!#-~]*)[\"\u201d]")
COMMENT = re.compile(r"\s+# (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What is known of a language pair.

    Attributes:
        pages: pages with a translation, by their names in the repository: "README.md" -> "README.zh.md".
        stand_ins: pages without a translation, and to which page the links of translations lead instead.
        headings: headings -> their translation.
        numbers: numbers written as words, first in the language of the pages, then in that of the translations.
    """

    pages: Mapping[str, str]
    stand_ins: Mapping[str, str]
    headings: Mapping[str, str]
    numbers: tuple[Mapping[str, str], Mapping[str, str]]


@dataclass(slots=True, kw_only=True)
class Section:
    """A heading and what stands below it, to the next heading of any level."""

    heading: str
    level: str
    blocks: list[str] = field(default_factory=list[str])
    code: list[str] = field(default_factory=list[str])
    words_of_code: list[str] = field(default_factory=list[str])
    links: list[str] = field(default_factory=list[str])
    prose: list[str] = field(default_factory=list[str])


def known_words() -> Words:
    """Read tests/chinese.toml."""
    table = tomllib.loads((ROOT / "tests/chinese.toml").read_text(encoding="utf-8"))
    return Words(
        pages=table["pages"],
        stand_ins=table["stand_ins"],
        headings=table["headings"],
        numbers=(table["numbers"]["english"], table["numbers"]["chinese"]),
    )


def slug(heading: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def sections(text: str) -> list[Section]:
    """Cut a page into its sections."""
    found: list[Section] = []
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    skip = -1
    for index, token in enumerate(tokens):
        if token.type == "heading_open":
            found.append(Section(heading=tokens[index + 1].content, level=token.tag))
            skip = index + 1
        elif index == skip or not found:
            continue
        elif token.type == "paragraph_open" and LANGUAGES.match(tokens[index + 1].content):
            skip = index + 1
        elif token.type in BLOCKS:
            found[-1].blocks.append(BLOCKS[token.type])
        elif token.type == "html_block":
            found[-1].blocks.append("picture")
            for source, described in IMAGE.findall(token.content):
                found[-1].links.append(source)
                found[-1].prose.append(described)
        elif token.type in ("fence", "code_block"):
            _add_code(found[-1], token)
        elif token.type == "inline":
            _add_text(found[-1], token.children or [])
    return found


def _add_code(section: Section, token: Token) -> None:
    section.blocks.append("code")
    if token.info.startswith("{toctree}"):  # its pages are those of its own language
        return
    if token.type == "code_block":  # comments in commands are translated, output in fences is not
        section.prose += COMMENT.findall(token.content)
        section.code += COMMENT.sub("", token.content).splitlines()
    else:
        section.code += [token.info, *token.content.splitlines()]


def _add_text(section: Section, tokens: Sequence[Token]) -> None:
    prose = ""
    for token in tokens:
        if token.type == "code_inline":
            section.words_of_code.append(token.content)
        elif token.type in ("link_open", "image"):
            section.links.append(str(token.attrs.get("href", token.attrs.get("src"))))
        prose += token.content if token.type in ("text", "image") else " "
    section.prose.append(prose)


def figures(prose: Iterable[str], numbers: Mapping[str, str]) -> list[str]:
    """Return the numbers of a text, with their units: `8,192 tokens, two GPUs, 0.4 s` -> 8192, 2, 0.4 s."""
    # Longer words first: eleven is not one of its parts.
    words = "|".join(sorted(numbers, key=len, reverse=True))
    # A Chinese word has no end that a pattern could see.
    pattern = re.compile(rf"\b(?:{words})\b" if words.isascii() else rf"(?<!\u7b2c)(?:{words})", re.IGNORECASE)
    found: list[str] = []
    for piece in prose:
        found += [" ".join((number.replace(",", ""), unit)).strip() for number, unit in DIGITS.findall(piece)]
        found += [numbers[word.lower()] for word in pattern.findall(piece)]
    return found


def quotations(prose: Iterable[str]) -> list[str]:
    """Return what a text quotes of programs, in small letters: such words are the same in every language."""
    return [quoted.lower() for piece in prose for quoted in QUOTED.findall(piece)]


def targets(links: Iterable[str], page: str) -> list[str]:
    """Return where the links of a page lead, by names in the repository."""
    found: list[str] = []
    for link in map(unquote, links):
        file, anchor, heading = link.partition("#")
        name = os.path.normpath(os.path.join(os.path.dirname(page), file)) if file else page
        found.append(link if ":" in file else f"{name}{anchor}{heading}")
    return found


def translated(target: str, words: Words) -> str:
    """Return where the translation of a link leads."""
    name, anchor, heading = target.partition("#")
    if name not in words.pages:
        return f"{words.stand_ins.get(name, name)}{anchor}{heading}"
    headings = {slug(original): slug(translation) for original, translation in words.headings.items()}
    return f"{words.pages[name]}{anchor}{headings.get(heading, heading)}"


def differences(page: str, text: str, translated_text: str, words: Words) -> list[str]:
    """Compare a page with its translation.

    Args:
        page: name of the page, a key of `words.pages`.
        text: the page.
        translated_text: its translation.
        words: what is known of the two languages.

    Returns:
        A line for each thing that only one of them has, with the section; none if they agree.
    """
    translation = words.pages[page]
    ours, theirs = sections(text), sections(translated_text)
    expected = [(section.level, words.headings.get(section.heading, f"? ({section.heading})")) for section in ours]
    found = [(section.level, section.heading) for section in theirs]
    if expected != found:
        return list(_headings(translation, expected, found))
    return [
        f"{translation}, {other.heading} ({section.heading}): {line}"
        for section, other in zip(ours, theirs, strict=True)
        for line in _of_section(page, section, other, words)
    ]


def _headings(translation: str, expected: Sequence[tuple[str, str]], found: Sequence[tuple[str, str]]) -> Iterator[str]:
    missing = [heading for level, heading in expected if (level, heading) not in found]
    more = [heading for level, heading in found if (level, heading) not in expected]
    for heading in missing:
        yield f"{translation} has no heading {heading!r} of this level (see [headings] of tests/chinese.toml)"
    for heading in more:
        yield f"{translation} has a heading {heading!r} of this level, and the page has none for it"
    if not missing and not more:
        yield f"{translation} has its headings in another order, or one of them twice"


def _of_section(page: str, section: Section, other: Section, words: Words) -> Iterator[str]:
    if section.blocks != other.blocks:
        yield f"blocks of text: {_counted(section.blocks)}; translated: {_counted(other.blocks)}"
    pairs = {
        "code": (section.code, other.code),
        "code in the text": (section.words_of_code, other.words_of_code),
        "links": (
            [translated(target, words) for target in targets(section.links, page)],
            targets(other.links, words.pages[page]),
        ),
        "figures": (figures(section.prose, words.numbers[0]), figures(other.prose, words.numbers[1])),
        "quoted": (quotations(section.prose), quotations(other.prose)),
    }
    for what, (ours, theirs) in pairs.items():
        only, more = Counter(ours) - Counter(theirs), Counter(theirs) - Counter(ours)
        if only or more:
            yield f"{what}: not translated: {_shown(only)}; only translated: {_shown(more)}"
        elif what == "code" and ours != theirs:
            yield "lines of code are in another order"


def _counted(blocks: Sequence[str]) -> str:
    return ", ".join(f"{len(list(run))} {block}" for block, run in itertools.groupby(blocks))


def _shown(counted: Counter[str]) -> str:
    return ", ".join(repr(each) for each in counted.elements()) or "nothing"
