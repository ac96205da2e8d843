"""Each section of a Chinese page has the blocks of text, commands, links, figures and quotations of the English one."""

from __future__ import annotations

import pytest

from tests.rules.translations import LANGUAGES, ROOT, Words, differences, figures, known_words, sections

WORDS = known_words()
OWN_PAGES = {"docs/zh/terms.md"}  # no translation

RUN = "\u8fd0\u884c"  # run
TWO = "\u4e24"
PAGE = """# Tool

English | [other](README.zh.md)

Two GPUs, 8,192 tokens, 0.4 s. See [start](docs/start.md#first-run), [guide](docs/guide.md).

## First run

Takes `--size 2` and a minute, and prints "all done":

    vtp plan --have 8,6   # for 14 GPUs

and

    vtp doctor

* one item
"""
TRANSLATED = f"""# Tool

[English](README.md) | other

{TWO} GPU, 8,192 token, 0.4 s. [start](docs/zh/start.md#{RUN}), [guide](docs/zh/start.md)

## {RUN}

`--size 2`, \u201call done\u201d:

    vtp plan --have 8,6   # 14 GPU

and

    vtp doctor

* item
"""
LANGUAGE_PAIR = Words(
    pages={"README.md": "README.zh.md", "docs/start.md": "docs/zh/start.md"},
    stand_ins={"docs/guide.md": "docs/zh/start.md"},
    headings={"Tool": "Tool", "First run": RUN},
    numbers=({"two": "2"}, {TWO: "2"}),
)


@pytest.mark.parametrize("page", WORDS.pages)
def test_both_languages_say_the_same(page: str) -> None:
    translated = (ROOT / WORDS.pages[page]).read_text(encoding="utf-8")
    assert differences(page, (ROOT / page).read_text(encoding="utf-8"), translated, WORDS) == []


@pytest.mark.parametrize("page", WORDS.pages)
def test_each_language_leads_to_the_other(page: str) -> None:
    for name, other in ((page, WORDS.pages[page]), (WORDS.pages[page], page)):
        path = ROOT / name
        [line] = [line for line in path.read_text(encoding="utf-8").splitlines()[:8] if LANGUAGES.match(line)]
        linked = [path.parent / target.partition(")")[0] for target in line.split("](")[1:]]
        assert (ROOT / other).resolve() in [target.resolve() for target in linked], name


def test_every_chinese_page_is_held() -> None:
    pages = {str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.zh.md"), *ROOT.glob("docs/zh/**/*.md"))}
    assert pages - OWN_PAGES == set(WORDS.pages.values())
    headings = {section.heading for page in WORDS.pages for section in sections((ROOT / page).read_text())}
    assert headings == set(WORDS.headings), "tests/chinese.toml has headings that no page has, or lacks some"


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("", "", None),
        ("Two", "Three", "Tool (Tool): figures: not translated: nothing; only translated: '2'"),
        ("8,192", "8,193", "Tool (Tool): figures: not translated: '8193'; only translated: '8192'"),
        ("0.4 s", "0.4 ms", "Tool (Tool): figures: not translated: '0.4 ms'; only translated: '0.4 s'"),
        ("14 GPUs", "15 GPUs", f"{RUN} (First run): figures: not translated: '15'; only translated: '14'"),
        (
            "    vtp doctor\n",
            "    vtp doctor\n    vtp doctor\n",
            f"{RUN} (First run): code: not translated: 'vtp doctor'; only",
        ),
        ("    vtp doctor\n", "", f"{RUN} (First run): code: not translated: nothing; only translated: 'vtp doctor'"),
        ("--have 8,6", "--have 8,4", f"{RUN} (First run): code: not translated: 'vtp plan --have 8,4'; only"),
        ("`--size 2`", "`--size 3`", f"{RUN} (First run): code in the text: not translated: '--size 3'; only"),
        (
            '"all done"',
            '"all gone"',
            f"{RUN} (First run): quoted: not translated: 'all gone'; only translated: 'all done'",
        ),
        ("#first-run", "#tool", "Tool (Tool): links: not translated: 'docs/zh/start.md#tool'; only"),
        ("start.md", "end.md", "Tool (Tool): links: not translated: 'docs/end.md#first-run'; only"),
        ("* one item", "* one item\n* another", f"{RUN} (First run): blocks of text: "),
        ("## First run\n", "", f"README.zh.md has a heading '{RUN}' of this level"),
        ("## First", "### First", f"README.zh.md has no heading '{RUN}' of this level"),
        ("## First run", "## A run", "README.zh.md has no heading '? (A run)' of this level"),
    ],
)
def test_what_one_language_alone_says_is_found(old: str, new: str, line: str | None) -> None:
    assert old in PAGE
    found = differences("README.md", PAGE.replace(old, new, 1), TRANSLATED, LANGUAGE_PAIR)
    assert found == [] if line is None else any(line in each for each in found), found


def test_a_link_to_what_is_translated_leads_to_the_translation() -> None:
    [line] = differences(
        "README.md", PAGE, TRANSLATED.replace(f"docs/zh/start.md#{RUN}", "docs/start.md"), LANGUAGE_PAIR
    )
    assert line.endswith(f"not translated: 'docs/zh/start.md#{RUN}'; only translated: 'docs/start.md'")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Twelve of 288 clusters lose 32 %", ["288", "32", "12"]),
        ("layers 19,9,4 of Megatron 0.12, 0.16", ["19", "9", "4", "0.12", "0.16"]),
        ("the second of ten, someone", ["10"]),
    ],
)
def test_figures_of_english(text: str, found: list[str]) -> None:
    assert figures([text], WORDS.numbers[0]) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\u5341\u4e8c\u4e2a\u96c6\u7fa4, \u7b2c\u4e8c\u4e2a\u8282\u70b9, \u4e00\u534a", ["12", "1/2"]),
        ("288 \u4e2a\u56db\u8282\u70b9\u96c6\u7fa4\u63d0\u901f 5% \u5230 15%", ["288", "5", "15", "4"]),
    ],
)
def test_figures_of_chinese(text: str, found: list[str]) -> None:
    assert figures([text], WORDS.numbers[1]) == found
