"""Every rank has exactly the channels that the schedule of its team names for it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.support.plans import channels
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.boundary.channel_spec import pipeline_boundaries
from vtp_plugin.plan.layout.pipeline_layout import Direction, PipelineLayout
from vtp_plugin.plan.layout.replica_map import DpMode, ReplicaMap
from vtp_plugin.plan.schedule.order.placement import place_workers
from vtp_plugin.runtime.step.communicator import own_channels


@pytest.mark.parametrize("mode", DpMode)
@pytest.mark.parametrize("num_rings", [0, 1, 2])
@pytest.mark.parametrize("dp_sizes", [(1, 2), (4, 2), (2, 2), (2, 4, 4), (2, 1, 2), (1, 4, 2), (3, 1, 3)], ids=str)
def test_channels_of_the_schedule(dp_sizes: tuple[int, ...], num_rings: int, mode: DpMode) -> None:
    tp_sizes = (2, 1, 3)[: len(dp_sizes)]
    world_size = sum(map(math.prod, zip(tp_sizes, dp_sizes, strict=True)))
    layout = PipelineLayout.from_sizes(tp_sizes, world_size=world_size, dp=dp_sizes)
    replicas = ReplicaMap(dp_sizes=dp_sizes, mode=mode)
    placement = place_workers(replicas, num_chunks=1, num_rings=num_rings)
    boundaries = pipeline_boundaries(layout, is_ring=num_rings > 0, dp_mode=mode)
    found = []
    for rank in range(world_size):
        own = layout.coord(rank)
        opened: list[Any] = [
            (b, direction) if rank in b.channel(direction).members else None
            for b in boundaries
            for direction in Direction
        ]
        worker = replicas.worker(own.stage, own.dp_rank)
        assert worker == placement.worker(
            own.stage, 0 if replicas.is_split else replicas.team_and_replica(own.stage, own.dp_rank)[1]
        )
        names = own_channels(boundaries, opened)
        assert len(names) == len([one for one in opened if one]), "two channels of one rank have one name"
        assert sorted(names) == sorted(name for name in channels(placement) if worker in (name.src, name.dst))
        found.append((own, names))
    # The other end of a channel has it under the same name.
    for own, names in found:
        for name, (boundary, direction) in names.items():
            spec = boundary.channel(direction)
            assert all(found[rank][1][name] == (boundary, direction) for rank in spec.members), own


def test_interleaving_needs_equal_replicas() -> None:
    equal = place_workers(ReplicaMap(dp_sizes=(2, 2)), num_chunks=2, num_rings=0)
    assert equal.stages == (0, 1, 0, 1) and equal.num_workers == 2
    with pytest.raises(ConfigError, match="2 model chunks on each stage do not work with --vtp-dp-list 1,2"):
        place_workers(ReplicaMap(dp_sizes=(1, 2)), num_chunks=2, num_rings=0)
