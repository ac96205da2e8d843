"""A rank's share of weights that several ranks hold once together, if stages have different numbers of replicas."""

from __future__ import annotations

from dataclasses import dataclass

from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.layout.replica_map import ReplicaMap


@dataclass(frozen=True, slots=True)
class RankShare:
    """A rank's share of what several ranks hold once together: all weights, the experts, or an optimizer's state.

    Attributes:
        ranks: global ranks that hold each weight once together with this rank.
        index: position of the rank among them.
        replica: which copy of the weights the rank has, from 0.
    """

    ranks: tuple[int, ...]
    index: int
    replica: int

    @property
    def size(self) -> int:
        """Number of ranks that hold each weight once together."""
        return len(self.ranks)


def share_of_model(layout: PipelineLayout, rank: int) -> RankShare:
    """Return a rank's share of the dense weights of a model.

    >>> share_of_model(PipelineLayout.from_sizes([1, 2], world_size=4, dp=[2, 1]), 3)
    RankShare(ranks=(0, 2, 3), index=2, replica=0)
    """
    own = layout.coord(rank)
    model = layout.model_ranks(own.dp_rank, own.cp_rank)
    return RankShare(model, model.index(rank), own.dp_rank * layout.cp_sizes[own.stage] + own.cp_rank)


def share_of_experts(layout: PipelineLayout, rank: int) -> RankShare:
    """Return a rank's share of the experts of a model.

    Megatron compares their list with that of the dense weights, and sums both at once where they are equal. So either
    all ranks find equal lists, where every stage spreads its experts over as many ranks as its dense weights, or none.

    >>> share_of_experts(PipelineLayout.from_sizes([1, 2], world_size=6, ep=[1, 2], etp=1), 5)
    RankShare(ranks=(1, 4, 5), index=2, replica=1)
    """
    if all(expert.tp * expert.ep == dense.tp for expert, dense in zip(layout.experts, layout.stages, strict=True)):
        return share_of_model(layout, rank)
    own = layout.expert_coord(rank)
    ranks: tuple[int, ...] = ()
    for stage, grid in enumerate(layout.experts):
        start, width = own.dp_rank % grid.dp, grid.tp * grid.ep
        ranks += layout.stage_ranks(stage)[start * width : (start + 1) * width]
    return RankShare(ranks, ranks.index(rank), own.dp_rank)


def share_of_world(layout: PipelineLayout, rank: int) -> RankShare:
    """Return a rank's share where every rank holds numbers of its own, as in a distributed optimizer's state.

    >>> share_of_world(PipelineLayout.from_sizes([1, 2], world_size=3), 2)
    RankShare(ranks=(0, 1, 2), index=2, replica=0)
    """
    return RankShare(tuple(range(layout.world_size)), rank, 0)


def expert_spans(layout: PipelineLayout, replicas: ReplicaMap) -> tuple[int, ...]:
    """Return, by stage, over how many neighbouring replicas of a team one set of its experts lies.

    These replicas exchange tokens in every forward and backward of the stage. Ranks of one replica, and of one replica
    number in several teams, do the same at the same time, so they count once.

    >>> layout = PipelineLayout.from_sizes([1, 1], world_size=5, dp=[1, 4], ep=[1, 2])
    >>> expert_spans(layout, ReplicaMap(dp_sizes=(1, 4)))
    (1, 2)
    >>> layout = PipelineLayout.from_sizes([1, 1], world_size=6, dp=[2, 4], ep=[1, 2])
    >>> expert_spans(layout, ReplicaMap(dp_sizes=(2, 4)))
    (1, 1)
    """
    return tuple(_expert_span(layout, replicas, stage) for stage in range(layout.num_stages))


def _expert_span(layout: PipelineLayout, replicas: ReplicaMap, stage: int) -> int:
    dense, expert = layout.stages[stage], layout.experts[stage]
    block, replica_size, number = expert.tp * expert.ep, dense.tp * dense.cp, replicas.num_replicas(stage)
    if replicas.is_split or number == 1:
        return 1
    sets: list[set[int]] = []
    for start in range(0, dense.dp * replica_size, block):
        dp_ranks = {place // replica_size for place in range(start, start + block)}
        sets.append({replicas.team_and_replica(stage, dp_rank)[1] for dp_rank in dp_ranks})
    sizes = (size for size in range(1, number + 1) if number % size == 0)
    return next(size for size in sizes if all(min(found) // size == max(found) // size for found in sets))
