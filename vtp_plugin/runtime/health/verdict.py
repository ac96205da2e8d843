"""What ranks post in a joint check, and what the coordinator concludes."""

from __future__ import annotations

from dataclasses import dataclass


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
    """

    text: str = ""
    name: str | None = None
    is_missing: bool = False
    is_final: bool = False
