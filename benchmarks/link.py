"""What the encrypted link between two sites costs: messages of gloo, plain and over `vtp link`.

    python -m benchmarks.link                 100 Mbit/s, 1 Gbit/s and no limit; prints a table
    python -m benchmarks.link --quick         two rates, few messages

It needs root, /dev/net/tun, iproute2 and wireguard-tools; elsewhere it says why it cannot run, and ends. Two network
namespaces are joined by a pair of veth, with a token bucket (tbf) of the rate at both ends. Two ranks, one in each,
send a tensor of 8 MiB there and back. Plain, they use the veth; else the link, with wireguard-go and, where this kernel
has it, the kernel's own module. All take turns; the median of a turn's messages counts, and of those the median.

What headers alone cost is the least that a link can: TCP carries 1,448 bytes in a frame of 1,514, and over the link
1,368 in one of 1,494, so 1.044 times the time of plain. "CPU" is how long the ranks and wireguard-go computed for each
GiB that was sent; what the kernel does by itself, its own module included, is not in it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.turns import Figures, in_turn, measure_in_turn
from vtp_plugin.errors import VtpError
from vtp_plugin.link.run_commands import make_keys, run_command, run_up
from vtp_plugin.link.site_file import Engine, LinkCommand, LinkSite, plan_down, plan_up, site_of

ROOT = Path(__file__).resolve().parent.parent
RATES_MBIT = (100, 1000, 0)
MESSAGE_BYTES = 8 << 20
PORT = 29555
OUTER = ("198.18.0.1", "198.18.0.2")
FLOOR = (1448 / 1514) / (1368 / 1494)
_NAMES = ("vtpb-a", "vtpb-b")
_ENGINES: tuple[tuple[Engine, str], ...] = (("wireguard-go", "g"), ("kernel", "k"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way between the ranks: its name, and of each end the namespace, the interface and the address."""

    name: str
    namespaces: tuple[str, str]
    interfaces: tuple[str, str]
    addresses: tuple[str, str]


def main() -> None:
    """Measure and print; as a rank, send."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rates, few messages")
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--turns", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _send(*options.rank, turns=options.turns)
        return
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        sys.exit("no figures: it needs root and /dev/net/tun")
    print(f"load before: {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores; headers alone: {FLOOR:.3f}")
    print("  Mbit/s  way           ms for 8 MiB  Mbit/s seen  / plain  CPU s per GiB")
    try:
        for rate in RATES_MBIT[:2] if options.quick else RATES_MBIT:
            with tempfile.TemporaryDirectory() as folder, _ways(rate, Path(folder)) as ways:
                _print(rate, ways, *_measure(rate, ways, 2 if options.quick else 7))
    except VtpError as error:
        sys.exit(f"no figures: {error}")
    print(f"load after: {os.getloadavg()[0]:.1f}")


def _measure(rate: int, ways: Sequence[Way], num_turns: int) -> tuple[list[Figures], int]:
    number = 3 if rate == 100 else 10
    programs = [(ROOT, [*_enter(way, 0), *_command(way, 0, number)]) for way in ways]
    return in_turn(programs, num_turns), num_turns * number


def _print(rate: int, ways: Sequence[Way], found: Sequence[Figures], number: int) -> None:
    for way, figures in zip(ways, found, strict=True):
        seen = MESSAGE_BYTES * 8 / figures["s"] / 1e6
        ratio = figures["s"] / found[0]["s"]
        print(
            f"{rate or 'none':>8}  {way.name:12}  {1e3 * figures['s']:12.1f}  {seen:11.0f}  {ratio:7.3f}  "
            f"{figures['busy_s_per_gib']:13.1f}   ({number} messages each way)",
            flush=True,
        )


def _enter(way: Way, rank: int) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{way.namespaces[rank]}", "--"]


def _command(way: Way, rank: int, number: int) -> list[str]:
    other = way.namespaces[1] if rank == 0 else ""
    own = [str(rank), way.addresses[0], ",".join(way.interfaces), other, str(number)]
    return [sys.executable, "-m", "benchmarks.link", "--rank", *own]


def _send(rank: str, address: str, interfaces: str, other: str, number: str, *, turns: str | None) -> None:
    """Be a rank; the first starts the second in the other namespace."""
    os.environ["GLOO_SOCKET_IFNAME"] = interfaces.split(",")[int(rank)]
    second: subprocess.Popen[bytes] | None = None
    if other:
        words = ["--rank", "1", address, interfaces, "", number, "--turns", str(turns)]
        command = ["nsenter", f"--net=/run/netns/{other}", "--", sys.executable, "-m", "benchmarks.link", *words]
        second = subprocess.Popen(command)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:{PORT}", rank=int(rank), world_size=2, timeout=timedelta(seconds=300)
    )
    tensor = torch.zeros(MESSAGE_BYTES // 4)

    def once() -> float:
        begin_s = time.monotonic()
        if rank == "0":
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        else:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)
        return (time.monotonic() - begin_s) / 2

    def measure() -> Figures:
        once()  # a connection that was idle starts slowly
        before_s = _busy_s(interfaces)
        times_s = [once() for _ in range(int(number))]
        sent_gib = 2 * int(number) * MESSAGE_BYTES / 2**30
        return {"s": statistics.median(times_s), "busy_s_per_gib": (_busy_s(interfaces) - before_s) / sent_gib}

    measure_in_turn(str(turns), measure)
    dist.destroy_process_group()
    if second is not None:
        second.wait()


def _busy_s(interfaces: str) -> float:
    """Return how long the ranks and the wireguard-go of their interfaces have computed so far."""
    own = {f"wireguard-go\0{each}\0" for each in interfaces.split(",")}
    ticks = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text()
            if words in own or ("benchmarks.link" in words and interfaces in words):
                ticks += sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:13]))
        except OSError:  # it has ended
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def _ways(rate: int, folder: Path) -> Iterator[list[Way]]:
    """Join two namespaces by a line of a rate, and set up the links that this machine can make."""
    ways = [Way(name="plain", namespaces=(_NAMES[0], _NAMES[1]), interfaces=("eth0", "eth0"), addresses=OUTER)]
    links: list[tuple[int, LinkSite]] = []
    try:
        run_up(list(_line(rate)))
        for engine, letter in _ENGINES:
            sites = _sites(engine, letter, folder)
            try:
                for end, site in enumerate(sites):
                    run_up([_outside(command, end) for command in plan_up(site)])
                    links.append((end, site))
            except VtpError as error:
                print(f"    not measured: {engine}: {str(error).partition(';')[0]}", file=sys.stderr)
                continue
            first, second = sites
            ways.append(
                Way(
                    name=engine,
                    namespaces=(first.interface, second.interface),
                    interfaces=(first.interface, second.interface),
                    addresses=(first.address, second.address),
                )
            )
        yield ways
    finally:
        for end, site in links:
            for command in plan_down(site):
                run_command(_outside(command, end))
        for name in _NAMES:
            run_command(LinkCommand(words=("ip", "netns", "delete", name)))


def _line(rate: int) -> Iterator[LinkCommand]:
    for name in _NAMES:
        yield LinkCommand(words=("ip", "netns", "add", name), undo=("ip", "netns", "delete", name))
    veth = ("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", _NAMES[1])
    yield LinkCommand(words=("ip", "-n", _NAMES[0], *veth))
    for name, address in zip(_NAMES, OUTER, strict=True):
        yield LinkCommand(words=("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0"))
        yield LinkCommand(words=("ip", "-n", name, "link", "set", "lo", "up"))
        yield LinkCommand(words=("ip", "-n", name, "link", "set", "eth0", "up"))
        if rate:
            burst = max(64 << 10, rate * 1000000 // 8 // 100)
            bucket = ("tbf", "rate", f"{rate}mbit", "burst", str(burst), "latency", "100ms")
            yield LinkCommand(words=("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *bucket))


def _sites(engine: Engine, letter: str, folder: Path) -> tuple[LinkSite, LinkSite]:
    """Give both ends of a link, with new keys."""
    own = folder / letter
    own.mkdir()
    third = {"g": 9, "k": 10}[letter]
    ends = [
        site_of(
            {
                "name": f"b{letter}{end}",
                "engine": engine,
                "address": f"10.{third}.0.{end + 1}",
                "listen_port": 51900 + third,
                "peer": [{"address": f"10.{third}.0.{2 - end}", "endpoint": f"{OUTER[1 - end]}:{51900 + third}"}],
            },
            own,
        )
        for end in (0, 1)
    ]
    public = [make_keys(site, is_first=True)[0].rpartition(" ")[2] for site in ends]
    first, second = (
        replace(site, peers=tuple(replace(peer, public_key=public[1 - end]) for peer in site.peers))
        for end, site in enumerate(ends)
    )
    return first, second


def _outside(command: LinkCommand, end: int) -> LinkCommand:
    """Run a command where the line is."""
    enter = ("nsenter", f"--net=/run/netns/{_NAMES[end]}", "--")
    return replace(
        command,
        words=(*enter, *command.words),
        otherwise=(*enter, *command.otherwise) if command.otherwise else (),
        undo=(*enter, *command.undo) if command.undo else (),
        undo_otherwise=(*enter, *command.undo_otherwise) if command.undo_otherwise else (),
    )


if __name__ == "__main__":
    main()
