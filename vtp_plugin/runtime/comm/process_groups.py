"""How process groups are opened from planned lists of ranks, and destroyed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _pg_map

from vtp_plugin.platform.interface import Platform

_SETTLE_S = 0.1


def open_group(
    ranks: Sequence[int],
    *,
    platform: Platform,
    timeout_s: float,
    description: str,
    buffer_size_bytes: int | None = None,
) -> dist.ProcessGroup | None:
    """Open a process group. Every rank of the world calls this for every planned group, in the plan's order.

    torch names groups by a counter of these calls (since 2.15 also with ``use_local_synchronization``), so a rank that
    skips a call meets the wrong peers in its next one. A call costs a rank that is not a member microseconds: no
    connection, no barrier.

    Args:
        ranks: global ranks of the group's members.
        platform: decides the options; the backend is the world's (a fake one in dry runs).
        timeout_s: limit of every operation, in seconds; torch's own default for a new group is 30 minutes.
        description: shown by torch's debugging tools.
        buffer_size_bytes: size of the largest message, for backends that reserve device memory for each communicator.

    Returns:
        The group; None on ranks that are not members.
    """
    group = dist.new_group(
        ranks=list(ranks),
        timeout=timedelta(seconds=timeout_s),
        pg_options=platform.group_options(buffer_size_bytes),
        group_desc=description,
    )
    return group if isinstance(group, dist.ProcessGroup) else None


def settle(platform: Platform) -> None:
    """Let gloo's threads delete their finished work before a group that ran collectives is destroyed.

    Otherwise this process may wait forever in torch 2.6 and 2.7: docs/development/gloo-dropped-groups.md.
    """
    if platform.host_blocking_wait:
        time.sleep(_SETTLE_S)


def close_groups(groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Destroy process groups; every member does so, in the order in which they were opened, once all has arrived.

    After collectives :func:`settle` comes first; messages need no threads.

    Args:
        groups: groups to destroy; None is skipped, and so is a group that torch has destroyed with the world.
    """
    for group in groups:
        if group is not None and group in _pg_map:
            dist.destroy_process_group(group)
