"""Errors of the plugin.

A :class:`VtpError` is meant for a person: its text is one line that names the value, the rule and the way out, and the
plugin's exception hook prints it without a stack trace. Checks that protect a run raise one, too: ``python -O`` removes
``assert`` statements, so an ``assert`` only tells the type checker what is known (``is not None``, ``isinstance``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class VtpError(Exception):
    """Base of every error that a user of the plugin may see.

    Args:
        text: one line for the person who started this rank.
        shared: the text that other sites of a run may read. It has words of the plugin, ranks, boundaries, and values
            of the plugin's layout flags, but never a path, data, or the message of another library. With None, other
            sites learn the type of the error only.
        is_final: no restart cures it; None for what the class says.

    Attributes:
        is_known_to_node: whether every rank of this machine ends with the same text, so that one of them says it.

    >>> ConfigError("--a 1").is_final, PeerError("no answer").is_final, ConfigError("in use", is_final=False).is_final
    (True, False, False)
    """

    _is_final = True

    def __init__(self, text: str = "", *, shared: str | None = None, is_final: bool | None = None) -> None:
        super().__init__(text)
        self.shared = shared
        self.is_known_to_node = False
        self.is_final = self._is_final if is_final is None else is_final


class ConfigError(VtpError, ValueError):
    """A value that the user gave breaks a rule; the message states the rule."""


class MissingError(ConfigError, RuntimeError):
    """What a call needs is not there yet; Megatron and the Ascend implementation raise a RuntimeError for it."""


class LayoutError(ConfigError):
    """A :class:`ConfigError` about the plugin's layout flags alone; other sites may read its whole text."""

    def __init__(self, text: str = "", *, is_final: bool | None = None) -> None:
        super().__init__(text, shared=text, is_final=is_final)


class ShortageError(LayoutError):
    """Too few cards are there; more of them cure it, such as those of a machine that comes back.

    >>> ShortageError("cards 1+1; 3 stages need 3 cards").is_final
    False
    """

    _is_final = False


def refuse(problems: Iterable[str], error: type[ConfigError] = ConfigError) -> None:
    """Raise one error for all problems that checks have found; do nothing if there are none.

    Args:
        problems: lines of the form ``value; rule; way out``.
        error: the class to raise; :class:`LayoutError` if all problems concern the plugin's layout flags.

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
    """A patch does not fit the installed Megatron, or the state of Megatron does not allow the request."""


class PlanError(VtpError, AssertionError):
    """A plan or an order breaks a rule that the plugin must keep: a bug, with which no run may start or continue.

    Args:
        problem: the rule that is broken, with the values.

    >>> str(PlanError("rank 3 never gets [0:4]"))
    'rank 3 never gets [0:4]; this is a bug of vtp_plugin: please report this line and the command'
    """

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; this is a bug of vtp_plugin: please report this line and the command")

    @classmethod
    def listing(cls, what: str, problems: Sequence[str]) -> PlanError:
        """Make an error that names the first three problems.

        >>> str(PlanError.listing("invalid order", ["a", "b", "c", "d", "e"])).partition(";")[0]
        'invalid order (5 problems): a | b | c'
        """
        return cls(f"{what} ({len(problems)} problem{'s'[: len(problems) > 1]}): {' | '.join(problems[:3])}")


class PeerError(VtpError, RuntimeError):
    """Another rank failed, disagrees or does not answer."""

    _is_final = False


def is_final(error: BaseException) -> bool:
    """Tell whether no restart cures what ends a process.

    Of other errors these are: what a parser of flags ends with, and a bare assertion, as in Megatron's checks.

    >>> is_final(SystemExit(2)), is_final(AssertionError()), is_final(OSError()), is_final(PeerError("no answer"))
    (True, True, False, False)
    """
    if isinstance(error, VtpError):
        return error.is_final
    return isinstance(error, AssertionError) or (isinstance(error, SystemExit) and error.code == 2)
