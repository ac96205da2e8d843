"""`vtp-flags`: the plugin's flags among Megatron's."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from vtp_plugin.config.resolve import VTP_FLAGS, add_vtp_arguments, is_as_started
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import replaces
from vtp_plugin.host.rules.table.rows import RULES
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.runtime.health.redaction import START_PATIENCE_S, say_once
from vtp_plugin.session import Session
from vtp_plugin.util import log
from vtp_plugin.util.text import question

_TENSOR_SIZE = "tensor_model_parallel_size"


@replaces("megatron.training.arguments:parse_args", id="vtp-flags", when=Moment.COMMAND_LINE)
def _parse(
    session: Session,
    host: MegatronHost,
    original: Callable[..., argparse.Namespace],
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    ignore_unknown_args: bool = False,
) -> argparse.Namespace:
    """Run `parse_args` with the plugin's flags behind those of the script.

    Why: it takes a provider of extra arguments, so the functions that declare Megatron's stay as they are.

    Remove when: Megatron has the option.
    """
    _refuse_yaml(session)
    defaults: dict[str, Any] = {}
    declared = host.declared_flags

    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if extra_args_provider is not None:
            parser = extra_args_provider(parser)
        defaults[_TENSOR_SIZE] = parser.get_default(_TENSOR_SIZE)
        # Unset, to tell "not given" from 1.
        parser.set_defaults(**{_TENSOR_SIZE: None})
        _mend_help(parser)
        add_vtp_arguments(parser, declared)
        if _names_stages(session):
            parser.error = functools.partial(_leave, parser)
        return parser

    args = original(provider, ignore_unknown_args)
    if not asks_for_stages(session, args):
        _forget_flags(args, defaults, declared)
    return args


def _refuse_yaml(session: Session) -> None:
    """Refuse a YAML file beside a list: Megatron reads it instead of the command line, and checks it elsewhere.

    Raises:
        ConfigError: both are given.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--yaml-cfg")
    try:
        given, _ = parser.parse_known_args()
    except argparse.ArgumentError:
        # Megatron's parser says what is wrong.
        return
    if given.yaml_cfg is not None and _names_stages(session):
        (rule,) = [rule for rule in RULES if rule.attribute == "yaml_cfg"]
        session.watch_failures()
        raise ConfigError(f"--yaml-cfg {given.yaml_cfg} with --vtp-size-list; {rule.reason}; {rule.way_out}")


def _names_stages(session: Session) -> bool:
    """Tell whether a list of sizes is given, where the command line has not been parsed."""
    return session.config.size_list is not None or any(word.partition("=")[0] == "--vtp-size-list" for word in sys.argv)


def _leave(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """End the process as Megatron's parser does, with one line on each machine in place of its 750 lines of usage.

    All ranks of a machine are started with one command line, and nothing reaches the others yet.
    """
    unknown = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
    hints = [question(flag, parser._option_string_actions) for flag in unknown]
    # Of an argument that is known, the message says what is wrong with its value.
    line = f"{message}{max(hints, default='')}" if message.startswith("unrecognized") else message
    if is_as_started(sys.argv):
        say_once(line, log.error, limit_s=START_PATIENCE_S)
    else:
        log.error(line)
    sys.exit(2)


def asks_for_stages(session: Session, args: argparse.Namespace) -> bool:
    """Tell whether a list of sizes was asked for."""
    return session.config.size_list is not None or getattr(args, "vtp_size_list", None) is not None


def _forget_flags(args: argparse.Namespace, defaults: dict[str, Any], declared: Collection[str]) -> None:
    """Leave no trace of flags that were not given: without a list the arguments are those of Megatron's parser."""
    if getattr(args, _TENSOR_SIZE, None) is None:
        vars(args).update(defaults)
    for flag in VTP_FLAGS:
        if flag.name not in declared and getattr(args, flag.dest, None) is None:
            vars(args).pop(flag.dest, None)


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Escape percent signs in help texts that argparse cannot format, as one of Megatron 0.19, or ``--help`` fails."""
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except (KeyError, TypeError, ValueError):
            action.help = (action.help or "").replace("%", "%%")
