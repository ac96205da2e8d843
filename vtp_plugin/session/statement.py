"""What a rank states in the start-up checks: every rank must say the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from vtp_plugin.config import VtpConfig
from vtp_plugin.ground.version import __version__
from vtp_plugin.hosts import find_host
from vtp_plugin.layout.pipeline import PipelineLayout


def state_request(config: VtpConfig) -> dict[str, object]:
    """Say what this rank was started with, before any layout is known."""
    sizes = config.size_list
    lists = {name: getattr(config, name) for name in ("cp_list", "dp_list", "ep_list", "etp_list")}
    return {
        "vtp_plugin version": __version__,
        "vtp_size_list": ",".join(str(size) for size in sizes) if isinstance(sizes, tuple) else sizes,
        **{f"vtp_{name}": ",".join(map(str, given)) if given else None for name, given in lists.items()},
        "sites": ",".join(config.sites or ()),
        "timeout_s": config.timeout_s,
        "vtp_bridges": config.bridges,
    }


def state_run(config: VtpConfig, layout: PipelineLayout, platform_name: str) -> dict[str, object]:
    """Say what this rank is about to run."""
    return {
        "vtp_plugin version": __version__,
        "megatron-core version": find_host()[1].version,
        "vtp_size_list": ",".join(str(size) for size in layout.tp_sizes),
        "world size": layout.world_size,
        "rank order": layout.order.value,
        "vtp_cp_list": ",".join(str(size) for size in layout.cp_sizes),
        "vtp_dp_list": ",".join(str(size) for size in layout.dp_sizes),
        "vtp_ep_list": ",".join(map(str, layout.ep_sizes)),
        "vtp_etp_list": ",".join(map(str, layout.etp_sizes)),
        "dp mode": config.dp_mode,
        "transport": config.transport,
        "vtp_transport_threshold": config.transport_threshold_bytes,
        "sites": ",".join(config.sites or ()),
        "platform": platform_name,
        "forced": config.force,
        "timeout_s": config.timeout_s,
        "schedule": config.schedule,
        "layerwise disaggregated": config.layerwise_disaggregated,
        "vtp_encoder_layer_list": ",".join(map(str, config.encoder_layer_list or ())),
        "num_layer_list": ",".join(map(str, config.num_layer_list or ())),
        "vtp_in_flight": ",".join(map(str, config.in_flight or ())),
        "vtp_costs": " ".join(config.costs or ()),
        "vtp_replan_share": config.replan_share,
        "vtp_bridges": config.bridges,
    }


def digest_of(statement: Mapping[str, object]) -> str:
    """Give a short mark of a statement: two logs that show the same one come from ranks that were asked for the same.

    >>> digest_of({"vtp_size_list": "1,2"})
    '936e500c'
    """
    return hashlib.sha256(json.dumps(statement, sort_keys=True).encode()).hexdigest()[:8]
