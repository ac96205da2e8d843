"""What a rank states in the start-up checks, which must be equal on all ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from vtp_plugin.config import VtpConfig, flags_of_fields
from vtp_plugin.host.versions import find_host
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.util.version import __version__


def state_request(config: VtpConfig) -> dict[str, object]:
    """Return the options that this rank was started with, before any layout is known."""
    return {"vtp_plugin version": __version__, **_stated(config, at_start=True)}


def state_run(config: VtpConfig, layout: PipelineLayout, platform_name: str) -> dict[str, object]:
    """Return what this rank is about to run: all options that ranks share, and the sizes of the layout."""
    sizes = {
        "vtp_size_list": layout.tp_sizes,
        "vtp_cp_list": layout.cp_sizes,
        "vtp_dp_list": layout.dp_sizes,
        "vtp_ep_list": layout.ep_sizes,
        "vtp_etp_list": layout.etp_sizes,
    }
    return {
        "vtp_plugin version": __version__,
        "megatron-core version": find_host()[1].version,
        **_stated(config),
        **{name: ",".join(map(str, of_stages)) for name, of_stages in sizes.items()},
        "world size": layout.world_size,
        "rank order": layout.order.value,
        "platform": platform_name,
    }


def _stated(config: VtpConfig, *, at_start: bool = False) -> dict[str, object]:
    """Return the options that all ranks share, or those that are compared at the start, as their fields declare."""
    shared = [(flag.compared, getattr(config, str(flag.field))) for flag in flags_of_fields()]
    return {
        compared.name: compared.state(value)
        for compared, value in shared
        if compared is not None and compared.name is not None and (compared.at_start or not at_start)
    }


def digest_of(statement: Mapping[str, object]) -> str:
    """Return a short digest of a statement: two logs that show the same one come from ranks with equal requests.

    >>> digest_of({"vtp_size_list": "1,2"})
    '936e500c'
    """
    return hashlib.sha256(json.dumps(statement, sort_keys=True).encode()).hexdigest()[:8]
