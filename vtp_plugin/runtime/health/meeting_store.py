"""Where the ranks of a run meet: the store at ``MASTER_ADDR:MASTER_PORT``, what listens where, and how to test it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import torch
import torch.distributed as dist

from vtp_plugin.errors import ConfigError, PeerError
from vtp_plugin.runtime.health.attempt import agree_on_attempt
from vtp_plugin.runtime.health.redaction import first_line
from vtp_plugin.runtime.health.store import Topic, part_of
from vtp_plugin.runtime.health.store_posts import read_number
from vtp_plugin.runtime.health.store_server import (
    ALL_INTERFACES,
    attach,
    is_agent_store,
    is_server_bounded,
    listening_address,
    serve,
    serves_store,
)
from vtp_plugin.runtime.health.waiting import STORE_KEEPER, WAITED, WaitingLines, poll, time_limit, until_store_ends

_NUM_PINGS = 5
ATTEMPT_VARIABLE = "VTP_ATTEMPT"
"""Set in a process whose ranks have agreed before on the name of this attempt."""
KEEPER_VARIABLE = "VTP_STORE_KEEPER"
"""Set in such a process: description of the process that keeps the store."""


def open_store(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Join the launcher's rendezvous (``MASTER_ADDR``, ``MASTER_PORT``) before torch.distributed is initialised.

    Waits for the other ranks only if the launcher keeps the store: what an earlier attempt posted there must not be
    read, so ranks agree on a name first. Elsewhere :class:`~vtp_plugin.runtime.health.startup.Agreement` waits, and
    names the missing ones. ``init_process_group`` shares the same server later: torch opens it as multi-tenant. If rank
    0 keeps the store, its server listens only on the address that ``MASTER_ADDR`` names; torch alone would listen on
    all interfaces.

    Raises:
        ConfigError: the launcher's variables are missing or wrong.
        PeerError: the server or a rank did not answer within ``timeout_s``.
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
            store = serve(host, int(port), timeout_s) if serves else attach(host, int(port), timeout_s)
    except (RuntimeError, TimeoutError) as error:
        if serves:
            raise ConfigError(
                f"rank 0 cannot serve at {host}:{port} ({first_line(str(error))}); choose a free MASTER_PORT",
                is_final=False,
            ) from None
        waited = f"{WAITED} {time.monotonic() - begin_s:.1f} s"
        raise PeerError(
            f"{waited} {reason} ({first_line(str(error))}); look for a rank 0 that did not start or ended, or raise "
            "the timeout",
            shared=f"{waited} for the store: no answer",
        ) from None
    # A store that rank 0 keeps is new each time.
    attempt = os.environ.get(ATTEMPT_VARIABLE, "" if is_agent_store(os.environ) else "0")
    if not attempt:
        with time_limit(rank, timeout_s, reason):
            attempt = agree_on_attempt(store, rank=rank, world_size=world_size, timeout_s=timeout_s)
    return dist.PrefixStore(f"vtp/{attempt}", store)


@until_store_ends(STORE_KEEPER, "the store of this attempt")
def open_own_store(store: dist.Store, rank: int, environment: MutableMapping[str, str], timeout_s: float) -> dist.Store:
    """Open a store for this attempt alone, where the launcher keeps one store over several attempts.

    In the launcher's store torch would read what an earlier attempt has left there, such as addresses. Afterwards the
    variables name the new store, which rank 0 keeps.

    Args:
        store: store that reaches all ranks of this attempt.
        rank: this rank.
        environment: variables of this process, with the launcher's; changed to name the new store.
        timeout_s: how long to wait for rank 0.

    Raises:
        ConfigError: rank 0 cannot serve.
        PeerError: rank 0 did not answer, or posted no address.
    """
    part, host = part_of(store, Topic.ATTEMPTS), environment["MASTER_ADDR"]
    if rank == 0:
        try:
            own = serve(host, 0, timeout_s)
        except RuntimeError as error:
            reason = f"rank 0 cannot serve at {host} ({first_line(str(error))}); free a port"
            raise ConfigError(reason, is_final=False) from None
        part.set("port", str(own.port))
    else:
        lines = WaitingLines(timeout_s, lambda: "rank 0 to open the store of this attempt")
        if not poll(lambda: part.check(["port"]), timeout_s, pause_s=0.1, lines=lines):
            raise PeerError(f"{WAITED} {timeout_s:.1f} s for rank 0 to open the store of this attempt: no answer")
        own = attach(host, read_number(part, "port", Topic.ATTEMPTS.key, 1, 65535), timeout_s)
    environment["MASTER_PORT"], environment["TORCHELASTIC_USE_AGENT_STORE"] = str(own.port), "False"
    return dist.PrefixStore("vtp/0", own)


def describe_listening(environment: Mapping[str, str]) -> list[str]:
    """Describe what listens on which address in a run with these variables, one line for each listener.

    Args:
        environment: variables, such as ``os.environ``.

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
    """Describe where a backend listens; ``names`` are the variables that decide it."""
    name = next((name for name in names if environment.get(name)), None)
    return f"{default}; {names[0]} sets it" if name is None else f"interface {environment[name]} ({name})"


def _describe_store(environment: Mapping[str, str]) -> str:
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if host is None or is_agent_store(environment):
        whose = f"port {port}" if port else "the port of --master-port or --rdzv-endpoint"
        return f"{ALL_INTERFACES}, {whose}, kept by torchrun on its first machine; let a firewall keep others out"
    address, reason = listening_address(host, environment)
    stranger = ""
    if not is_server_bounded():
        stranger = f"; with torch {torch.__version__} a stranger can stop it, or make it take GiB of memory: let a "
        stranger += "firewall keep others out, or take torch 2.8 or newer"
    return f"{address or ALL_INTERFACES} port {port}, kept by rank 0 ({reason}){stranger}"


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
        timeout_s: limit of the whole test, in seconds.

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
            store = attach(host, port, max(1.0, deadline_s - time.monotonic()))
            for _ in range(_NUM_PINGS):
                begin_s = time.monotonic()
                store.check(["vtp doctor"])
                found_ms.append(1e3 * (time.monotonic() - begin_s))

    # In a thread, which may stay behind: torch waits forever for a server that accepts connections and sends nothing.
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
