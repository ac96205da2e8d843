"""What ranks post in a joint check, and what the coordinator concludes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vtp_plugin.runtime.health.waiting import some_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """What a rank posts.

    Attributes:
        says: statement of the rank; None if it failed.
        error: why it failed; empty if it did not.
        is_final: whether no restart cures the error.
    """

    says: dict[str, object] | None = None
    error: str = ""
    is_final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What the coordinator concludes from all posts.

    Attributes:
        text: why all ranks end; empty if they agree.
        name: name of the value that differs; None if that is not the reason.
        is_missing: whether a rank did not come.
        is_final: whether no restart cures the error.
        speakers: ranks with an error that not all have; the first rank of those with each error.
    """

    text: str = ""
    name: str | None = None
    is_missing: bool = False
    is_final: bool = False
    speakers: tuple[int, ...] = ()


def summarise_errors(errors: Mapping[int, str], *, is_whole: bool) -> tuple[str, tuple[int, ...]]:
    """Group equal texts, so that one mistake on 4,000 ranks is one line, and name the first rank with each text.

    Args:
        errors: text of every rank that has found one.
        is_whole: whether these are all ranks of the run; if they have one error, the text names no rank.

    >>> summarise_errors({0: "a", 1: "a"}, is_whole=True)
    ('a', ())
    >>> summarise_errors({1: "a", 2: "a", 3: "b"}, is_whole=False)
    ('rank 1, 2: a; rank 3: b', (1, 3))
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, text in sorted(errors.items()):
        ranks_of.setdefault(text, []).append(rank)
    if is_whole and len(ranks_of) == 1:
        return next(iter(ranks_of)), ()
    text = "; ".join(f"rank {some_ranks(ranks)}: {text}" for text, ranks in ranks_of.items())
    return text, tuple(ranks[0] for ranks in ranks_of.values())
