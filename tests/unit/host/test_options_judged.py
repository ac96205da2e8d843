"""Every option of Megatron that a training script can reach has a verdict, and so has every value of a choice."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.expected.of_megatron import megatron_parser
from tests.options.judged import (
    GRID,
    MEANINGS,
    READ,
    Entry,
    Group,
    Judgement,
    doubles,
    groups,
    problems,
    rows,
    strangers,
)
from tests.options.parsers import LISTED, Option, by_name, listed, options_of
from tests.support.hosts import ROOT, host_name

SIZES = {"TP", "CP", "EP", "PP"}


@pytest.fixture(scope="module")
def judged() -> list[Group]:
    return groups()


def installed() -> list[Option]:
    """The options of the Megatron that is here, on Megatron 0.19 only."""
    return options_of(megatron_parser())


def everything() -> list[Option]:
    """The options of all three, each with the values of any."""
    found: dict[str, Option] = {}
    for option in (*installed(), *(option for family in LISTED for option in listed(family))):
        for name in option.names:
            known = found[name].choices if name in found else ()
            found[name] = Option(names=option.names, choices=tuple(dict.fromkeys((*known, *option.choices))))
    return [*found.values()]


@pytest.mark.needs("flags_of_0_19")
def test_every_option_of_the_installed_megatron_has_a_verdict(judged: list[Group]) -> None:
    """A line here names an option, or a value, that nobody has judged: read it, run it, and add it to a group."""
    assert problems(installed(), judged, rows()) == []


@pytest.mark.parametrize("family", LISTED)
def test_every_option_of_an_older_megatron_has_a_verdict(judged: list[Group], family: str) -> None:
    assert problems(listed(family), judged, rows()) == []


@pytest.mark.parametrize("family", LISTED)
def test_the_list_of_an_older_megatron_is_its_parsers(family: str) -> None:
    if host_name() != family:
        pytest.skip(f"this Megatron is not of {family}")
    assert sorted(map(str, installed())) == sorted(map(str, listed(family)))


@pytest.mark.needs("flags_of_0_19")
def test_every_verdict_is_about_an_option_and_given_once(judged: list[Group]) -> None:
    options = everything()
    assert strangers(options, judged) == doubles(options, judged, rows()) == []


def test_what_nobody_has_judged_is_named() -> None:
    """An option or a value that is new, and a verdict on what no Megatron has."""
    kind = Option(names=("--kind", "--sort"), choices=("a", "b"))
    group = Group(subject="", judgement=Judgement.SAME, entries=(Entry(option="--sort", words=("a",)),))
    assert problems([kind, Option(names=("--new",))], [group], ()) == ["--kind: no verdict for b", "--new: no verdict"]
    assert problems([kind], [group], [("--kind", "b")]) == []
    assert problems([kind], [], [("--kind", "")]) == ["--kind: no verdict for a, b"]
    other = Group(
        subject="", judgement=Judgement.SAME, entries=(Entry(option="--kind", words=("c",)), Entry(option="--x"))
    )
    assert strangers([kind], [other]) == ["--kind c: no such value", "--x: no such option"]
    assert doubles([kind], [group, group], ()) == ["--sort a: judged twice"]
    taken = replace(group, judgement=Judgement.TABLE)
    assert doubles([kind], [taken], ()) == ["--sort a: not in the table"]
    assert doubles([kind], [taken], [("--sort", "a")]) == doubles([kind], [group], [("--sort", "a")]) == []


def test_groups_are_complete(judged: list[Group]) -> None:
    for group in judged:
        said = str(group.entries[0])
        assert set(group.depends) <= SIZES, said
        assert bool(group.why) != (group.judgement is Judgement.TABLE), said
        assert not re.search(r"[.;|]$", group.why), said
        assert group.depends or group.judgement not in (Judgement.SAID, Judgement.MENDED, Judgement.DEPENDS), said
        assert group.evidence in (READ, GRID) or _exists(group.evidence), said
    assert MEANINGS.keys() | {Judgement.TABLE} == set(Judgement)


def _exists(test: str) -> bool:
    file, _, function = test.partition("::")
    return bool(re.search(rf"^def {function}\(", Path(ROOT / file).read_text(), re.MULTILINE))


def test_an_option_has_one_name_in_a_command_line() -> None:
    for family in LISTED:
        assert len(by_name(listed(family))) == sum(len(option.names) for option in listed(family))
