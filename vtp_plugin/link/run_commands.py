"""Run the commands of a plan; what was done is undone if a later command fails."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from vtp_plugin.errors import ConfigError
from vtp_plugin.link.link_plan import LinkCommand, Words
from vtp_plugin.link.site_file import LinkSite, is_key
from vtp_plugin.util.untrusted_files import open_file

_LIMIT_S = 60.0
# `wg` looks an unknown name of a machine up 15 times, for over a minute; whoever wants that can set the variable.
_FEW_LOOKUPS = {"WG_ENDPOINT_RESOLUTION_RETRIES": "3"}
_KEY_BYTES = 45  # with the end of the line
_PACKAGES = {
    "ip": "iproute2",
    "ss": "iproute2",
    "nft": "nftables",
    "wg": "wireguard-tools",
    "wireguard-go": "wireguard-go",
    "nsenter": "util-linux",
}


def run_up(commands: Sequence[LinkCommand]) -> None:
    """Run commands one after another.

    Raises:
        ConfigError: one failed; those before it are undone.
    """
    done: list[LinkCommand] = []
    for command in commands:
        problem = run_command(command)[1]
        if problem:
            undone = [earlier for earlier in reversed(done) if earlier.undo]
            for earlier in undone:
                run_command(LinkCommand(words=earlier.undo, otherwise=earlier.undo_otherwise))
            raise ConfigError(f"{problem}; {'all before it is undone; ' if undone else ''}{_way_out(problem)}")
        done.append(command)


def run_down(site: LinkSite, commands: Sequence[LinkCommand]) -> None:
    """Run commands that undo, each whether or not those before it failed.

    Raises:
        ConfigError: all of them failed: there is no link.
    """
    problems = [run_command(command)[1] for command in commands]
    if all(problems):
        raise ConfigError(f"no link of {site.name} is up here ({problems[-1]}); `vtp link up` sets one up")


def run_command(command: LinkCommand) -> tuple[str, str]:
    """Run a command.

    Returns:
        What it printed, and why it failed; the latter is empty if it did not.
    """
    printed, problem = _run(command.words, command.stdin)
    if problem and command.otherwise:
        before, (printed, problem) = problem, _run(command.otherwise, "")
        problem = f"{before}, and {problem}" if problem else ""
    return printed, problem


def require_private(path: Path, *, way_out: str) -> None:
    """Refuse a file of a key that is missing, that others may read, or that holds something else.

    The programs would print what else it holds.

    Args:
        path: the file.
        way_out: what to do if it is missing.

    Raises:
        ConfigError: it is.
    """
    try:
        with open_file(path) as file:
            mode, text = os.fstat(file.fileno()).st_mode, file.read(_KEY_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; the link needs this key; {way_out}") from None
    if mode & 0o077:
        raise ConfigError(f"{path} may be read by others; a key is a file for its owner alone; chmod 600 {path}")
    if not is_key(text.decode("ascii", "replace").strip()):
        raise ConfigError(f"{path} holds no WireGuard key; a key has 44 characters; move the file away; {way_out}")


def require_administrator(action: str) -> None:
    """Refuse an action that only an administrator can do.

    Raises:
        ConfigError: this process has no such rights.
    """
    if os.geteuid() != 0:
        raise ConfigError(f"link {action} needs an administrator; put sudo and the full path of the program before it")


def _run(words: Words, stdin: str) -> tuple[str, str]:
    try:
        env = {**_FEW_LOOKUPS, **os.environ}
        done = subprocess.run(
            words, input=stdin, capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=env
        )
    except FileNotFoundError:
        return "", f"{words[0]} is not installed; install {_PACKAGES.get(words[0], words[0])}"
    except subprocess.TimeoutExpired:
        return "", f"{' '.join(words[:5])}: no end within {_LIMIT_S:g} s"
    why = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    return done.stdout, f"{' '.join(words[:5])}: {why}" if done.returncode else ""


def _way_out(problem: str) -> str:
    if "not permitted" in problem or "denied" in problem:
        return "it needs an administrator with CAP_NET_ADMIN and CAP_SYS_ADMIN, which containers often do not have"
    if "File exists" in problem:
        return "the link is up already: `vtp link down` first"
    if "not installed" in problem:
        return "then try again"
    return "`vtp link up --dry-run` shows all commands"
