"""Ranks of two stages on links of a chosen rate, on one machine: one network namespace per rank, joined by a bridge.

    with Links((2, 3), mbit=200) as links:
        links.enter(rank)        # in a process of its own

Every rank has one interface, ``eth0``, whose other end is a port of a bridge in a namespace of its own. Traffic between
the stages is limited to `mbit` each way and per rank; inside a stage it is not limited. Both ends of a rank's link
carry a limit: ``eth0`` for what the rank sends, the bridge's port for what it receives. Without the second one, several
senders together would exceed the rate of one receiver.

The namespaces have no names: file descriptors of the process that made them hold them, so they end with it and with
the ranks inside, whatever ends those.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

INTERFACE = "eth0"
_NETWORK = "10.78"  # two more bytes: stage, and tensor-parallel rank from 1

# Without the first line Linux hands on up to 64 KB as one packet, which a slow link keeps until all of it has come: two
# links one after another, as here, would cost the time of some 200 KB.
# HTB: what no filter takes goes to class 0, that is unlimited. The burst is what a link may send at once after a pause;
# with a larger one, short messages would be faster than the rate.
_LIMIT = """\
ip link set dev {device} gso_max_size 8192 gro_max_size 8192
tc qdisc add dev {device} root handle 1: htb default 0
tc class add dev {device} parent 1: classid 1:1 htb rate {mbit}mbit burst 8k
tc filter add dev {device} parent 1: protocol ip u32 match ip {field} {subnet} flowid 1:1
"""

# Connections keep their window over the pauses between two measurements, learn nothing from earlier ones, and all use
# one congestion control whatever the host's default.
_RANK = """\
echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle
echo 1 > /proc/sys/net/ipv4/tcp_no_metrics_save
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
ip link set lo up
ip link set {device} up
ip addr add {address}/16 dev {device}
ip route replace {network}.0.0/16 dev {device} src {address} congctl cubic
"""

_BRIDGE = """\
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
ip link add bridge0 type bridge
ip link set bridge0 up
"""

_PORT = """\
ip link add {port} type veth peer name {device} netns {namespace}
ip link set {port} master bridge0 up
"""


class LinksUnavailableError(Exception):
    """This machine cannot make the links; the text says why in one line."""


class Links:
    """The network of two stages, as a context manager.

    Args:
        sizes: Number of ranks of either stage; ranks count through both.
        mbit: Rate of every rank's link toward the other stage, each way, in Mbit/s on the wire.
    """

    def __init__(self, sizes: tuple[int, int], mbit: float) -> None:
        self._places = [(stage, index) for stage, size in enumerate(sizes) for index in range(size)]
        self._mbit = mbit
        self._namespaces: list[int] = []

    def __enter__(self) -> Links:
        if (reason := _missing()) is not None:
            raise LinksUnavailableError(reason)
        try:
            bridge = self._new_namespace()
            _run(bridge, _BRIDGE)
            for rank in range(len(self._places)):
                self._join(bridge, rank)
        except OSError as error:
            self.__exit__()
            raise LinksUnavailableError(f"network namespaces need root with all its rights ({error})") from error
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        namespaces, self._namespaces = self._namespaces, []
        for namespace in namespaces:
            os.close(namespace)

    def address(self, rank: int) -> str:
        """Return the address of a rank: ``10.78.stage.index``, the index counting from 1."""
        stage, index = self._places[rank]
        return f"{_NETWORK}.{stage}.{index + 1}"

    def enter(self, rank: int) -> None:
        """Move the calling thread, and what it starts from now on, into the namespace of a rank."""
        os.setns(self._namespaces[1 + rank], os.CLONE_NEWNET)

    def _new_namespace(self) -> int:
        with _back_home():
            os.unshare(os.CLONE_NEWNET)
            self._namespaces.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
        return self._namespaces[-1]

    def _join(self, bridge: int, rank: int) -> None:
        """Give a rank its namespace, its port of the bridge, and the limits of both directions."""
        namespace, port = self._new_namespace(), f"port{rank}"
        other_stage = f"{_NETWORK}.{1 - self._places[rank][0]}.0/24"
        path = f"/proc/{os.getpid()}/fd/{namespace}"
        to_rank = _LIMIT.format(device=port, mbit=self._mbit, field="src", subnet=other_stage)
        _run(bridge, _PORT.format(port=port, device=INTERFACE, namespace=path) + to_rank)
        from_rank = _LIMIT.format(device=INTERFACE, mbit=self._mbit, field="dst", subnet=other_stage)
        _run(namespace, _RANK.format(device=INTERFACE, address=self.address(rank), network=_NETWORK) + from_rank)


def _missing() -> str | None:
    """Name what this machine lacks, or None."""
    if not hasattr(os, "setns"):
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "network namespaces need root"
    commands = [command for command in ("ip", "tc") if shutil.which(command) is None]
    return f"no command {', '.join(commands)} (package iproute2)" if commands else None


@contextmanager
def _back_home() -> Iterator[None]:
    """Return to the present namespace at the end."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        yield
    finally:
        os.setns(home, os.CLONE_NEWNET)
        os.close(home)


def _run(namespace: int, script: str) -> None:
    with _back_home():
        os.setns(namespace, os.CLONE_NEWNET)
        done = subprocess.run(["sh", "-exc", script], capture_output=True, text=True, check=False)
    if done.returncode:
        # With -x, the lines before the message are the commands; the last one failed.
        *commands, message = done.stderr.strip().splitlines()
        failed = next((line for line in reversed(commands) if line.startswith("+ ")), "+ ?")
        raise LinksUnavailableError(f"`{failed[2:]}` failed here: {message}")
