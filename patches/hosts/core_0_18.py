"""Megatron 0.18."""

from __future__ import annotations

from vtp_plugin.patches.hosts.grouped import GroupedHost


class Host(GroupedHost):
    """Megatron 0.18."""

    name = "0.18"
