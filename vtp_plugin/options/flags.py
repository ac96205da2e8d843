"""The plugin's flags on Megatron's command line: which there are, and how they are read.

The fields of :class:`~vtp_plugin.config.VtpConfig` declare their flags. :data:`VTP_FLAGS` adds those that only the
command line has; parsers, ``--help`` and the documentation are made of it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from vtp_plugin.config import Flag, FlagGroup, VtpConfig, flags_of_fields, merge
from vtp_plugin.errors import LayoutError
from vtp_plugin.schedule.cost.stated import COST_KEYS

_COST_KEYS = " Keys:\n" + "\n".join(f"{name} ({key.unit}): {key.meaning};" for name, key in COST_KEYS.items())
# By the field whose flag they follow in ``--help``.
_WITHOUT_FIELD = {
    "layerwise_disaggregated": Flag(
        name="--num-layer-list",
        group=FlagGroup.WHERE,
        metavar="1,3,3,1",
        help="U-shaped pipeline: layers of the edge's first part, of every cloud stage, and of the edge's last part",
    ),
    "sites": Flag(
        name="--vtp-site",
        group=FlagGroup.TRUST,
        metavar="edge",
        help="site of this machine, one of --vtp-sites: ranks that find themselves on another site's stage end the run",
    ),
}
VTP_FLAGS: tuple[Flag, ...] = tuple(
    flag
    for declared in flags_of_fields()
    for flag in (
        replace(declared, help=declared.help + _COST_KEYS) if declared.field == "costs" else declared,
        _WITHOUT_FIELD.get(str(declared.field)),
    )
    if flag is not None
)
"""All flags, in the order of ``--help``."""


def add_vtp_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Declare the plugin's flags, group by group. Their values stay None when a flag is not given."""
    for group in FlagGroup:
        section = parser.add_argument_group(title=group.value)
        for flag in VTP_FLAGS:
            if flag.group is not group:
                continue
            if flag.metavar is None:
                section.add_argument(flag.name, action="store_true", default=None, help=flag.help)
            else:
                section.add_argument(flag.name, metavar=flag.metavar, type=flag.type, nargs=flag.nargs, help=flag.help)
    return parser


def read_flags(args: argparse.Namespace, given: VtpConfig) -> VtpConfig:
    """Add the flags to what ``apply()`` was given.

    Args:
        args: as parsed, with the flags of :func:`add_vtp_arguments`; those that were not given may be missing.
        given: to ``apply()``.

    Raises:
        ConfigError: a flag's value is wrong, contradicts what ``apply()`` was given, or needs another flag.
    """
    config = merge(given, {flag.field: flag.read(getattr(args, flag.dest, None)) for flag in VTP_FLAGS if flag.field})
    if getattr(args, "num_layer_list", None) is not None and not config.layerwise_disaggregated:
        raise LayoutError("--num-layer-list is for --layerwise-disaggregated-training; give both or none")
    return config


def check_without_stages(config: VtpConfig) -> tuple[str, ...]:
    """Refuse what needs stages, in a run without a list of their sizes.

    Returns:
        One line for every other list, and for a planned schedule.
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
