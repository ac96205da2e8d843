"""Start-up plans what a rank needs, and makes the groups that somebody uses."""

from __future__ import annotations

import dataclasses
import gc
from types import MappingProxyType
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

import vtp_plugin
from vtp_plugin.plan.boundary import channel_spec
from vtp_plugin.plan.boundary.boundary_plan import BoundaryPlan
from vtp_plugin.plan.boundary.endpoint import Sharding
from vtp_plugin.plan.boundary.strategies.known_strategies import Strategy


@pytest.fixture(name="plans")
def count_plans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the strategy of every plan that is made from now on."""
    made: list[str] = []

    def counted(strategy: Strategy) -> Strategy:
        def plan(src: Sharding, dst: Sharding) -> BoundaryPlan:
            made.append(strategy.name)
            return strategy.plan(src, dst)

        return dataclasses.replace(strategy, plan=plan)

    strategies = {name: counted(strategy) for name, strategy in channel_spec.STRATEGIES.items()}
    monkeypatch.setattr(channel_spec, "STRATEGIES", MappingProxyType(strategies))
    return made


def start(sizes: list[int], world_size: int, rank: int) -> None:
    """Run Megatron's start-up with the plugin on one rank of a world that is not there."""
    channel_spec._prototype.cache_clear()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        vtp_plugin.apply(vtp_size_list=sizes, device="cpu")
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=len(sizes), create_gloo_process_groups=False
        )
    finally:
        parallel_state.destroy_model_parallel()
        vtp_plugin.revert()
        dist.destroy_process_group()
        # What the last apply() has left would have the next one search all that is loaded, and the garbage.
        gc.collect()


@pytest.mark.parametrize("sizes", [[1, 2], [2, 3, 1]])
@pytest.mark.parametrize("is_last", [False, True])
def test_replicas_cost_no_plans(plans: list[str], sizes: list[int], is_last: bool) -> None:
    counts = []
    for num_replicas in (1, 2, 16):
        plans.clear()
        world_size = sum(sizes) * num_replicas
        start(sizes, world_size, world_size - 1 if is_last else 0)
        counts.append(len(plans))
    assert counts[0] > 0
    assert counts == [counts[0]] * 3


@pytest.mark.parametrize(("sizes", "has_embedding_groups"), [([2, 2], True), ([1, 4], False)])
def test_unequal_ends_have_no_embedding_groups(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], *, has_embedding_groups: bool
) -> None:
    made: list[str] = []
    original = dist.new_group

    def new_group(ranks: list[int] | None = None, **options: Any) -> Any:
        made.append(options["group_desc"])
        return original(ranks, **options)

    monkeypatch.setattr(dist, "new_group", new_group)
    start(sizes, sum(sizes), 0)
    assert made.count("PIPELINE_MODEL_PARALLEL_GROUP") == max(sizes)
    for name in ("EMBEDDING_GROUP", "POSITION_EMBEDDING_GROUP"):
        assert made.count(name) == max(sizes) * has_embedding_groups
