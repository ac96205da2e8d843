"""Who can reach what listens in this network namespace: loopback, the link, or other interfaces as well.

What ``ip`` and ``ss`` print is read by functions of text.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vtp_plugin.link.link_plan import LinkCommand
from vtp_plugin.link.run_commands import run_command
from vtp_plugin.link.site_file import LinkSite
from vtp_plugin.util.untrusted_files import parse_json

_ENCRYPTED = ("wireguard", "tun", "xfrm")  # wireguard-go and other VPNs make a tun; xfrm is IPsec
_ANY = ("0.0.0.0", "::", "*")
_OF_A_RUN = re.compile(r"vtp_plugin|torch\.distributed\.run|torchrun")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetInterface:
    """A network interface that is up.

    Attributes:
        name: as the system calls it.
        kind: loopback, the interface of a VPN, or any other.
        addresses: without those that are valid on its own wire alone.
    """

    name: str
    kind: Literal["loopback", "vpn", "other"]
    addresses: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} {', '.join(f'{each} ({scope_of(each)})' for each in self.addresses)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A TCP socket that listens.

    Attributes:
        address: on which; ``*``, ``0.0.0.0`` and ``::`` are all addresses.
        port: on which.
        process: name of the process; empty where it is another user's.
        pid: number of the process; None where it is another user's.
    """

    address: str
    port: int
    process: str
    pid: int | None


def scope_of(address: str) -> Literal["public", "private"]:
    """Tell whether an address is known to the whole internet.

    >>> scope_of("8.8.8.8"), scope_of("192.168.1.2"), scope_of("100.64.0.1"), scope_of("fd00::7")
    ('public', 'private', 'private', 'private')
    """
    return "public" if ipaddress.ip_address(address.partition("%")[0]).is_global else "private"


def find_interfaces() -> tuple[NetInterface, ...] | None:
    """Return the interfaces of this namespace; None where ``ip`` does not tell."""
    printed, problem = run_command(LinkCommand(words=("ip", "-json", "-details", "address", "show")))
    return None if problem else read_interfaces(printed)


def find_listeners() -> tuple[tuple[Listener, ...], str]:
    """Return what listens in this namespace, and why that cannot be told; the latter is empty if it can."""
    printed, problem = run_command(LinkCommand(words=("ss", "-H", "-l", "-n", "-t", "-p", "-O")))
    return tuple(read_listeners(printed)), problem


def read_interfaces(text: str) -> tuple[NetInterface, ...]:
    """Read what ``ip -json -details address show`` prints.

    >>> read_interfaces('[{"ifname": "lo", "flags": ["LOOPBACK", "UP"], "addr_info": [{"local": "127.0.0.1"}]}]')
    (NetInterface(name='lo', kind='loopback', addresses=('127.0.0.1',)),)
    """
    found: list[NetInterface] = []
    for each in parse_json(text or "[]"):
        if "UP" not in each.get("flags", ()):
            continue
        kind = each.get("linkinfo", {}).get("info_kind", "")
        addresses = [entry["local"] for entry in each.get("addr_info", ()) if _is_wide(entry)]
        is_loopback = "LOOPBACK" in each["flags"]
        found.append(
            NetInterface(
                name=each["ifname"],
                kind="loopback" if is_loopback else "vpn" if kind in _ENCRYPTED else "other",
                addresses=tuple(addresses),
            )
        )
    return tuple(found)


def _is_wide(entry: dict[str, Any]) -> bool:
    return "local" in entry and not ipaddress.ip_address(entry["local"]).is_link_local


def read_listeners(text: str) -> Iterator[Listener]:
    """Read what ``ss -H -l -n -t -p -O`` prints.

    >>> list(read_listeners('LISTEN 0 128 [::]:22 [::]:* users:(("sshd",pid=7,fd=3))'))
    [Listener(address='::', port=22, process='sshd', pid=7)]
    """
    for line in text.splitlines():
        words = line.split(None, 5)
        if len(words) < 5 or words[0] != "LISTEN":
            continue
        address, _, port = words[3].rpartition(":")
        owner = re.search(r'\("(.*?)",pid=(\d+)', words[5] if len(words) > 5 else "")
        yield Listener(
            address=address.partition("%")[0].strip("[]"),
            port=int(port),
            process=owner[1] if owner else "",
            pid=int(owner[2]) if owner else None,
        )


def reach_of(listener: Listener, interfaces: Sequence[NetInterface], site: LinkSite | None = None) -> tuple[str, bool]:
    """Say who can connect to a listener, and whether that is somebody outside machine and link.

    Linux answers for each of its addresses on every interface, so only what interfaces there are counts, unless the
    listener is on loopback.

    Args:
        listener: what listens.
        interfaces: those of the namespace.
        site: with a firewall, the site whose rules hold.
    """
    if listener.address not in _ANY and ipaddress.ip_address(listener.address).is_loopback:
        return "this machine alone", False
    links = [each for each in interfaces if each.kind == "vpn" and each.addresses]
    others = [each for each in interfaces if each.kind == "other" and each.addresses]
    if not others:
        return (f"the link alone, {', '.join(map(str, links))}" if links else "this machine alone"), False
    if (
        site is not None
        and site.how == "firewall"
        and (listener.address == site.address or listener.port in site.ports)
    ):
        return f"the link alone, by the rules of table {site.interface}", False
    return f"whoever reaches {' or '.join(map(str, (*others, *links)))}", True


def is_of_a_run(listener: Listener) -> bool:
    """Tell whether a listener belongs to a launcher or a rank of a run, by the command line of its process."""
    if listener.pid is None:
        return False
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{listener.pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return _OF_A_RUN.search(words.decode(errors="replace")) is not None
    return False


def addresses_of(name: str) -> tuple[str, ...]:
    """Return the addresses of a machine; none if its name has none here."""
    try:
        return tuple({str(info[4][0]): None for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError:
        return ()


def source_of(address: str) -> str | None:
    """Return this machine's address on the way to another one; None if there is no way. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None
