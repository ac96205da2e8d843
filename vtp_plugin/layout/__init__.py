"""Who is where: stages, grids, ranks and groups. Pure Python: no torch, no Megatron, no global state."""

from __future__ import annotations

from vtp_plugin.layout.grid import RankGrid
from vtp_plugin.layout.groups import GroupSpec, LayoutRankGenerator, model_parallel_groups
from vtp_plugin.layout.pipeline import Coord, PipelineLayout, RankOrder, StageGrid, format_ranks

__all__ = [
    "Coord",
    "GroupSpec",
    "LayoutRankGenerator",
    "PipelineLayout",
    "RankGrid",
    "RankOrder",
    "StageGrid",
    "format_ranks",
    "model_parallel_groups",
]
