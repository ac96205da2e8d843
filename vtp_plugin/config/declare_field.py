"""How a field of the options is declared: once, with its flag, its keyword, its help and what ranks compare."""

from __future__ import annotations

import dataclasses
from typing import Any

from vtp_plugin.config.flag import ComparisonRule, FlagGroup


def declare(
    group: FlagGroup, compared: ComparisonRule, default: Any, help: str, metavar: str | None = None, **flag: Any
) -> Any:
    """Declare a field, with what :func:`~vtp_plugin.config.flags_of_fields` cannot take from its name and type.

    Args:
        group: group of its flag in ``--help``.
        compared: whether all ranks must have one value.
        default: default value of the field and of the keyword.
        help: what the option does.
        metavar: placeholder of its value in ``--help``; None for a switch or a list of choices.
        flag: other attributes of :class:`~vtp_plugin.config.flag.Flag`.
    """
    return dataclasses.field(
        default=default, metadata={"group": group, "compared": compared, "help": help, "metavar": metavar, **flag}
    )
