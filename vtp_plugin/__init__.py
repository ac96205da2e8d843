"""Every pipeline stage of a Megatron run gets its own tensor-parallel size."""

import sys

# First of all, and nothing that Python 3.6 cannot compile: an older Python ends here, with a line.
from vtp_plugin.can_start import end_with, why_not

if why_not(sys.version_info[:2]):
    end_with(why_not(sys.version_info[:2]))

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
