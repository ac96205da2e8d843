"""Where the store listens, what is said about it, and the test of a rendezvous from outside."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.pace import pace
from tests.support.pool import free_port
from vtp_plugin.runtime.health import ask_store, meeting_store
from vtp_plugin.runtime.health.meeting_store import describe_listening, listening_address

# Opens the store as rank 0 does, attaches by env://, and says on which addresses this process listens.
SOURCE = """
import os
import torch.distributed as dist
from vtp_plugin.runtime.health.meeting_store import open_store

port = os.environ["MASTER_PORT"]
store = open_store(0, 1, 20.0)
again = open_store(0, 1, 20.0)  # a second time in one process, as when apply() and the arguments are checked
dist.init_process_group("gloo", init_method="env://", rank=0, world_size=1)
store.set("key", "value")
assert again.get("key") == b"value"
assert dist.distributed_c10d._get_default_store().num_keys() >= 1
for name in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{name}").readlines()[1:]:
        words = line.split()
        address, number = words[1].split(":")
        if words[3] == "0A" and int(number, 16) == int(port):
            print("listens on", address, flush=True)
"""


def _listens(host: str, **env: str) -> tuple[list[str], str]:
    done = subprocess.run(
        [sys.executable, "-c", SOURCE],
        env={**os.environ, "MASTER_ADDR": host, "MASTER_PORT": str(free_port()), "LOCAL_RANK": "0", **env},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("listens on")], done.stderr


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")
@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "0100007F"), ("127.0.0.2", "0200007F")])
def test_the_store_listens_on_the_address_of_master_addr_alone(host: str, address: str) -> None:
    assert _listens(host)[0] == [address]


def test_a_name_that_only_this_machine_takes_for_loopback() -> None:
    environment = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert listening_address("127.0.0.1", environment)[0] == "127.0.0.1"
    assert listening_address("localhost", environment)[0] in ("127.0.0.1", "::1")
    address, reason = listening_address("192.0.2.1", environment)
    assert address is None and "no address of this machine" in reason
    address, reason = listening_address("no-such-host.invalid", environment)
    assert address is None and "has no address here" in reason


def test_own_name_in_the_hosts_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian gives a machine's own name the address 127.0.1.1, by which no other machine finds it."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    address, reason = listening_address("edge", {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    assert address is None and "loopback address 127.0.1.1 here; write the address that others use" in reason
    assert listening_address("edge", {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})[0] == "127.0.1.1"


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(listener.getsockname()[1]))
        with pytest.raises(ValueError, match=r"rank 0 cannot serve at .*; choose a free MASTER_PORT"):
            meeting_store.open_store(0, 2, 5.0)


class TestDescription:
    def test_without_a_launcher(self) -> None:
        lines = describe_listening({})
        assert lines[0].startswith("store: all interfaces, the port of --master-port") and "firewall" in lines[0]
        assert [line.partition(":")[0] for line in lines] == ["store", "gloo", "NCCL", "HCCL"]

    def test_under_torchrun(self) -> None:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        assert describe_listening(env)[0].startswith("store: all interfaces, port 29511, kept by torchrun")

    def test_a_server_that_strangers_can_stop(self, monkeypatch: pytest.MonkeyPatch) -> None:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
        monkeypatch.setattr("torch.__version__", "2.7.1+cu126")
        assert "with torch 2.7.1+cu126 a stranger can stop it" in describe_listening(env)[0]
        monkeypatch.setattr("torch.__version__", "2.10.0")
        assert "stranger" not in describe_listening(env)[0]

    def test_interfaces(self) -> None:
        env = {
            "GLOO_SOCKET_IFNAME": "wg0",
            "NCCL_SOCKET_IFNAME": "wg1",
            "HCCL_IF_IP": "10.8.0.1",
            "HCCL_IF_BASE_PORT": "5",
        }
        _, gloo, nccl, hccl = describe_listening(env)
        assert "interface wg0" in gloo and "interface wg1" in nccl and "10.8.0.1" in hccl and "from 5 on" in hccl


class TestRendezvousTest:
    def test_a_store(self) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        keys = store.num_keys()
        lines, is_well = ask_store.test_rendezvous(f"127.0.0.1:{store.port}")
        assert is_well and "the store answers; round trip" in lines[-1], lines
        assert store.num_keys() == keys, "it joined the run"

    def test_nobody(self) -> None:
        lines, is_well = ask_store.test_rendezvous(f"127.0.0.1:{free_port()}", 5.0)
        assert not is_well and "no connection to 127.0.0.1" in lines[-1] and "look for a wrong port" in lines[-1]

    def test_something_else(self) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            begin_s = time.monotonic()
            lines, is_well = ask_store.test_rendezvous(f"127.0.0.1:{listener.getsockname()[1]}", 2.0)
        assert time.monotonic() - begin_s < 4.0 * pace()
        assert not is_well and "is no store of torch" in lines[-1]

    @pytest.mark.parametrize("address", ["here", ":29500", "here:", "here:x", "here:99999"])
    def test_no_address(self, address: str) -> None:
        lines, is_well = ask_store.test_rendezvous(address, 1.0)
        assert not is_well and "is not HOST:PORT" in lines[0]

    def test_no_such_name(self) -> None:
        lines, is_well = ask_store.test_rendezvous("no-such-host.invalid:29500", 5.0)
        assert not is_well and "has no address here" in lines[0]
