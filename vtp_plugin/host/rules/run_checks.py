"""All checks of Megatron's options against the stages, as a run and the command line make them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

from vtp_plugin.host.megatron_flags import MEGATRON_FLAGS
from vtp_plugin.host.rules.checks.batch import check_batches, check_packed
from vtp_plugin.host.rules.checks.divisibility import check_sizes
from vtp_plugin.host.rules.checks.lora_fits import check_adapters
from vtp_plugin.host.rules.checks.stage_layers import check_layer_file
from vtp_plugin.host.rules.rule import OptionContext, OptionRule
from vtp_plugin.host.rules.table.rows import MEGATRON_RULES, check_options
from vtp_plugin.plan.layout.replica_map import ReplicaMap
from vtp_plugin.util.text import argument_of


def check_run(args: object, context: OptionContext, replicas: ReplicaMap) -> tuple[str, ...]:
    """Find the options, model sizes and batches that do not fit the stages.

    Args:
        args: Megatron's arguments as parsed, before ``validate_args``.
        context: The run.
        replicas: Which replicas of the stages work together.

    Returns:
        One line for every problem, ``value; rule; way out``.

    >>> from types import SimpleNamespace
    >>> args = SimpleNamespace(use_sharp=True, num_attention_heads=6)
    >>> len(check_run(args, OptionContext(tp_sizes=(1, 4)), ReplicaMap(dp_sizes=(1, 1))))
    2
    """
    return (
        *check_options(args, context),
        *check_sizes(args, context),
        *check_adapters(args, context),
        *check_layer_file(args, context),
        *check_packed(args, context),
        *check_batches(args, replicas, context.version),
    )


def with_judged(args: argparse.Namespace, words: Sequence[str], context: OptionContext) -> argparse.Namespace:
    """Add the options that no parser here declares and that the table judges, as Megatron's parser would read them.

    So a plan, which does not need Megatron, refuses what a run refuses. An option of another type than its words show
    is read as what its row takes.

    Args:
        args: Megatron's arguments as far as they are declared here.
        words: the command line's words that are not.
        context: the run.

    >>> context = OptionContext(tp_sizes=(1, 2))
    >>> with_judged(argparse.Namespace(disable_bias_linear=True), ["--use-torch-fsdp2", "--data-path", "a"], context)
    Namespace(disable_bias_linear=True, add_bias_linear=False, use_torch_fsdp2=True, data_path='a')
    """
    found = {**vars(args), **_stored(args)}
    # Some rows ask for a second option, too.
    guessed = {argument_of(flag): next(_readings(values)) for flag, values in _values(words).items()}
    found |= {name: value for name, value in guessed.items() if name not in found}
    for rule, values in _judged(words):
        if not hasattr(args, rule.attribute):
            readings = ({**found, rule.attribute: value} for value in _readings(values))
            found = next((each for each in readings if rule.applies(argparse.Namespace(**each), context)), found)
    return argparse.Namespace(**found)


def _stored(args: argparse.Namespace) -> dict[str, object]:
    """Give the flags that Megatron stores under another name as it does: a switch with such a name is the opposite."""
    return {
        flag.stored_as: (not value) if flag.is_switch else value
        for flag in MEGATRON_FLAGS
        if flag.stored_as and not hasattr(args, flag.stored_as)
        for value in [getattr(args, argument_of(flag.name), None)]
        if value is not None
    }


def judged_flags(words: Sequence[str]) -> set[str]:
    """Give the flags among some words that a run may refuse."""
    return {rule.option.split()[0] for rule, _ in _judged(words)}


def _judged(words: Sequence[str]) -> Iterator[tuple[OptionRule, Sequence[str]]]:
    given = _values(words)
    for rule in MEGATRON_RULES:
        flag = rule.option.split()[0]
        if rule.verdict.is_refusal and flag in given:
            yield rule, given[flag]


def _values(words: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Give the words behind each flag.

    >>> _values(["--a", "--b=1", "--c", "2", "-3"])
    {'--a': [], '--b': ['1'], '--c': ['2', '-3']}
    """
    flag, found = "", dict[str, list[str]]()
    for word in words:
        if word.startswith("--"):
            flag, mark, value = word.partition("=")
            found[flag] = [value] if mark else []
        elif flag:
            found[flag].append(word)
    return found


def _readings(values: Sequence[str]) -> Iterator[object]:
    """Yield what the words of an option may mean: a switch, a number, a text, or several of them."""
    if not values:
        yield from (True, False)
        return
    for read in (int, float, str):
        try:
            several = [read(value) for value in values]
        except ValueError:
            continue
        yield from ([several[0], several] if len(values) == 1 else [several])
