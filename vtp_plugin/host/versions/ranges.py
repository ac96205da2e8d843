"""Versions and ranges of them, as Python's packages write them (PEP 440)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

_CLAUSE = re.compile(r"(?:>=|<)\d+(?:\.\d+)*", re.ASCII)


def check_range(versions: str) -> None:
    """Refuse what is no range of versions: clauses with ``>=`` or ``<``, joined by commas.

    Raises:
        ValueError: it is none.
    """
    for clause in versions.split(","):
        if not _CLAUSE.fullmatch(clause):
            raise ValueError(f"{versions!r} is not a version range; write it like '>=0.19,<0.20'")


def is_in(version: str, *ranges: str) -> bool:
    """Tell whether a version lies in one of some ranges; of pre-releases, those of a range's ends do not.

    Raises:
        ValueError: it is no version.

    >>> [is_in(version, "<0.17", ">=0.18,<0.19") for version in ("0.16.1", "0.17.0", "0.18.0", "0.19.2")]
    [True, False, True, False]
    """
    try:
        found = Version(version)
    except InvalidVersion:
        raise ValueError(f"{version!r} is not a PEP 440 version") from None
    return any(SpecifierSet(versions).contains(found, prereleases=True) for versions in ranges)


def between(ranges: tuple[str, ...]) -> tuple[str, ...]:
    """Return the ranges that lie before, between and after some, which are in their order.

    >>> between(("<0.17", ">=0.19,<0.20")), between((">=0.12.1,<0.12.3",)), between((">=0.15",))
    (('>=0.17,<0.19', '>=0.20'), ('<0.12.1', '>=0.12.3'), ('<0.15',))
    """
    return tuple(_between(ranges))


def _between(ranges: tuple[str, ...]) -> Iterator[str]:
    end = ""
    for versions in ranges:
        first = next((clause[2:] for clause in versions.split(",") if clause.startswith(">=")), "")
        below = next((clause[1:] for clause in versions.split(",") if clause.startswith("<")), "")
        if first and first != end:
            yield f">={end},<{first}" if end else f"<{first}"
        end = below
    if end:
        yield f">={end}"
