"""The plugin's flags on Megatron's command line: the list of them, and how they are read.

The fields of :class:`~vtp_plugin.config.VtpConfig` declare their flags. :data:`VTP_FLAGS` adds one that only the
command line has; parsers, ``--help`` and the documentation are made from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from vtp_plugin.config import Flag, FlagGroup, VtpConfig, flags_of_fields, merge
from vtp_plugin.schedule.cost.stated import COST_KEYS

_COST_KEYS = " Keys:\n" + "\n".join(f"{name} ({key.unit}): {key.meaning};" for name, key in COST_KEYS.items())
VTP_FLAGS: tuple[Flag, ...] = (
    # The keys of costs are known here only: config lies below the package that reads them.
    *(replace(flag, help=flag.help + _COST_KEYS) if flag.field == "costs" else flag for flag in flags_of_fields()),
    Flag(
        name="--vtp-site",
        group=FlagGroup.TRUST,
        metavar="edge",
        help="site of this machine, one of --vtp-sites; a rank whose stage belongs to another site ends the run",
    ),
)
"""All flags; ``--help`` shows them group by group, each group in this order."""


def add_vtp_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Declare the plugin's flags, group by group. A flag that is not given has the value None."""
    for group in FlagGroup:
        section = parser.add_argument_group(title=group.value)
        for flag in (flag for flag in VTP_FLAGS if flag.group is group):
            if flag.metavar is None:
                section.add_argument(flag.name, action="store_true", default=None, help=flag.help)
            else:
                section.add_argument(flag.name, metavar=flag.metavar, type=flag.type, nargs=flag.nargs, help=flag.help)
    return parser


def read_flags(args: argparse.Namespace, given: VtpConfig) -> VtpConfig:
    """Add the flags to what ``apply()`` was given.

    Args:
        args: parsed with the flags of :func:`add_vtp_arguments`; attributes of flags not given may be missing.
        given: what ``apply()`` was given.

    Raises:
        ConfigError: a flag's value is wrong, contradicts what ``apply()`` was given, or needs another flag.
    """
    return merge(given, {flag.field: flag.read(getattr(args, flag.dest, None)) for flag in VTP_FLAGS if flag.field})


def peek_device(words: Sequence[str]) -> str | None:
    """Read the platform from a command line that has not been parsed yet.

    >>> peek_device(["script.py", "--vtp-device", "cpu", "--lr", "0.1"]), peek_device(["script.py"])
    ('cpu', None)
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--vtp-device")
    try:
        return parser.parse_known_args(list(words))[0].vtp_device
    except argparse.ArgumentError:
        return None  # the script's parser says what is wrong


def check_without_stages(config: VtpConfig) -> tuple[str, ...]:
    """Find what needs stages, for a run without a list of their sizes.

    Returns:
        One line for each list of other sizes, and for a planned schedule.
    """
    lists = (("--vtp-cp-list", config.cp_list), ("--vtp-dp-list", config.dp_list))
    problems = [
        f"{flag} {','.join(map(str, sizes))} needs stages: give --vtp-size-list, such as {','.join('1' * len(sizes))}"
        for flag, sizes in lists
        if sizes
    ]
    if config.has_planned_schedule:
        problems.append("planned schedules need stages: give --vtp-size-list, such as 1,1")
    return tuple(problems)
