"""torch, as Megatron's ``parallel_state`` shall see it while it makes its groups: in a world of another size."""

from __future__ import annotations

from typing import Any

import torch


class SeenDistributed:
    """``torch.distributed`` with another size of the world; every group has its true size."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def get_world_size(self, group: Any = None) -> int:
        """Return the size of a group; of the world, the one to be seen."""
        return self._world_size if group is None else torch.distributed.get_world_size(group)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)


class SeenTorch:
    """``torch`` with such a ``torch.distributed``.

    >>> seen = SeenTorch(6)
    >>> seen.distributed.get_world_size(), seen.float32, seen.distributed.is_available()
    (6, torch.float32, True)
    """

    def __init__(self, world_size: int) -> None:
        self.distributed = SeenDistributed(world_size)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
