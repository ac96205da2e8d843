"""Errors of the plugin.

A :class:`VtpError` is meant for a person: its text is one line that names the value, the rule and the way out, and the
plugin's exception hook prints it without a stack trace. What protects a run raises one, too: ``python -O`` removes
``assert`` statements, so these only tell the type checker what is known (``is not None``, ``isinstance``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class VtpError(Exception):
    """Base of every error that a user of the plugin may see.

    Args:
        text: one line for the person who started this rank.
        shared: what the other sites of a run may read of it. It consists of the plugin's own words, ranks, boundaries
            and values of the plugin's layout flags; never of a path, of the data, or of what another library said.
            None lets only the type of the error cross.
    """

    def __init__(self, text: str = "", *, shared: str | None = None) -> None:
        super().__init__(text)
        self.shared = shared


class ConfigError(VtpError, ValueError):
    """What the user asked for cannot work: a value breaks a rule that the message states."""


class LayoutError(ConfigError):
    """A :class:`ConfigError` about the plugin's layout flags alone, whose whole text the other sites may read."""

    def __init__(self, text: str = "") -> None:
        super().__init__(text, shared=text)


def refuse(problems: Iterable[str], error: type[ConfigError] = ConfigError) -> None:
    """Refuse what checks have found: all of it in one line, or nothing if they found nothing.

    Args:
        problems: lines of the form ``value; rule; way out``.
        error: what to raise; :class:`LayoutError` if all is about the plugin's layout flags.

    Raises:
        ConfigError: there is a problem.

    >>> refuse(())
    >>> refuse(["--a 1; too small; use 2", "--b; does not go with --a; leave it out"])
    Traceback (most recent call last):
    ...
    vtp_plugin.errors.ConfigError: --a 1; too small; use 2 | --b; does not go with --a; leave it out
    """
    if text := " | ".join(problems):
        raise error(text)


class PatchError(VtpError, RuntimeError):
    """A patch does not fit the Megatron that is installed, or its state does not allow the request."""


class PlanError(VtpError, AssertionError):
    """A plan or an order breaks a rule that the plugin itself must keep; the run may not begin with it, or go on.

    Args:
        problem: what is wrong, with the values.

    >>> str(PlanError("rank 3 never gets [0:4]"))
    'rank 3 never gets [0:4]; this is a bug of vtp_plugin: please report this line and the command'
    """

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; this is a bug of vtp_plugin: please report this line and the command")

    @classmethod
    def listing(cls, what: str, problems: Sequence[str]) -> PlanError:
        """Name the first problems that a check found.

        >>> str(PlanError.listing("invalid order", ["a", "b", "c", "d", "e"])).partition(";")[0]
        'invalid order (5 problems): a | b | c'
        """
        return cls(f"{what} ({len(problems)} problem{'s'[: len(problems) > 1]}): {' | '.join(problems[:3])}")


class PeerError(VtpError, RuntimeError):
    """Another rank failed, disagrees or does not answer."""
