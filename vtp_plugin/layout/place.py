"""Where a rank is among those that together hold each weight once, if stages have different numbers of replicas."""

from __future__ import annotations

from dataclasses import dataclass

from vtp_plugin.layout.pipeline import PipelineLayout


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is among those that together hold each weight once.

    Attributes:
        index: the rank's place among them.
        size: how many they are.
        replica: which copy of the weights the rank has, from 0.
    """

    index: int
    size: int
    replica: int


def place_in_model(layout: PipelineLayout, rank: int) -> Place:
    """Give a rank's place among the ranks that hold the dense weights once.

    >>> place_in_model(PipelineLayout.from_sizes([1, 2], world_size=4, dp=[2, 1]), 3)
    Place(index=2, size=3, replica=0)
    """
    own = layout.coord(rank)
    model = layout.model_ranks(own.dp_rank, own.cp_rank)
    return Place(model.index(rank), len(model), own.dp_rank * layout.cp_sizes[own.stage] + own.cp_rank)


def place_in_experts(layout: PipelineLayout, rank: int) -> Place:
    """Give a rank's place among the ranks that hold the experts once.

    >>> place_in_experts(PipelineLayout.from_sizes([1, 2], world_size=6, ep=[1, 2], etp=1), 5)
    Place(index=2, size=3, replica=1)
    """
    own = layout.expert_coord(rank)
    widths = [grid.tp * grid.ep for grid in layout.experts]
    index = own.ep_rank * layout.experts[own.stage].tp + own.tp_rank
    return Place(sum(widths[: own.stage]) + index, sum(widths), own.dp_rank)
