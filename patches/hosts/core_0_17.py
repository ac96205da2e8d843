"""Megatron 0.17."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from vtp_plugin.patches.hosts.shared import NotedMetrics
from vtp_plugin.patches.hosts.since_0_15 import GroupedHost, edge_alone


class Megatron017(NotedMetrics, GroupedHost):
    """Megatron 0.17."""

    name = "0.17"
    needs_device_first = True

    def seen_single_stage(self, options: dict[str, Any]) -> AbstractContextManager[None]:
        return edge_alone()


HOST = Megatron017
