"""What ranks post in a check that they pass or fail together, and what one of them concludes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """What a rank posts.

    Attributes:
        says: its statement; None if it failed.
        error: why it failed.
        is_final: no restart cures that.
    """

    says: dict[str, object] | None = None
    error: str = ""
    is_final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What the judge concludes from all posts.

    Attributes:
        text: why all ranks end; empty if they agree.
        name: value that differs, if that is why.
        is_missing: a rank did not come.
        is_final: no restart cures it.
    """

    text: str = ""
    name: str | None = None
    is_missing: bool = False
    is_final: bool = False
