"""What a site knows of the link: its file, its keys, the plan of addresses."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from vtp_plugin.errors import ConfigError
from vtp_plugin.util.typed_json import Key, as_typed, read_toml_by, whole_number

How = Literal["namespace", "firewall"]
Engine = Literal["auto", "kernel", "wireguard-go"]
MTU: Final = 1420  # of Ethernet, less the 80 bytes that WireGuard adds with IPv6
LEAST_MTU: Final = 1280  # of IPv6
_MOST_MTU: Final = 65535
_MOST_TEXT: Final = 1024
_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,10}")  # an interface has at most 15 characters, 4 of them are "vtp-"
_ENDPOINT: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{1,5})", re.ASCII)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable() or len(value) > _MOST_TEXT:
        raise ValueError("must be text of one line")
    return value


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("must be 1 to 11 of a-z, 0-9 and -, a letter first")
    return text


def _key(text: str) -> str:
    if text and not is_key(text):
        raise ValueError("is no WireGuard key; it has 44 characters; `vtp link keys` prints it")
    return text


def _endpoint(text: str) -> str:
    found = _ENDPOINT.fullmatch(text)
    if text and not (found and 0 < int(found[2]) <= 65535):
        raise ValueError("is not HOST:PORT; write for example 198.51.100.7:51820")
    return text


def _address(value: object) -> str:
    try:
        return str(ipaddress.ip_address(_text(value)))
    except ValueError:
        raise ValueError("is no IP address; write for example 10.8.0.1") from None


def _master(value: object) -> str:
    return _address(value) if value else ""


def is_key(text: str) -> bool:
    """Tell whether a text is a key of WireGuard: 32 bytes in base64."""
    try:
        return len(base64.b64decode(text, validate=True)) == 32
    except (binascii.Error, ValueError):
        return False


_Port = Annotated[int, whole_number(1, 65535)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPeer:
    """A machine at the other end.

    Attributes:
        public_key: its public key, in base64; empty before it is known.
        address: its address inside the link.
        endpoint: where it is reached from outside, ``HOST:PORT``; empty if it calls first.
    """

    public_key: Annotated[str, _text, _key] = ""
    address: Annotated[str, _address]
    endpoint: Annotated[str, _text, _endpoint] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSite:
    """This machine's end of the link.

    Attributes:
        name: of the site.
        how: the interface is alone in a network namespace, or beside others, behind rules of nftables.
        engine: what encrypts: the kernel's module, wireguard-go, or the first where it is there.
        private_key: file of this machine's private key.
        pre_shared_key: file of the key that all machines of the link share.
        listen_port: UDP port for the peers.
        mtu: largest packet inside the link, in bytes.
        address: of this machine inside the link.
        master: address of rank 0 inside the link, ``MASTER_ADDR`` of what is run; empty leaves that alone.
        ports: with a firewall: TCP ports at which a run listens on all addresses, such as ``MASTER_PORT`` of torchrun.
        peers: the other machines.
    """

    name: Annotated[str, _text, _name]
    how: How = "namespace"
    engine: Engine = "auto"
    private_key: Annotated[Path, _text, Path]
    pre_shared_key: Annotated[Path, _text, Path] = Path("link.psk")
    listen_port: _Port = 51820
    mtu: Annotated[int, whole_number(LEAST_MTU, _MOST_MTU)] = MTU
    address: Annotated[str, _address]
    master: Annotated[str, _master] = ""
    ports: tuple[_Port, ...] = ()
    peers: Annotated[tuple[LinkPeer, ...], Key("peer")]

    @property
    def interface(self) -> str:
        """Name of the WireGuard interface, and of its namespace or its table of rules."""
        return f"vtp-{self.name}"


def read_site(path: Path) -> LinkSite:
    """Read a site's file.

    Args:
        path: TOML; paths in it are relative to its folder.

    Raises:
        ConfigError: it cannot be read, or a value breaks its rule.
    """
    way_out = "; docs/guides/link.md has the file of a site to start from"
    return read_toml_by(partial(site_of, folder=path.absolute().parent), path, way_out)


def site_of(values: Mapping[str, Any], folder: Path) -> LinkSite:
    """Check the values of a site's file.

    Args:
        values: as TOML gives them.
        folder: that relative paths start from.

    Raises:
        ValueError: a value breaks its rule.

    >>> peer = {"public_key": "", "address": "10.8.0.2"}
    >>> site = site_of({"name": "edge", "address": "10.8.0.1", "peer": [peer]}, Path("/etc/vtp"))
    >>> site.interface, str(site.private_key), site.mtu, site.peers[0].endpoint
    ('vtp-edge', '/etc/vtp/edge.key', 1420, '')
    """
    site = as_typed(LinkSite, {"private_key": f"{values.get('name')}.key", **values})
    if not site.peers:
        raise ConfigError("[[peer]] is missing; a link has another end; add its public_key and address")
    site = replace(site, private_key=folder / site.private_key, pre_shared_key=folder / site.pre_shared_key)
    addresses = [site.address, *(peer.address for peer in site.peers)]
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"addresses {', '.join(addresses)} must differ; give every machine one of its own")
    if len({ipaddress.ip_address(address).version for address in addresses}) > 1:
        raise ConfigError(f"addresses {', '.join(addresses)} must be of one kind; use IPv4 or IPv6 for all")
    if site.master and site.master not in addresses:
        raise ConfigError(f"master {site.master} is none of {', '.join(addresses)}; name the machine of rank 0")
    return site


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
