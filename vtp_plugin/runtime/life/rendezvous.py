"""Where the ranks of a run meet: the store at ``MASTER_ADDR:MASTER_PORT``, what listens where, and how to test it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from vtp_plugin.errors import ConfigError, PeerError
from vtp_plugin.ground import log
from vtp_plugin.runtime.life.disclosure import first_line
from vtp_plugin.runtime.life.waiting import WAITED, WaitingLines, poll, time_limit

_ALL_INTERFACES = "all interfaces"
_NUM_PINGS = 5


def open_store(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Join the launcher's rendezvous (``MASTER_ADDR``, ``MASTER_PORT``) before torch.distributed is initialised.

    Does not wait for the other ranks: :class:`~vtp_plugin.runtime.life.startup.Agreement` does, and names the
    missing ones.
    ``init_process_group`` shares the same server later: torch opens it as multi-tenant. If rank 0 keeps the store, its
    server listens only on the address that ``MASTER_ADDR`` names; torch alone would listen on all interfaces.

    Raises:
        ConfigError: the launcher's variables are missing or wrong.
        PeerError: the server did not answer within ``timeout_s``.
    """
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(f"environment variable {name} is not set; start the script with torchrun")
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not port.isdigit():
        raise ConfigError(f"environment variable MASTER_PORT is {port!r}, not a number; start the script with torchrun")
    serves = serves_store(rank, os.environ)
    lines = WaitingLines(timeout_s, lambda: "rank 0 or the launcher to open the store")
    begin_s = time.monotonic()
    reason = f"for the store that rank 0 or the launcher keeps at {host}:{port}: no answer"
    try:
        with time_limit(rank, timeout_s, reason):
            # Not left to torch, whose attempts together take longer than the timeout that it gets.
            if not serves and not poll(lambda: _is_reachable(host, int(port)), timeout_s, pause_s=0.2, lines=lines):
                raise TimeoutError("nobody listens there")
            store = _serve(host, int(port), timeout_s) if serves else _attach(host, int(port), timeout_s)
    except (RuntimeError, TimeoutError) as error:
        if serves:
            raise ConfigError(
                f"rank 0 cannot serve at {host}:{port} ({first_line(str(error))}); choose a free MASTER_PORT"
            ) from None
        waited = f"{WAITED} {time.monotonic() - begin_s:.1f} s"
        raise PeerError(
            f"{waited} {reason} ({first_line(str(error))}); look for a rank 0 that did not start or ended, or raise "
            "the timeout",
            shared=f"{waited} for the store: no answer",
        ) from None
    # A launcher that restarts the ranks may keep its store: what an earlier attempt posted must not be read. One that
    # rank 0 keeps is new each time, and ranks of one attempt may have been restarted unequally often.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if _is_agent_store(os.environ) else "0"
    return dist.PrefixStore(f"vtp/{attempt}", store)


def serves_store(rank: int, environment: Mapping[str, str]) -> bool:
    """Tell whether a rank keeps the store; if none does, the launcher does.

    >>> serves_store(0, {}), serves_store(1, {}), serves_store(0, {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    (True, False, False)
    """
    return rank == 0 and not _is_agent_store(environment)


def _serve(host: str, port: int, timeout_s: float) -> dist.Store:
    """Open the store's server on the one address of ``host``, or attach to one that this process has there."""
    address, reason = listening_address(host, os.environ)
    if address is None:
        log.warning(f"the store listens on {_ALL_INTERFACES} at port {port}: {reason}")
    try:
        return _open_server(host, port, timeout_s, address, use_libuv=True)
    except RuntimeError as error:
        # The newer of torch's two servers takes no listening socket in old versions, such as 2.7.
        if "libuv" not in str(error):
            raise
    return _open_server(host, port, timeout_s, address, use_libuv=False)


def _open_server(host: str, port: int, timeout_s: float, address: str | None, *, use_libuv: bool) -> dist.TCPStore:
    listener = None if address is None else _bind(address, port)
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


def _attach(host: str, port: int, timeout_s: float) -> dist.TCPStore:
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
    """Choose the address on which rank 0 keeps the store, and say why; None stands for all interfaces.

    Args:
        host: ``MASTER_ADDR``.
        environment: of rank 0; the launcher says in it whether all ranks are on this machine.
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


def describe_listening(environment: Mapping[str, str]) -> list[str]:
    """Say what listens where in a run with these environment variables, one line for each listener.

    Args:
        environment: such as ``os.environ``.

    >>> lines = describe_listening({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "wg0"})
    >>> print(lines[0])
    store: 127.0.0.1 port 29500, kept by rank 0 (the address of MASTER_ADDR 127.0.0.1)
    >>> "gloo: interface wg0 (GLOO_SOCKET_IFNAME)" in lines[1]
    True
    """
    ports = _ephemeral_ports()
    hccl_base = environment.get("HCCL_IF_BASE_PORT")
    hccl_ports = f"from {hccl_base} on (HCCL_IF_BASE_PORT)" if hccl_base else "of its choice; see HCCL_IF_BASE_PORT"
    gloo = _interface(environment, _own_address(), "GLOO_SOCKET_IFNAME")
    nccl = _interface(environment, "an interface of its choice", "NCCL_SOCKET_IFNAME")
    hccl = _interface(environment, "an interface of its choice", "HCCL_SOCKET_IFNAME", "HCCL_IF_IP")
    return [
        f"store: {_describe_store(environment)}",
        f"gloo: {gloo}; every rank, ports {ports}",
        f"NCCL: {nccl}; every rank, ports {ports}",
        f"HCCL: {hccl}; every rank, ports {hccl_ports}",
    ]


def _interface(environment: Mapping[str, str], default: str, *names: str) -> str:
    """Say where a backend listens; ``names`` are the variables that decide it."""
    name = next((name for name in names if environment.get(name)), None)
    return f"{default}; {names[0]} sets it" if name is None else f"interface {environment[name]} ({name})"


def _describe_store(environment: Mapping[str, str]) -> str:
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if host is None or _is_agent_store(environment):
        whose = f"port {port}" if port else "the port of --master-port or --rdzv-endpoint"
        return f"{_ALL_INTERFACES}, {whose}, kept by torchrun on its first machine; let a firewall keep others out"
    address, reason = listening_address(host, environment)
    return f"{address or _ALL_INTERFACES} port {port}, kept by rank 0 ({reason})"


def _is_agent_store(environment: Mapping[str, str]) -> bool:
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _own_address() -> str:
    try:
        return f"{socket.gethostbyname(socket.gethostname())}, the address of this machine's name"
    except OSError:
        return "unknown: this machine's name has no address"


def _ephemeral_ports() -> str:
    try:
        return "-".join(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except OSError:
        return "ephemeral"


def test_rendezvous(address: str, timeout_s: float = 10.0) -> tuple[list[str], bool]:
    """Test from this machine whether a run's store answers, without joining the run. Nothing is written to the store.

    Args:
        address: ``HOST:PORT``, as given to torchrun.
        timeout_s: for all of it together.

    Returns:
        One line for each step, and whether the store answered.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or int(port) > 65535:
        return [f"{address!r} is not HOST:PORT; write for example 10.8.0.1:29500"], False
    deadline_s = time.monotonic() + timeout_s
    try:
        found = sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        return [f"{host} has no address here ({error.strerror}); write an address, or add the name"], False
    lines = [f"{host} is {', '.join(found)}"]
    begin_s = time.monotonic()
    try:
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
    except OSError as error:
        waited_s = time.monotonic() - begin_s
        lines.append(
            f"no connection to {host}:{port} after {waited_s:.1f} s ({error.strerror or error}); look for a wrong "
            "port, a firewall, or a first machine that has not started"
        )
        return lines, False
    lines.append(f"connected to port {port} within {1e3 * (time.monotonic() - begin_s):.1f} ms")
    text, is_store = _ask_store(host, int(port), deadline_s)
    return [*lines, text], is_store


def _ask_store(host: str, port: int, deadline_s: float) -> tuple[str, bool]:
    """Speak the store's protocol with the process that listens there."""
    found_ms: list[float] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            store = _attach(host, port, max(1.0, deadline_s - time.monotonic()))
            for _ in range(_NUM_PINGS):
                begin_s = time.monotonic()
                store.check(["vtp doctor"])
                found_ms.append(1e3 * (time.monotonic() - begin_s))

    # In a thread, which may stay behind: torch waits for ever for a server that accepts connections and says nothing.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(max(0.0, deadline_s - time.monotonic()))
    if len(found_ms) < _NUM_PINGS:
        return f"what listens at port {port} is no store of torch, or it is stopped; look for a wrong port", False
    return f"the store answers; round trip {min(found_ms):.2f} ms (fastest of {_NUM_PINGS})", True


def _is_reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True
