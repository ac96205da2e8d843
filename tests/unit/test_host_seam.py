"""What differs between families of Megatron versions stands in one place, and names records that exist."""

from __future__ import annotations

import re

import pytest
import torch

from vtp_plugin.config import VtpConfig
from vtp_plugin.errors import PatchError
from vtp_plugin.hosts import HOSTS
from vtp_plugin.patches import registry
from vtp_plugin.patches.hosts import load_host
from vtp_plugin.patches.hosts.seen_torch import SeenTorch
from vtp_plugin.patching import Record
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.session import Session

NEWEST = HOSTS[-1].name
OLDER = [host.name for host in HOSTS[:-1]]


def records(name: str, *, is_u_shaped: bool = False) -> dict[str, Record]:
    session = Session(VtpConfig(size_list=(1, 2), layerwise_disaggregated=is_u_shaped))
    session.platform = CpuPlatform("of the test")
    host = load_host(name)
    found = (
        *registry.argument_records(session, host, lambda: None),
        *registry.platform_records(session, host),
        *registry.training_records(session, host),
    )
    assert len({record.id for record in found}) == len(found)
    return {record.id: record for record in found}


@pytest.mark.parametrize("name", OLDER)
def test_a_family_names_what_exists(name: str) -> None:
    """A misspelt id would leave a record where it does not belong."""
    host, known = load_host(name), set(records(NEWEST, is_u_shaped=True)) | set(records(name, is_u_shaped=True))
    assert set(host.moved) | set(host.absent) <= known | set(load_host(NEWEST).absent)
    assert not set(host.moved) & set(host.absent)
    assert all(re.fullmatch(r"megatron\.[\w.]+:[\w.]+", target) for target in host.moved.values())


@pytest.mark.parametrize("name", OLDER)
def test_records_lie_where_the_family_has_them(name: str) -> None:
    host, here, newest = load_host(name), records(name, is_u_shaped=True), records(NEWEST, is_u_shaped=True)
    for record_id, record in here.items():
        assert record_id not in host.absent
        if record_id in newest and record_id not in host.moved:
            assert record.target == newest[record_id].target
        assert record.target == host.moved.get(record_id, record.target)
    assert set(newest) - set(here) == set(host.absent) & set(newest)


def test_a_write_cannot_move() -> None:
    """Patches hold the record that they write through, so a copy with another target would be written by nobody."""
    host = load_host("0.16")
    (write,) = [record for record in records(NEWEST).values() if record.target.endswith(":RankGenerator")]
    moving = type("Moving", (type(host),), {"moved": {write.id: "megatron.core:x"}})()
    with pytest.raises(PatchError, match="is a write, which cannot move"):
        moving.placed([write])


def test_megatron_sees_another_world_and_nothing_else() -> None:
    seen = SeenTorch(6)
    assert seen.distributed.get_world_size() == 6
    assert seen.distributed.new_group is torch.distributed.new_group
    assert (seen.cuda, seen.Tensor) == (torch.cuda, torch.Tensor)
