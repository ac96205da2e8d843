"""What is run to set a link up, to show it and to take it down: data, made without rights."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vtp_plugin.errors import ConfigError
from vtp_plugin.link.site_file import LinkSite

Words = tuple[str, ...]
_KEEPALIVE_S = 25  # so that firewalls on the way keep the way open
BACKEND_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Variables that name the interface of a backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCommand:
    """One command, and what undoes it.

    Attributes:
        words: program and arguments.
        otherwise: run in its place where it fails; empty for nothing.
        undo: undoes it; empty where an earlier command's does.
        undo_otherwise: run where `undo` fails.
        stdin: text that the program reads.
    """

    words: Words
    otherwise: Words = ()
    undo: Words = ()
    undo_otherwise: Words = ()
    stdin: str = ""


def plan_up(site: LinkSite) -> tuple[LinkCommand, ...]:
    r"""Return the commands that set the link up, in their order.

    The interface is made where the network is, so that WireGuard's own packets leave there, and then moved into a
    namespace in which nothing else is. Keys are named by their files, so that no list of processes shows them.

    Args:
        site: the site's file.

    Raises:
        ConfigError: a peer's public key is not known yet.

    >>> from pathlib import Path
    >>> from vtp_plugin.link.site_file import site_of
    >>> peer = {"public_key": "A" * 43 + "=", "address": "10.8.0.2", "endpoint": "198.51.100.7:51820"}
    >>> site = site_of({"name": "edge", "address": "10.8.0.1", "peer": [peer]}, Path("/etc/vtp"))
    >>> print("\n".join(" ".join(command.words[:6]) for command in plan_up(site)))
    ip netns add vtp-edge
    ip link add vtp-edge type wireguard
    wg set vtp-edge private-key /etc/vtp/edge.key listen-port
    ip link set vtp-edge netns vtp-edge
    ip -n vtp-edge link set lo
    ip -n vtp-edge address add 10.8.0.1/32
    ip -n vtp-edge link set vtp-edge
    ip -n vtp-edge route add 10.8.0.2/32
    """
    name = site.interface
    unknown = [peer.address for peer in site.peers if not peer.public_key]
    if unknown:
        raise ConfigError(
            f"public_key of peer {unknown[0]} is not known; the other site prints it with `vtp link keys`; write it "
            "into the file"
        )
    if site.how == "firewall":
        table = ("nft", "delete", "table", "inet", name)
        first = LinkCommand(words=("nft", "-f", "-"), undo=table, stdin=rules_of(site))
        return first, _made(site), _set(site), *_addressed(site)
    return (
        LinkCommand(words=("ip", "netns", "add", name), undo=("ip", "netns", "delete", name)),
        _made(site),
        _set(site),
        LinkCommand(words=("ip", "link", "set", name, "netns", name)),
        LinkCommand(words=(*_ip(site), "link", "set", "lo", "up")),
        *_addressed(site),
    )


def plan_down(site: LinkSite) -> tuple[LinkCommand, ...]:
    """Return the commands that undo all of :func:`plan_up`, the last one first, whatever of it was done.

    >>> from pathlib import Path
    >>> from vtp_plugin.link.site_file import site_of
    >>> site = site_of({"name": "edge", "address": "10.8.0.1", "peer": [{"address": "10.8.0.2"}]}, Path("/etc"))
    >>> for command in plan_down(site):
    ...     print(" ".join(command.words))
    ip -n vtp-edge link delete dev vtp-edge
    ip netns delete vtp-edge
    """
    name = site.interface
    if site.how == "firewall":
        undo = ((_made(site).undo, ()), (("nft", "delete", "table", "inet", name), ()))
    else:
        undo = ((_made(site).undo, _made(site).undo_otherwise), (("ip", "netns", "delete", name), ()))
    return tuple(LinkCommand(words=words, otherwise=otherwise) for words, otherwise in undo)


def plan_show(site: LinkSite) -> tuple[LinkCommand, ...]:
    """Return the commands that show the link; ``wg show`` prints no private and no pre-shared key."""
    inside = () if site.how == "firewall" else ("nsenter", f"--net=/run/netns/{site.interface}", "--")
    commands = [
        LinkCommand(words=(*inside, "wg", "show", site.interface)),
        LinkCommand(words=(*_ip(site), "-brief", "address", "show")),
    ]
    if site.how == "firewall":
        commands.append(LinkCommand(words=("nft", "list", "table", "inet", site.interface)))
    return tuple(commands)


def rules_of(site: LinkSite) -> str:
    """Write the rules that keep others out where the interface stands beside others.

    Linux answers for the link's address on every interface, and torchrun's store listens on all of them. So both are
    closed on all interfaces but the link and loopback. Only peers come in by the link, and nothing is passed through.
    """
    addresses = ", ".join(peer.address for peer in site.peers)
    ip = "ip6" if _is_v6(site.address) else "ip"
    rules = [
        'iifname "lo" accept',
        f'iifname "{site.interface}" {ip} saddr {{ {addresses} }} accept',
        f'iifname "{site.interface}" drop',
        f"{ip} daddr {site.address} drop",
    ]
    if site.ports:
        rules.append(f"tcp dport {{ {', '.join(map(str, site.ports))} }} drop")
    lines = [
        f"table inet {site.interface} {{",
        "  chain input {",
        "    type filter hook input priority -10; policy accept;",
        *(f"    {rule}" for rule in rules),
        "  }",
        "  chain forward {",
        "    type filter hook forward priority -10; policy accept;",
        f'    iifname "{site.interface}" drop',
        f'    oifname "{site.interface}" drop',
        "  }",
        "}",
    ]
    return "\n".join(lines) + "\n"


def variables_of(site: LinkSite) -> dict[str, str]:
    """Return the variables of what is run over the link: the interface, and rank 0's address where the file has it."""
    return dict.fromkeys(BACKEND_VARIABLES, site.interface) | ({"MASTER_ADDR": site.master} if site.master else {})


def shown(commands: Sequence[LinkCommand]) -> Iterator[str]:
    """Write commands as a shell would run them, a line for each.

    >>> list(shown([LinkCommand(words=("ip", "link", "add"), otherwise=("wireguard-go", "a b"))]))
    ["ip link add || wireguard-go 'a b'"]
    """
    for command in commands:
        line = shlex.join(command.words)
        if command.otherwise:
            line += f" || {shlex.join(command.otherwise)}"
        if command.stdin:
            line += f" <<'END'\n{command.stdin}END"
        yield line


def _made(site: LinkSite) -> LinkCommand:
    """Make the interface; once it is moved, it is deleted in its namespace."""
    name = site.interface
    kernel, userspace = ("ip", "link", "add", name, "type", "wireguard"), ("wireguard-go", name)
    delete: Words = ("ip", "link", "delete", "dev", name)
    words, otherwise = {"auto": (kernel, userspace), "kernel": (kernel, ()), "wireguard-go": (userspace, ())}[
        site.engine
    ]
    if site.how == "firewall":
        return LinkCommand(words=words, otherwise=otherwise, undo=delete)
    inside: Words = (*_ip(site), "link", "delete", "dev", name)
    return LinkCommand(words=words, otherwise=otherwise, undo=inside, undo_otherwise=delete)


def _set(site: LinkSite) -> LinkCommand:
    words = ["wg", "set", site.interface, "private-key", str(site.private_key), "listen-port", str(site.listen_port)]
    for peer in site.peers:
        words += ["peer", peer.public_key, "preshared-key", str(site.pre_shared_key)]
        words += ["allowed-ips", _alone(peer.address), "persistent-keepalive", str(_KEEPALIVE_S)]
        words += ["endpoint", peer.endpoint] if peer.endpoint else []
    return LinkCommand(words=tuple(words))


def _addressed(site: LinkSite) -> Iterator[LinkCommand]:
    name, ip = site.interface, _ip(site)
    yield LinkCommand(words=(*ip, "address", "add", _alone(site.address), "dev", name))
    yield LinkCommand(words=(*ip, "link", "set", name, "mtu", str(site.mtu), "up"))
    for peer in site.peers:
        yield LinkCommand(words=(*ip, "route", "add", _alone(peer.address), "dev", name))


def _ip(site: LinkSite) -> Words:
    return ("ip",) if site.how == "firewall" else ("ip", "-n", site.interface)


def _alone(address: str) -> str:
    """Write an address as a network of one."""
    return f"{address}/{128 if _is_v6(address) else 32}"


def _is_v6(address: str) -> bool:
    return ipaddress.ip_address(address).version == 6
