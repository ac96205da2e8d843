"""The model-parallel group of stages with different numbers of replicas: each counts once, and one trip crosses."""

from __future__ import annotations

import pytest

from tests.multiproc.jobs.model_group_job import Reduced
from tests.support.pool import Pool
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout

CASES = [
    ((2, 1), (1, 2), (1, 1)),
    ((2, 1, 1), (1, 1, 1), (1, 2, 1)),
    pytest.param((1, 1, 1), (1, 2, 1), (2, 2, 2), marks=pytest.mark.full),
    pytest.param((1, 2), (2, 1), (1, 3), marks=pytest.mark.full),
]


@pytest.mark.parametrize(("tp_sizes", "cp_sizes", "dp_sizes"), CASES, ids=str)
def test_every_stage_counts_once(
    pool: Pool, tp_sizes: tuple[int, ...], cp_sizes: tuple[int, ...], dp_sizes: tuple[int, ...]
) -> None:
    sizes = {"tp_sizes": tp_sizes, "cp_sizes": cp_sizes, "dp_sizes": dp_sizes}
    world_size = sum(tp * cp * dp for tp, cp, dp in zip(*sizes.values(), strict=True))
    layout = PipelineLayout.from_sizes(tp_sizes, world_size=world_size, cp=cp_sizes, dp=dp_sizes)
    job = "tests.multiproc.jobs.model_group_job:reduce"
    results: list[Reduced] = pool.run(world_size, job, sizes)
    leaders = tuple(layout.leader(stage) for stage in range(layout.num_stages))
    for rank, result in enumerate(results):
        own = layout.coord(rank)
        # Shards of the model are numbered as in the group of one replica: optimizer states are saved by that number.
        assert result.place == (sum(tp_sizes[: own.stage]) + own.tp_rank, sum(tp_sizes))
        assert result.total == int("1" * sum(tp_sizes)), "a shard was left out or counted twice"
        assert result.shares == world_size
        assert result.spoiled == [1.0] * len(tp_sizes), "a rank of some replica was not heard"
        assert result.agreed == [0.0] * len(tp_sizes)
        replica = list(layout.model_ranks(own.dp_rank, own.cp_rank))
        assert result.members == replica and result.asked == (replica.index(rank), len(replica), replica[0])
        stage = layout.stage_ranks(own.stage)
        assert result.groups == ([stage, leaders, stage] if rank in leaders else [stage, stage])
        assert result.error and "not initialized in the world group map" not in result.error
        groups = {"_MODEL_PARALLEL_GROUP", "_pg_map", "_pg_group_ranks"}
        assert groups <= set(result.written) and "RankGenerator" not in result.written
        assert result.is_undone
