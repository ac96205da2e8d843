"""The file of a site, the plans made from it, and who can reach what: all without rights."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import ROOT
from vtp_plugin.cli import main
from vtp_plugin.errors import ConfigError, VtpError
from vtp_plugin.link import guard
from vtp_plugin.link.enter import LinkUser, callers_variables, user_of
from vtp_plugin.link.guard import Listener, NetInterface, reach_of, read_interfaces, read_listeners
from vtp_plugin.link.run_commands import make_keys, require_private, run_up
from vtp_plugin.link.site_file import (
    LinkCommand,
    LinkSite,
    plan_down,
    plan_show,
    plan_up,
    read_site,
    rules_of,
    shown,
    site_of,
    variables_of,
)

KEY = "A" * 43 + "="
PEER = {"public_key": KEY, "address": "10.8.0.2", "endpoint": "198.51.100.7:51820"}
EDGE: dict[str, Any] = {"name": "edge", "address": "10.8.0.1", "peer": [PEER]}
LO = NetInterface(name="lo", kind="loopback", addresses=("127.0.0.1",))
LINK = NetInterface(name="vtp-edge", kind="vpn", addresses=("10.8.0.1",))
LAN = NetInterface(name="eth0", kind="other", addresses=("192.168.1.2",))
PUBLIC = NetInterface(name="eth1", kind="other", addresses=("8.8.4.4",))


def site(**changed: Any) -> LinkSite:
    return site_of({**EDGE, **changed}, Path("/etc/vtp"))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mtu": 1000}, "has 1000 at [mtu], which must be a whole number from 1280 to 65535"),
        ({"name": "Edge"}, 'has "Edge" at [name], which must be 1 to 11 of a-z, 0-9 and -'),
        ({"name": "a-name-too-long"}, "must be 1 to 11"),
        ({"address": "10.8.0.2"}, "addresses 10.8.0.2, 10.8.0.2 must differ"),
        ({"address": "fd00::1"}, "must be of one kind"),
        ({"address": "edge.example.org"}, "is no IP address"),
        ({"master": "10.8.0.9"}, "master 10.8.0.9 is none of 10.8.0.1, 10.8.0.2"),
        ({"how": "vpn"}, 'has "vpn" at [how], which is none of namespace, firewall'),
        ({"ports": 29511}, "has 29511 at [ports], which is no "),
        ({"ports": [70000]}, "has 70000 at [ports][0], which must be a whole number from 1 to 65535"),
        ({"listen_prot": 1}, "has 'listen_prot', which is unknown; do you mean listen_port?"),
        ({"peer": []}, "[[peer]] is missing"),
        ({"peer": [{**PEER, "public_key": "abc"}]}, 'has "abc" at [peer][0][public_key], which is no WireGuard key'),
        ({"peer": [{**PEER, "endpoint": "-x"}]}, 'has "-x" at [peer][0][endpoint], which is not HOST:PORT'),
        ({"peer": [{"public_key": KEY}]}, "has no 'address' at [peer][0]"),
        ({"private_key": "a\x1b[2J"}, "at [private_key], which must be text of one line"),
    ],
)
def test_a_wrong_value_is_one_line(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:
        site(**changed)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_none_is_one_line(tmp_path: Path) -> None:
    for name, text in (("a.toml", "name = "), ("b.toml", 'name = "B"'), ("c.toml", None)):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError) as error:
            read_site(tmp_path / name)
        assert str(error.value).startswith(str(tmp_path / name)) and "\n" not in str(error.value)


def test_the_files_of_the_example_are_two_ends_of_one_link() -> None:
    edge, cloud = (read_site(ROOT / f"examples/edge_cloud/{name}.toml") for name in ("edge", "cloud"))
    assert (edge.name, cloud.name) == ("edge", "cloud")
    assert (edge.address, cloud.address) == (cloud.peers[0].address, edge.peers[0].address)
    assert edge.master == cloud.master == edge.address


def test_no_plan_holds_a_secret() -> None:
    """Keys are named by their files; what a list of processes would show is no secret."""
    (command,) = [command for command in plan_up(site()) if command.words[0] == "wg"]
    assert "/etc/vtp/edge.key" in command.words and "/etc/vtp/link.psk" in command.words
    assert [word for word in command.words if len(word) == 44] == [KEY]


def test_only_the_interface_and_loopback_are_in_the_namespace() -> None:
    words = [command.words for command in plan_up(site())]
    assert words.index(("ip", "link", "set", "vtp-edge", "netns", "vtp-edge")) > words.index(
        ("ip", "link", "add", "vtp-edge", "type", "wireguard")
    )
    inside = [each for each in words if each[:3] == ("ip", "-n", "vtp-edge")]
    assert all("vtp-edge" in each[3:] or "lo" in each for each in inside)
    assert not any("default" in each for each in words)


@pytest.mark.parametrize("how", ["namespace", "firewall"])
def test_down_undoes_what_up_did(how: str) -> None:
    undone = [(command.words, command.otherwise) for command in plan_down(site(how=how))]
    assert undone == [
        (command.undo, command.undo_otherwise) for command in reversed(plan_up(site(how=how))) if command.undo
    ]


def test_rules_close_all_but_the_link() -> None:
    """The first command of a firewall: the interface comes behind it."""
    commands = plan_up(site(how="firewall", ports=[29511], peer=[PEER, {**PEER, "address": "10.8.0.3"}]))
    assert commands[0].words == ("nft", "-f", "-") and commands[0].stdin.splitlines()[1:9] == [
        "  chain input {",
        "    type filter hook input priority -10; policy accept;",
        '    iifname "lo" accept',
        '    iifname "vtp-edge" ip saddr { 10.8.0.2, 10.8.0.3 } accept',
        '    iifname "vtp-edge" drop',
        "    ip daddr 10.8.0.1 drop",
        "    tcp dport { 29511 } drop",
        "  }",
    ]
    assert "ip6 daddr fd00::1 drop" in rules_of(site(address="fd00::1", peer=[{**PEER, "address": "fd00::2"}]))
    assert not any("netns" in command.words for command in commands)
    assert [command.words[0] for command in plan_show(site(how="firewall"))] == ["wg", "ip", "nft"]


def test_a_peer_without_a_key_is_named() -> None:
    with pytest.raises(ConfigError, match="public_key of peer 10.8.0.2 is not known; the other site prints it"):
        plan_up(site(peer=[{"address": "10.8.0.2"}]))


def test_the_engine_is_the_kernels_where_it_is_there() -> None:
    made = {engine: plan_up(site(engine=engine))[1] for engine in ("auto", "kernel", "wireguard-go")}
    assert made["auto"].otherwise == made["wireguard-go"].words == ("wireguard-go", "vtp-edge")
    assert made["auto"].words == made["kernel"].words and made["kernel"].otherwise == ()


def test_a_step_that_fails_undoes_those_before_it(tmp_path: Path) -> None:
    commands = [
        LinkCommand(words=("touch", str(tmp_path / "a")), undo=("rm", str(tmp_path / "a"))),
        LinkCommand(
            words=("false",),
            otherwise=("touch", str(tmp_path / "b")),
            undo=("false",),
            undo_otherwise=("rm", str(tmp_path / "b")),
        ),
        LinkCommand(words=("cat", "/no/such/file"), undo=("touch", str(tmp_path / "c"))),
    ]
    with pytest.raises(ConfigError) as error:
        run_up(commands)
    assert "No such file" in str(error.value) and "all before it is undone" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="vtp-no-such-program is not installed"):
        run_up([LinkCommand(words=("vtp-no-such-program",))])


def test_dry_run_prints_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "edge.toml"
    file.write_text(f'name = "edge"\naddress = "10.8.0.1"\n[[peer]]\naddress = "10.8.0.2"\npublic_key = "{KEY}"\n')
    for action, plan in (("up", plan_up), ("down", plan_down), ("show", plan_show)):
        main(["link", action, "--dry-run", str(file)])
        assert capsys.readouterr().out.splitlines() == list(shown(plan(read_site(file))))


def test_keys_of_others_and_no_keys_are_rejected(tmp_path: Path) -> None:
    key = tmp_path / "edge.key"
    key.write_text(KEY + "\n")
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=f"{key} may be read by others; .* chmod 600 {key}"):
        require_private(key, way_out="")
    key.chmod(0o600)
    require_private(key, way_out="")
    key.write_text("root:secret:1\n")
    with pytest.raises(ConfigError, match="holds no WireGuard key") as error:
        require_private(key, way_out="")
    assert "secret" not in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        require_private(tmp_path / "none", way_out="")


def test_keys_are_made_once_for_their_owner_alone(tmp_path: Path) -> None:
    own = site_of(EDGE, tmp_path)
    try:
        first = make_keys(own, is_first=True)
    except ConfigError as error:
        pytest.skip(str(error))
    assert make_keys(own, is_first=True)[0] == first[0]
    for path in (own.private_key, own.pre_shared_key):
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.read_text().strip() not in "".join(first)


def test_who_came_by_sudo_stays_who_they_were() -> None:
    assert user_of({"SUDO_UID": "4242", "SUDO_GID": "7"}, None) == LinkUser(name="", uid=4242, gid=7)
    with pytest.raises(ConfigError, match="sudo was called by user 4242, who stays that user"):
        user_of({"SUDO_UID": "4242", "SUDO_GID": "7"}, "root")
    assert user_of({}, None) is None
    assert user_of({}, "0") == LinkUser(name="root", uid=0, gid=0)
    with pytest.raises(ConfigError, match="there is no such user"):
        user_of({}, "no-such-user")


def test_variables_are_those_of_this_process_without_sudo() -> None:
    assert callers_variables({"A": "1"}) == {"A": "1"}
    assert callers_variables({"A": "1", "SUDO_UID": "4242"}) == {"A": "1", "SUDO_UID": "4242"}  # no sudo runs this
    assert variables_of(site(master="10.8.0.1"))["MASTER_ADDR"] == "10.8.0.1"
    assert "MASTER_ADDR" not in variables_of(site())


def test_the_variables_that_sudo_took_away_come_back(tmp_path: Path) -> None:
    """A shell by the name of sudo gives its child almost none of its own."""
    sudo = tmp_path / "sudo"
    shutil.copy("/bin/sh", sudo)
    code = "import os; from vtp_plugin.link.enter import callers_variables as v; print(v(os.environ).get('KEPT'))"
    words = ["env", "-i", "SUDO_UID=4242", f"PYTHONPATH={ROOT}", sys.executable, "-c", code]
    command = [str(sudo), "-c", f"{shlex.join(words)}; true"]  # the shell stays
    done = subprocess.run(
        command, env={"PATH": "/usr/bin:/bin", "KEPT": "kept"}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "kept\n"


def test_interfaces_are_read() -> None:
    entries = [
        {"ifname": "lo", "flags": ["LOOPBACK", "UP"], "addr_info": [{"local": "127.0.0.1"}]},
        {"ifname": "vtp-edge", "flags": ["UP"], "linkinfo": {"info_kind": "tun"}, "addr_info": [{"local": "10.8.0.1"}]},
        {"ifname": "eth0", "flags": ["UP"], "addr_info": [{"local": "192.168.1.2"}, {"local": "fe80::1"}]},
        {"ifname": "eth9", "flags": [], "addr_info": [{"local": "192.168.9.9"}]},
    ]
    assert read_interfaces(json.dumps(entries)) == (LO, LINK, LAN)


LISTENING = """\
LISTEN 0      4096    127.0.0.53%lo:53      0.0.0.0:*
LISTEN 0      2048                *:29511         *:* users:(("pt_elastic",pid=334,fd=12))
LISTEN 0      128              [::]:22         [::]:* users:(("sshd",pid=7,fd=3),("sshd",pid=8,fd=3))
"""


def test_listeners_are_read() -> None:
    assert list(read_listeners(LISTENING)) == [
        Listener(address="127.0.0.53", port=53, process="", pid=None),
        Listener(address="*", port=29511, process="pt_elastic", pid=334),
        Listener(address="::", port=22, process="sshd", pid=7),
    ]


@pytest.mark.parametrize(
    ("address", "interfaces", "said", "is_outside"),
    [
        ("127.0.0.1", (LO, LAN), "this machine alone", False),
        ("*", (LO, LINK), "the link alone, vtp-edge 10.8.0.1 (private)", False),
        ("*", (LO,), "this machine alone", False),
        (
            "10.8.0.1",
            (LO, LINK, LAN),
            "whoever reaches eth0 192.168.1.2 (private) or vtp-edge 10.8.0.1 (private)",
            True,
        ),
        ("0.0.0.0", (LO, PUBLIC), "whoever reaches eth1 8.8.4.4 (public)", True),
    ],
)
def test_reach_follows_from_the_interfaces(
    address: str, interfaces: tuple[NetInterface, ...], said: str, is_outside: bool
) -> None:
    """Linux answers for the link's address on every interface: binding to it keeps nobody out."""
    listener = Listener(address=address, port=29511, process="", pid=None)
    assert reach_of(listener, interfaces) == (said, is_outside)


def test_a_firewall_counts_where_its_file_is_given() -> None:
    with_rules = site(how="firewall", ports=[29511])
    for address, port, is_outside in (("*", 29511, False), ("10.8.0.1", 40000, False), ("*", 40000, True)):
        listener = Listener(address=address, port=port, process="", pid=None)
        assert reach_of(listener, (LO, LINK, LAN), with_rules)[1] is is_outside


FAR = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "eth1"}


@pytest.mark.parametrize(
    ("interfaces", "source", "problems", "warnings"),
    [
        ((LO, LINK), "10.8.0.1", 0, 0),
        ((LO, LAN), "192.168.1.2", 0, 1),
        ((LO, PUBLIC), "8.8.4.4", 1, 0),
        ((), "8.8.4.4", 1, 0),
        ((LO, LINK, PUBLIC), "10.8.0.1", 1, 0),  # MASTER_ADDR goes by the link, gloo does not
    ],
)
def test_the_way_between_sites_is_judged(
    monkeypatch: pytest.MonkeyPatch, interfaces: tuple[NetInterface, ...], source: str, problems: int, warnings: int
) -> None:
    """A public address on no VPN is refused, a private one warned of."""
    master = "8.8.8.8" if source == "8.8.4.4" else "10.8.0.9"
    monkeypatch.setattr(guard, "find_interfaces", lambda: interfaces)
    monkeypatch.setattr(guard, "source_of", lambda address: source)
    environment = {**FAR, "MASTER_ADDR": master}
    found = guard.check_way(environment)
    assert (len(found[0]), len(found[1])) == (problems, warnings)
    if problems:
        with pytest.raises(VtpError, match="is a public address, reached by .* give --vtp-link-is-protected"):
            guard.require_protected(("edge", "cloud"), False, environment)
    guard.require_protected(("edge", "cloud"), True, environment)
    guard.require_protected(("edge", "edge"), False, environment)


def test_nothing_is_asked_on_one_machine() -> None:
    for environment in (
        {},
        {**FAR, "MASTER_ADDR": "127.0.0.1"},
        {**FAR, "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "8.8.8.8"},
    ):
        assert guard.check_way(environment) == ([], [])
        assert guard.check_device("npu", environment) is None


def test_backends_that_go_past_the_kernel_are_rejected() -> None:
    environment = {**FAR, "MASTER_ADDR": "10.8.0.9"}
    said = guard.check_device("npu", environment)
    assert said and "HCCL sends between two sites by the ports of the devices" in said
    assert "--vtp-link-is-protected" in said
    assert guard.check_device("cuda", environment) is None
    assert guard.check_device("cpu", environment) is None
    for name, value in (("NCCL_IB_DISABLE", "0"), ("NCCL_NET_PLUGIN", "aws"), ("NCCL_NET", "IB")):
        said = guard.check_device("cuda", {**environment, name: value})
        assert said and said.startswith(f"{name}={value}: between two sites NCCL must go by sockets")
    assert guard.check_device("cuda", {**environment, **guard.NCCL_BY_SOCKETS, "NCCL_NET": "socket"}) is None
