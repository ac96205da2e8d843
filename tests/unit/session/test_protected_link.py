"""What a run settles about the way between its sites, before its first group."""

from __future__ import annotations

import pytest

from vtp_plugin.config import VtpConfig
from vtp_plugin.config.resolve import check_command_line
from vtp_plugin.errors import ConfigError
from vtp_plugin.link import guard
from vtp_plugin.link.guard import NCCL_BY_SOCKETS
from vtp_plugin.runtime.health.startup import find_difference
from vtp_plugin.session.edge_seed import protected_link
from vtp_plugin.session.ranks import state_request

ARGV = ("script.py", "--vtp-size-list", "1,2", "--vtp-sites", "edge,cloud")
SITES = VtpConfig(size_list=(1, 2), sites=("edge", "cloud"))
FAR = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.8.0.9"}


@pytest.fixture(autouse=True)
def _protected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "find_interfaces", lambda: ())
    monkeypatch.setattr(guard, "source_of", lambda address: None)


def test_nccl_goes_by_sockets_until_the_end() -> None:
    environment = {**FAR, "NCCL_NET": "Socket"}
    with protected_link(SITES, "cuda", environment):
        assert {name: environment[name] for name in NCCL_BY_SOCKETS} == NCCL_BY_SOCKETS
    assert environment == {**FAR, "NCCL_NET": "Socket"}


def test_nothing_is_set_where_it_is_declared_or_needless() -> None:
    declared = VtpConfig(size_list=(1, 2), sites=("edge", "cloud"), link_is_protected=True)
    for config, device, environment in (
        (declared, "cuda", dict(FAR)),
        (declared, "npu", dict(FAR)),
        (VtpConfig(size_list=(1, 2)), "cuda", dict(FAR)),
        (SITES, "cpu", dict(FAR)),
        (SITES, "cuda", {**FAR, "LOCAL_WORLD_SIZE": "3"}),
    ):
        before = dict(environment)
        with protected_link(config, device, environment):
            assert environment == before


def test_hccl_between_sites_must_be_declared() -> None:
    said = "HCCL sends .* not supported; .* give --vtp-link-is-protected"
    with pytest.raises(ConfigError, match=said), protected_link(SITES, "npu", dict(FAR)):
        pass


def test_a_public_way_is_rejected_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "source_of", lambda address: "8.8.4.4")
    environment = {**FAR, "MASTER_ADDR": "8.8.8.8"}
    with pytest.raises(ConfigError, match="MASTER_ADDR 8.8.8.8 is a public address"):
        check_command_line(ARGV, VtpConfig(), environment)
    check_command_line((*ARGV, "--vtp-link-is-protected"), VtpConfig(), environment)


def test_sites_that_declare_different_links_are_named() -> None:
    declared = VtpConfig(size_list=(1, 2), sites=("edge", "cloud"), link_is_protected=True)
    _, text = find_difference({0: state_request(declared), 1: state_request(SITES)}, way_out="give one")
    assert text == "ranks disagree: vtp_link_is_protected is True on rank 0 and False on rank 1; give one"
