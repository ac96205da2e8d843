"""A flag of the command line, as a field of the configuration declares it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class FlagGroup(Enum):
    """The groups of flags; the value is the title of the group in ``--help``."""

    WHERE = "vtp_plugin: where (which ranks form which stage)"
    WHAT = "vtp_plugin: what crosses (how tensors get from stage to stage)"
    WHEN = "vtp_plugin: when (the order of a step)"
    TRUST = "vtp_plugin: trust (a run over several sites)"
    SAVED = "vtp_plugin: checkpoints (which are kept, and which one is loaded)"
    FAILURE = "vtp_plugin: what a run says, and failure (ranks that stop or do not come)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRule:
    """Whether all ranks of a run must have one value of an option; :func:`same`, :func:`given` and :func:`own` make it.

    Attributes:
        name: name of the option in the error if ranks disagree; None if each rank may have its own value.
        reason: why each rank may have its own value.
        at_start: whether it is compared before anything is derived from it, since it decides how ranks find and treat
            each other.
        separator: text between the entries of a list.
        none: value that stands for an option that was not given.
        is_path: whether it names a file or a folder, which other sites must not read; then only whether it is given is
            compared.
    """

    name: str | None = None
    reason: str = ""
    at_start: bool = False
    separator: str = ","
    none: object = None
    is_path: bool = False

    def state(self, value: object) -> object:
        """Return a value in the form in which ranks compare it.

        >>> same("vtp_size_list").state((1, 2)), same("sites", none="").state(None), same("timeout_s").state(600.0)
        ('1,2', '', 600.0)
        >>> given("whether there is a trace").state("logs"), given("whether there is a trace").state(None)
        (True, False)
        """
        if self.is_path:
            return value is not None
        if isinstance(value, tuple):
            return self.separator.join(map(str, value))
        return self.none if value is None else value


def same(name: str, *, at_start: bool = False, separator: str = ",", none: object = None) -> ComparisonRule:
    """Make the rule that all ranks must have one value; the arguments are attributes of :class:`ComparisonRule`."""
    return ComparisonRule(name=name, at_start=at_start, separator=separator, none=none)


def given(name: str) -> ComparisonRule:
    """Make the rule that all ranks must give the option, or none, each with a value of its own."""
    return ComparisonRule(name=name, is_path=True)


def own(reason: str, *, is_path: bool = False) -> ComparisonRule:
    """Make the rule that each rank may have its own value; the arguments are attributes of :class:`ComparisonRule`."""
    return ComparisonRule(reason=reason, is_path=is_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag on the command line.

    Attributes:
        name: name on the command line, with its dashes.
        group: group in ``--help``.
        help: text in ``--help``.
        metavar: placeholder of the value in ``--help``; None for a switch.
        keyword: keyword of :func:`vtp_plugin.apply`; None if only the command line has the option.
        field: field of :class:`VtpConfig`; None if the flag is read elsewhere.
        type: turns one argument of the command line into a value.
        nargs: number of arguments, see :meth:`argparse.ArgumentParser.add_argument`; so is `const`.
        parse: turns the value of the flag or of the keyword into that of the field.
        choices: the values that the field may have; empty for any value.
        compared: whether all ranks must have one value of the field; None where there is no field.
    """

    name: str
    group: FlagGroup
    help: str
    metavar: str | None = None
    keyword: str | None = None
    field: str | None = None
    type: Callable[[str], object] = str
    nargs: str | None = None
    const: object = None
    parse: Callable[[Any], object] | None = None
    choices: tuple[str, ...] = ()
    compared: ComparisonRule | None = None

    @property
    def dest(self) -> str:
        """Name of its attribute among the parsed arguments."""
        return self.name.removeprefix("--").replace("-", "_")

    def read(self, value: object) -> object:
        """Return the value of the field for what was given; None stays None."""
        return value if value is None or self.parse is None else self.parse(value)
