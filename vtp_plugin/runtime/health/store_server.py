"""The server of a run's store: who keeps it, on which address it listens, and how to open or reach one."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from vtp_plugin.errors import ConfigError
from vtp_plugin.util import log

_KEEPER_S = 300.0
ALL_INTERFACES = "all interfaces"


def is_server_bounded() -> bool:
    """Tell whether torch's server bounds what a stranger's connection costs: one socket is read at a time before 2.8.

    There :func:`serve` gets torch's older server, which reads a message to its end before it answers anybody else, and
    makes as many bytes as a length announces.
    """
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)


def serves_store(rank: int, environment: Mapping[str, str]) -> bool:
    """Tell whether a rank keeps the store; if none does, the launcher does.

    >>> serves_store(0, {}), serves_store(1, {}), serves_store(0, {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    (True, False, False)
    """
    return rank == 0 and not is_agent_store(environment)


def serve(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Open the store's server on the one address of ``host``, or attach to one that this process has there.

    Args:
        host: ``MASTER_ADDR``.
        port: 0 for any that is free.
        timeout_s: limit of each request to the store, in seconds.
    """
    address, reason = listening_address(host, os.environ)
    if address is None:
        log.warning(f"the store listens on {ALL_INTERFACES} at port {port}: {reason}")
    return _open_either(host, port, timeout_s, address)


def keep_open(host: str, port: int) -> tuple[dist.TCPStore, str]:
    """Open a store for a launcher, on one address and no other.

    Args:
        host: the address, or a name that has it.
        port: must be free.

    Returns:
        The store, which listens as long as somebody holds it, and the address.

    Raises:
        ConfigError: this machine does not have the address, or the port is taken.
    """
    address, reason = listening_address(host, {})
    if address is None or ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        why = f"{host} is every address of this machine" if address else reason.removeprefix("MASTER_ADDR ")
        raise ConfigError(f"{why}; a rendezvous listens on one address, which others must reach; give that one")
    listener = _bind(address, port)
    if listener is None:
        raise ConfigError(f"{host}:{port} is taken; a rendezvous needs a port for itself; choose another one")
    listener.close()
    return _open_either(host, port, _KEEPER_S, address), address


def _open_either(host: str, port: int, timeout_s: float, address: str | None) -> dist.TCPStore:
    try:
        return _open_server(host, port, timeout_s, address, use_libuv=True)
    except RuntimeError as error:
        # The newer of torch's two servers takes no listening socket before 2.8 (pytorch/pytorch#150215).
        if "libuv" not in str(error):
            raise
    return _open_server(host, port, timeout_s, address, use_libuv=False)


def _open_server(host: str, port: int, timeout_s: float, address: str | None, *, use_libuv: bool) -> dist.TCPStore:
    listener = None if address is None else _bind(address, port)
    port = port if listener is None else listener.getsockname()[1]
    fd = None if listener is None else listener.detach()  # torch's server closes it
    try:
        return dist.TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=fd,
            use_libuv=use_libuv,
        )
    except BaseException:
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)
        raise


def attach(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Connect to a store's server."""
    limit = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False, multi_tenant=True)


def _bind(address: str, port: int) -> socket.socket | None:
    """Listen on one address; None if somebody listens at that port already: torch then attaches to it, or says so."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        return None
    return listener


def listening_address(host: str, environment: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the address on which rank 0 keeps the store, and the reason; None stands for all interfaces.

    Args:
        host: ``MASTER_ADDR``.
        environment: variables of rank 0, in which the launcher says whether all ranks are on this machine.
    """
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        return None, f"MASTER_ADDR {host} has no address here ({error.strerror})"
    is_one_machine = environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE", "1")
    is_loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    if is_loopback and host not in (address, "localhost") and not is_one_machine:
        # Debian maps a machine's name to a loopback address in /etc/hosts; other machines know another address.
        return None, f"MASTER_ADDR {host} is the loopback address {address} here; write the address that others use"
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return (
            None,
            f"MASTER_ADDR {host} is no address of this machine ({errno.errorcode.get(error.errno or 0, error)})",
        )
    return address, f"the address of MASTER_ADDR {host}"


def is_agent_store(environment: Mapping[str, str]) -> bool:
    """Tell whether the launcher keeps the store."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
