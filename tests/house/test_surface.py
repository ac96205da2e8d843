"""What users and tests see of the project is found, and what a change loses of it."""

from __future__ import annotations

import doctest
import importlib.util
import sys
from types import ModuleType

import pytest

from tests.rules.import_rules import ROOT


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("surface", ROOT / "scripts" / "surface.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


surface = load()
PRODUCT = '''
class Box:
    """Hold it."""

    def lid(self, size):
        """Close it."""
        if size < 0:
            raise ValueError(f"size {size!r:>8} of the lid is negative; take 0 " "or more")

def _hidden(): ...
def add(parser):
    """Add flags."""
    parser.add_argument("--depth", help="how deep")
'''
TESTS = """
NAMES = ["a", "b"]
@pytest.mark.parametrize("x", [1, pytest.param(2, id="two")])
def test_lid(x):
    assert boxes.open.lid(x) == 3
    with pytest.raises(ValueError, match="is negative"):
        boxes.lid(-x)
"""


def keys(product: str = PRODUCT, tests: str = TESTS, file: str = "vtp_plugin/api.py") -> list[str]:
    return [entry.key for entry in entries(product, tests, file)]


def entries(product: str = PRODUCT, tests: str = TESTS, file: str = "vtp_plugin/api.py") -> list[object]:
    return surface.surface({file: product, "tests/unit/test_box.py": tests})


def test_what_is_listed() -> None:
    assert set(keys()) == {
        *("name: Box", "name: Box.lid", "name: add", "docstring: Box", "docstring: Box.lid", "docstring: add"),
        *("message: size {} of the lid is negative; take 0 or more", "message: how deep", "flag: --depth"),
        *("import: vtp_plugin.api.Box", "import: vtp_plugin.api.add", "keyword: add(parser)"),
        *(
            "keyword: Box.lid(size)",
            "test: test_lid",
            "case: test_lid[1]",
            "case: test_lid[param(2, id='two')]",
            "case: NAMES['a']",
        ),
        *("case: NAMES['b']", "assertion: lid(x) == 3", "assertion: raises(ValueError, match='is negative')"),
    }


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("is negative; take 0", "is wrong; take 0", ["message: size {} of the lid is negative; take 0 or more"]),
        ("{size!r:>8}", "{lid}", []),
        ('"""Close it."""', '"""Shut it."""', []),
        ('"""Close it."""', "", ["docstring: Box.lid"]),
        ("--depth", "--deep", ["flag: --depth"]),
        ("def add(parser)", "def add(given)", ["keyword: add(parser)"]),
        ("def add(", "def append(", ["import: vtp_plugin.api.add", "keyword: add(parser)", "name: add"]),
        ("lid(x) == 3", "lid(x)", ["assertion: lid(x) == 3"]),
        ("boxes.open.lid(x)", "box.lid(x)", []),
        ('match="is negative"', "", ["assertion: raises(ValueError, match='is negative')"]),
        ("[1, pytest", "[pytest", ["case: test_lid[1]"]),
        ('NAMES = ["a", ', "NAMES = [", ["case: NAMES['a']"]),
        ("def test_lid", "def lid", ["case: test_lid[1]", "case: test_lid[param(2, id='two')]", "test: test_lid"]),
    ],
)
def test_what_is_lost(old: str, new: str, expected: list[str]) -> None:
    assert old in PRODUCT + TESTS
    changed = entries(PRODUCT.replace(old, new), TESTS.replace(old, new))
    assert sorted(entry.key for entry in surface.lost(entries(), changed)) == expected


def test_a_second_one_counts_where_each_counts() -> None:
    twice = entries(PRODUCT + PRODUCT, TESTS + TESTS)
    assert {entry.key for entry in surface.lost(twice, entries())} == {
        *("name: Box", "name: Box.lid", "name: add"),
        *("test: test_lid", "case: test_lid[1]", "case: test_lid[param(2, id='two')]", "case: NAMES['a']"),
        *("case: NAMES['b']", "assertion: lid(x) == 3", "assertion: raises(ValueError, match='is negative')"),
    }


def test_what_has_moved_is_not_lost() -> None:
    moved = surface.lost(entries(), entries(file="patches/core/box.py"))
    assert {entry.kind for entry in moved} == {"import", "keyword"}


def test_reasons() -> None:
    now = entries(PRODUCT.replace("--depth", "--deep"))
    gone = {"why": "another name", "gone": ["flag: --depth"], "now": ["flag: --deep"]}
    (line,) = surface.problems(entries(), now, [])
    assert line == "flag: --depth\n    was in vtp_plugin/api.py:13\n    near:  --deep"
    assert list(surface.problems(entries(), now, [gone])) == []
    assert list(surface.problems(entries(), entries(), [gone])) == [
        "explained, but not gone: flag: --depth",
        "said to stand in the place of others, but is not there: flag: --deep",
    ]


def test_reasons_by_pattern() -> None:
    now = entries(PRODUCT.replace("lid", "cover"), TESTS.replace("lid", "cover"))
    lost = {entry.key for entry in surface.lost(entries(), now)}
    assert len(lost) == 7
    moved = {"why": "another name", "like": [r"\w+: .*\blid\b.*", "test: .*", "case: .*"], "becomes": {"lid": "cover"}}
    assert list(surface.problems(entries(), now, [moved])) == []
    # What is said to have come must be there, and must not have been there before.
    wrong = {**moved, "becomes": {"lid": "Box"}}
    assert len(list(surface.problems(entries(), now, [wrong]))) == len(lost) + len(wrong["like"])
    assert list(surface.problems(entries(), now, [{**moved, "like": [".*", "flag: .*"]}])) == [
        "explains nothing: flag: .*"
    ]
    gone = {"why": "gone with what it refused", "like": [".*"]}
    assert list(surface.problems(entries(), now, [gone])) == []
    assert list(surface.problems(entries(), entries(), [gone])) == ["explains nothing: .*"]


def test_its_examples() -> None:
    found = doctest.testmod(surface)
    assert found.attempted > 0 and not found.failed
