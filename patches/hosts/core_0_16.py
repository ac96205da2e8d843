"""Megatron 0.15 and 0.16."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from vtp_plugin.patches.hosts.grouped import GroupedHost, edge_alone
from vtp_plugin.patches.hosts.older import OlderHost


class Host(OlderHost, GroupedHost):
    """Megatron 0.15 and 0.16."""

    name = "0.16"
    moved = {**OlderHost.moved, "U3": "megatron.training.utils:get_batch_on_this_tp_rank"}

    def seen_single_stage(self, options: dict[str, Any]) -> AbstractContextManager[None]:
        return edge_alone()
