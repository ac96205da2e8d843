"""Asks the store of a run from a machine that is not in it; torch is imported only where somebody listens."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from vtp_plugin.host.versions import find_torch

_NUM_PINGS = 5


def test_rendezvous(address: str, timeout_s: float = 10.0) -> tuple[list[str], bool]:
    """Test from this machine whether a run's store answers, without joining the run. Nothing is written to the store.

    Args:
        address: ``HOST:PORT``, as given to torchrun.
        timeout_s: limit of each step, in seconds.

    Returns:
        One line for each step, and whether the store answered.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or int(port) > 65535:
        return [f"{address!r} is not HOST:PORT; write for example 10.8.0.1:29500"], False
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
    if find_torch() is None:
        return [*lines, "torch is missing, so the store cannot be asked; run: pip install torch"], False
    text, is_store = _ask_store(host, int(port), timeout_s)
    return [*lines, text], is_store


def _ask_store(host: str, port: int, timeout_s: float) -> tuple[str, bool]:
    """Speak the store's protocol with the process that listens there."""
    # Only now, since it takes seconds, which are not the store's.
    from vtp_plugin.runtime.health.meeting_store import attach

    deadline_s = time.monotonic() + timeout_s
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
