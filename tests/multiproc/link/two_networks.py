"""Two sites and somebody on the wire between them: three network namespaces, joined by a bridge in the last.

The sites' outer networks are where a machine's interfaces are: `vtp link up` is run there. Needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rules.launcher_commands import environment

REQUIRED_VARIABLE = "VTP_TEST_LINK"
NEEDED = ("ip", "ss", "nft", "wg", "wireguard-go", "nsenter")
FOLDER_VARIABLE = "VTP_TEST_LINK_FOLDER"  # where watched_gpt.py writes what it has seen
ADDRESSES = {"edge": "198.18.0.1", "cloud": "198.18.0.2"}
INSIDE = {"edge": "10.8.0.1", "cloud": "10.8.0.2"}
STRANGER = "198.18.0.66"
PORT = 51820


def missing() -> str | None:
    """Name what this machine lacks, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun"
    absent = [name for name in NEEDED if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    tried = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() if tried.returncode else None


def require_link() -> None:
    """Skip where a link cannot be made; where the variable says that it must be, fail."""
    reason = missing()
    if reason is not None and os.environ.get(REQUIRED_VARIABLE) == "required":
        pytest.fail(f"{REQUIRED_VARIABLE}=required, but: {reason}")
    if reason is not None:
        pytest.skip(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """The namespaces by their names: those of the sites, and that of the wire with its two ports."""

    sites: Mapping[str, str]
    wire: str
    ports: Mapping[str, str]

    def inside(self, site: str, words: Sequence[object]) -> list[str]:
        """Give a command that runs in the outer network of a site."""
        return ["nsenter", f"--net=/run/netns/{self.sites[site]}", "--", *map(str, words)]

    def on_wire(self, words: Sequence[object]) -> list[str]:
        """Give a command that the stranger runs."""
        return ["nsenter", f"--net=/run/netns/{self.wire}", "--", *map(str, words)]


@contextmanager
def two_networks() -> Iterator[Networks]:
    """Make the namespaces; their ends take all interfaces with them."""
    own = f"vtpt{os.getpid()}"
    networks = Networks(
        sites={site: f"{own}{site}" for site in ADDRESSES},
        wire=f"{own}wire",
        ports={site: f"to-{site}" for site in ADDRESSES},
    )
    names = [networks.wire, *networks.sites.values()]
    try:
        for name in names:
            must(["ip", "netns", "add", name])
            must(["ip", "-n", name, "link", "set", "lo", "up"])
        must(["ip", "-n", networks.wire, "link", "add", "bridge", "type", "bridge"])
        for site, name in networks.sites.items():
            port = networks.ports[site]
            must(
                ["ip", "-n", networks.wire, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name]
            )
            must(["ip", "-n", networks.wire, "link", "set", port, "master", "bridge", "up"])
            must(["ip", "-n", name, "address", "add", f"{ADDRESSES[site]}/24", "dev", "eth0"])
            must(["ip", "-n", name, "link", "set", "eth0", "up"])
        must(["ip", "-n", networks.wire, "address", "add", f"{STRANGER}/24", "dev", "bridge"])
        must(["ip", "-n", networks.wire, "link", "set", "bridge", "up"])
        yield networks
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def must(words: Sequence[object], *, stdin: str = "") -> str:
    """Run a command that ends well; return what it prints."""
    done = subprocess.run(
        list(map(str, words)), input=stdin, capture_output=True, text=True, check=False, timeout=300, env=environment()
    )
    assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


def link(networks: Networks, site: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run `vtp link` in the outer network of a site."""
    command = networks.inside(site, [sys.executable, "-m", "vtp_plugin", "link", *words])
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment())


def write_sites(folder: Path, **changed: str) -> dict[str, Path]:
    """Write the files of both sites with keys as `vtp link keys` makes them; lines may be added to both."""
    files = {site: folder / site / "site.toml" for site in ADDRESSES}
    keys: dict[str, str] = {}
    for pass_number in (1, 2):
        for site, file in files.items():
            other = "cloud" if site == "edge" else "edge"
            file.parent.mkdir(exist_ok=True)
            lines = [
                f'name = "{site}{os.getpid() % 10000}"',
                f'address = "{INSIDE[site]}"',
                f'master = "{INSIDE["edge"]}"',
            ]
            lines += [f"{name} = {value}" for name, value in changed.items()]
            lines += ["[[peer]]", f'address = "{INSIDE[other]}"', f'endpoint = "{ADDRESSES[other]}:{PORT}"']
            lines += [f'public_key = "{keys[other]}"'] if keys else []
            file.write_text("\n".join(lines) + "\n")
            if pass_number == 1:
                first = ["--pre-shared"] if site == "edge" else []
                said = must([sys.executable, "-m", "vtp_plugin", "link", "keys", file, *first])
                keys = {**keys, site: said.splitlines()[0].rpartition(" ")[2]}
        if pass_number == 1:
            shutil.copy(files["edge"].parent / "link.psk", files["cloud"].parent / "link.psk")
    return files


@contextmanager
def linked(networks: Networks, files: Mapping[str, Path]) -> Iterator[None]:
    """Set both ends up, and take both down."""
    try:
        for site, file in files.items():
            done = link(networks, site, "up", file)
            assert done.returncode == 0, done.stderr
        yield
    finally:
        for site, file in files.items():
            link(networks, site, "down", file)
