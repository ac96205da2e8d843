"""Which rows of the option table stop a run, and of which it says something at its start."""

from __future__ import annotations

import itertools

from vtp_plugin.host.rules.context import OptionContext
from vtp_plugin.host.rules.table.rows import CONFIG_RULES, RULES, STEP_RULES
from vtp_plugin.host.rules.table.rows_before_0_19 import OLDER_RULES
from vtp_plugin.host.rules.table.rows_mindspeed import MINDSPEED_RULES
from vtp_plugin.host.rules.table.rule import OptionRule


def check_options(args: object, context: OptionContext) -> tuple[str, ...]:
    """Find the options that do not work with the stage sizes of a run.

    Args:
        args: Megatron's arguments as parsed, before ``validate_args``. An attribute that is missing counts as unused.
        context: The run.

    Returns:
        One line for every refused option, ``value; rule; way out``, in the order of the table. Empty if there is none,
        as always with a uniform list that leaves Megatron untouched.

    >>> from types import SimpleNamespace
    >>> print(*check_options(SimpleNamespace(use_sharp=True), OptionContext(tp_sizes=(1, 4))))
    --use-sharp with --vtp-size-list 1,4; the plugin's group builder does not set up SHARP; leave it out
    >>> check_options(SimpleNamespace(use_sharp=True), OptionContext(tp_sizes=(4, 4)))
    ()
    """
    return refusals((*RULES, *OLDER_RULES, *MINDSPEED_RULES), args, context)


def option_warnings(args: object, context: OptionContext) -> tuple[str, ...]:
    """Find the options that work, but of which a user should know something before the run.

    Args:
        args: Megatron's arguments, or a model's configuration, whose fields have the same names.
        context: The run.

    Returns:
        One line for each reason, ``values; rule; way out``, in the order of the table.

    >>> from types import SimpleNamespace
    >>> (line,) = option_warnings(SimpleNamespace(hidden_dropout=0.1), OptionContext(tp_sizes=(1, 4)))
    >>> line.split("; ")[0]
    '--hidden-dropout 0.1 with --vtp-size-list 1,4'
    """
    found = [rule for rule in (*RULES, *OLDER_RULES) if rule.warns(args, context)]
    lines = []
    for _, group in itertools.groupby(found, key=lambda rule: rule.reason):
        *others, last = group
        lines.append(", ".join([*(rule.as_given(args) for rule in others), last.say(args, context)]))
    return tuple(lines)


def check_config(config: object, context: OptionContext) -> tuple[str, ...]:
    """Find what a script has switched on in the model's configuration and what does not work there.

    Args:
        config: Megatron's ``TransformerConfig``.
        context: The run.

    Returns:
        Lines as of :func:`check_options`.
    """
    return refusals(CONFIG_RULES, config, context)


def check_step(arguments: object, context: OptionContext) -> tuple[str, ...]:
    """Find arguments of a step that would have no effect.

    Args:
        arguments: What the script gives to Megatron's function that runs a step, as attributes.
        context: The run.

    Returns:
        Lines as of :func:`check_options`.
    """
    return refusals(STEP_RULES, arguments, context)


def refusals(rules: tuple[OptionRule, ...], args: object, context: OptionContext) -> tuple[str, ...]:
    """Return one line for every option that some rows refuse, from the first row that refuses it.

    Args:
        rules: Rows, in their order.
        args: What has their attributes.
        context: The run.
    """
    refused: dict[str, OptionRule] = {}
    for rule in rules:
        if rule.refuses(args, context):
            refused.setdefault(rule.option, rule)
    return tuple(rule.say(args, context) for rule in refused.values())
