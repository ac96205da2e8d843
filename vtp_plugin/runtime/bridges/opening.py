"""How a bridge is opened: its process groups and its two channels."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from vtp_plugin.plan.boundary.bridge_spec import BridgeSpec
from vtp_plugin.plan.boundary.check_boundary import require_valid
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.audit import Audit
from vtp_plugin.runtime.comm.channel import Channel
from vtp_plugin.runtime.comm.process_groups import open_group
from vtp_plugin.runtime.comm.transfers import ChannelGroups
from vtp_plugin.runtime.health.monitor import Monitor

Cache = MutableMapping[str, "dist.ProcessGroup | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeGroups:
    """Groups of one direction of a bridge; None on ranks that are not in them.

    Attributes:
        spec: the direction, as data.
        messages: group of all ranks of both ends.
        pieces: group of the same ranks, for slices that are swapped by messages; no two ranks do so in both directions.
        gather: group of ranks that swap slices by the backend's all-gather, where these are not a whole replica.
    """

    spec: BridgeSpec
    messages: dist.ProcessGroup | None
    pieces: dist.ProcessGroup | None
    gather: dist.ProcessGroup | None


def open_bridge_groups(
    forward: BridgeSpec, *, cache: Cache, platform: Platform, timeout_s: float
) -> tuple[BridgeGroups, BridgeGroups]:
    """Open the groups of both directions. All ranks of the world call this at the same point.

    Args:
        forward: the direction of activations.
        cache: groups that are open already, by purpose; its owner destroys them.
        platform: says how ranks swap slices.
        timeout_s: limit of every operation, in seconds.

    Raises:
        PlanError: a plan is wrong.
    """

    def group_of(ranks: Sequence[int], what: str) -> dist.ProcessGroup | None:
        key = f"{what}: {list(ranks)}"
        if key not in cache:
            cache[key] = open_group(ranks, platform=platform, timeout_s=timeout_s, description=what)
        return cache[key]

    def groups_of(spec: BridgeSpec) -> BridgeGroups:
        require_valid(spec.probe)
        require_valid(spec.plan_header(spec.header_codec(spec.src.ranks[0]).length))
        # A rank that sends forward receives backward, and finishes are inside an end: no pair sends for two purposes.
        name = spec.name.rpartition(",")[0] if platform.orders_by_peer else spec.name
        messages, gather = group_of(spec.participants, name), None
        for ranks in () if platform.gathers_by_messages else spec.gathering_groups:
            if not any(set(ranks) == set(replica) for replica in spec.dst_end.replicas):
                gather = group_of(ranks, f"{spec.name}, finish") or gather
        pieces = messages if platform.gathers_by_messages else None
        return BridgeGroups(spec=spec, messages=messages, pieces=pieces, gather=gather)

    return groups_of(forward), groups_of(forward.reversed())


def open_bridge(
    groups: Sequence[BridgeGroups],
    *,
    stage_group: dist.ProcessGroup | None,
    platform: Platform,
    monitor: Monitor | None,
    audit: Audit | None,
) -> tuple[Channel, ...]:
    """Open and warm up the channels of a bridge. All ranks of both ends call this at the same point.

    Args:
        groups: groups of both directions.
        stage_group: group of this rank's replica, in which sums and all-gathers among all its ranks run.
        platform: says how to wait.
        monitor: keeps the time.
        audit: records every message.

    Returns:
        The channels of activations and of gradients; nothing on ranks outside the ends.
    """
    channels = tuple(
        Channel(
            one.spec,
            order,
            ChannelGroups(messages=one.messages, stage=one.gather or stage_group, pieces=one.pieces),
            platform,
            monitor,
            audit,
            is_coalesced=coalesces(platform),
        )
        for order, one in enumerate(groups)
        if dist.get_rank() in one.spec.members
    )
    for channel in channels:
        channel.warm_up()
    return channels


def coalesces(platform: Platform) -> bool:
    """Tell whether the messages of a bridge are coalesced: then all of them use one communicator of the backend."""
    return not platform.host_blocking_wait
