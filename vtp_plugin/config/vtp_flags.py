"""The plugin's flags on Megatron's command line: the list of them, and how they are read.

The fields of :class:`~vtp_plugin.config.VtpConfig` declare their flags. :data:`VTP_FLAGS` adds those that only the
command line has; parsers, ``--help`` and the documentation are made from it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import takewhile

from vtp_plugin.config import VtpConfig, flags_of_fields, merge
from vtp_plugin.config.flag import Flag, FlagGroup
from vtp_plugin.errors import LayoutError
from vtp_plugin.plan.schedule.cost.cost_text import COST_KEYS

_COST_KEYS = " Keys:\n" + "\n".join(f"{name} ({key.unit}): {key.meaning};" for name, key in COST_KEYS.items())
VTP_FLAGS: tuple[Flag, ...] = (
    # The keys of costs are known here only: config lies below the package that reads them.
    *(replace(flag, help=flag.help + _COST_KEYS) if flag.field == "costs" else flag for flag in flags_of_fields()),
    Flag(
        name="--vtp-node",
        group=FlagGroup.WHERE,
        metavar="NAME",
        help="with --vtp-stages: name of this machine, which stages follow; default: its host name, between "
        "sites a digest of it. Agents of one machine that shall count as several give each its own",
    ),
    Flag(
        name="--vtp-forgive",
        group=FlagGroup.FAILURE,
        help="with --vtp-stages: use devices again that are excluded because they failed; without it a device that "
        "failed twice stays excluded. It acts once for each start of the launcher, not when that restarts the ranks",
    ),
    Flag(
        name="--vtp-on-loss",
        group=FlagGroup.FAILURE,
        metavar="COMMAND",
        help="with --vtp-stages: a shell command that rank 0's machine runs when the run restarts after a loss, or "
        "when no layout fits any more; VTP_LOSS holds the line that says what happened. It has 10 seconds",
    ),
    Flag(
        name="--vtp-site",
        group=FlagGroup.TRUST,
        metavar="edge",
        help="site of this machine, one of --vtp-sites; a rank whose stage belongs to another site ends the run",
    ),
)
"""All flags; ``--help`` shows them group by group, each group in this order."""


def add_vtp_arguments(parser: argparse.ArgumentParser, declared: Collection[str] = ()) -> argparse.ArgumentParser:
    """Declare the plugin's flags, group by group. A flag that is not given has the value None.

    Args:
        parser: parser that gets the flags.
        declared: flags that somebody else declares with the same meaning.
    """
    for group in FlagGroup:
        section = parser.add_argument_group(title=group.value)
        for flag in (flag for flag in VTP_FLAGS if flag.group is group and flag.name not in declared):
            if flag.metavar is None:
                section.add_argument(flag.name, action="store_true", default=None, help=flag.help)
            else:
                section.add_argument(
                    flag.name,
                    metavar=flag.metavar,
                    type=flag.type,
                    nargs=flag.nargs,
                    const=flag.const,
                    help=flag.help,
                )
    return parser


def read_flags(args: argparse.Namespace, given: VtpConfig, declared: Collection[str] = ()) -> VtpConfig:
    """Add the flags to what ``apply()`` was given.

    Args:
        args: parsed with the flags of :func:`add_vtp_arguments`; attributes of flags not given may be missing.
        given: what ``apply()`` was given.
        declared: flags that somebody else declares with the same meaning.

    Raises:
        ConfigError: a flag's value is wrong, contradicts what ``apply()`` was given, or needs another flag.
    """
    argv = {flag: getattr(args, flag.dest, None) for flag in VTP_FLAGS}
    # A switch that somebody else declares is False where it was not given.
    values = {flag.field: flag.read(None if word is False else word) for flag, word in argv.items() if flag.field}
    # MindSpeed-LLM has a list of layers for any pipeline; only that of a U-shape is ours.
    if "--num-layer-list" in declared and not (given.layerwise_disaggregated or values["layerwise_disaggregated"]):
        del values["num_layer_list"]
    return merge(given, values)


_NUMBERS = re.compile(r"[\d,]+")


def reject_spaces(words: Sequence[str], declared: Collection[str] = ()) -> None:
    """Reject numbers that spaces separate: parsers would take the first one, and call the others unknown.

    Args:
        words: the words of a command line.
        declared: flags that somebody else declares with the same meaning.

    Raises:
        LayoutError: a flag that takes numbers in one word has several words of numbers.

    >>> reject_spaces(["--vtp-size-list", "1,2", "--num-layers", "4"])
    >>> reject_spaces(["--vtp-size-list", "1,", "2", "--num-layers", "4"])
    Traceback (most recent call last):
    ...
    vtp_plugin.errors.LayoutError: --vtp-size-list 1, 2 has a space; it takes one word; write --vtp-size-list 1,2
    """
    names = {flag.name for flag in VTP_FLAGS if _NUMBERS.fullmatch(flag.metavar or "")} - {*declared}
    for place, word in enumerate(words, start=1):
        name, separator, value = word.partition("=")
        found = [*([value] if separator else []), *takewhile(_NUMBERS.fullmatch, words[place:])]
        if name in names and len(found) > 1 and _NUMBERS.fullmatch(found[0]):
            joined = ",".join(part for text in found for part in text.split(",") if part)
            raise LayoutError(f"{name} {' '.join(found)} has a space; it takes one word; write {name} {joined}")


_TAKEN = ("--layerwise-disaggregated-training", "--num-layer-list")


def hide_taken_flags(argv: Sequence[str]) -> list[str]:
    """Remove the flags that MindSpeed-LLM would take for its own layerwise-disaggregated training, if a list is given.

    >>> hide_taken_flags(["s.py", "--layerwise-disaggregated-training", "--num-layer-list", "1,2,1", "--lr", "0.1"])
    ['s.py', '--layerwise-disaggregated-training', '--num-layer-list', '1,2,1', '--lr', '0.1']
    >>> argv = ["s.py", "--layerwise-disaggregated-training", "--num-layer-list=1,2,1", "--vtp-size-list", "1,2"]
    >>> hide_taken_flags(argv)
    ['s.py', '--vtp-size-list', '1,2']
    """
    names = {word.partition("=")[0] for word in argv}
    if not {"--vtp-size-list", _TAKEN[0]} <= names:
        return list(argv)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(_TAKEN[0], action="store_true")
    parser.add_argument(_TAKEN[1], nargs="?")
    return [argv[0], *parser.parse_known_args(list(argv[1:]))[1]]


def peek_device(argv: Sequence[str]) -> str | None:
    """Read the platform from a command line that has not been parsed yet.

    >>> peek_device(["script.py", "--vtp-device", "cpu", "--lr", "0.1"]), peek_device(["script.py"])
    ('cpu', None)
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--vtp-device")
    try:
        return parser.parse_known_args(list(argv))[0].vtp_device
    except argparse.ArgumentError:
        return None  # the script's parser says what is wrong


def check_without_stages(config: VtpConfig) -> tuple[str, ...]:
    """Find options that need stages, in a run without a list of their sizes.

    Returns:
        One line for each list of other sizes, for a seed of the edge, and for a planned schedule.
    """
    lists = (
        ("--vtp-cp-list", config.cp_list),
        ("--vtp-dp-list", config.dp_list),
        ("--vtp-ep-list", config.ep_list),
        ("--vtp-etp-list", config.etp_list),
    )
    problems = [
        f"{flag} {','.join(map(str, sizes))} needs stages: give --vtp-size-list, such as {','.join('1' * len(sizes))}"
        for flag, sizes in lists
        if sizes
    ]
    problems += check_edge_seed(config)
    # Modules with grids of their own have stages without a list.
    if config.has_planned_schedule and not config.bridges:
        problems.append("planned schedules need stages: give --vtp-size-list, such as 1,1")
    return tuple(problems)


def check_edge_seed(config: VtpConfig) -> tuple[str, ...]:
    """Find a seed of the edge in a run that has no edge at a site of its own.

    >>> print(*check_edge_seed(VtpConfig(edge_seed="random")))  # doctest: +ELLIPSIS
    --vtp-edge-seed is for a U-shaped pipeline of two sites; give --vtp-size-list, ...
    >>> check_edge_seed(VtpConfig(edge_seed="random", sites=("edge", "cloud"), layerwise_disaggregated=True))
    ()
    """
    if config.edge_seed is None or config.has_own_edge:
        return ()
    return (
        "--vtp-edge-seed is for a U-shaped pipeline of two sites; give --vtp-size-list, "
        "--layerwise-disaggregated-training and two names in --vtp-sites, such as edge,cloud, or leave it out",
    )
