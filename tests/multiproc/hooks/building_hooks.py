"""What data sets of others do while they are built: they meet other ranks, and make groups."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder


def _when_building(run: Callable[[], None]) -> None:
    original = BlendedMegatronDatasetBuilder.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        run()
        original(self, *args, **kwargs)

    BlendedMegatronDatasetBuilder.__init__ = init


def meet_while_building(facts: dict[str, Any]) -> None:
    """Let the script's provider use torch's world in all ways, and note who is there."""
    facts["met"] = []

    def meet() -> None:
        dist.barrier()
        size, own = dist.get_world_size(), int(os.environ["RANK"])
        total = torch.ones(1)
        dist.all_reduce(total)
        everybody: list[Any] = [None] * size
        dist.all_gather_object(everybody, own)
        first = [own]
        dist.broadcast_object_list(first, 0)
        dist.barrier(dist.group.WORLD)
        facts["met"].append(
            (dist.get_rank(), size, int(total), everybody, first, dist.get_world_size(dist.group.WORLD))
        )

    _when_building(meet)


def group_while_building(facts: dict[str, Any]) -> None:
    """Let the script's provider make a process group."""
    _when_building(lambda: dist.new_group([0]) and None)


BUILDING_HOOKS: dict[str, Callable[[dict[str, Any]], Callable[[], None] | None]] = {
    "meet_while_building": meet_while_building,
    "group_while_building": group_while_building,
}
