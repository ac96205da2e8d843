"""Every pipeline stage of a Megatron run gets its own tensor-parallel size."""

from __future__ import annotations

from vtp_plugin.api import (
    apply,
    get_vtp_intra_stage_group,
    get_vtp_my_stage_idx,
    get_vtp_size_list,
    get_vtp_stage_ranks,
    is_vtp_enabled,
    is_vtp_stage_rank0,
    revert,
    status,
)
from vtp_plugin.edge import drawing_edge_weights
from vtp_plugin.util.text import __version__

__all__ = [
    "__version__",
    "apply",
    "drawing_edge_weights",
    "get_vtp_intra_stage_group",
    "get_vtp_my_stage_idx",
    "get_vtp_size_list",
    "get_vtp_stage_ranks",
    "is_vtp_enabled",
    "is_vtp_stage_rank0",
    "revert",
    "status",
]
