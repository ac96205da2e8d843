"""The command line: the plugin's flags, and Megatron's options against the stage sizes.

``flags`` declares the plugin's flags, and ``derived`` says what follows from them. ``table`` says which of Megatron's
options work, and ``checks`` whether the values of those that work fit every stage.
``check_options`` and ``check_sizes`` read Megatron's arguments as its parser returns them, before ``validate_args`` has
run: every rank then sees the same values and reports the same lines. Nothing here needs torch or Megatron.
"""

from __future__ import annotations

from vtp_plugin.options.checks.batch import check_batches, describe_batches, own_batches
from vtp_plugin.options.checks.schedules import check_one_chunk, check_u_shaped
from vtp_plugin.options.checks.sites import EDGE_ARGUMENTS, LOCAL_ARGUMENTS, check_site, shared_arguments
from vtp_plugin.options.checks.sizes import check_sizes
from vtp_plugin.options.context import OptionContext
from vtp_plugin.options.flags import VTP_FLAGS, Flag, FlagGroup, add_vtp_arguments, check_without_stages, read_flags
from vtp_plugin.options.table.check import check_config, check_options
from vtp_plugin.options.table.rows import CONFIG_RULES, RULES
from vtp_plugin.options.table.rule import OptionRule, Verdict
from vtp_plugin.options.table.show import format_markdown, format_table

__all__ = [
    "CONFIG_RULES",
    "EDGE_ARGUMENTS",
    "LOCAL_ARGUMENTS",
    "RULES",
    "VTP_FLAGS",
    "Flag",
    "FlagGroup",
    "OptionContext",
    "OptionRule",
    "Verdict",
    "add_vtp_arguments",
    "check_batches",
    "check_config",
    "check_one_chunk",
    "check_options",
    "check_site",
    "check_sizes",
    "check_u_shaped",
    "check_without_stages",
    "describe_batches",
    "format_markdown",
    "format_table",
    "own_batches",
    "read_flags",
    "shared_arguments",
]
