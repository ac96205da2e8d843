"""A verdict for every option that a training script can reach: does a number depend on the sizes of the stages?

What the plugin's own table says (``vtp_plugin/host/rules/table``) is taken from there, whatever else is said. All other
options are judged in ``tests/options/verdicts``: groups of options with one verdict, one reason, and what it rests on.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from tests.options.parsers import FOLDER, Option, by_name
from vtp_plugin.host.rules.rule import OptionRule
from vtp_plugin.host.rules.table.rows import documented
from vtp_plugin.util.text import TextEnum

READ, GRID = "read", "grid"
"""What a verdict rests on besides a test: Megatron's source, or ``tests/multiproc/options/test_options_grid.py``."""
_ROW = re.compile(r"(--[\w-]+)(?: (\S+))?")


class Judgement(TextEnum):
    """What comes of an option, as the page says it."""

    SAME = "same"
    MENDED = "mended"
    NONE = "no number"
    SAID = "said"
    DEPENDS = "depends"
    REFUSED = "with what is not supported"
    IGNORED = "ignored"
    ENDS = "ends"
    DEVICE = "device"
    TABLE = "table"


MEANINGS: Mapping[Judgement, str] = {
    Judgement.SAME: "a number may change with it, and is the same in all layouts",
    Judgement.MENDED: "a number would depend on the sizes, and [a patch](../how/patches.md) makes it the same",
    Judgement.NONE: "it changes no number of the training",
    Judgement.SAID: "a number depends on the sizes, and the start of a run or a page says so",
    Judgement.DEPENDS: "a number depends on the sizes, and the run says nothing: a defect",
    Judgement.REFUSED: "it has an effect only beside an option that is not supported, or warned of, where sizes matter",
    Judgement.IGNORED: "it has no effect on such a run",
    Judgement.ENDS: "Megatron itself ends with it, with any sizes",
    Judgement.DEVICE: "the same in all layouts as far as the source says; only a run on a GPU can show it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One option, and the values of it that are meant; of an option without choices, a value to try."""

    option: str
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.option, *self.words))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Options with one verdict.

    Attributes:
        subject: the part of the page where it stands.
        judgement: the verdict.
        why: one clause.
        depends: on which sizes a number depends: some of TP, CP, EP, PP.
        evidence: ``read``, ``grid``, or a test.
        base: the model that the grid gives the option to.
        companions: further flags of that run, without the option, too.
        entries: what it is about.
    """

    subject: str
    judgement: Judgement
    entries: tuple[Entry, ...]
    why: str = ""
    depends: tuple[str, ...] = ()
    evidence: str = READ
    base: str = "dense"
    companions: tuple[str, ...] = ()


@cache
def groups() -> list[Group]:
    """Read all verdicts, in the order of their subjects' files."""
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    found = []
    for path in sorted((FOLDER / "verdicts").glob("*.toml")):
        tables = tomllib.loads(path.read_text())
        found += [_group(tables["title"], table) for table in tables["group"]]
    return found


def _group(subject: str, table: Mapping[str, object]) -> Group:
    words = {name: str(value) for name, value in table.items() if name != "options"}
    known = {"verdict", "why", "depends", "evidence", "base", "with"}
    if words.keys() - known:
        raise ValueError(f"{sorted(words.keys() - known)}; a group has {', '.join(sorted(known))} and options")
    options: Iterable[str] = table["options"]  # type: ignore[assignment]
    return Group(
        subject=subject,
        judgement=Judgement[words["verdict"].upper()],
        entries=tuple(Entry(option=option, words=tuple(values)) for option, *values in map(str.split, options)),
        why=words.get("why", ""),
        depends=tuple(words.get("depends", "").split()),
        evidence=words.get("evidence", READ),
        base=words.get("base", "dense"),
        companions=tuple(words.get("with", "").split()),
    )


@cache
def rows() -> dict[tuple[str, str], list[OptionRule]]:
    """Give the rows of the plugin's table by option and value; the value is empty where the row means all."""
    found: dict[tuple[str, str], list[OptionRule]] = {}
    for rule in documented():
        if match := _ROW.fullmatch(rule.option):
            found.setdefault((match[1], match[2] or ""), []).append(rule)
    return found


def rows_of(option: str, value: str = "") -> list[OptionRule]:
    """Give the rows about an option, or about one of its values."""
    known = rows()
    return [*known.get((option, ""), []), *(known.get((option, value), []) if value else [])]


def problems(options: Sequence[Option], judged: Sequence[Group], table: Iterable[tuple[str, str]]) -> list[str]:
    """Say what of a command line has no verdict: one line for each option, and each value of one."""
    wholly = {option for option, value in table if not value}
    values = {(option, value) for option, value in table if value}
    for entry in (entry for group in judged for entry in group.entries):
        wholly |= set() if entry.words else {entry.option}
        values |= {(entry.option, word) for word in entry.words}
    lines = []
    for option in options:
        known = {value for name, value in values if name in option.names}
        if not option.choices:
            if not (known or wholly & {*option.names}):
                lines.append(f"{option}: no verdict")
        elif missing := [choice for choice in option.choices if choice not in known]:
            lines.append(f"{option.names[0]}: no verdict for {', '.join(missing)}")
    return lines


def strangers(options: Sequence[Option], judged: Sequence[Group]) -> list[str]:
    """Say which verdicts are about no option, or no value, of any of some command lines."""
    known: dict[str, set[str]] = {}
    for option in options:
        for name in option.names:
            known.setdefault(name, set()).update(option.choices)
    lines = []
    for entry in (entry for group in judged for entry in group.entries):
        if entry.option not in known:
            lines.append(f"{entry}: no such option")
        elif choices := known[entry.option]:
            lines += [f"{entry.option} {word}: no such value" for word in entry.words if word not in choices]
    return lines


def doubles(options: Sequence[Option], judged: Sequence[Group], table: Iterable[tuple[str, str]]) -> list[str]:
    """Say what two groups judge, and what is said to stand in the plugin's table and does not."""
    names = by_name(options)
    known = set(table)
    seen: set[tuple[str, str]] = set()
    lines = []
    for group in judged:
        for key in (key for entry in group.entries for key in cells(entry, names)):
            lines += [f"{' '.join(key)}: judged twice"] if key in seen else []
            seen.add(key)
            if group.judgement is Judgement.TABLE and not known & {key, (key[0], "")}:
                lines.append(f"{' '.join(key)}: not in the table")
    return lines


def cells(entry: Entry, names: Mapping[str, Option]) -> Iterator[tuple[str, str]]:
    """Yield option and value for all that an entry is about; the value is empty where it has no choices."""
    choices = names[entry.option].choices if entry.option in names else ()
    yield from ((entry.option, word) for word in entry.words) if choices else ((entry.option, ""),)
