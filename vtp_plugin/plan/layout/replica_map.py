"""Replicas of stages: who works with whom, and the share of each.

Which data-parallel replicas of stages of different data-parallel sizes work together, and on which samples.

A narrow stage (few replicas) and a wide one can work together in two modes. *Multiplex*: all stages run microbatches of
one size; data-parallel rank ``g mod dp`` of every stage runs global microbatch ``g`` of a step, the samples
``[g * size, (g + 1) * size)``, so a narrow replica takes the microbatches of several wide ones in turn. *Split*: all
stages run the same number of microbatches; a narrow replica runs larger ones, whose parts belong to neighbouring
replicas of the wide stage. In both modes every replica reads the samples that Megatron's sampler gives to the
data-parallel rank and size of its stage (0.19, ``MegatronPretrainingSampler``).

With ``dp_i`` replicas on stage ``i`` and ``c = gcd(dp_0, dp_1, ...)`` the run falls into ``c`` *teams* of
replicas that share nothing but the sums of their gradients; stage ``i`` has ``dp_i / c`` replicas in each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from vtp_plugin.errors import LayoutError
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.util.text import TextEnum


class DpMode(TextEnum):
    """How a boundary between different data-parallel sizes works."""

    MULTIPLEX = "multiplex"
    SPLIT = "split"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMap:
    """The replicas of all stages.

    Attributes:
        dp_sizes: data-parallel size of every stage.
        mode: how boundaries between different sizes work.

    >>> replicas = ReplicaMap(dp_sizes=(2, 4), mode=DpMode.MULTIPLEX)
    >>> replicas.num_teams, [replicas.team_and_replica(1, dp_rank) for dp_rank in range(4)]
    (2, [(0, 0), (1, 0), (0, 1), (1, 1)])
    >>> replicas.joined(0, 1)
    (((0,), (0,)), ((1,), (1,)), ((0,), (2,)), ((1,), (3,)))
    >>> ReplicaMap(dp_sizes=(2, 4), mode=DpMode.SPLIT).joined(0, 1)
    (((0,), (0, 1)), ((1,), (2, 3)))
    """

    dp_sizes: tuple[int, ...]
    mode: DpMode = DpMode.MULTIPLEX

    @property
    def is_equal(self) -> bool:
        """Whether all stages have the same number of replicas."""
        return len(set(self.dp_sizes)) == 1

    @property
    def is_split(self) -> bool:
        """Whether the stages run microbatches of different sizes."""
        return self.mode is DpMode.SPLIT and not self.is_equal

    @property
    def num_teams(self) -> int:
        """Number of teams."""
        return math.gcd(*self.dp_sizes)

    def num_replicas(self, stage: int) -> int:
        """Return how many replicas of a stage each team has."""
        return self.dp_sizes[stage] // self.num_teams

    def team_and_replica(self, stage: int, dp_rank: int) -> tuple[int, int]:
        """Return the team of a replica, and its number among the stage's replicas in that team."""
        if self.mode is DpMode.SPLIT:
            return divmod(dp_rank, self.num_replicas(stage))
        replica, team = divmod(dp_rank, self.num_teams)
        return team, replica

    def worker(self, stage: int, dp_rank: int) -> int:
        """Return the number of a replica among the workers of its team, which are numbered stage by stage.

        Split microbatches join all replicas of a stage: to a schedule they are one worker.

        >>> replicas = ReplicaMap(dp_sizes=(2, 4))
        >>> [replicas.worker(1, dp_rank) for dp_rank in range(4)]
        [1, 1, 2, 2]
        """
        if self.is_split:
            return stage
        return sum(map(self.num_replicas, range(stage))) + self.team_and_replica(stage, dp_rank)[1]

    def joined(self, upstream: int, downstream: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """List the dp ranks at both ends of every boundary between two stages; one of the sizes divides the other."""
        a, b = self.dp_sizes[upstream], self.dp_sizes[downstream]
        if self.is_split:
            num = math.gcd(a, b)
            return tuple(
                (tuple(range(i * a // num, (i + 1) * a // num)), tuple(range(i * b // num, (i + 1) * b // num)))
                for i in range(num)
            )
        return tuple(((dp_rank % a,), (dp_rank % b,)) for dp_rank in range(max(a, b)))

    def partner(self, stage: int, dp_rank: int, other: int) -> int:
        """Return the first dp rank of another stage that runs the same samples as a replica does.

        >>> ReplicaMap(dp_sizes=(1, 2), mode=DpMode.MULTIPLEX).partner(1, 1, 0)
        0
        """
        here, there = self.dp_sizes[stage], self.dp_sizes[other]
        return dp_rank * there // here if self.is_split else dp_rank % there

    def micro_batch(self, stage: int, size: int) -> int:
        """Return the microbatch size of a stage.

        Args:
            stage: index of the stage.
            size: microbatch size of the stage with most replicas.

        >>> ReplicaMap(dp_sizes=(1, 2), mode=DpMode.SPLIT).micro_batch(0, 2)
        4
        """
        return size * max(self.dp_sizes) // self.dp_sizes[stage] if self.is_split else size

    def batch_unit(self, size: int) -> int:
        """Return what must divide the global batch, so that every stage has a whole number of microbatches.

        Args:
            size: size of a microbatch on the stage with most replicas.

        >>> [ReplicaMap(dp_sizes=(2, 1, 3), mode=mode).batch_unit(4) for mode in DpMode]
        [24, 12]
        """
        return size * (max(self.dp_sizes) if self.is_split else math.lcm(*self.dp_sizes))

    def check(self, boundaries: Iterable[tuple[int, int]]) -> None:
        """Refuse sizes that the mode cannot join.

        Args:
            boundaries: pairs of neighbouring stages, including the end of a U and its edge.

        Raises:
            ConfigError: at a boundary neither size divides the other, or a size does not divide the largest in split
                mode.
        """
        shown = f"--vtp-dp-list {','.join(map(str, self.dp_sizes))}"
        for upstream, downstream in boundaries:
            a, b = self.dp_sizes[upstream], self.dp_sizes[downstream]
            if max(a, b) % min(a, b):
                raise LayoutError(
                    f"{shown}: boundary {upstream}->{downstream} joins data-parallel sizes {a} and {b}, and "
                    f"{max(a, b)} / {min(a, b)} is not whole; let one divide the other"
                )
        largest = max(self.dp_sizes)
        for stage, size in enumerate(self.dp_sizes):
            if self.is_split and largest % size:
                raise LayoutError(
                    f"{shown} with --vtp-dp-mode split: stage {stage} runs microbatches {largest} / {size} times as "
                    f"large as the widest stage, which is not whole; use sizes that divide {largest}, or multiplex"
                )

    def check_equal_batch(self, batch: int, size: int) -> tuple[str, ...]:
        """Check that equal replicas can share a global batch, as Megatron would, which says less.

        Args:
            batch: samples of a step.
            size: size of a microbatch on the stage with most replicas.

        >>> print(*ReplicaMap(dp_sizes=(1, 1)).check_equal_batch(7, 2))
        --global-batch-size 7 is no multiple of --micro-batch-size 2 times the data-parallel size 1; use 8
        """
        unit = size * (max(self.dp_sizes) if self.is_split else self.num_teams)
        if batch % unit == 0:
            return ()
        return (
            f"--global-batch-size {batch} is no multiple of --micro-batch-size {size} times the data-parallel size "
            f"{unit // size}; use {(batch // unit + 1) * unit}",
        )

    def check_batch(self, option: str, batch: int, size: int) -> tuple[str, ...]:
        """Check that the stages can share a global batch.

        Args:
            option: flag that gave the batch, for the message.
            batch: samples of a step.
            size: size of a microbatch on the stage with most replicas.

        Returns:
            One line about the first stage whose number of microbatches would not be whole; empty if there is none.

        >>> print(*ReplicaMap(dp_sizes=(1, 4)).check_batch("--global-batch-size", 12, 2))
        --global-batch-size 12 cannot be shared by --vtp-dp-list 1,4: stage 1 has data-parallel size 4 * micro batch \
size 2 = 8, and 12 / 8 is not whole; use a multiple of 8, such as 16
        """
        unit = self.batch_unit(size)
        for stage, dp in enumerate(self.dp_sizes):
            micro_batch = self.micro_batch(stage, size)
            if batch % (dp * micro_batch):
                return (
                    f"{option} {batch} cannot be shared by --vtp-dp-list {','.join(map(str, self.dp_sizes))}: stage "
                    f"{stage} has data-parallel size {dp} * micro batch size {micro_batch} = {dp * micro_batch}, and "
                    f"{batch} / {dp * micro_batch} is not whole; use a multiple of {unit}, such as "
                    f"{(batch // unit + 1) * unit}",
                )
        return ()


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
