"""`checkpoint-integrity`: what Megatron's check of a checkpoint finds when stages cut a tensor differently."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor, validation
from megatron.core.dist_checkpointing.mapping import ShardedObject

from vtp_plugin.host.patching import PatchRecord, declared
from vtp_plugin.patches.core.dist_checkpointing import validation as patch
from vtp_plugin.session.site_parts import SiteParts

ROWS, COLUMNS, NUM_LAYERS = 12, 5, 4

Shards = list[tuple[int, Any]]
Check = Callable[[Sequence[tuple[int, Any]]], list[Exception]]


@pytest.fixture
def parts() -> SiteParts:
    return SiteParts()


@pytest.fixture
def check(parts: SiteParts) -> dict[str, Check]:
    """Both replaced checks, by what they look at, built around Megatron's own."""
    records = {record.id: record for record in declared(patch)}
    given = {"session": SimpleNamespace(parts=parts)}
    tensors, objects = (records[name].bound(given) for name in ("checkpoint-integrity", "checkpoint-integrity/objects"))
    assert isinstance(tensors, PatchRecord) and isinstance(objects, PatchRecord)
    return {
        "tensors": tensors.build(validation._validate_sharding_for_key),
        "objects": objects.build(validation._validate_objects_for_key),
    }


def _shard(rank: int, layer: int, tp_rank: int, tp_size: int, replica: int = 0) -> tuple[int, ShardedTensor]:
    """A rank's rows of one layer's weight, in the tensor ``[layers, rows, columns]`` of all layers."""
    data = torch.zeros(ROWS // tp_size, COLUMNS)
    tensor = ShardedTensor.from_rank_offsets(
        "weight", data, (0, layer, NUM_LAYERS), (1, tp_rank, tp_size), replica_id=replica, prepend_axis_num=1
    )
    return rank, tensor


def _shards() -> Shards:
    """Layers 0 and 1 on a stage of size 1 (rank 0), layers 2 and 3 on one of size 3 (ranks 1 to 3)."""
    narrow = [_shard(0, layer, 0, 1) for layer in (0, 1)]
    return narrow + [_shard(1 + tp_rank, layer, tp_rank, 3) for layer in (2, 3) for tp_rank in range(3)]


def _texts(problems: list[Exception]) -> list[str]:
    return [str(problem) for problem in problems]


def test_complete_shards_of_unequal_stages_pass(check: dict[str, Check]) -> None:
    assert check["tensors"](_shards()) == []


def test_one_site_has_a_part_and_nothing_twice(check: dict[str, Check], parts: SiteParts) -> None:
    parts.is_seen = True
    assert check["tensors"](_shards()[:2]) == []
    (problem,) = _texts(check["tensors"]([*_shards()[:2], _shard(1, 1, 0, 1)]))
    assert "shards overlap" in problem


def test_megatrons_own_check_does_not_take_them() -> None:
    with pytest.raises(AssertionError):
        validation._validate_sharding_for_key(_shards())


def test_second_data_parallel_replica_is_no_overlap(check: dict[str, Check]) -> None:
    assert check["tensors"](_shards() + [_shard(4, 2, 0, 3, replica=1), _shard(5, 0, 0, 1, replica=1)]) == []


@pytest.mark.parametrize("position", range(8))
def test_hole_is_found(check: dict[str, Check], position: int) -> None:
    shards = _shards()
    missing = shards.pop(position)[1].data.numel()
    assert _texts(check["tensors"](shards)) == [f"weight: {missing} elements are not stored by any rank"]


@pytest.mark.parametrize("position", range(8))
def test_hole_under_a_replica_is_found(check: dict[str, Check], position: int) -> None:
    """A replica is not written, so it does not fill the hole."""
    shards = _shards()
    rank, shard = shards[position]
    shards[position] = (rank, dataclasses.replace(shard, replica_id=1))
    assert len(check["tensors"](shards)) == 1


@pytest.mark.parametrize(
    "extra",
    [_shard(4, 0, 0, 1), _shard(4, 3, 2, 3), _shard(4, 1, 0, 2), _shard(4, 2, 0, 1)],
    ids=["whole-layer-twice", "third-twice", "half-of-a-whole", "whole-over-thirds"],
)
def test_overlap_is_found(check: dict[str, Check], extra: tuple[int, ShardedTensor]) -> None:
    assert "weight: shards overlap" in _texts(check["tensors"]([*_shards(), extra]))


def test_overlap_and_hole_of_one_size_are_found(check: dict[str, Check]) -> None:
    """Counting elements alone would miss it."""
    shards = _shards()
    shards[-1] = _shard(3, 2, 2, 3)
    assert _texts(check["tensors"](shards)) == ["weight: shards overlap"]


@pytest.mark.needs("returned_validation")
def test_equal_stages_are_left_to_megatron(check: dict[str, Check]) -> None:
    shards = [_shard(1 + tp_rank, layer, tp_rank, 3) for layer in range(4) for tp_rank in range(3)]
    assert not check["tensors"](shards)  # Megatron 0.12 returns nothing where it finds nothing
    assert [text[:22] for text in _texts(check["tensors"](shards[:-1]))] == ["Invalid access pattern"]


def test_random_states_on_a_ragged_grid(check: dict[str, Check]) -> None:
    """Stage 0 of size 1 and stage 1 of size 2 each store states on a (stage, tp) grid of their own width."""
    places = [(0, 0, 1), (1, 0, 2), (1, 1, 2)]
    states = [
        (rank, ShardedObject("rng", None, (2, size), (stage, tp_rank)))
        for rank, (stage, tp_rank, size) in enumerate(places)
    ]
    assert check["objects"](states) == []
    assert _texts(check["objects"]([*states, states[2]])) == [f"{states[2][1].unique_key} is stored 2 times"]
