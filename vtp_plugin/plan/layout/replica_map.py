"""Which data-parallel replicas of stages of different data-parallel sizes work together, and on which samples.

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
from vtp_plugin.util.text_enum import TextEnum


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
