"""Ranks that time the links between places."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from tests.pool import init_gloo
from vtp_plugin.cluster.machines import Links, Location
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.runtime.wire.ping import time_links


def time_places(places: Sequence[tuple[str, str]]) -> Links | None:
    """Time the links as the ranks of a launcher do."""
    rank = init_gloo()
    try:
        node, site = places[rank]
        return time_links(CpuPlatform("test"), Location(node=node, site=site, kind="new"))
    finally:
        dist.destroy_process_group()
