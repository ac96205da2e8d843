"""`builders-world`: while the edge of a U builds its data sets, torch's world is the ranks that build them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d

from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import Writes, Written
from vtp_plugin.patches.patch_set import Moment

_WORLD = Written(
    id="builders-world",
    target="torch.distributed.distributed_c10d:_world",
    when=Moment.U_SHAPE,
    why="a data set may let the ranks of the world wait for each other, as MindSpeed-MM's does by main_process_first() "
    "of transformers, and in a U only the edge builds one; torch's own place for another world, written only while the "
    "script's provider runs",
    remove_when="with `data-iterators`",
)


class _BuildersWorld(distributed_c10d._World):
    """Torch's world, of which only some ranks are there, numbered from 0.

    Args:
        world: torch's own.
        builders: group of the ranks that are there.
    """

    def __init__(self, world: distributed_c10d._World, builders: dist.ProcessGroup) -> None:
        vars(self).update(vars(world))
        self.default_pg = builders

    @property
    def group_count(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Refuse to number a new group: the other ranks of the world would number theirs differently.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a process group made while the script's provider builds its data sets; in a U-shape only the edge runs "
            "it, and all ranks make a group together; make it before, such as when the model is built"
        )


def among_builders(writes: Writes, provider: Callable[..., Any]) -> Callable[..., Any]:
    """Let a script's provider of data sets meet only the ranks that run it, too.

    Args:
        writes: names that the run's patches may write.
        provider: of data sets; with the mark ``is_distributed`` Megatron calls it on all tensor-parallel ranks, else on
            the first of each group.
    """
    is_on_all = getattr(provider, "is_distributed", False)

    @functools.wraps(provider)
    def build(*args: Any, **kwargs: Any) -> Any:
        find: Callable[..., Any] = parallel_state.get_data_parallel_group
        if is_on_all:
            find = parallel_state.get_tensor_and_data_parallel_group
        world = _BuildersWorld(distributed_c10d._world, find(with_context_parallel=True))
        with writes[_WORLD].during(world):
            return provider(*args, **kwargs)

    build.is_distributed = is_on_all
    return build
