"""Find out whether the other end of a link answers, and to packets of the link's size too; needs no rights."""

from __future__ import annotations

import ipaddress
import socket
import time

from vtp_plugin.errors import ConfigError
from vtp_plugin.link.site_file import LEAST_MTU, LinkSite

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
