"""What the kernel counts of TCP in this process's network namespace; on Linux only.

Gloo's connections cannot be asked one by one: torch gives out no sockets. The counters are those of all connections of
the namespace, other programs' included.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

_COUNTERS = Path("/proc/self/net/snmp")
_NAMESPACE, _BOOT = Path("/proc/self/ns/net"), Path("/proc/sys/kernel/random/boot_id")


def read_counters(text: str) -> Mapping[str, int]:
    r"""Read the counters of TCP from the text of ``/proc/net/snmp``: a line of names, then one of values.

    >>> read_counters("Ip: Forwarding\nIp: 2\nTcp: OutSegs RetransSegs\nTcp: 700 3\n")
    {'OutSegs': 700, 'RetransSegs': 3}
    """
    rows = [line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:")]
    return {} if len(rows) != 2 else dict(zip(rows[0], map(int, rows[1]), strict=True))


def num_resent() -> int | None:
    """Count the TCP segments that the namespace has sent again since it exists; None where the system does not tell."""
    try:
        return read_counters(_COUNTERS.read_text(encoding="ascii")).get("RetransSegs")
    except (OSError, ValueError):
        return None


def name_network() -> str:
    """Return a digest that is equal for processes of one network namespace and differs between others; else empty."""
    try:
        name = f"{_BOOT.read_text(encoding='ascii').strip()} {_NAMESPACE.stat().st_ino}"
    except OSError:
        return ""
    return hashlib.sha256(name.encode()).hexdigest()[:16]
