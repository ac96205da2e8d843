"""What a run may ask of a Megatron, and with which versions it was run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from vtp_plugin.host.versions.ranges import between, check_range, is_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """Something that works with some versions of Megatron and was not run, or does not work, with others.

    Attributes:
        name: Name by which code asks for it, such as ``"two_rings"``.
        what: Description in a few words.
        versions: The ranges of versions with which it was run, in their order, each with an end: what a newer Megatron
            does with it is not known. A fact of Megatron that needs no run may be true from a version on.
        shown_by: The test that shows it, or the command.
        absent: The ranges of versions that have no such thing, so that there is nothing to run.
        notes: Remarks about some versions, by ranges.
        untried: Name in the warning of ``apply()`` where no version of a family ran it; empty for no warning, as where
            the run stops.
        untried_in_part: Name in the warning where only some versions of a family ran it, after the first that did not.

    Raises:
        ValueError: a range is malformed.
    """

    name: str
    what: str
    versions: tuple[str, ...]
    shown_by: str
    absent: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    untried: str = ""
    untried_in_part: str = ""

    def __post_init__(self) -> None:
        for versions in (*self.versions, *self.absent, *self.notes):
            check_range(versions)

    def has(self, version: str) -> bool:
        """Tell whether a version has it."""
        return is_in(version, *self.versions)

    def is_absent(self, version: str) -> bool:
        """Tell whether a version has no such thing that could be run."""
        return is_in(version, *self.absent)

    @property
    def missing(self) -> tuple[str, ...]:
        """The ranges of versions that do not have it."""
        return between(self.versions)

    def said_of(self, version: str) -> str:
        """Say what was done with it where a version lacks it: ``not in it``, ``not run``, or ``not supported``."""
        return "not in it" if self.is_absent(version) else self.note(version) or "not run"

    def note(self, version: str) -> str:
        """Return what else is to say of it with a version; empty if nothing."""
        return next((text for versions, text in self.notes.items() if is_in(version, versions)), "")
