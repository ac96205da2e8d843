"""Start a program where the link is, as the user who asked for it, with that user's variables.

The process stays in its cgroup and mount namespace: unlike with ``ip netns exec``, a job's limits hold and
``/sys/fs/cgroup`` is there. It becomes the program, so that signals of a launcher reach it.
"""

from __future__ import annotations

import ctypes
import os
import pwd
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from vtp_plugin.errors import ConfigError
from vtp_plugin.link.run_commands import require_administrator
from vtp_plugin.link.site_file import LinkSite, variables_of

_CLONE_NEWNET = 0x40000000
_NAMESPACES = Path("/run/netns")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUser:
    """Who runs a program over the link.

    Attributes:
        name: of the user; empty for one without a name.
        uid: its number.
        gid: number of its group.
    """

    name: str
    uid: int
    gid: int


def user_of(environment: Mapping[str, str], asked: str | None) -> LinkUser | None:
    """Return who is to run the program; None for this process's own user.

    Who came by sudo stays who they were, whatever they ask for: the right to use the link is no right to be root.

    Args:
        environment: variables of this process; sudo sets SUDO_UID and SUDO_GID.
        asked: name or number that ``--user`` gave; None for none.

    Raises:
        ConfigError: there is no such user, or sudo was called by another one.

    >>> user_of({"SUDO_UID": "4242", "SUDO_GID": "4343"}, None)
    LinkUser(name='', uid=4242, gid=4343)
    """
    by_sudo = environment.get("SUDO_UID", "")
    found = _asked_user(asked) if asked is not None else None
    if by_sudo.isdigit() and int(by_sudo):
        if found is not None and found.uid != int(by_sudo):
            raise ConfigError(
                f"--user {asked}: sudo was called by user {by_sudo}, who stays that user; leave --user out"
            )
        try:
            name = pwd.getpwuid(int(by_sudo)).pw_name
        except KeyError:
            name = ""
        return LinkUser(name=name, uid=int(by_sudo), gid=int(environment.get("SUDO_GID", by_sudo)))
    return found


def callers_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the user who called sudo, which gives a program only few of them; else this process's.

    Nothing that runs with rights gets them: they may name libraries to load.
    """
    if not environment.get("SUDO_UID"):
        return dict(environment)
    pid = os.getppid()
    try:
        # A sudo with a terminal of its own has two processes, one the parent of the other.
        if Path(f"/proc/{pid}/comm").read_text().strip() == "sudo":
            texts = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            pairs = (os.fsdecode(text).partition("=") for text in texts)
            return {name: value for name, found, value in pairs if found}
    except OSError:
        pass
    return dict(environment)


def enter(site: LinkSite) -> None:
    """Move this process to the network of the link; with a firewall it is there already.

    Raises:
        ConfigError: the link is not up, or this process has no rights to enter it.
    """
    if site.how == "firewall":
        return
    path = _NAMESPACES / site.interface
    try:
        if path.stat().st_ino == Path("/proc/self/ns/net").stat().st_ino:
            return
        require_administrator("run")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"the link of {site.name} is not up ({path}: {error.strerror}); a run over it needs it; `vtp link up` first"
        ) from None
    # os.setns came with Python 3.12.
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.setns(descriptor, _CLONE_NEWNET)
    os.close(descriptor)
    if failed:
        why = os.strerror(ctypes.get_errno())
        raise ConfigError(f"{path} cannot be entered: {why}; it needs CAP_SYS_ADMIN; start it as an administrator")


def become(user: LinkUser | None) -> None:
    """Give up all rights that the user does not have.

    Raises:
        ConfigError: this process may not become that user.
    """
    if user is None or (os.geteuid(), os.getegid()) == (user.uid, user.gid):
        return
    try:
        if user.name:
            os.initgroups(user.name, user.gid)
        else:
            os.setgroups([user.gid])
        os.setresgid(user.gid, user.gid, user.gid)
        os.setresuid(user.uid, user.uid, user.uid)
    except OSError as error:
        raise ConfigError(
            f"user {user.uid} cannot be become: {error.strerror}; a program over the link runs as whoever called it; "
            "start it as an administrator"
        ) from None


def start(site: LinkSite, command: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Become a program.

    Args:
        site: the site's file.
        command: program and arguments.
        variables: of the caller; those of the link are added, but a MASTER_ADDR of the caller stays.

    Raises:
        ConfigError: there is no such program.
    """
    added = {
        name: value for name, value in variables_of(site).items() if not (name == "MASTER_ADDR" and name in variables)
    }
    try:
        os.execvpe(command[0], [*command], {**variables, **added})
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be started: {error.strerror}; give its path") from None


def _asked_user(asked: str) -> LinkUser:
    try:
        entry = pwd.getpwuid(int(asked)) if asked.isdigit() else pwd.getpwnam(asked)
    except KeyError:
        raise ConfigError(f"--user {asked}: there is no such user here; give a name or a number of one") from None
    return LinkUser(name=entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid)
