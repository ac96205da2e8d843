"""`model-groups`: torch knows the groups of the plugin that sum over stages with different replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import _pg_map

from vtp_plugin.host.patching import Writes, Written
from vtp_plugin.patches.patch_set import Moment

_BACKENDS, _MEMBERS = (
    Written(
        id=f"model-groups/{holds}",
        target=f"torch.distributed.distributed_c10d:{name}",
        when=Moment.STAGES,
        why="an entry for each ModelGroup: torch asks for its backend when it reports a failed collective, and "
        "Megatron for its ranks",
        remove_when="with `parallel-state`",
    )
    for name, holds in (("_pg_map", "backends"), ("_pg_group_ranks", "ranks"))
)


@contextmanager
def known(writes: Writes, group: dist.ProcessGroup, ranks: Sequence[int], like: dist.ProcessGroup) -> Iterator[None]:
    """Let torch know a group that it did not make, inside a ``with`` block.

    Args:
        writes: names that the run's patches may write.
        group: that torch did not make.
        ranks: its ranks, in their order.
        like: a group with the same backend.
    """
    places = {rank: place for place, rank in enumerate(ranks)}
    with writes[_BACKENDS].during(_pg_map[like], key=group), writes[_MEMBERS].during(places, key=group):
        yield
