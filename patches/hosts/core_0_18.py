"""Megatron 0.18."""

from __future__ import annotations

from vtp_plugin.patches.hosts.since_0_15 import GroupedHost


class Megatron018(GroupedHost):
    """Megatron 0.18."""

    name = "0.18"


HOST = Megatron018
