"""``link``: an encrypted link between two sites that nobody else can reach; see docs/guides/link.md."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vtp_plugin.cli.parser import Parser
from vtp_plugin.errors import ConfigError
from vtp_plugin.link.enter import become, callers_variables, enter, start, user_of
from vtp_plugin.link.keys import make_keys
from vtp_plugin.link.link_plan import LinkCommand, plan_down, plan_show, plan_up, shown
from vtp_plugin.link.probe import require_answers
from vtp_plugin.link.run_commands import require_administrator, require_private, run_command, run_down, run_up
from vtp_plugin.link.site_file import LinkSite, read_site
from vtp_plugin.util.own_command import own_command

_ANSWER_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", parser_class=Parser)
    keys = _add(actions, "keys", _keys, "make the keys that are missing, and print the public one")
    keys.add_argument(
        "--pre-shared", action="store_true", help="make the pre-shared key, too; on one machine alone, which copies it"
    )
    for name, action, text in (
        ("up", _up, "set the link up; needs an administrator"),
        ("down", _down, "take the link down, also under a run that uses it; needs an administrator"),
        ("show", _show, "show interface, peers, handshakes and bytes; needs an administrator"),
    ):
        one = _add(actions, name, action, text)
        one.add_argument("--dry-run", action="store_true", help="print the commands, and run none")
    run_one = _add(actions, "run", _run, "run a command over the link, as the user who called sudo")
    run_one.usage = "%(prog)s [-h] [--user NAME] [--wait SECONDS] FILE -- COMMAND ..."
    run_one.add_argument("--user", metavar="NAME", help="run it as this user; for administrators who did not use sudo")
    run_one.add_argument(
        "--wait",
        type=float,
        default=_ANSWER_S,
        metavar="SECONDS",
        help=f"how long to wait for the peers' answer; 0 does not ask; default {_ANSWER_S:g}",
    )
    run_one.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="such as torchrun ...")


def run(options: argparse.Namespace) -> None:
    """Do what was asked for."""
    if options.unknown:
        raise ConfigError(f"{options.unknown[0]} is unknown; see: {own_command()} link {options.argv[1]} --help")
    options.action(read_site(options.file), options)


def _add(actions: Any, name: str, action: Callable[[LinkSite, argparse.Namespace], None], text: str) -> Any:
    one = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    one.add_argument("file", type=Path, metavar="FILE", help="the site's file, in TOML")
    one.set_defaults(action=action)
    return one


def _keys(site: LinkSite, options: argparse.Namespace) -> None:
    print("\n".join(make_keys(site, is_first=options.pre_shared)))


def _up(site: LinkSite, options: argparse.Namespace) -> None:
    commands = plan_up(site)
    if _is_shown(commands, options):
        return
    require_administrator("up")
    for path in (site.private_key, site.pre_shared_key):
        require_private(path, way_out="`vtp link keys` makes it, or says where it comes from")
    run_up(commands)
    print(
        f"the link of {site.name} is up: {site.address}, interface {site.interface}; "
        f"start a run: {_how_to_run(options)}"
    )


def _down(site: LinkSite, options: argparse.Namespace) -> None:
    commands = plan_down(site)
    if _is_shown(commands, options):
        return
    require_administrator("down")
    run_down(site, commands)
    print(f"the link of {site.name} is down")


def _show(site: LinkSite, options: argparse.Namespace) -> None:
    commands = plan_show(site)
    if _is_shown(commands, options):
        return
    require_administrator("show")
    for command in commands:
        printed, problem = run_command(command)
        if problem:
            raise ConfigError(f"the link of {site.name} is not up here ({problem}); `vtp link up` sets it up")
        print(printed, end="")


def _run(site: LinkSite, options: argparse.Namespace) -> None:
    command = options.words[1:] if options.words[:1] == ["--"] else options.words
    if command == options.words and command and command[0].startswith("-"):
        raise ConfigError(
            f"{command[0]} stands behind the file; flags of link run stand before it, -- before the command"
        )
    if not command:
        raise ConfigError(f"link run has no command; it runs one over the link; write: {_how_to_run(options)}")
    # Read before this process gives up the rights to read it.
    user, variables = user_of(os.environ, options.user), callers_variables(os.environ)
    enter(site)
    become(user)
    if options.wait > 0:
        require_answers(site, options.wait)
    start(site, command, variables)


def _is_shown(commands: tuple[LinkCommand, ...], options: argparse.Namespace) -> bool:
    if options.dry_run:
        print("\n".join(shown(commands)))
    return bool(options.dry_run)


def _how_to_run(options: argparse.Namespace) -> str:
    return f"{own_command()} link run {options.file} -- torchrun ..."
