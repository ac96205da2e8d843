"""The commands that ``doctor`` prints are those of the guide."""

from __future__ import annotations

import socket

import pytest

from tests.rules.launcher_commands import GUIDE, printed
from vtp_plugin.cli import main
from vtp_plugin.plan.launch.launch_commands import COMMANDS, PICKLE, describe_launchers
from vtp_plugin.util.log import wrap
from vtp_plugin.util.text import MODULE, own_command


@pytest.mark.parametrize("name", COMMANDS)
def test_the_guide_has_each_command_and_doctor_prints_it_unbroken(name: str) -> None:
    lines = [f"    {line}" for line in describe_launchers({})]  # as doctor indents them
    shown = [piece for line in lines for piece in wrap(line)]
    begin = shown.index(f"    {name}:") + 1
    command = printed(name).replace(MODULE, own_command()).splitlines()
    assert [line.removeprefix(" " * 8) for line in shown[begin : begin + len(command)]] == command


def test_whom_a_rendezvous_trusts_is_said() -> None:
    assert PICKLE in describe_launchers({})
    assert "can run code on all machines of the run" in GUIDE.read_text().replace("\n", " ")


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("0.0.0.0:{port}", "0.0.0.0 is every address of this machine; a rendezvous listens on one address"),
        ("[::]:{port}", ":: is every address of this machine; "),
        ("192.0.2.1:{port}", "192.0.2.1 is no address of this machine (EADDRNOTAVAIL); "),
        ("127.0.0.1:{port}", "127.0.0.1:{port} is taken; a rendezvous needs a port for itself; choose another one"),
        ("127.0.0.1", "'127.0.0.1' is not HOST:PORT; torchrun needs both; write for example 10.8.0.1:29400"),
        ("127.0.0.1:65536", "'127.0.0.1:65536' is not HOST:PORT"),
    ],
)
def test_a_rendezvous_listens_on_one_address(address: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as left:
            main(["rendezvous", address.format(port=port)])
    assert left.value.code == 2 and line.format(port=port) in capsys.readouterr().err


def test_what_the_variable_means_is_said() -> None:
    assert describe_launchers({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})[-1].endswith("as elastic torchrun needs it")
