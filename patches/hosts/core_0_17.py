"""Megatron 0.17."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from vtp_plugin.patches.hosts.base import NO_PROJECTION
from vtp_plugin.patches.hosts.grouped import GroupedHost, edge_alone
from vtp_plugin.patches.hosts.noted import NotedMetrics


class Host(NotedMetrics, GroupedHost):
    """Megatron 0.17."""

    name = "0.17"
    runs_experts = False
    needs_device_first = True
    moved = {
        "U3": "megatron.training.utils:get_batch_on_this_tp_rank",
        "U6": "megatron.training.utils:is_last_rank",
        "H11": "megatron.core.transformer.moe.moe_utils:reduce_aux_losses_tracker_across_ranks",
    }
    absent = {
        **NO_PROJECTION,
        "H4c10": "it has no such group",
        "H15": "it counts no lengths of packed samples",
        "H3b": "the tokenizer alone pads the vocabulary; model builders take what it says",
        "U4": "models are built by megatron.training.training:get_model alone, which U5 carries",
    }

    def seen_single_stage(self, options: dict[str, Any]) -> AbstractContextManager[None]:
        return edge_alone()
