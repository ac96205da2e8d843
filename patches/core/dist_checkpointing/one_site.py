"""The ranks of one site as the world of a save or a load: what each site keeps is planned and written by it alone."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan

from vtp_plugin.checkpoint.format.index import Index
from vtp_plugin.checkpoint.format.site_part import num_missing, read_part, require_whole
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.versions import find_host
from vtp_plugin.patches.hosts import load_host
from vtp_plugin.patches.hosts.megatron_host import SeenTorch
from vtp_plugin.session import Session
from vtp_plugin.util.index_boxes import Box
from vtp_plugin.util.text import own_command
from vtp_plugin.util.undo import Name, UndoStack

_PACKAGE: Final = "megatron.core.dist_checkpointing"
# Which ask for the world. Not `strategies.torch`: its tensors are placed by ranks of the world.
_OF_STRATEGIES: Final = ("strategies.state_dict_saver", "strategies.async_utils")
_MODULES: Final = ("serialization", "validation", "exchange_utils", *_OF_STRATEGIES)
_OF_WORLD: Final = ("all_gather_object", "all_reduce", "barrier", "get_rank", "get_world_size")


class SiteDistributed:
    """``torch.distributed`` whose world is a group; calls for other groups are as ever.

    Args:
        group: the ranks of one site.
        names: of the functions that take the group for the world.
    """

    def __init__(self, group: dist.ProcessGroup, names: Collection[str] = _OF_WORLD) -> None:
        self._group = group
        self._names = names

    def broadcast(self, tensor: torch.Tensor, src: int, group: Any = None, **kwargs: Any) -> Any:
        """Broadcast; over the site the source is the number of a rank in it."""
        own = self._group if group is None else group
        return dist.broadcast(tensor, dist.get_global_rank(own, src) if own is self._group else src, own, **kwargs)

    def __getattr__(self, name: str) -> Any:
        found = getattr(dist, name)
        if name not in self._names:
            return found

        def call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
            return found(*args, group=self._group if group is None else group, **kwargs)

        return call


@contextmanager
def as_one_site(session: Session, *, is_meant: bool = True) -> Iterator[None]:
    """Let Megatron save or load as if there were no ranks but this site's; all ranks of the run enter it together.

    Follows Megatron 0.19, whose planning of a save, its checks, and its exchanges after a load take the world.

    Args:
        session: the applied plugin.
        is_meant: whether to do so; otherwise nothing is changed.
    """
    if not is_meant:
        yield
        return
    group, saver = (
        session.parts.open(session.planned),
        importlib.import_module(f"{_PACKAGE}.strategies.state_dict_saver"),
    )
    strategies: Any = importlib.import_module(f"{_PACKAGE}.strategies.torch")
    undo, wrapper = UndoStack(), saver._DistWrapper
    kept = strategies.TorchDistSaveShardedStrategy._get_save_and_finalize_callbacks
    modules = (importlib.import_module(f"{_PACKAGE}.{name}") for name in _MODULES)
    with ExitStack() as stack:
        for place, value in (
            *((Name(module, "torch"), SeenTorch(SiteDistributed(group))) for module in modules),
            (Name(saver, "_DistWrapper"), lambda _, *rest: wrapper(group, *rest)),
            (Name(strategies.MCoreSavePlanner, "create_global_plan"), _plan_part),
            (
                Name(strategies.TorchDistSaveShardedStrategy, "_get_save_and_finalize_callbacks"),
                functools.partialmethod(_with_index, kept),
            ),
            (Name(session.parts, "is_seen"), True),
        ):
            stack.enter_context(undo.during(place, value))
        yield


@contextmanager
def waiting_for_site(session: Session, module: Any) -> Iterator[None]:
    """Let a module of Megatron's wait for the ranks of this site alone, where each site keeps its part."""
    if session.parts.run is None:
        yield
        return
    seen = SeenTorch(SiteDistributed(session.parts.open(session.planned), ("barrier",)))
    with UndoStack().during(Name(module, "torch"), seen):
        yield


def _plan_part(planner: Any, all_plans: list[Any]) -> tuple[list[Any], Any]:
    """Plan as torch's `DefaultSavePlanner.create_global_plan`, without its check that no element is missing.

    What is missing is at another site. Nothing is there twice: Megatron's own check looks at that.
    """
    planner.global_plan, planner.metadata = create_default_global_save_plan(all_plans)
    return planner.global_plan, planner.metadata


def _with_index(strategy: Any, kept: Callable[..., Any], writer: Any, planned: Any, *rest: Any) -> Any:
    """Give the first rank of a site the index that it has kept: Megatron gives it to rank 0 of the world."""
    storage, index, wrapper = planned
    if index is None and wrapper.is_coordinator:
        index = strategy.cached_global_metadata
    return kept(strategy, writer, (storage, index, wrapper), *rest)


def is_own_part(session: Session, checkpoint: Path) -> bool:
    """Tell whether a checkpoint is this site's part of one; all sites know it alike.

    Raises:
        ConfigError: it is the part of another site, or this run has one site only, or a Megatron before 0.19.
    """
    if (part := read_part(checkpoint)) is None:
        return False
    # What older Megatrons load, they plan over all ranks.
    is_apart = session.is_planned and session.config.has_several_sites
    if not (is_apart and load_host(find_host()[0].name).can("saves_by_site")):
        require_whole(checkpoint)
    if (site := session.planned.site_of(dist.get_rank())) != part.site:
        raise ConfigError(
            f"{checkpoint} is the part of site {part.site}, and this is {site}; each site loads its own; give another "
            "folder with --load",
            shared=f"the folder of --load at {site} holds the part of site {part.site}",
        )
    return True


def box_of_shard(shard: Any) -> Box:
    """Give the shard's interval in every global dimension; prepended dimensions have length 1 locally."""
    lengths = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    return tuple((start, start + length) for start, length in zip(shard.global_offset, lengths, strict=True))


def require_held(index: Index, state: Any) -> None:
    """Refuse to load tensors of which this site's part lacks elements: torch would leave these as they are.

    Args:
        index: index of the part.
        state: what is to be loaded.

    Raises:
        ConfigError: it names the first tensors.
    """
    wanted = (each for each in nested_values(load_preprocess(state)[0]) if isinstance(each, ShardedTensor))
    keys = dict.fromkeys(
        each.key for each in wanted if each.key in index.tensors and num_missing(index, each.key, box_of_shard(each))
    )
    if keys:
        named = ", ".join([*keys][:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
        raise ConfigError(
            f"{index.folder} is this site's part, and lacks elements of {named}, which another site keeps; a site "
            f"loads the layers that it had; where both may be seen: {own_command()} checkpoint merge, then split",
            shared="this site's part of the checkpoint lacks layers that this run places here; checkpoint merge, then "
            "split, where both sites may be seen",
        )
