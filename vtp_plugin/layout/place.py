"""Where a rank is among those that together hold each weight once, if stages have different numbers of replicas."""

from __future__ import annotations

from dataclasses import dataclass

from vtp_plugin.layout.pipeline import PipelineLayout


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is among those that together hold each weight once.

    Attributes:
        ranks: of the world, those that hold each weight once together with this rank.
        index: the rank's place among them.
        replica: which copy of the weights the rank has, from 0.
    """

    ranks: tuple[int, ...]
    index: int
    replica: int

    @property
    def size(self) -> int:
        """How many ranks hold each weight once."""
        return len(self.ranks)


def place_in_model(layout: PipelineLayout, rank: int) -> Place:
    """Give a rank's place among the ranks that hold the dense weights once.

    >>> place_in_model(PipelineLayout.from_sizes([1, 2], world_size=4, dp=[2, 1]), 3)
    Place(ranks=(0, 2, 3), index=2, replica=0)
    """
    own = layout.coord(rank)
    model = layout.model_ranks(own.dp_rank, own.cp_rank)
    return Place(model, model.index(rank), own.dp_rank * layout.cp_sizes[own.stage] + own.cp_rank)


def place_in_experts(layout: PipelineLayout, rank: int) -> Place:
    """Give a rank's place among the ranks that hold the experts once.

    Megatron compares their list with that of the dense weights, and sums both at once where they are equal. So either
    all ranks find equal lists, where every stage spreads its experts over as many ranks as its dense weights, or none.

    >>> place_in_experts(PipelineLayout.from_sizes([1, 2], world_size=6, ep=[1, 2], etp=1), 5)
    Place(ranks=(1, 4, 5), index=2, replica=1)
    """
    if all(expert.tp * expert.ep == dense.tp for expert, dense in zip(layout.experts, layout.stages, strict=True)):
        return place_in_model(layout, rank)
    own = layout.expert_coord(rank)
    ranks: tuple[int, ...] = ()
    for stage, grid in enumerate(layout.experts):
        start, width = own.dp_rank % grid.dp, grid.tp * grid.ep
        ranks += layout.stage_ranks(stage)[start * width : (start + 1) * width]
    return Place(ranks, ranks.index(rank), own.dp_rank)


def place_in_world(layout: PipelineLayout, rank: int) -> Place:
    """Give a rank's place where every rank holds numbers of its own: its share of an optimizer's state.

    >>> place_in_world(PipelineLayout.from_sizes([1, 2], world_size=3), 2)
    Place(ranks=(0, 1, 2), index=2, replica=0)
    """
    return Place(tuple(range(layout.world_size)), rank, 0)
