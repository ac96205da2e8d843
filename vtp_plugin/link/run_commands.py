"""Commands that set up a link: they are run, its keys are made, and its other end is asked."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from vtp_plugin.errors import ConfigError
from vtp_plugin.link.site_file import LEAST_MTU, LinkCommand, LinkSite, Words, is_key
from vtp_plugin.util.typed_json import open_file

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


def make_keys(site: LinkSite, *, is_first: bool) -> list[str]:
    """Make the keys that are missing.

    Args:
        site: names their files.
        is_first: make the pre-shared key, too; the other machines get a copy.

    Returns:
        Lines that say what to give to the other machines; the public key is in the first.

    Raises:
        ConfigError: a file cannot be written or may be read by others, or ``wg`` is missing.
    """
    if not site.private_key.exists():
        _write(site.private_key, _wg(("genkey",)))
    require_private(site.private_key, way_out="choose another file")
    public = _wg(("pubkey",), stdin=site.private_key.read_bytes()).decode().strip()
    lines = [f"public key of {site.name}: {public}", "the other machines need it as public_key of their [[peer]]"]
    if site.pre_shared_key.exists():
        require_private(site.pre_shared_key, way_out="choose another file")
    elif is_first:
        _write(site.pre_shared_key, _wg(("genpsk",)))
        lines.append(f"new pre-shared key in {site.pre_shared_key}: copy it to them by a way that nobody else reads")
    else:
        lines.append(
            f"the pre-shared key {site.pre_shared_key} is missing: copy it from the other site, or, on one side alone, "
            "make it with --pre-shared"
        )
    return lines


def _wg(words: Sequence[str], stdin: bytes = b"") -> bytes:
    try:
        return subprocess.run(("wg", *words), input=stdin, capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise ConfigError("wg is not installed; it makes the keys; install wireguard-tools") from None
    except subprocess.CalledProcessError as error:
        why = " ".join(error.stderr.decode(errors="replace").split())
        raise ConfigError(f"wg {words[0]} failed: {why}; a key file may hold something else; move it away") from None


def _write(path: Path, key: bytes) -> None:
    """Write a key into a new file, which from its first moment on only its owner can read."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; a key needs a file of its own; choose another folder"
        ) from None


_PORT = 9  # nobody listens there, so that the other machine's system answers
_PAUSE_S = 1.0  # a system answers so often
_LARGE_S = 6.0
_NOT_FRAGMENTED = {4: (socket.IPPROTO_IP, 10, 2), 6: (socket.IPPROTO_IPV6, 23, 2)}  # MTU_DISCOVER, PMTUDISC_DO
_HEADERS_BYTES = {4: 28, 6: 48}  # of IP and UDP


def require_answers(site: LinkSite, limit_s: float) -> None:
    """Wait until all peers answer, first to a small packet, then to one as large as the link lets through.

    Args:
        site: the site's file; the process is where the link is.
        limit_s: how long to wait for a peer, in seconds.

    Raises:
        ConfigError: one did not.
    """
    for peer in site.peers:
        if not _answers(peer.address, 1, limit_s):
            raise ConfigError(
                f"peer {peer.address} did not answer within {limit_s:g} s; both ends must be up, with each other's "
                "public key and one pre-shared key; check at both that `vtp link show` has a handshake, then keys, "
                f"endpoint, and the firewall at its UDP port ({peer.endpoint or site.listen_port})"
            )
        largest = site.mtu - _HEADERS_BYTES[ipaddress.ip_address(peer.address).version]
        if not _answers(peer.address, largest, _LARGE_S):
            raise ConfigError(
                f"peer {peer.address} answers, but not to packets of {site.mtu} bytes; the path or the peer's mtu is "
                f"smaller; write a smaller mtu, from {LEAST_MTU} on, into the files of both sites"
            )


def _answers(address: str, num_bytes: int, limit_s: float) -> bool:
    """Tell whether a machine says, within a limit, that nobody listens at a port of it."""
    version = ipaddress.ip_address(address).version
    deadline_s = time.monotonic() + limit_s
    while True:
        with socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            try:
                probe.setsockopt(*_NOT_FRAGMENTED[version])
                probe.connect((address, _PORT))
                probe.send(bytes(num_bytes))
                probe.settimeout(_PAUSE_S)
                probe.recv(1)
            except ConnectionRefusedError:
                return True
            except OSError:
                pass  # no answer, or no way there yet
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(min(_PAUSE_S, max(0.0, deadline_s - time.monotonic())) / 2)
