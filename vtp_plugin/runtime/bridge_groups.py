"""Opening of a bridge: its groups and its two channels."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import torch.distributed as dist

from vtp_plugin.boundary.bridge import BridgeSpec
from vtp_plugin.boundary.check import require_valid
from vtp_plugin.platform.base import Platform
from vtp_plugin.runtime.audit import Audit
from vtp_plugin.runtime.bridge import BridgeChannel
from vtp_plugin.runtime.monitor import Monitor
from vtp_plugin.runtime.process_groups import open_group
from vtp_plugin.runtime.transfers import ChannelGroups

Cache = MutableMapping[str, "dist.ProcessGroup | None"]


def open_bridge(
    forward: BridgeSpec,
    *,
    stage_group: dist.ProcessGroup | None,
    cache: Cache,
    platform: Platform,
    monitor: Monitor | None,
    timeout_s: float,
    audit: Audit | None,
) -> tuple[BridgeChannel, BridgeChannel] | None:
    """Open and warm up both channels of a bridge. All ranks of the world call this at the same point.

    Args:
        forward: the way of activations.
        stage_group: of this rank's replica at its end; None outside the ends. Sums and, where all its ranks want one
            tensor, all-gathers run there.
        cache: groups by what they are for; whoever keeps it destroys them.
        platform: says how to wait.
        monitor: keeps the time.
        timeout_s: limit of every operation.
        audit: records every message.

    Returns:
        The channels of activations and of gradients; None on ranks outside the ends.

    Raises:
        PlanError: a plan is wrong.
    """
    rank = dist.get_rank()

    def group_of(ranks: Sequence[int], what: str) -> dist.ProcessGroup | None:
        key = f"{what} {list(ranks)}"
        if key not in cache:
            cache[key] = open_group(ranks, platform=platform, timeout_s=timeout_s, description=what)
        return cache[key]

    channels: list[BridgeChannel] = []
    for order, spec in enumerate((forward, forward.reversed())):
        require_valid(spec.probe)
        require_valid(spec.plan_header(spec.header_length))
        messages = group_of(spec.participants, spec.name)
        stage, pieces = stage_group, None
        for ranks in spec.gathering_groups:
            if platform.gathers_by_messages:
                pieces = group_of(ranks, f"{spec.name}, finish") or pieces
            elif not _is_replica(ranks, spec):
                stage = group_of(ranks, f"{spec.name}, finish") or stage
        if rank in spec.members:
            groups = ChannelGroups(messages=messages, stage=stage, pieces=pieces)
            channels.append(BridgeChannel(spec, order, groups, platform, monitor, audit))
    for channel in channels:
        channel.warm_up()
    return (channels[0], channels[1]) if channels else None


def _is_replica(ranks: Sequence[int], spec: BridgeSpec) -> bool:
    return any(set(ranks) == set(replica) for replica in spec.dst_end.replicas)
