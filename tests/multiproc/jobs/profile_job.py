"""Ranks that time the links between places."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import init_gloo
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.runtime.comm.ping import time_links
from vtp_plugin.tune.cluster.machines import Links, Location


def time_places(places: Sequence[tuple[str, str]]) -> Links | None:
    """Time the links as the ranks of a launcher do."""
    rank = init_gloo()
    try:
        node, site = places[rank]
        return time_links(CpuPlatform("test"), Location(node=node, site=site, kind="new"))
    finally:
        dist.destroy_process_group()


def time_a_wire(places: Sequence[tuple[str, str]], lock: Path, *, is_shared: bool) -> Links | None:
    """Time the links where a large message between nodes takes long, and where they share a wire its turn, too."""
    send = dist.send

    def slow(tensor: torch.Tensor, peer: int) -> None:
        if places[peer] != places[dist.get_rank()] and tensor.numel() > 1000:
            with lock.open("w") as wire:
                if is_shared:
                    fcntl.flock(wire, fcntl.LOCK_EX)
                time.sleep(0.06)
        send(tensor, peer)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(dist, "send", slow)
        return time_places(places)
