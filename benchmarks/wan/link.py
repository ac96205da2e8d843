"""Two sites, "edge" and "cloud", on one machine, joined by a line with a chosen latency and rate.

    with WanLink(latency_ms=20, mbit=1000) as link:
        link.enter("edge")       # in a process of its own

Needs root, /dev/net/tun, gcc, iproute2 and nsenter. ``wanlink.c`` makes two network namespaces, each with one interface
``wan0``, and relays what is sent between them: it puts every packet on a line of the rate, then delays it. Both
directions are independent; nothing is lost unless the queue is full, and nothing jitters. Processes of one site talk
at loopback speed. The namespaces have no names and end with the relay, every process inside them too.

TCP is real, so its cost is too: a connection starts slowly, and by default falls back to that after a pause. The latter
is switched off here (``tcp_slow_start_after_idle = 0``), the former is for the user to warm up. When the machine's CPUs
are busy, the relay is late by up to a scheduler tick now and then: look at ``stats()``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Literal

# There are no names inside, and torch would warn of that at every connection; it reads this when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

Site = Literal["edge", "cloud"]

INTERFACE = "wan0"
ADDRESSES: dict[Site, str] = {"edge": "10.77.0.1", "cloud": "10.77.0.2"}

# Windows for 1 Gbit/s over 200 ms and more; connections learn nothing from earlier ones; one congestion control for all
# of them, whatever the host's default: by the route, as a namespace may not choose any as its default.
_SITE = """\
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
echo 4096 131072 67108864 > /proc/sys/net/ipv4/tcp_rmem
echo 4096 65536 67108864 > /proc/sys/net/ipv4/tcp_wmem
echo 1 > /proc/sys/net/ipv4/tcp_no_metrics_save
echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle
ip link set lo up
ip link set {interface} mtu 1500 up
ip addr add {address}/24 dev {interface}
ip route replace 10.77.0.0/24 dev {interface} src {address} congctl cubic
"""


class LinkUnavailableError(Exception):
    """This machine cannot make the link; the text says why in one line."""


class WanLink:
    """The link as a context manager.

    Args:
        latency_ms: One way.
        mbit: Rate in Mbit/s of IP bytes, each way; 0 for no limit.
    """

    def __init__(self, latency_ms: float, mbit: float) -> None:
        # The queue holds two round trips, at least 100 ms: a shorter one makes the time of a message vary.
        queue_bytes = mbit * 1e6 / 8 * max(4 * latency_ms, 100.0) / 1e3
        self._numbers = [latency_ms * 1e3, mbit * 1e6, mbit * 1e6, queue_bytes, queue_bytes]
        self._namespaces: dict[Site, str] = {}
        self._relay: subprocess.Popen[str] | None = None

    def __enter__(self) -> WanLink:
        if (reason := _missing()) is not None:
            raise LinkUnavailableError(reason)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        relay, self._relay = self._relay, None
        if relay is None:
            return
        assert relay.stdin is not None and relay.stdout is not None
        relay.stdin.close()  # the relay kills what is left in the namespaces, and ends
        try:
            relay.wait(15)
        finally:
            relay.kill()
            relay.wait()
            relay.stdout.close()

    def enter(self, site: Site) -> None:
        """Move the calling thread, and what it starts from now on, to a site."""
        namespace = os.open(self._namespaces[site], os.O_RDONLY)
        os.setns(namespace, os.CLONE_NEWNET)
        os.close(namespace)

    def stats(self) -> dict[str, Any]:
        """Return the relay's CPU time, and per direction its frames, bytes, drops and lateness in microseconds."""
        assert self._relay is not None and self._relay.stdin is not None and self._relay.stdout is not None
        self._relay.stdin.write("\n")
        self._relay.stdin.flush()
        return json.loads(self._relay.stdout.readline())

    def _start(self) -> None:
        with tempfile.TemporaryDirectory(prefix="wanlink-") as folder:
            binary = f"{folder}/wanlink"
            subprocess.run(["gcc", "-O2", "-o", binary, str(Path(__file__).parent / "wanlink.c")], check=True)
            self._relay = subprocess.Popen(
                [binary, *map(str, self._numbers)],
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            assert self._relay.stdout is not None
            ready = self._relay.stdout.readline().split()
        if len(ready) != 4:
            raise LinkUnavailableError("the relay did not start: it needs root with all its rights, and /dev/net/tun")
        for (site, address), namespace in zip(ADDRESSES.items(), ready[2:], strict=True):
            self._namespaces[site] = f"/proc/{ready[1]}/fd/{namespace}"
            script = _SITE.format(interface=INTERFACE, address=address)
            enter = ["nsenter", f"--net={self._namespaces[site]}", "--", "sh", "-ec", script]
            done = subprocess.run(enter, capture_output=True, text=True, check=False, timeout=30)
            if done.returncode:
                raise LinkUnavailableError(f"the {site} site could not be set up: {done.stderr.strip()}")


def _missing() -> str | None:
    """Name what this machine lacks, or None."""
    if not hasattr(os, "setns"):
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun"
    commands = [command for command in ("gcc", "ip", "nsenter") if shutil.which(command) is None]
    return f"no command {', '.join(commands)}" if commands else None
