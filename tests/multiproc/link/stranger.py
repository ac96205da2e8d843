"""Somebody on the wire between two sites: listens to all of it, sends it again, garbled and cut, and tries all ports.

python -m tests.multiproc.link.stranger watch FILE PORT=SITE_MAC ...     until its standard input ends
python -m tests.multiproc.link.stranger scan ADDRESS ...                 prints the open ports as JSON
"""

from __future__ import annotations

import errno
import json
import resource
import select
import socket
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.multiproc.link.two_networks import STRANGER

_ALL = 0x0003
_ETHERNET, _IP, _UDP = 14, 20, 8
_LARGEST = 1514
_EVERY = 5
_MOST_TRIED = 16000
_SILENCE_S = 0.5  # in which no port answers
_OWN = socket.inet_aton(STRANGER)


def watch(file: Path, ports: dict[str, bytes]) -> dict[str, int]:
    """Write all frames of the first port into a file; send some UDP packets again, as they were, garbled and cut.

    Args:
        file: gets the frames, each with its length before it.
        ports: by name, with the hardware address of the site behind it. All frames between the sites pass the first.

    Returns:
        Numbers of the sites' frames by what they were, and of those that were sent here.
    """
    sockets: dict[bytes, socket.socket] = {}
    for port, site in ports.items():
        sockets[site] = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
        sockets[site].bind((port, 0))
    watched = next(iter(sockets.values()))
    watched.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
    found = {"tcp": 0, "udp": 0, "other": 0, "sent": 0}
    print("ready", flush=True)
    with file.open("wb") as out:
        while not (ready := select.select([watched, sys.stdin], [], [])[0]) or sys.stdin not in ready:
            frame = watched.recv(1 << 17)
            out.write(struct.pack("<I", len(frame)) + frame)
            protocol = frame[_ETHERNET + 9] if frame[12:14] == b"\x08\x00" else 0
            is_own = _OWN in (frame[26:30], frame[30:34])
            kind = "other" if is_own else {6: "tcp", 17: "udp"}.get(protocol, "other")
            found[kind] += 1
            if kind == "udp" and found["udp"] % _EVERY == 0 and len(frame) <= _LARGEST and frame[:6] in sockets:
                for changed in (_again(frame), _garbled(frame), cut(frame)):
                    found["sent"] += _send(sockets[frame[:6]], changed)
    return found


def _send(to: socket.socket, frame: bytes) -> bool:
    """Send a frame; where the machine has no room for it, it is lost, as on a wire."""
    try:
        to.send(frame)
    except OSError as error:
        if error.errno != errno.ENOBUFS:  # what Linux 6.7 and newer say where the other end's queue is full
            raise
        return False
    return True


def frames(file: Path) -> list[bytes]:
    """Read what :func:`watch` has written."""
    data, at, found = file.read_bytes(), 0, []
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        found.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return found


def payloads(file: Path) -> bytes:
    """Join what the frames carry behind their headers, in the order of the wire, each direction for itself."""
    sides: dict[bytes, list[bytes]] = {}
    for frame in frames(file):
        if frame[12:14] != b"\x08\x00":
            continue
        begin = _ETHERNET + 4 * (frame[_ETHERNET] & 15)
        header = 4 * (frame[begin + 12] >> 4) if frame[_ETHERNET + 9] == 6 else _UDP
        end = _ETHERNET + int.from_bytes(frame[_ETHERNET + 2 : _ETHERNET + 4], "big")
        # Both ends of each connection, so that a message in several packets is whole again.
        sides.setdefault(frame[_ETHERNET + 12 : begin + 4], []).append(frame[begin + header : end])
    return b"\0".join(b"".join(parts) for parts in sides.values())


def scan(addresses: list[str]) -> dict[str, list[int]]:
    """Try to connect to every TCP port; return those that are open.

    Addresses that answer nothing are waited for after each batch: at once, and few batches.
    """
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    batch = min(_MOST_TRIED, most_files // len(addresses) - 100)
    with ThreadPoolExecutor(len(addresses)) as threads:
        found = threads.map(partial(_open_ports, ports=range(1, 65536), batch=batch), addresses)
        return dict(zip(addresses, found, strict=True))


def _open_ports(address: str, ports: range, batch: int) -> list[int]:
    found: list[int] = []
    for first in range(0, len(ports), batch):
        tried = {port: socket.socket(socket.AF_INET, socket.SOCK_STREAM) for port in ports[first : first + batch]}
        waiting: dict[int, int] = {}
        for port, each in tried.items():
            each.setblocking(False)
            code = each.connect_ex((address, port))
            if code == errno.EINPROGRESS:
                waiting[each.fileno()] = port
            elif code == 0:
                found.append(port)
        poller = select.poll()
        for number in waiting:
            poller.register(number, select.POLLOUT)
        end_s = time.monotonic() + _SILENCE_S
        while waiting and time.monotonic() < end_s:
            for number, _ in poller.poll(50):
                poller.unregister(number)
                port = waiting.pop(number)
                if tried[port].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    found.append(port)
                end_s = time.monotonic() + _SILENCE_S
        for each in tried.values():
            each.close()
    return sorted(found)


def _again(frame: bytes) -> bytes:
    """Give the same packet, which needs no checksum."""
    return frame[: _ETHERNET + _IP + 6] + b"\0\0" + frame[_ETHERNET + _IP + _UDP :]


def _garbled(frame: bytes) -> bytes:
    frame = _again(frame)
    middle = (_ETHERNET + _IP + _UDP + len(frame) - 1) // 2
    return frame[:middle] + bytes([frame[middle] ^ 0xFF]) + frame[middle + 1 :]


def cut(frame: bytes) -> bytes:
    """Give a packet of UDP with half of what it carries, and headers that say so."""
    payload = frame[_ETHERNET + _IP + _UDP :]
    payload = payload[: len(payload) // 2]
    udp = frame[_ETHERNET + _IP : _ETHERNET + _IP + 4] + struct.pack("!HH", _UDP + len(payload), 0)
    ip = bytearray(frame[_ETHERNET : _ETHERNET + _IP])
    ip[2:4] = struct.pack("!H", _IP + _UDP + len(payload))
    ip[10:12] = b"\0\0"
    total = sum(struct.unpack("!10H", ip))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    ip[10:12] = struct.pack("!H", 0xFFFF ^ total)
    return frame[:_ETHERNET] + bytes(ip) + udp + payload


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "watch":
        pairs = dict(each.split("=") for each in rest[1:])
        print(
            json.dumps(watch(Path(rest[0]), {port: bytes.fromhex(mac.replace(":", "")) for port, mac in pairs.items()}))
        )
    else:
        print(json.dumps(scan(rest)))
