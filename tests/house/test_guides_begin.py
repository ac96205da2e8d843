"""Each guide begins with one complete command, and that command runs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.rules.doc_commands import PROGRAMS, ROOT
from tests.rules.launcher_commands import run_as_printed

GUIDES = [path for path in sorted((ROOT / "docs/guides").glob("*.md")) if path.name != "index.md"]
# What these show first needs NPUs and the trees of others, and was never run there.
ELSEWHERE = {"ascend.md", "mindspeed-mm.md"}
# Tests that run the first block of a page, because it takes two terminals, or another environment.
RUN_BY = {
    "edge-cloud.md": ("tests/multiproc/u_shape/test_edge_cloud_example.py", "docs/guides/edge-cloud.md"),
    "ms-swift.md": ("tests/swift/test_swift_grid.py", '"ms_swift" / "sft.sh"'),
}
# What a page shows -> what this machine can run in its place.
SUBSTITUTED = {"gpus.md": ("--device cuda --ranks 3", "--device cpu --short")}
# The page whose first block makes what this one reads.
BEFORE = {"checkpoint-tools.md": "checkpoints.md"}
# What a block prints besides the losses of a run.
PRINTS = {
    "checkpoints.md": r"iteration +11/ +20 ",
    "core-only.md": r"step 10  loss ",
    "trace.md": r"more than planned in a step",
    "logging.md": r"\niteration 10/10 \| lm loss 5\.05\d+ \|",
    "lost-cards.md": r"iteration +10/ +20 ",
}
_TITLE = ["heading_open", "inline", "heading_close"]
_PARAGRAPH = ["paragraph_open", "inline", "paragraph_close"]
_PLACEHOLDER = re.compile(r"\.\.\.|[<>\[\]]|(?<![$\w])[A-Z]{3,}(?:_[A-Z]+)*\b(?!=)")
_BEGINS = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:(?:{'|'.join(PROGRAMS)}) |examples/|for \w+ in [^;]+; do\n)")


def first_block(text: str) -> str:
    """Return the commands with which a page begins; empty where more than a title and a paragraph stands before.

    The line that leads to the page in another language does not count.
    """
    text = re.sub(r"^English \| .*\n\n", "", text, flags=re.MULTILINE)
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    kinds = [token.type for token in tokens]
    place = 3 if kinds[:3] == _TITLE else len(kinds)
    place += 3 if kinds[place : place + 3] == _PARAGRAPH else 0
    if place >= len(kinds) or kinds[place] not in ("fence", "code_block") or tokens[place].info not in ("", "sh"):
        return ""
    return tokens[place].content


def is_complete(block: str) -> bool:
    """Say whether a block can be pasted into a shell as it is."""
    bare = re.sub(r"\s+#.*$", "", block, flags=re.MULTILINE)
    return bool(_BEGINS.match(bare)) and not _PLACEHOLDER.search(bare)


def begins(name: str) -> str:
    """Return the first block of a guide."""
    return first_block((ROOT / "docs/guides" / name).read_text(encoding="utf-8"))


def to_run(name: str) -> str:
    """Return what runs here of a guide's first block, behind the block of the page that makes what it reads."""
    shown, here = SUBSTITUTED.get(name, ("", ""))
    return (begins(BEFORE[name]) if name in BEFORE else "") + begins(name).replace(shown, here or shown)


@pytest.mark.parametrize("path", [path for path in GUIDES if path.name not in ELSEWHERE], ids=lambda path: path.name)
def test_a_guide_begins_with_a_complete_command(path: Path) -> None:
    block = begins(path.name)
    assert block, "more than a title and one paragraph stands before the first command"
    assert is_complete(block), block


@pytest.mark.parametrize(
    "block", ["--save out\n", "vtp plan ...\n", "torchrun SCRIPT\n", "vtp trace [flags]\n", "x = 1\n"]
)
def test_an_incomplete_command_is_found(block: str) -> None:
    assert is_complete("RANKS=2 torchrun train.py  # or SCRIPT\n") and not is_complete(block)


@pytest.mark.parametrize("before", ["Two.\n\n", "* An item\n\n", "## A section\n\n", "```text\nout\n```\n\n"])
def test_what_stands_before_the_first_command_is_found(before: str) -> None:
    assert first_block("# Title\n\nOne.\n\n    vtp doctor\n") == "vtp doctor\n"
    assert first_block(f"# Title\n\nOne.\n\n{before}    vtp doctor\n") != "vtp doctor\n"


def test_what_is_run_elsewhere_is() -> None:
    assert {path.name for path in GUIDES} >= {*ELSEWHERE, *RUN_BY, *SUBSTITUTED, *BEFORE, *PRINTS}
    assert all(shown in begins(name) for name, (shown, _) in SUBSTITUTED.items())
    assert [test for test, says in RUN_BY.values() if says not in (ROOT / test).read_text()] == []


_LIMIT_S = 400


def _runs() -> list[object]:
    names = [path.name for path in GUIDES if path.name not in (*ELSEWHERE, *RUN_BY)]
    takes_long = {name: re.search(r"torchrun|python |vtp (doctor|certify)", to_run(name)) for name in names}
    return [pytest.param(name, marks=pytest.mark.full if takes_long[name] else ()) for name in names]


@pytest.mark.needs("documents_of_0_19")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", _runs())
def test_the_first_command_runs(name: str, tmp_path: Path) -> None:
    if name == "link.md" and shutil.which("wg") is None:
        pytest.skip("wg of wireguard-tools makes the keys")
    block = to_run(name)
    printed = run_as_printed(tmp_path, block, limit_s=_LIMIT_S)
    assert "examples/pretrain_gpt.py" not in block or "lm loss" in printed, printed[-3000:]
    assert re.search(PRINTS.get(name, ""), printed), printed[-3000:]


@pytest.mark.needs("documents_of_0_19")
@pytest.mark.full
def test_the_page_of_lost_devices_says_what_happens_with_fewer(tmp_path: Path) -> None:
    three = begins("lost-cards.md")
    both = three + three.replace("--nproc-per-node 3", "--nproc-per-node 2")
    printed = run_as_printed(tmp_path, both, limit_s=_LIMIT_S)
    assert [int(step) for step in re.findall(r"iteration +(\d+)/ +20 ", printed)] == list(range(1, 21))
    assert re.findall(r"TP sizes ([\d,]+)", printed)[0] != re.findall(r"TP sizes ([\d,]+)", printed)[-1]
