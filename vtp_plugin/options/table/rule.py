"""What a row of the option table is, and short builders that keep the table readable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vtp_plugin.options.context import OptionContext
from vtp_plugin.text_enum import TextEnum

Test = Callable[[object], bool]
"""Says of the parsed value of an option whether the option is in use."""


class Verdict(TextEnum):
    """What happens to a run that uses an option."""

    SUPPORTED = "supported"
    REFUSED_UNEQUAL_DP = "refused when data-parallel sizes differ"
    REFUSED_UNEQUAL = "refused when sizes differ"
    REFUSED_PLANNED = "refused with a planned schedule"
    REFUSED_U_SHAPED = "refused in a U-shape"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRule:
    """One row of the table.

    Attributes:
        option: The flag as users know it, with a value where only that value is meant (``--ckpt-format torch_dcp``).
        attribute: The name of the option in Megatron's parsed arguments.
        applies: Says whether a run with these arguments uses the option.
        verdict: What happens then.
        reason: Why: one sentence without a final stop and without a semicolon.
        way_out: What to do instead. Empty for a supported option.
        evidence: For a supported option the test that shows it, or ``not run: ...``. Empty for a refused one.
    """

    option: str
    attribute: str
    applies: Callable[[object, OptionContext], bool]
    verdict: Verdict
    reason: str
    way_out: str = ""
    evidence: str = ""

    def refuses(self, args: object, context: OptionContext) -> bool:
        """Whether this row stops the run.

        A row that is refused is so wherever the plugin's own groups are in use, that is for every unequal list and
        for a uniform one that is forced. Otherwise a uniform list leaves Megatron untouched and nothing is refused.

        Args:
            args: Megatron's parsed arguments.
            context: The run.
        """
        is_met = {
            Verdict.SUPPORTED: False,
            Verdict.REFUSED_UNEQUAL_DP: context.has_unequal_dp,
            Verdict.REFUSED_UNEQUAL: not context.is_uniform,
            Verdict.REFUSED_PLANNED: context.is_planned,
            Verdict.REFUSED_U_SHAPED: context.is_u_shaped,
            Verdict.REFUSED: context.forced or not context.is_uniform,
        }
        return is_met[self.verdict] and self.applies(args, context)

    def situation(self, context: OptionContext) -> str:
        """Say, as the user would, what the option does not go with."""
        if self.verdict is Verdict.REFUSED_U_SHAPED:
            return "--layerwise-disaggregated-training"
        return "a planned schedule" if self.verdict is Verdict.REFUSED_PLANNED else context.size_list


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An option, its attribute and the values that count as using it."""

    option: str
    attribute: str
    test: Test


def on(value: object) -> bool:
    """The flag is set, or the value is neither empty nor zero."""
    return bool(value)


def off(value: object) -> bool:
    """A switch that is on by default was turned off."""
    return value is False


def given(value: object) -> bool:
    """The option was given: its default is None."""
    return value is not None


def above(limit: float) -> Test:
    """The value is larger than a limit.

    >>> above(1)(2), above(1)(1), above(1)(None)
    (True, False, False)
    """
    return lambda value: isinstance(value, (int, float)) and value > limit


def case(option: str, test: Test | None = None, attribute: str = "") -> Case:
    """Describe when an option is in use.

    Args:
        option: The flag, or flag and value when only that value is meant.
        test: Applied to the parsed value. When it is not given: the value that the option names, else ``on``.
        attribute: The parsed name, when it is not made from the flag.

    >>> case("--use-sharp").attribute
    'use_sharp'
    >>> case("--ckpt-format torch_dcp").test("torch_dist")
    False
    """
    flag, _, wanted = option.partition(" ")
    return Case(
        option=option,
        attribute=attribute or flag.removeprefix("--").replace("-", "_"),
        test=test or ((lambda value: value == wanted) if wanted else on),
    )


def supported(reason: str, evidence: str, *cases: Case | str) -> tuple[OptionRule, ...]:
    """Rows for options that work. A plain string stands for ``case(string)``."""
    return _rules(Verdict.SUPPORTED, reason, cases, evidence=evidence)


def refused_unequal(
    reason: str, *cases: Case | str, way_out: str = "leave it out or give every stage the same size"
) -> tuple[OptionRule, ...]:
    """Rows for options that are refused when sizes differ. A plain string stands for ``case(string)``."""
    return _rules(Verdict.REFUSED_UNEQUAL, reason, cases, way_out=way_out)


def refused_unequal_dp(
    reason: str, *cases: Case | str, way_out: str = "leave it out or give every stage the same data-parallel size"
) -> tuple[OptionRule, ...]:
    """Rows for options that are refused when data-parallel sizes differ. A plain string is ``case(string)``."""
    return _rules(Verdict.REFUSED_UNEQUAL_DP, reason, cases, way_out=way_out)


def refused_u_shaped(reason: str, *cases: Case | str, way_out: str = "leave it out") -> tuple[OptionRule, ...]:
    """Rows for options that do not work in a U-shape. A plain string stands for ``case(string)``."""
    return _rules(Verdict.REFUSED_U_SHAPED, reason, cases, way_out=way_out)


def refused_planned(reason: str, *names: str) -> tuple[OptionRule, ...]:
    """Rows for what planned schedules leave out; a name is one of the configuration, or of an argument of the step."""
    way_out = "leave it out, or use --vtp-schedule stock where all layers of a stage lie in a row"
    cases = (case(name, attribute=name.partition(" ")[0].removeprefix("config.")) for name in names)
    return _rules(Verdict.REFUSED_PLANNED, reason, tuple(cases), way_out=way_out)


def refused(reason: str, *cases: Case | str, way_out: str = "leave it out") -> tuple[OptionRule, ...]:
    """Rows for options that the plugin's own groups or communicator never serve. A plain string is ``case(string)``."""
    return _rules(Verdict.REFUSED, reason, cases, way_out=way_out)


def _rules(
    verdict: Verdict, reason: str, cases: tuple[Case | str, ...], way_out: str = "", evidence: str = ""
) -> tuple[OptionRule, ...]:
    complete = (case(item) if isinstance(item, str) else item for item in cases)
    return tuple(
        OptionRule(
            option=item.option,
            attribute=item.attribute,
            applies=_applies(item),
            verdict=verdict,
            reason=reason,
            way_out=way_out,
            evidence=evidence,
        )
        for item in complete
    )


def _applies(item: Case) -> Callable[[object, OptionContext], bool]:
    # An older Megatron that has no such attribute cannot be using the option: every test says no to None.
    return lambda args, _context: item.test(getattr(args, item.attribute, None))
