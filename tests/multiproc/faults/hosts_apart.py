"""Hosts of their own on one machine: network namespaces on a bridge, each with a cable that can be pulled.

It needs root and Linux; ``why_not()`` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field

NETWORK = "10.213.77"


def why_not() -> str:
    """Say why namespaces cannot be made here; empty if they can."""
    if shutil.which("ip") is None:
        return "there is no command ip"
    if os.geteuid() != 0:
        return "network namespaces need root"
    done = _ip("netns", "add", "vtp-try", check=False)
    _ip("netns", "del", "vtp-try", check=False)
    return "" if done.returncode == 0 else f"no network namespaces: {done.stderr.strip()}"


@dataclass(slots=True)
class Network:
    """A bridge in the machine's own namespace, and a namespace for each host.

    Attributes:
        name: of all that is made, short enough for the name of an interface.
    """

    name: str = "vtpnet"
    hosts: list[str] = field(default_factory=list)

    @property
    def keeper(self) -> str:
        """Address of the machine's own namespace."""
        return f"{NETWORK}.1"

    def __enter__(self) -> Network:
        self.close()
        _ip("link", "add", self.name, "type", "bridge")
        _ip("addr", "add", f"{self.keeper}/24", "dev", self.name)
        _ip("link", "set", self.name, "up")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove all."""
        for host in self.hosts:
            _ip("link", "del", f"{self.name[:8]}-{host}", check=False)
            _ip("netns", "del", f"{self.name}-{host}", check=False)
        _ip("link", "del", self.name, check=False)

    def address(self, host: str) -> str:
        """Return the address of a host; it is made when it is asked for first."""
        if host not in self.hosts:
            self.hosts.append(host)
            self._add(host)
        return f"{NETWORK}.{10 + self.hosts.index(host)}"

    def _add(self, host: str) -> None:
        space, inside, outside = f"{self.name}-{host}", "eth0", f"{self.name[:8]}-{host}"
        _ip("link", "del", outside, check=False)
        _ip("netns", "del", space, check=False)
        _ip("netns", "add", space)
        _ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", space)
        _ip("link", "set", outside, "master", self.name)
        _ip("link", "set", outside, "up")
        address = f"{NETWORK}.{10 + self.hosts.index(host)}/24"
        for words in (
            ("addr", "add", address, "dev", inside),
            ("link", "set", inside, "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", space, *words)

    def inside(self, host: str) -> list[str]:
        """Return the words that start a program on a host."""
        self.address(host)
        return ["ip", "netns", "exec", f"{self.name}-{host}"]

    def plug(self, host: str, *, is_in: bool) -> None:
        """Pull a host's cable, or put it back."""
        _ip("link", "set", f"{self.name[:8]}-{host}", "up" if is_in else "down")


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)
