"""`vtp link` and `vtp rendezvous`, and what doctor asks of a link."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vtp_plugin.cli.command_base import Parser, as_json, named, print_answer
from vtp_plugin.errors import ConfigError, VtpError
from vtp_plugin.host.versions import find_torch
from vtp_plugin.link import run_commands
from vtp_plugin.link.enter import become, callers_variables, enter, start, user_of
from vtp_plugin.link.guard import find_interfaces, find_listeners, is_of_a_run, reach_of
from vtp_plugin.link.site_file import LinkCommand, LinkSite, plan_down, plan_show, plan_up, read_site, shown
from vtp_plugin.plan.launch.launch_commands import PICKLE
from vtp_plugin.report.page.report_page import TextTable
from vtp_plugin.util.text import own_command


def add_rendezvous_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the address."""
    parser.epilog = f"It ends with Ctrl-C, and all runs that meet there with it. {PICKLE[0].upper()}{PICKLE[1:]}."
    parser.add_argument(
        "address", metavar="HOST:PORT", help="of this machine, as torchrun gets it by --rdzv-endpoint on all machines"
    )


def run_rendezvous(options: argparse.Namespace) -> None:
    """Listen until this process is told to end."""
    if options.unknown:
        raise VtpError(f"{options.unknown[0]} is unknown; see: {own_command()} rendezvous --help")
    if find_torch() is None:
        raise VtpError("torch is not installed here; a rendezvous is a store of torch; install it: pip install torch")
    from vtp_plugin.runtime.health.meeting_store import keep_open

    host, _, port = options.address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) <= 65535:
        raise VtpError(f"{options.address!r} is not HOST:PORT; torchrun needs both; write for example 10.8.0.1:29400")
    store, address = keep_open(host.strip("[]"), int(port))
    print(f"the rendezvous listens on {address} port {port}, until this process ends; {PICKLE}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()
    del store  # it listened as long as somebody held it


_HEADER = ("listens on", "process", "who can reach it")


def report_listeners(options: argparse.Namespace) -> None:
    """Print all listeners, and leave with 1 if somebody outside can reach one of a run.

    Args:
        options: parsed arguments; ``link`` is a site's file, whose firewall counts, or empty for none.

    Raises:
        ConfigError: the system does not tell.
    """
    site = read_site(Path(options.link)) if options.link else None
    interfaces, (listeners, problem) = find_interfaces(), find_listeners()
    if interfaces is None or problem:
        raise ConfigError(f"listeners cannot be told: {problem or 'ip shows no interface'}; install iproute2")
    rows: list[dict[str, object]] = []
    cells: list[tuple[str, ...]] = []
    problems: list[str] = []
    for listener in listeners:
        reach, is_outside = reach_of(listener, interfaces, site)
        of_run, port = is_of_a_run(listener), listener.port
        rows.append(as_json(listener) | {"of_a_run": of_run, "reach": reach, "outside": is_outside})
        cells.append((f"{listener.address} port {port}", listener.process or "(of another user)", reach))
        if of_run and is_outside:
            problems.append(
                f"port {port} of process {listener.pid} is open to {reach}; a run over several sites listens "
                "on its link alone; start it with `vtp link run` (docs/guides/link.md)"
            )
    names = {each.name: named(each, "kind", "addresses") for each in interfaces}
    answer = {"interfaces": names, "listeners": rows, "problems": problems, "exit_code": bool(problems)}
    table = TextTable.aligned(_HEADER, cells) if cells else "nothing listens here"
    verdict = f"{len(problems)} listeners of runs can be reached from outside" if problems else "fine"
    found = [table, *(f"problem: {line}" for line in problems), f"verdict: {verdict}"]
    print_answer(options, answer, [f"interfaces: {', '.join(map(str, interfaces))}", *found])
    sys.exit(1 if problems else 0)


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
    print("\n".join(run_commands.make_keys(site, is_first=options.pre_shared)))


def _up(site: LinkSite, options: argparse.Namespace) -> None:
    commands = plan_up(site)
    if not _may_run(commands, options):
        return
    for path in (site.private_key, site.pre_shared_key):
        run_commands.require_private(path, way_out="`vtp link keys` makes it, or says where it comes from")
    run_commands.run_up(commands)
    print(
        f"the link of {site.name} is up: {site.address}, interface {site.interface}; "
        f"start a run: {_how_to_run(options)}"
    )


def _down(site: LinkSite, options: argparse.Namespace) -> None:
    commands = plan_down(site)
    if not _may_run(commands, options):
        return
    run_commands.run_down(site, commands)
    print(f"the link of {site.name} is down")


def _show(site: LinkSite, options: argparse.Namespace) -> None:
    commands = plan_show(site)
    if not _may_run(commands, options):
        return
    for command in commands:
        printed, problem = run_commands.run_command(command)
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
        run_commands.require_answers(site, options.wait)
    start(site, command, variables)


def _may_run(commands: tuple[LinkCommand, ...], options: argparse.Namespace) -> bool:
    """Show commands with ``--dry-run``; else let only an administrator run them."""
    if options.dry_run:
        print("\n".join(shown(commands)))
    else:
        run_commands.require_administrator(options.argv[1])
    return not options.dry_run


def _how_to_run(options: argparse.Namespace) -> str:
    return f"{own_command()} link run {options.file} -- torchrun ..."
