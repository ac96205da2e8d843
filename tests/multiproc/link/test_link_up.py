"""The link itself: who is in its namespace, what is left behind, and what is wrong said in one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiproc.link.two_networks import (
    ADDRESSES,
    INSIDE,
    Networks,
    link,
    linked,
    must,
    require_link,
    two_networks,
    write_sites,
)
from tests.rules.launcher_commands import environment
from tests.support.hosts import ROOT
from vtp_plugin.link.site_file import read_site

LISTEN = """
import socket, sys
listeners = [socket.create_server((address, int(port))) for address, port in zip(sys.argv[1::2], sys.argv[2::2])]
print("vtp_plugin listens", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def networks() -> Iterator[Networks]:
    require_link()
    with two_networks() as made:
        yield made


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """Give the error of a command that was rejected."""
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr, done
    assert done.stderr.startswith("vtp_plugin: error: ")
    return done.stderr


def left_behind(file: Path) -> list[str]:
    """Name what is still there of a link."""
    name = read_site(file).interface
    places = [Path("/run/netns") / name, Path(f"/var/run/wireguard/{name}.sock")]
    end_s = time.monotonic() + 20  # wireguard-go ends once its interface is gone
    while (found := [str(place) for place in places if place.exists()]) and time.monotonic() < end_s:
        time.sleep(0.1)
    return found


def test_a_command_runs_as_the_user_alone_with_the_link(networks: Networks, tmp_path: Path) -> None:
    """In its cgroup, with its variables, and without any right; and the namespace has nothing but loopback and link."""
    files = write_sites(tmp_path)
    script = "id -u; id -G; cat /proc/self/cgroup; grep CapEff /proc/self/status; ls /sys/fs/cgroup | wc -l; "
    script += "ip -brief link show | cut -d' ' -f1; echo $KEPT $MASTER_ADDR $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME"
    with linked(networks, files):
        command = [sys.executable, "-m", "vtp_plugin", "link", "run", "--user", "65534", files["edge"]]
        done = subprocess.run(
            networks.inside("edge", [*command, "--", "sh", "-c", script]),
            capture_output=True,
            text=True,
            check=True,
            env=environment(KEPT="kept", MASTER_ADDR="10.9.9.9"),
        )
        shown = link(networks, "edge", "show", files["edge"])
    uid, gids, *rest = done.stdout.splitlines()
    assert (uid, gids.split()[0]) == ("65534", "65534")
    cgroup = Path("/proc/self/cgroup").read_text().splitlines()
    assert rest[: len(cgroup)] == cgroup
    rights, folders, *interfaces, variables = rest[len(cgroup) :]
    assert int(rights.split()[1], 16) == 0
    assert int(folders) == len(os.listdir("/sys/fs/cgroup"))
    name = read_site(files["edge"]).interface
    assert interfaces == ["lo", name]
    assert variables == f"kept 10.9.9.9 {name} {name}"
    assert "latest handshake" in shown.stdout
    secrets = [path.read_text().strip() for path in (*tmp_path.rglob("*.key"), *tmp_path.rglob("*.psk"))]
    assert len(secrets) == 4 and not any(secret in shown.stdout for secret in secrets)


def test_nothing_is_left_behind(networks: Networks, tmp_path: Path) -> None:
    """After down, after a step that fails in the middle, and up again."""
    edge = write_sites(tmp_path)["edge"]
    text = edge.read_text()
    edge.write_text(text.replace(ADDRESSES["cloud"], "no-such-machine.invalid"))  # `wg` cannot find it
    said = one_line(link(networks, "edge", "up", edge))
    assert "wg set" in said and "no-such-machine.invalid" in said and "all before it is undone" in said
    assert left_behind(edge) == []
    edge.write_text(text)
    for _ in range(2):
        assert link(networks, "edge", "up", edge).returncode == 0
        assert "the link is up already: `vtp link down` first" in one_line(link(networks, "edge", "up", edge))
        assert link(networks, "edge", "down", edge).returncode == 0
        assert left_behind(edge) == []
    assert "is up here" in one_line(link(networks, "edge", "down", edge))
    assert "is not up" in one_line(link(networks, "edge", "show", edge))
    assert "is not up" in one_line(link(networks, "edge", "run", edge, "--", "true"))


@pytest.mark.parametrize("wrong", ["public", "pre-shared", "one side", "mtu of the path"])
def test_a_peer_that_does_not_answer_is_named(networks: Networks, tmp_path: Path, wrong: str) -> None:
    files = write_sites(tmp_path)
    if wrong == "public":
        other = re.sub(
            r'public_key = ".*"', f'public_key = "{must(["wg", "genkey"]).strip()}"', files["cloud"].read_text()
        )
        files["cloud"].write_text(other)
    elif wrong == "pre-shared":
        (files["cloud"].parent / "link.psk").write_text(must(["wg", "genpsk"]))
    elif wrong == "one side":
        files = {"edge": files["edge"]}
    with linked(networks, files):
        if wrong == "mtu of the path":
            must(networks.inside("cloud", ["nft", "-f", "-"]), stdin=DROP_LARGE)
        said = one_line(link(networks, "edge", "run", "--wait", "4", files["edge"], "--", "true"))
    if wrong == "mtu of the path":
        assert "answers, but not to packets of 1420 bytes; the path or the peer's mtu is smaller" in said
    else:
        assert f"peer {INSIDE['cloud']} did not answer within 4 s; both ends must be up" in said


# A path that drops what is large, and tells nobody.
DROP_LARGE = "table inet small { chain input { type filter hook input priority 0; udp length > 1400 drop; }; }\n"


def test_who_may_not_is_told(networks: Networks, tmp_path: Path) -> None:
    """Without an administrator's rights, and without those of a container."""
    files = write_sites(tmp_path)
    program = [sys.executable, "-m", "vtp_plugin", "link"]
    plain = ["unshare", "--user", "--"]  # nobody, who may still read what root owns, such as Python's own files
    known = environment()
    for action in ("up", "down", "show"):
        done = subprocess.run(
            [*plain, *program, action, files["edge"]], capture_output=True, text=True, env=known, check=False
        )
        assert f"link {action} needs an administrator; put sudo" in one_line(done)
    bare = ["setpriv", "--bounding-set", "-sys_admin,-net_admin", "--inh-caps", "-sys_admin,-net_admin", "--"]
    done = subprocess.run(
        [*bare, *program, "up", files["edge"]], capture_output=True, text=True, env=known, check=False
    )
    assert "it needs an administrator with CAP_NET_ADMIN and CAP_SYS_ADMIN" in one_line(done)
    assert left_behind(files["edge"]) == []


def test_a_firewall_keeps_the_link_to_itself(networks: Networks, tmp_path: Path) -> None:
    """Listeners on all addresses, and on the link's: the stranger reaches neither; without the rules both."""
    files = write_sites(tmp_path, how='"firewall"', ports="[29511]")
    table = read_site(files["edge"]).interface
    with linked(networks, files):
        listening = networks.inside("edge", [sys.executable, "-c", LISTEN, "0.0.0.0", 29511, INSIDE["edge"], 41234])
        with subprocess.Popen(listening, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "vtp_plugin listens\n"
            must(["ip", "-n", networks.wire, "route", "add", f"{INSIDE['edge']}/32", "via", ADDRESSES["edge"]])
            outside = [(ADDRESSES["edge"], 29511), (INSIDE["edge"], 29511), (INSIDE["edge"], 41234)]
            assert [_connects(networks.on_wire([]), *each) for each in outside] == [False] * 3
            over_link = link(networks, "cloud", "run", files["cloud"], "--", *_connecting(INSIDE["edge"], 29511))
            assert over_link.returncode == 0, over_link.stderr
            report = _doctor(networks, "edge", str(files["edge"]))
            assert "by the rules of table" in report.stdout and report.returncode == 0
            must(networks.inside("edge", ["nft", "delete", "table", "inet", table]))
            assert [_connects(networks.on_wire([]), *each) for each in outside] == [True] * 3
            process.stdin.close()  # type: ignore[union-attr]


def test_doctor_names_a_listener_outside(networks: Networks, tmp_path: Path) -> None:
    files = write_sites(tmp_path)
    with linked(networks, files):
        command = [sys.executable, "-c", LISTEN, "0.0.0.0", 29511]
        inner = [sys.executable, "-m", "vtp_plugin", "link", "run", files["edge"], "--", *command]
        for words, is_outside in ((command, True), (inner, False)):
            with subprocess.Popen(
                networks.inside("edge", words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment(),
            ) as process:
                assert process.stdout is not None and process.stdout.readline() == "vtp_plugin listens\n"
                if is_outside:
                    report = _doctor(networks, "edge")
                    assert report.returncode == 1
                    assert (
                        f"problem: port 29511 of process {process.pid} is open to whoever reaches eth0" in report.stdout
                    )
                else:
                    report = link(networks, "edge", "run", files["edge"], "--", *_DOCTOR)
                    assert report.returncode == 0 and "the link alone" in report.stdout, report.stdout + report.stderr
                    assert "0.0.0.0 port 29511" in report.stdout
                process.stdin.close()  # type: ignore[union-attr]


_DOCTOR = (sys.executable, "-m", "vtp_plugin", "doctor", "--link")


def _doctor(networks: Networks, site: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = networks.inside(site, [*_DOCTOR, *words])
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), cwd=ROOT)


def _connecting(address: str, port: int) -> list[str]:
    code = f"import socket; socket.create_connection(({address!r}, {port}), timeout=1).close()"
    return [sys.executable, "-S", "-c", code]


def _connects(before: list[str], address: str, port: int) -> bool:
    done = subprocess.run([*before, *_connecting(address, port)], capture_output=True, check=False)
    return done.returncode == 0
