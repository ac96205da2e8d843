"""Where the ranks of a run meet: the store's server, this attempt's name, and what listens where.

Which attempt of a run this is: a name on which its ranks agree, over a store that may have seen earlier attempts.

A launcher that starts the ranks again may keep its store. Its counts of restarts tell attempts apart only within one
agent: an agent that left and came back counts from zero, and a restart for a new member is not counted at all.

Rank 0 opens an attempt, under the next number. Each other rank takes its seat in the newest attempt, once; a seat that
is taken, or an attempt of another size, is an earlier one, and the rank waits for the next. When all seats are taken,
rank 0 says so. A rank whose attempt was left by its rank 0 hears nothing, sees a newer attempt, and takes a seat there.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import socket
import time
import uuid
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from vtp_plugin.errors import ConfigError, PeerError
from vtp_plugin.runtime.health.redaction import first_line
from vtp_plugin.runtime.health.startup_waiting import (
    JUDGE_SHARE,
    STORE_KEEPER,
    UNKNOWN_PEER,
    WAITED,
    WaitingLines,
    poll,
    some_ranks,
    time_limit,
    until_store_ends,
)
from vtp_plugin.runtime.health.store import PostError, Topic, count, part_of, read_number, read_post, read_text
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


_LOOK_S = 0.05
_MOST_RANKS = 1 << 16  # rank 0 deletes a key for each
# The store's server is one thread: all ranks together look at most this often.
_MAX_LOOKS_PER_S = 4000


@until_store_ends(STORE_KEEPER, "start")
def agree_on_attempt(store: dist.Store, *, rank: int, world_size: int, timeout_s: float) -> str:
    """Agree with the other ranks of this attempt on its name.

    Args:
        store: reaches all ranks, and may hold what earlier attempts have posted.
        rank: this rank.
        world_size: number of ranks.
        timeout_s: how long to wait for the others.

    Returns:
        A number, as text, which no earlier attempt in this store had.

    Raises:
        PeerError: a rank did not come, or somebody has posted what is no attempt.
    """
    if world_size == 1:
        return str(count(part_of(store, Topic.ATTEMPTS), "count"))
    table = _Table(part_of(store, Topic.ATTEMPTS), max(_LOOK_S, world_size / _MAX_LOOKS_PER_S))
    begin_s = time.monotonic()
    if rank == 0:
        return str(table.open(world_size, begin_s, timeout_s))
    return str(table.enter(rank, world_size, begin_s, timeout_s))


@dataclass(frozen=True, slots=True)
class _Table:
    """The attempts in a store.

    Attributes:
        part: part of the store that belongs to this topic.
        pause_s: seconds between two reads.
    """

    part: dist.Store
    pause_s: float

    def open(self, world_size: int, begin_s: float, timeout_s: float) -> int:
        """Open the next attempt on rank 0, and return its number once all ranks are there."""
        number = count(self.part, "count")
        self._clear()
        self.part.set("newest", json.dumps([number, world_size]))
        seats = [f"{number} seat {rank}" for rank in range(1, world_size)]

        def missing() -> list[int]:
            return [rank for rank, seat in enumerate(seats, 1) if not self.part.check([seat])]

        limit_s = JUDGE_SHARE * timeout_s
        lines = WaitingLines(limit_s, lambda: f"rank {some_ranks(missing())} at start")
        error = ""
        if not poll(lambda: self.part.check(seats), limit_s, pause_s=self.pause_s, lines=lines):
            # A rank that comes from now on must not take a seat in what is over.
            late = [rank for rank, seat in enumerate(seats, 1) if self._take(seat, "-")]
            if late:
                waited = f"{WAITED} {time.monotonic() - begin_s:.1f} s"
                error = f"{waited} for rank {some_ranks(late)} at start: no answer; {UNKNOWN_PEER}"
        self.part.set(f"{number} is", error or "whole")
        if error:
            raise PeerError(error, shared=error)
        return number

    def enter(self, rank: int, world_size: int, begin_s: float, timeout_s: float) -> int:
        """Take a seat on another rank, and return the attempt's number once all ranks are there."""
        own, last, found = uuid.uuid4().hex, 0, 0

        def is_whole() -> bool:
            nonlocal last, found
            newest, size = self._newest()
            if newest > last:
                last = newest
                if found:  # a seat in what was cleared meanwhile
                    self.part.delete_key(f"{found} seat {rank}")
                is_mine = size == world_size and self._take(f"{newest} seat {rank}", own)
                found = newest if is_mine else 0
            return found > 0 and self.part.check([f"{found} is"])

        lines = WaitingLines(timeout_s, lambda: f"{'another rank' if found else 'rank 0'} at start")
        if not poll(is_whole, timeout_s, pause_s=self.pause_s, lines=lines):
            whom = "rank 0, which still waits for another rank," if found else "rank 0"
            waited = f"{WAITED} {time.monotonic() - begin_s:.1f} s"
            text = f"{waited} for {whom} at start: no answer; {UNKNOWN_PEER}"
            raise PeerError(text, shared=text)
        outcome = read_text(self.part, f"{found} is")
        if not outcome:
            raise PostError(Topic.ATTEMPTS.key, f"{found} is", "is empty")
        if outcome != "whole":
            raise PeerError(outcome, shared=outcome)
        return found

    def _newest(self) -> tuple[int, int]:
        """Return the number of the newest attempt, and of its ranks; 0 if there is none."""
        if not self.part.check(["newest"]):
            return 0, 0
        number, size = read_post(tuple[int, int], self.part, "newest", Topic.ATTEMPTS.key)
        if number < 1 or not 1 < size <= _MOST_RANKS:
            raise PostError(Topic.ATTEMPTS.key, "newest", f"is attempt {number} of {size} ranks, which is none")
        return number, size

    def _take(self, seat: str, name: str) -> bool:
        return self.part.compare_set(seat, "", name) == name.encode()

    def _clear(self) -> None:
        """Delete what the last attempt has left, so that a store does not grow with attempts."""
        number, size = self._newest()
        for key in (f"{number} is", *(f"{number} seat {rank}" for rank in range(1, size))):
            self.part.delete_key(key)


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


def _is_reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True
