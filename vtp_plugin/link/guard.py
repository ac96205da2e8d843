"""Who can reach what listens here, and whether a run is protected enough.

Who can reach what listens in this network namespace: loopback, the link, or other interfaces as well.

What ``ip`` and ``ss`` print is read by functions of text.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from vtp_plugin.errors import LayoutError
from vtp_plugin.link.run_commands import run_command
from vtp_plugin.link.site_file import LinkCommand, LinkSite
from vtp_plugin.util.typed_json import parse_json

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


NCCL_BY_SOCKETS: Mapping[str, str] = MappingProxyType(
    {"NCCL_IB_DISABLE": "1", "NCCL_NET_PLUGIN": "none", "NCCL_NET": "Socket"}
)
"""With these NCCL goes by the kernel's sockets, which a link encrypts; InfiniBand, RoCE and plugins go past it."""
_WAY_OUT = (
    "start both sites with `vtp link run` (docs/guides/link.md), or, if something else such as IPsec or MACsec "
    "encrypts the way between them, give --vtp-link-is-protected on all ranks"
)
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def spans_machines(environment: Mapping[str, str]) -> bool:
    """Tell whether a run leaves this machine, as far as its launcher says.

    >>> spans_machines({"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.8.0.1"})
    True
    >>> spans_machines({"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}), spans_machines({})
    (False, False)
    """
    here, world, master = (environment.get(name, "") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR"))
    if not (here.isdigit() and world.isdigit() and int(here) < int(world) and master):
        return False
    return not all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in addresses_of(master) or ("::",))


def check_way(environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Find out by which interfaces this rank reaches the other site, and is reached.

    Args:
        environment: variables of this process.

    Returns:
        Problems, each a line: an address that is public, on an interface that is no VPN. And warnings: the same with a
        private address.
    """
    if not spans_machines(environment):
        return [], []
    interfaces = find_interfaces()
    problems: list[str] = []
    warnings: list[str] = []
    for what, address, interface in _ways(environment, interfaces or ()):
        if interface is not None and interface.kind != "other":
            continue
        by = f"by {interface.name}, which is no VPN" if interface else "by an interface that `ip` does not show"
        if scope_of(address) == "public":
            problems.append(
                f"{what} is a public address, reached {by}; between sites nothing that torch sends is encrypted; "
                f"{_WAY_OUT}"
            )
        else:
            warnings.append(
                f"{what} is reached {by}: whoever is on that network can read what crosses between the sites, and join "
                f"the run; {_WAY_OUT}"
            )
    return problems[:1], warnings[:1]


def _ways(
    environment: Mapping[str, str], interfaces: Sequence[NetInterface]
) -> Iterator[tuple[str, str, NetInterface | None]]:
    """Yield where this rank sends to or listens: what it is, the address that counts, and the interface."""
    owner = {address: each for each in interfaces for address in each.addresses}
    master = environment["MASTER_ADDR"]
    for address in addresses_of(master):
        source = source_of(address)
        if source is not None:
            yield f"MASTER_ADDR {master}", address, owner.get(source)
    named = {environment[name]: name for name in _INTERFACE_VARIABLES if environment.get(name)}
    for each in interfaces:
        if each.name in named:
            yield from ((f"{named[each.name]} {each.name}, {address},", address, each) for address in each.addresses)
    if "GLOO_SOCKET_IFNAME" not in environment:
        for address in addresses_of(socket.gethostname()):
            if address in owner and owner[address].kind == "other":
                yield f"gloo's address {address} (of this machine's name)", address, owner[address]


def check_device(device: str, environment: Mapping[str, str]) -> str | None:
    """Find a backend that goes past the kernel between the sites, and so past the link.

    Args:
        device: ``cpu``, ``cuda`` or ``npu``.
        environment: variables of this process.

    Returns:
        The problem, as one line.
    """
    if not spans_machines(environment):
        return None
    if device == "npu":
        return (
            "HCCL sends between two sites by the ports of the devices, which no link of the system encrypts; this is "
            "not supported; if something else such as MACsec encrypts that network, give --vtp-link-is-protected on "
            "all ranks"
        )
    if device == "cuda":
        for name, wanted in NCCL_BY_SOCKETS.items():
            found = environment.get(name, wanted)
            if found.lower() != wanted.lower():
                return (
                    f"{name}={found}: between two sites NCCL must go by sockets, which the link encrypts, not past the "
                    f"kernel; leave it out, or, if something else encrypts that network, give --vtp-link-is-protected"
                )
    return None


def require_protected(sites: Sequence[str], is_declared: bool, environment: Mapping[str, str]) -> None:
    """Refuse a way between sites that is known to everybody and encrypted by nobody.

    Args:
        sites: site of every stage; empty for one.
        is_declared: whether ``--vtp-link-is-protected`` was given.
        environment: variables of this process.

    Raises:
        LayoutError: it is such a way.
    """
    if len(set(sites)) > 1 and not is_declared:
        for problem in check_way(environment)[0]:
            raise LayoutError(problem)
