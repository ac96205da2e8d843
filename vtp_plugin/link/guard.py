"""What a run over several sites may use between them: an encrypted link, and backends that go by it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from vtp_plugin.errors import LayoutError
from vtp_plugin.link.reach import NetInterface, addresses_of, find_interfaces, scope_of, source_of

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
