"""RankGrid bound to torch.distributed: a drop-in for Megatron's HyperCommGrid.

No run uses it yet: bridges take Megatron's grids, and those of :mod:`vtp_plugin.session.stage_comm_grid`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from vtp_plugin.layout.grid import RankGrid


class ProcessGroupGrid(RankGrid[dist.ProcessGroup]):
    """A grid of ranks whose ``create_pg`` makes torch process groups.

    ``create_pg`` is collective over the whole world and takes the keyword arguments of
    ``torch.distributed.new_subgroups_by_enumeration`` (timeout, pg_options, group_desc). A rank outside the grid gets
    None.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dim_names: Sequence[str],
        rank_offset: int = 0,
        backend: str | None = None,
    ) -> None:
        """Describe the grid in the initialised world.

        Args:
            shape: length of every dimension.
            dim_names: name of every dimension, the first one changing fastest over the ranks.
            rank_offset: first rank of the grid.
            backend: backend of the groups; None means the default group's.

        Raises:
            ConfigError: see :class:`~vtp_plugin.layout.grid.RankGrid`.
            RuntimeError: torch.distributed is not initialised, or the grid is larger than the rest of the world.
        """
        if not dist.is_initialized():
            raise RuntimeError("a process-group grid needs the world: call torch.distributed.init_process_group first")
        super().__init__(
            shape,
            dim_names,
            rank_offset,
            backend,
            world_size=dist.get_world_size(),
            rank=dist.get_rank(),
            make_groups=_make_groups,
            destroy_group=dist.destroy_process_group,
        )


def _make_groups(
    rank_lists: list[list[int]], backend: str | None, options: Mapping[str, Any]
) -> dist.ProcessGroup | None:
    """Create one group per rank list, in order, on every rank of the world, and return this rank's."""
    own, _ = dist.new_subgroups_by_enumeration(rank_lists, backend=backend, **options)
    return own if isinstance(own, dist.ProcessGroup) else None
