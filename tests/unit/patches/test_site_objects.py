"""Torch's collectives of objects in a run of several sites: groups inside a site, one site, and the way back."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from vtp_plugin.config import VtpConfig
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import Writes, Written, declared
from vtp_plugin.patches import site_objects
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.patches.registry import list_moments
from vtp_plugin.runtime.comm.plain_data import ObjectError, PlainData
from vtp_plugin.runtime.health.redaction import Redaction

BOUNDED = {target.partition(":")[2] for target in site_objects._BOUNDED}
WRITTEN = [record for record in declared(site_objects) if isinstance(record, Written)]


class Own:
    """A class that only its own site knows."""


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def session() -> Iterator[Any]:
    """A session whose records are written; while nothing is planned, every group may reach another site."""
    writes = Writes()
    for record in WRITTEN:
        record.bound({"writes": writes})
    session: Any = SimpleNamespace(
        writes=writes,
        is_planned=False,
        planned=SimpleNamespace(site_of=lambda rank: "edge"),
        ranks=SimpleNamespace(redaction=Redaction(site="edge")),
    )
    site_objects.close_objects(session)
    yield session
    writes.undo(WRITTEN)


def all_gather(value: Any) -> Any:
    found: list[Any] = [None]
    dist.all_gather_object(found, value)
    return found[0]


def gather(value: Any) -> Any:
    found: list[Any] = [None]
    dist.gather_object(value, found)
    return found[0]


def scatter(value: Any) -> Any:
    found: list[Any] = [None]
    dist.scatter_object_list(found, [value], src=0)
    return found[0]


@pytest.mark.parametrize("collective", [all_gather, gather, scatter])
def test_groups_of_several_sites_send_data(
    session: Any, collective: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert collective({"a": (1, slice(2))}) == {"a": (1, slice(2))}
    with pytest.raises(ConfigError, match=r"an object of tests\.unit\.patches\.test_site_objects\.Own would cross"):
        collective(Own())
    monkeypatch.setattr(site_objects, "MOST_BYTES", 100)
    assert collective("short") == "short"
    with pytest.raises(ObjectError, match=r"would be \d+ bytes long; 100 at most"):
        collective("x" * 200)


@pytest.mark.parametrize("collective", [all_gather, gather, scatter])
def test_groups_inside_a_site_stay_as_they_are(session: Any, collective: Callable[[Any], Any]) -> None:
    session.is_planned = True
    assert isinstance(collective(Own()), Own)


def test_an_announced_length_is_no_negative_number() -> None:
    with pytest.raises(ObjectError, match="would be -1 bytes long"):
        site_objects._require_bounded(-1, 3)


def test_torch_is_as_it_was_before_and_afterwards(request: pytest.FixtureRequest) -> None:
    places = [(dist, name) for name in BOUNDED] + [
        (distributed_c10d, name) for name in (*BOUNDED, "_object_to_tensor", "_tensor_to_object", "send_object_list")
    ]
    before = [getattr(module, name) for module, name in places]
    session = request.getfixturevalue("session")
    during = [getattr(module, name) for module, name in places]
    assert [a is b for a, b in zip(before, during, strict=True)] == [False] * (len(places) - 1) + [True]
    session.writes.undo(WRITTEN)
    assert all(a is getattr(module, name) for a, (module, name) in zip(before, places, strict=True))


def test_only_runs_of_several_sites_write_into_torch() -> None:
    assert Moment.SITES in list_moments(VtpConfig(size_list=(1, 2), sites=("edge", "cloud")))
    for sites in (None, ("one", "one")):
        assert Moment.SITES not in list_moments(VtpConfig(size_list=(1, 2), sites=sites))


def test_all_that_collects_objects_is_bounded() -> None:
    """A new function of torch that reads objects needs a record of its own."""
    public = {name for name in distributed_c10d.__all__ if "object" in name}
    assert public == {*BOUNDED, "send_object_list"}


def test_what_is_said_of_a_checkpoint_crosses_with_its_types() -> None:
    """Annotations of every class of the table are known, and what torch and Megatron make is of these types."""
    pytest.importorskip("megatron.core")
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.rerun_state_machine import QuickStats

    for module in site_objects._CLASSES:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    known = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in site_objects._known_classes()}
    data = PlainData(known.values(), fields=site_objects._FIELDS)
    for key, kind in known.items():
        assert data.record(key).names or kind.__name__ == "MCoreSavePlan", key
    size = torch.Size([2, 3])
    index = MetadataIndex("weight", size, 0)
    written = TensorWriteData(ChunkStorageMetadata(size, size), TensorProperties(), size)
    sharded = ShardedTensor.from_rank_offsets("weight", torch.ones(2, 3), (0, 1, 2), replica_id=(0, 1))
    stats = QuickStats()
    stats.record(0.5)
    plan = SavePlan([WriteItem(index, WriteItemType.SHARD, tensor_data=written)], _StoragePrefix("__0_"), {"a": ("b",)})
    for value in (
        plan,
        LoadPlan([ReadItem(LoadItemType.TENSOR, index, size, index, size, size)]),
        [WriteResult(index, 24, _StorageInfo("__0_0.distcp", 0, 24))],
    ):
        assert data.read(data.write(value)) == value
    rng = ShardedObject("rng", io.BytesIO(b"state"), (1,), (0,))
    assert data.read(data.write(rng)).data.getvalue() == b"state"
    assert vars(data.read(data.write(stats))) == vars(stats)
    assert sharded.data is not None and torch.equal(data.read(data.write(sharded)).data, sharded.data)
    assert vars(data.read(data.write(sharded.without_data()))) == vars(sharded.without_data())


@pytest.mark.parametrize("name", ["../a", "/etc/a", "a/b", "..", ".a", "a\\b", "__0\n", "é"])
def test_a_file_of_a_checkpoint_is_in_its_folder(session: Any, name: str) -> None:
    """Torch joins these names to the path of the folder: rank 0 says how the files of all others begin."""
    for value in (_StoragePrefix(name), _StorageInfo(name, 0, 8)):
        with pytest.raises(ConfigError, match="an object that would cross between sites has 'str' as "):
            all_gather(value)
        read = PlainData([_StoragePrefix, _StorageInfo])
        if name.isprintable():  # another does not even leave the other site
            with pytest.raises(ObjectError, match="has 'str' as "):
                site_objects._plain_data(session).read(read.write(value))
    assert all_gather([_StoragePrefix("__0_"), _StorageInfo("__0_12.distcp", 0, 8)])[0] == _StoragePrefix("__0_")
