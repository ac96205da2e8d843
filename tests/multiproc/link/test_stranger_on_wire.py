"""A U of two sites trains over the link, and somebody on the wire between them learns, reaches and changes nothing.

The control trains without the link: there the same watch finds activations, and the same scan finds listeners.
"""

from __future__ import annotations

import base64
import json
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from tests.multiproc.link.stranger import cut, payloads
from tests.multiproc.link.two_networks import (
    ADDRESSES,
    FOLDER_VARIABLE,
    INSIDE,
    Networks,
    linked,
    must,
    require_link,
    two_networks,
    write_sites,
)
from tests.rules.launcher_commands import environment
from tests.support.hosts import ROOT
from tests.support.lines import warnings
from tests.support.pace import pace

pytestmark = [pytest.mark.needs("our_example"), pytest.mark.needs("scripts_here")]
STEPS = 5
PORT = 29511
_RUN_S = 300.0
LOSS = re.compile(r"iteration +(\d+)/ .* lm loss: (\S+)")
SCRIPT = ROOT / "tests/multiproc/link/watched_gpt.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a run printed, and what somebody on the wire found.

    Attributes:
        losses: of each step.
        printed: by both sites.
        known: pieces of what the edge sent and read, by kind.
        wire: all that was carried, without headers.
        numbers: of frames, by kind, and of those that were sent by the stranger.
        listeners: ports at which the sites listened, by address.
        opened: ports that the stranger could open, by address.
    """

    losses: list[tuple[str, str]]
    printed: dict[str, str]
    known: dict[str, list[bytes]]
    wire: bytes
    numbers: dict[str, int]
    listeners: set[int]
    opened: dict[str, list[int]]


def test_headers_of_cut_packets_are_right() -> None:
    """Whatever they add up to; a wrong one would be dropped before anybody reads the packet."""
    whole = (
        bytes(14) + struct.pack("!BBHHHBBH8x", 0x45, 0, 28 + 40, 0, 0, 64, 17, 0) + struct.pack("!HHHH", 1, 2, 48, 0)
    )
    for number in range(1 << 16):
        frame = cut(whole[:18] + struct.pack("!H", number) + whole[20:26] + b"\xff" * 8 + whole[34:] + bytes(40))
        total = sum(struct.unpack("!10H", frame[14:34]))
        assert total % 0xFFFF == 0 and len(frame) == 14 + 28 + 20


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """The control: no link, all by the wire."""
    require_link()
    with two_networks() as networks:
        known = {"MASTER_ADDR": ADDRESSES["edge"], "GLOO_SOCKET_IFNAME": "eth0"}
        commands = {site: networks.inside(site, _script(site)) for site in ADDRESSES}
        return _run(networks, tmp_path_factory.mktemp("plain"), commands, known, networks.sites, [*ADDRESSES.values()])


@pytest.fixture(scope="module")
def over_link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Seen, list[bytes]]]:
    """The same run over the link, and the keys."""
    require_link()
    folder = tmp_path_factory.mktemp("link")
    files = write_sites(folder)
    program = [sys.executable, "-m", "vtp_plugin", "link", "run"]
    with two_networks() as networks, linked(networks, files):
        commands = {site: networks.inside(site, [*program, file, "--", *_script(site)]) for site, file in files.items()}
        names = {site: f"vtp-{_name(file)}" for site, file in files.items()}
        keys = [path.read_bytes().strip() for path in (*folder.rglob("*.key"), *folder.rglob("*.psk"))]
        yield _run(networks, folder, commands, {}, names, [*ADDRESSES.values(), *INSIDE.values()]), keys


def test_the_run_is_as_without_the_link(plain: Seen, over_link: tuple[Seen, list[bytes]]) -> None:
    assert [step for step, _ in plain.losses] == [str(number + 1) for number in range(STEPS)]
    assert over_link[0].losses == plain.losses


def test_the_wire_shows_nothing(plain: Seen, over_link: tuple[Seen, list[bytes]]) -> None:
    """Not 16 bytes of an activation or gradient, a token, a label or a key; the control shows activations."""
    seen, keys = over_link
    assert len(seen.known["activation"]) >= 10 and seen.known["label"] and len(keys) == 4
    pieces = [piece for found in seen.known.values() for piece in found]
    pieces += [part for key in keys for part in (key[:16], base64.b64decode(key)[:16])]
    assert [piece for piece in pieces if piece in seen.wire] == []
    assert len(seen.wire) > len(plain.wire) / 2, "the run was not seen"
    assert seen.numbers["tcp"] == 0
    found = [piece in plain.wire for piece in plain.known["activation"]]
    assert sum(found) >= 0.9 * len(found)


def test_the_scan_reaches_no_listener(plain: Seen, over_link: tuple[Seen, list[bytes]]) -> None:
    seen = over_link[0]
    assert len(seen.listeners) >= 4 and PORT in seen.listeners
    assert seen.opened == {address: [] for address in (*ADDRESSES.values(), *INSIDE.values())}
    assert PORT in plain.opened[ADDRESSES["edge"]]
    assert {port for ports in plain.opened.values() for port in ports} >= plain.listeners


def test_packets_that_are_sent_again_garbled_or_cut_change_nothing(
    plain: Seen, over_link: tuple[Seen, list[bytes]]
) -> None:
    seen = over_link[0]
    assert seen.numbers["sent"] >= 100
    assert seen.losses == plain.losses


def test_a_private_address_without_a_vpn_is_warned_of(plain: Seen, over_link: tuple[Seen, list[bytes]]) -> None:
    said = [line for line in warnings(plain.printed["edge"]) if "which is no VPN" in line]
    assert len(said) == 1 and said[0].startswith(f"MASTER_ADDR {ADDRESSES['edge']} is reached by eth0")
    assert not [line for line in warnings(over_link[0].printed["edge"]) if "VPN" in line]


def _script(site: str) -> list[str]:
    """The example, with one seed on both sites: two runs whose losses are compared start from the same weights.

    One rank a site; files of this format are written without further processes, which cost as much as a rank.
    """
    shared = ["--vtp-edge-seed", "shared"] if site == "edge" else []
    return ["bash", str(ROOT / f"examples/edge_cloud/{site}.sh"), *shared, "--ckpt-format", "torch"]


def _name(file: Path) -> str:
    return re.findall(r'name = "(.*)"', file.read_text())[0]


def _run(
    networks: Networks,
    folder: Path,
    commands: Mapping[str, list[str]],
    variables: Mapping[str, str],
    names: Mapping[str, str],
    addresses: list[str],
) -> Seen:
    """Train, with a stranger who watches and disturbs, and scans the addresses while the run stands at a step."""
    known = environment(
        STEPS=STEPS,
        SIZE_LIST="1,1",
        PROCESSES=1,
        MASTER_PORT=PORT,
        SCRIPT=SCRIPT,
        EDGE_DIR=folder / "edge_out",
        CLOUD_DIR=folder / "cloud_out",
        **{FOLDER_VARIABLE: folder},
        **variables,
    )
    logs = {site: folder / f"{site}.log" for site in commands}
    started: list[subprocess.Popen[bytes]] = []
    with _watching(networks, folder / "frames") as counted:
        try:
            for site, command in commands.items():
                with logs[site].open("w") as log:
                    started.append(subprocess.Popen(command, env=known, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT))
            _await(folder / "held", started, logs)
            listeners = {port for name in names.values() for port in _listeners(name)}
            opened = _scan(networks, addresses)
            (folder / "go").touch()
            codes = [process.wait(timeout=_RUN_S * pace()) for process in started]
        finally:
            for process in started:
                process.terminate()
                process.wait(timeout=60)
    printed = {site: log.read_text() for site, log in logs.items()}
    assert codes == [0, 0], [text[-3000:] for text in printed.values()]
    pieces = json.loads((folder / "known.json").read_text())
    return Seen(
        losses=LOSS.findall(printed["edge"]),
        printed=printed,
        known={kind: [bytes.fromhex(piece) for piece in found] for kind, found in pieces.items()},
        wire=payloads(folder / "frames"),
        numbers=counted,
        listeners=listeners,
        opened=opened,
    )


@contextmanager
def _watching(networks: Networks, file: Path) -> Iterator[dict[str, int]]:
    """Let the stranger watch to the end; afterwards the result has the numbers of frames."""
    ports = [f"{networks.ports[site]}={_hardware_address(networks, site)}" for site in ADDRESSES]
    command = networks.on_wire([sys.executable, "-m", "tests.multiproc.link.stranger", "watch", file, *ports])
    counted: dict[str, int] = {}
    with (
        TemporaryFile("w+") as said,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, env=environment(), cwd=ROOT
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield counted
        finally:
            process.stdin.close()
            printed, code = process.stdout.read(), process.wait(timeout=60)
        said.seek(0)
        assert code == 0, said.read()
        counted |= json.loads(printed)


def _hardware_address(networks: Networks, site: str) -> str:
    (found,) = json.loads(must(["ip", "-n", networks.sites[site], "-json", "link", "show", "eth0"]))
    return found["address"]


def _await(file: Path, started: list[subprocess.Popen[bytes]], logs: Mapping[str, Path]) -> None:
    end_s = time.monotonic() + _RUN_S * pace()
    while not file.exists():
        is_running = time.monotonic() < end_s and all(process.poll() is None for process in started)
        assert is_running, [log.read_text()[-3000:] for log in logs.values()]
        time.sleep(0.2)


def _listeners(namespace: str) -> list[int]:
    lines = must(["nsenter", f"--net=/run/netns/{namespace}", "--", "ss", "-H", "-l", "-n", "-t"]).splitlines()
    found = [line.split()[3].rpartition(":") for line in lines]
    return [int(port) for address, _, port in found if not address.startswith(("127.", "[::1]"))]


def _scan(networks: Networks, addresses: list[str]) -> dict[str, list[int]]:
    for site, address in INSIDE.items():
        must(["ip", "-n", networks.wire, "route", "replace", f"{address}/32", "via", ADDRESSES[site]])
    command = networks.on_wire([sys.executable, "-m", "tests.multiproc.link.stranger", "scan", *addresses])
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment(), cwd=ROOT)
    return json.loads(done.stdout)
