"""Megatron 0.19."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from megatron.core.pipeline_parallel import schedules

from vtp_plugin.patches.hosts.since_0_15 import GroupedHost


class Megatron019(GroupedHost):
    """Megatron 0.19."""

    name = "0.19"

    def default_groups(self) -> Any:
        return schedules._build_default_pg_collection()

    def seen_world(
        self, options: dict[str, Any], world_size: int, put_torch: Callable[[object], AbstractContextManager[None]]
    ) -> AbstractContextManager[None]:
        options["local_world_size"] = world_size
        return contextlib.nullcontext()


HOST = Megatron019
