"""What a row of the option table is, and short builders that keep the table readable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vtp_plugin.host.rules.context import OptionContext
from vtp_plugin.host.versions import is_in
from vtp_plugin.util.text_enum import TextEnum

Test = Callable[[object], bool]
"""Takes the parsed value of an option and tells whether the option is in use."""


class Verdict(TextEnum):
    """What happens to a run that uses an option."""

    SUPPORTED = "supported"
    WARNED = "accepted, with a warning"
    WARNED_UNIFORM = "accepted, with a warning when sizes are equal"
    REFUSED_UNEQUAL_DP = "not supported when data-parallel sizes differ"
    REFUSED_UNEQUAL = "not supported when sizes differ"
    REFUSED_PLANNED = "not supported with a planned schedule"
    REFUSED_SPLIT = "not supported with split backwards"
    REFUSED_U_SHAPED = "not supported in a U-shape"
    REFUSED = "not supported"

    @property
    def is_refusal(self) -> bool:
        """Whether a run may end with it."""
        return self.value.startswith("not supported")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRule:
    """One row of the table.

    Attributes:
        option: The flag as users know it, with a value if only that value is meant (``--ckpt-format torch_dcp``).
        attribute: The name of the option in Megatron's parsed arguments.
        applies: Tells whether a run with these arguments uses the option.
        verdict: What happens then.
        versions: The versions of Megatron that the row is about, by ranges; empty for all. Where the version is not
            known the row holds.
        reason: Why: one clause without a final stop, and without a semicolon, which separates the parts of an error.
        way_out: What to do instead; empty for a supported option.
        evidence: The test that shows a supported option, or ``not run: ...``; empty for one that is not supported.
        line: How the error reads where it is not put together from option, situation, reason and way out. Fields as of
            ``str.format``: ``option``, its ``value``, ``reason``, ``way_out``, the family ``megatron``, and ``args``.
    """

    option: str
    attribute: str
    applies: Callable[[object, OptionContext], bool]
    verdict: Verdict = Verdict.SUPPORTED
    versions: tuple[str, ...] = ()
    reason: str = ""
    way_out: str = ""
    evidence: str = ""
    line: str = ""

    def is_about(self, version: str) -> bool:
        """Tell whether the row is about a version of Megatron, which may be unknown."""
        return not (self.versions and version) or is_in(version, *self.versions)

    def refuses(self, args: object, context: OptionContext) -> bool:
        """Tell whether this row stops the run.

        :attr:`Verdict.REFUSED` stops every run that uses the plugin's groups: one with unequal TP sizes, or with equal
        ones and ``--vtp-force``. With equal ones otherwise, Megatron runs untouched.

        Args:
            args: Megatron's parsed arguments.
            context: The run.
        """
        is_met = {
            Verdict.REFUSED_UNEQUAL_DP: context.has_unequal_dp,
            Verdict.REFUSED_UNEQUAL: not context.is_uniform,
            Verdict.REFUSED_PLANNED: context.is_planned,
            Verdict.REFUSED_SPLIT: context.has_split_backward,
            Verdict.REFUSED_U_SHAPED: context.is_u_shaped,
            Verdict.REFUSED: context.forced or not context.is_uniform,
        }
        is_met_here = self.verdict.is_refusal and is_met[self.verdict]
        return is_met_here and self.is_about(context.version) and self.applies(args, context)

    def warns(self, args: object, context: OptionContext) -> bool:
        """Tell whether a run says of this row at its start.

        What Megatron itself computes with a uniform list is left as it is, so :attr:`Verdict.WARNED_UNIFORM` is about
        what the plugin does right only where its groups are in use.

        Args:
            args: Megatron's parsed arguments.
            context: The run.
        """
        is_met = {Verdict.WARNED: True, Verdict.WARNED_UNIFORM: context.is_uniform and not context.forced}
        return is_met.get(self.verdict, False) and self.is_about(context.version) and self.applies(args, context)

    def say(self, args: object, context: OptionContext) -> str:
        """Say that the option is not supported, or warn of it: one line."""
        if not self.line:
            return f"{self.as_given(args)} with {self.situation(context)}; {self.reason}; {self.way_out}"
        return self.line.format(
            option=self.option,
            value=getattr(args, self.attribute, None),
            reason=self.reason,
            way_out=self.way_out,
            megatron=context.megatron,
            args=args,
        )

    def as_given(self, args: object) -> str:
        """Write the option with the value that the user gave, unless the option's name says it already."""
        value = getattr(args, self.attribute)
        if isinstance(value, bool) or " " in self.option or self.verdict is Verdict.REFUSED_PLANNED:
            return self.option
        text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        return " ".join(f"{self.option} {text}".split())

    def situation(self, context: OptionContext) -> str:
        """Name, in the user's words, what the option cannot be combined with."""
        if self.verdict is Verdict.REFUSED_U_SHAPED:
            return "--layerwise-disaggregated-training"
        if self.verdict is Verdict.REFUSED_SPLIT:
            return "--vtp-split-backward"
        return "a planned schedule" if self.verdict is Verdict.REFUSED_PLANNED else context.size_list


def on(value: object) -> bool:
    """Tell whether a flag is set, or its value is neither empty nor zero."""
    return bool(value)


def off(value: object) -> bool:
    """Tell whether a switch that is on by default was turned off."""
    return value is False


def given(value: object) -> bool:
    """Tell whether an option with the default None was given."""
    return value is not None


def above(limit: float) -> Test:
    """Make a test for values larger than a limit.

    >>> above(1)(2), above(1)(1), above(1)(None)
    (True, False, False)
    """
    return lambda value: isinstance(value, (int, float)) and value > limit


def case(option: str, test: Test | None = None, attribute: str = "") -> OptionRule:
    """Start a row: say when an option is in use. A function below adds the verdict.

    Args:
        option: The flag, or flag and value if only that value is meant.
        test: Applied to the parsed value. Default: it equals the value that ``option`` names, or is ``on``.
        attribute: The name among the parsed arguments. Default: made from the flag.

    >>> case("--use-sharp").attribute
    'use_sharp'
    >>> from types import SimpleNamespace
    >>> args, context = SimpleNamespace(ckpt_format="torch_dist"), OptionContext(tp_sizes=(1, 2))
    >>> case("--ckpt-format torch_dcp").applies(args, context)
    False
    """
    flag, _, wanted = option.partition(" ")
    name = attribute or flag.removeprefix("--").replace("-", "_")
    is_used = test or ((lambda value: value == wanted) if wanted else on)
    # An older Megatron that has no such attribute cannot be using the option: every test says no to None.
    return OptionRule(option=option, attribute=name, applies=lambda args, _context: is_used(getattr(args, name, None)))


def only(option: str, test: Callable[[object, OptionContext], bool], is_used: Test | None = None) -> OptionRule:
    """Start a row of an option that has an effect only in some runs."""
    rule = case(option, is_used)
    return replace(rule, applies=lambda args, context: rule.applies(args, context) and test(args, context))


def supported(reason: str, evidence: str, *cases: OptionRule | str) -> tuple[OptionRule, ...]:
    """Make rows for options that work. Here and below, a string stands for ``case(string)``."""
    return _rules(Verdict.SUPPORTED, reason, cases, evidence=evidence)


def warned(reason: str, evidence: str, way_out: str, *cases: OptionRule | str) -> tuple[OptionRule, ...]:
    """Make rows for options that a run names at its start: the sizes decide what they compute, or nothing does."""
    return _rules(Verdict.WARNED, reason, cases, way_out, evidence)


def warned_uniform(reason: str, evidence: str, way_out: str, *cases: OptionRule | str) -> tuple[OptionRule, ...]:
    """Make rows for options of which a run with a uniform list says what stock Megatron does with them."""
    return _rules(Verdict.WARNED_UNIFORM, reason, cases, way_out, evidence)


def refused_unequal(
    reason: str, *cases: OptionRule | str, way_out: str = "leave it out or give every stage the same size"
) -> tuple[OptionRule, ...]:
    """Make rows for options that are refused when sizes differ."""
    return _rules(Verdict.REFUSED_UNEQUAL, reason, cases, way_out)


def refused_unequal_dp(
    reason: str, *cases: OptionRule | str, way_out: str = "leave it out or give every stage the same data-parallel size"
) -> tuple[OptionRule, ...]:
    """Make rows for options that are refused when data-parallel sizes differ."""
    return _rules(Verdict.REFUSED_UNEQUAL_DP, reason, cases, way_out)


def refused_u_shaped(reason: str, *cases: OptionRule | str, way_out: str = "leave it out") -> tuple[OptionRule, ...]:
    """Make rows for options that do not work in a U-shape."""
    return _rules(Verdict.REFUSED_U_SHAPED, reason, cases, way_out)


def refused_planned(reason: str, *names: str) -> tuple[OptionRule, ...]:
    """Make rows for what planned schedules leave out: flags, fields of the configuration, or arguments of the step."""
    way_out = "leave it out, or use --vtp-schedule stock where all layers of a stage lie in a row"
    cases = [replace(case(name.removeprefix("config.")), option=name) for name in names]
    return _rules(Verdict.REFUSED_PLANNED, reason, cases, way_out)


def refused_split(
    reason: str, *cases: OptionRule | str, way_out: str = "leave it, or --vtp-split-backward, out"
) -> tuple[OptionRule, ...]:
    """Make rows for options that do not work where backwards are split."""
    return _rules(Verdict.REFUSED_SPLIT, reason, cases, way_out)


def refused(reason: str, *cases: OptionRule | str, way_out: str = "leave it out") -> tuple[OptionRule, ...]:
    """Make rows for options that the plugin's groups and channels never support."""
    return _rules(Verdict.REFUSED, reason, cases, way_out)


def _rules(
    verdict: Verdict, reason: str, cases: Sequence[OptionRule | str], way_out: str = "", evidence: str = ""
) -> tuple[OptionRule, ...]:
    """Complete the rows that share a verdict."""
    rows = (case(item) if isinstance(item, str) else item for item in cases)
    return tuple(replace(row, verdict=verdict, reason=reason, way_out=way_out, evidence=evidence) for row in rows)
