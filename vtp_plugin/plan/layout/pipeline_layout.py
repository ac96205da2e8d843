"""A pipeline of stages of unequal size: its stages, its channels' names, and how both are written for people.

Which global rank has which coordinates in a pipeline whose stages may differ in their parallel sizes.

A :class:`PipelineLayout` is a list of stages, each a small grid ``tp x cp x dp``, and a rank order. It answers "who is
where" by arithmetic (a binary search over the stages, never a scan over the ranks), so a query costs as little for ten
thousand ranks as for three. It creates no process groups and does not know torch or Megatron.

Terms: a *rank* is always global; a *replica* is one ``(dp_rank, cp_rank)`` through all stages; the *leader* of a stage
in a replica is its tp rank 0; *pipeline group* ``t`` of a replica has one rank of every stage. If sizes differ, a rank
of a smaller stage represents all coordinates of the largest stage that equal its coordinates modulo the sizes of its
stage: in group ``t`` of replica ``(dp_rank, cp_rank)``, stage ``i`` has rank
``(t mod tp_i, cp_rank mod cp_i, dp_rank mod dp_i)``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product

from vtp_plugin.errors import LayoutError, PlanError
from vtp_plugin.plan.layout.grids import (
    Coord,
    ExpertCoord,
    ExpertGrid,
    RankOrder,
    StageGrid,
    check_experts,
    check_list,
    check_positive,
    check_world,
    cuts_experts_apart,
    equal_dp,
    expert_copies,
)
from vtp_plugin.plan.layout.layer_lists import Chunk
from vtp_plugin.util.text import TextEnum


class Direction(TextEnum):
    """What a channel carries: activations go forward, gradients backward."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelId:
    """One direction between two workers.

    Messages arrive in the order of their sends; there are no tags. Channels sort by upstream worker, then downstream
    worker, then forward before backward, so every rank has them in the same order.

    Attributes:
        src: Worker that sends.
        dst: Worker that receives.
        direction: What it carries: activations or gradients.

    >>> str(ChannelId(src=1, dst=0, direction=Direction.BACKWARD))
    'boundary 0->1, backward'
    """

    src: int
    dst: int
    direction: Direction

    @classmethod
    def between(cls, upstream: int, downstream: int, direction: Direction) -> ChannelId:
        """Return the channel of one direction between the two workers of a boundary.

        >>> ChannelId.between(0, 1, Direction.BACKWARD).src
        1
        """
        src, dst = (upstream, downstream) if direction is Direction.FORWARD else (downstream, upstream)
        return cls(src=src, dst=dst, direction=direction)

    @property
    def upstream(self) -> int:
        """Worker that sends activations and receives gradients."""
        return self.src if self.direction is Direction.FORWARD else self.dst

    @property
    def downstream(self) -> int:
        """Worker that receives activations and sends gradients."""
        return self.dst if self.direction is Direction.FORWARD else self.src

    @property
    def opposite(self) -> ChannelId:
        """The channel of the other direction across the same boundary."""
        other = Direction.BACKWARD if self.direction is Direction.FORWARD else Direction.FORWARD
        return ChannelId(src=self.dst, dst=self.src, direction=other)

    def __lt__(self, other: ChannelId) -> bool:
        return self._key < other._key

    @property
    def _key(self) -> tuple[int, int, bool]:
        return self.upstream, self.downstream, self.direction is Direction.BACKWARD

    def __str__(self) -> str:
        return f"boundary {self.upstream}->{self.downstream}, {self.direction}"


_MAX_RUNS_SHOWN = 6


def describe_layout(layout: PipelineLayout, *, writer_rank: int | None = None, layers: Sequence[str] = ()) -> str:
    """Return a table: one line per stage, then which rank writes the log.

    Args:
        layout: the stages.
        writer_rank: rank that reports, if it is not :attr:`PipelineLayout.writer_rank`.
        layers: numbers of layers of every stage; empty if they are not known.

    >>> print(describe_layout(PipelineLayout.from_sizes([1, 2], world_size=6), layers=["2", "1+3"]))
    stage  tp  cp  dp  layers  ranks  leaders
        0   1   1   2       2  0-1    0-1
        1   2   1   2     1+3  2-5    2,4
    rank 5 writes the log

    Sizes of experts stand there where they are others than those of the stage:

    >>> print(describe_layout(PipelineLayout.from_sizes([1, 2], world_size=3, ep=[1, 2], etp=1)))
    stage  tp  cp  dp  etp  ep  edp  ranks  leaders
        0   1   1   1    1   1    1  0      0
        1   2   1   1    1   2    1  1-2    1
    rank 2 writes the log
    """
    rows = [["stage", *size_names(layout), *(["layers"] if layers else []), "ranks", "leaders"]]
    for stage, grid in enumerate(layout.stages):
        leaders = (layout.leader(stage, d, c) for d in range(grid.dp) for c in range(grid.cp))
        sizes = (*size_texts(layout, stage), *layers[stage : stage + 1])
        rows.append([str(stage), *sizes, format_ranks(layout.stage_ranks(stage)), format_ranks(leaders)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    columns = [f"{{:>{width}}}" for width in widths[:-2]] + [f"{{:<{widths[-2]}}}", "{}"]
    lines = ["  ".join(columns).format(*row) for row in rows]
    writer_rank = layout.writer_rank if writer_rank is None else writer_rank
    order = f"ranks are numbered in the order {layout.order}; " if layout.order is not RankOrder.STAGE_MAJOR else ""
    return "\n".join([*lines, f"{order}rank {writer_rank} writes the log"])


def format_layers(stages: Iterable[Iterable[Chunk]]) -> tuple[str, ...]:
    """Write how many layers each stage has, chunk by chunk.

    >>> from vtp_plugin.plan.layout.layer_lists import u_chunks
    >>> format_layers(u_chunks((1, 2, 1)))
    ('1+1', '2')
    """
    return tuple(join_layers(len(chunk.layers) for chunk in chunks) for chunks in stages)


def join_layers(numbers: Iterable[int]) -> str:
    """Write the numbers of layers of the chunks of a stage, without those that have none."""
    return "+".join(str(number) for number in numbers if number) or "0"


def size_names(layout: PipelineLayout) -> tuple[str, ...]:
    """Return the names of a stage's sizes; experts are named where they have sizes of their own.

    >>> size_names(PipelineLayout.from_sizes([1, 2], world_size=3))
    ('tp', 'cp', 'dp')
    """
    return ("tp", "cp", "dp", *(("etp", "ep", "edp") if layout.has_expert_groups else ()))


def size_texts(layout: PipelineLayout, stage: int) -> tuple[str, ...]:
    """Return the sizes of a stage, as texts in the order of :func:`size_names`.

    >>> size_texts(PipelineLayout.from_sizes([1, 2], world_size=3), 1)
    ('2', '1', '1')
    """
    grid, expert = layout.stages[stage], layout.experts[stage]
    sizes = grid.tp, grid.cp, grid.dp, *((expert.tp, expert.ep, expert.dp) if layout.has_expert_groups else ())
    return tuple(map(str, sizes))


def format_ranks(ranks: Iterable[int]) -> str:
    """Write ranks for people: consecutive ranks become ranges, and a long list ends with the total count.

    >>> format_ranks([0, 1, 2, 5, 8, 9])
    '0-2,5,8-9'
    >>> format_ranks(range(0, 40, 2))
    '0,2,4,6,8,10,... (20 ranks)'
    """
    runs: list[list[int]] = []
    total = 0
    for rank in ranks:
        total += 1
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:_MAX_RUNS_SHOWN]]
    if len(runs) > _MAX_RUNS_SHOWN:
        shown.append(f"... ({total} ranks)")
    return ",".join(shown)


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """The stages of a pipeline, and their global ranks.

    The layout covers exactly the ranks ``0 .. world_size - 1``, or as many from ``first_rank`` on. Stages may have
    different tp sizes. In stage-major order they may also have different cp and dp sizes; a rank of the smaller stage
    is then in several replicas.

    Attributes:
        stages: grid of every stage, first stage first.
        order: numbering of the ranks.
        first_rank: first rank of the pipeline, where it is a module among others.
        experts: how every stage shares its experts; by default no rank of a replica has experts of its own.
        world_size: number of ranks of all stages.

    Raises:
        ConfigError: there are no stages, or a replica-major order meets different cp or dp sizes; or expert sizes do
            not fill a stage.

    >>> layout = PipelineLayout.from_sizes([1, 2], world_size=6)
    >>> layout.stage_ranks(1), layout.coord(5)
    ((2, 3, 4, 5), Coord(stage=1, tp_rank=1, cp_rank=0, dp_rank=1))
    >>> layout.pipeline_group(0), layout.pipeline_group(1), layout.pipeline_group(1, dp_rank=1)
    ((0, 2), (0, 3), (1, 5))
    """

    stages: tuple[StageGrid, ...]
    order: RankOrder = RankOrder.STAGE_MAJOR
    first_rank: int = 0
    experts: tuple[ExpertGrid, ...] = ()
    world_size: int = field(init=False, repr=False, compare=False)
    # First rank of every stage, without `first_rank`; in replica-major order relative to the data-parallel replica.
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.stages:
            raise LayoutError("a pipeline layout needs at least one stage, got none: give one tp size per stage")
        is_replica_major = self.order is RankOrder.REPLICA_MAJOR
        if is_replica_major and not self.has_equal_replicas:
            sizes = f"cp {','.join(map(str, self.cp_sizes))} and dp {','.join(map(str, self.dp_sizes))}"
            raise LayoutError(
                f"the rank order {self.order} needs equal cp and dp sizes on all stages, got {sizes}: "
                f"use the order {RankOrder.STAGE_MAJOR} or equal sizes"
            )
        if not self.experts:
            experts = tuple(ExpertGrid(grid.tp, 1, grid.cp * grid.dp) for grid in self.stages)
            object.__setattr__(self, "experts", experts)
        check_experts([(g.tp, g.ep, g.dp) for g in self.experts], [(g.tp, g.cp, g.dp) for g in self.stages])
        # Each stage has one contiguous block of ranks (per replica in replica-major order).
        blocks = [stage.tp * stage.cp if is_replica_major else stage.size for stage in self.stages]
        object.__setattr__(self, "_starts", tuple(accumulate(blocks[:-1], initial=0)))
        object.__setattr__(self, "world_size", sum(stage.size for stage in self.stages))

    @classmethod
    def from_sizes(
        cls,
        tp_sizes: Sequence[int],
        *,
        world_size: int,
        cp: int | Sequence[int] = 1,
        dp: Sequence[int] | None = None,
        order: RankOrder = RankOrder.STAGE_MAJOR,
        ep: int | Sequence[int] = 1,
        etp: int | Sequence[int] | None = None,
    ) -> PipelineLayout:
        """Lay out stages of the given sizes over a world.

        Args:
            tp_sizes: tensor-parallel size of every stage, first stage first.
            world_size: number of ranks.
            cp: context-parallel size, one for all stages or one for each.
            dp: data-parallel size of every stage; None gives all the same one, ``world_size`` over the sum of
                ``tp * cp``.
            order: numbering of the ranks.
            ep: expert-parallel size, one for all stages or one for each.
            etp: tensor-parallel size of the experts, one for all stages or one for each; None is each stage's own tp.

        Raises:
            ConfigError: an entry or ``world_size`` is not a positive integer, the lists differ in length, the sizes do
                not fit the world, expert sizes do not divide a stage, or a replica-major order meets different cp or dp
                sizes.

        >>> PipelineLayout.from_sizes([1, 4, 4], world_size=18).stages[1]
        StageGrid(tp=4, cp=1, dp=2)
        >>> PipelineLayout.from_sizes([2, 1], world_size=8, cp=[1, 2]).stages
        (StageGrid(tp=2, cp=1, dp=2), StageGrid(tp=1, cp=2, dp=2))
        >>> PipelineLayout.from_sizes([2, 1], world_size=4, dp=[1, 2]).stages
        (StageGrid(tp=2, cp=1, dp=1), StageGrid(tp=1, cp=1, dp=2))
        """
        if not tp_sizes:
            raise LayoutError("the list of tp sizes is empty: give one size per pipeline stage, e.g. 1,2")
        check_list("tp", tp_sizes, tp_sizes)
        cp_sizes = tuple(cp) if isinstance(cp, Sequence) else (cp,) * len(tp_sizes)
        check_list("context-parallel", cp_sizes, tp_sizes)
        check_positive("the world size", world_size)
        dp_sizes = (equal_dp(tp_sizes, cp_sizes, world_size),) * len(tp_sizes) if dp is None else dp
        check_list("data-parallel", dp_sizes, tp_sizes)
        stages = tuple(zip(tp_sizes, cp_sizes, dp_sizes, strict=True))
        check_world(stages, world_size)
        return cls(tuple(StageGrid(*sizes) for sizes in stages), order).with_experts(ep, etp)

    def with_experts(self, ep: int | Sequence[int], etp: int | Sequence[int] | None = None) -> PipelineLayout:
        """Return the same stages with these sizes for their experts; arguments and errors as for :meth:`from_sizes`.

        >>> PipelineLayout.from_sizes([1, 2], world_size=6).with_experts(2, 1).experts
        (ExpertGrid(tp=1, ep=2, dp=1), ExpertGrid(tp=1, ep=2, dp=2))
        """
        ep_sizes = tuple(ep) if isinstance(ep, Sequence) else (ep,) * self.num_stages
        etp_sizes = tuple(etp) if isinstance(etp, Sequence) else (etp,) * self.num_stages if etp else self.tp_sizes
        check_list("expert-parallel", ep_sizes, self.tp_sizes)
        check_list("expert tensor-parallel", etp_sizes, self.tp_sizes)
        stages = [(grid.tp, grid.cp, grid.dp) for grid in self.stages]
        sizes = zip(etp_sizes, ep_sizes, expert_copies(etp_sizes, ep_sizes, stages), strict=True)
        return replace(self, experts=tuple(ExpertGrid(*one) for one in sizes))

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.stages)

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        """Tensor-parallel size of every stage."""
        return tuple(stage.tp for stage in self.stages)

    @property
    def cp_sizes(self) -> tuple[int, ...]:
        """Context-parallel size of every stage."""
        return tuple(stage.cp for stage in self.stages)

    @property
    def dp_sizes(self) -> tuple[int, ...]:
        """Data-parallel size of every stage."""
        return tuple(stage.dp for stage in self.stages)

    @property
    def ep_sizes(self) -> tuple[int, ...]:
        """Expert-parallel size of every stage."""
        return tuple(grid.ep for grid in self.experts)

    @property
    def etp_sizes(self) -> tuple[int, ...]:
        """Tensor-parallel size of the experts of every stage."""
        return tuple(grid.tp for grid in self.experts)

    @property
    def is_uniform(self) -> bool:
        """Whether all stages have the same tp, cp, dp and expert sizes, as stock Megatron requires."""
        return len(set(self.stages)) == len(set(self.experts)) == 1

    @property
    def has_equal_replicas(self) -> bool:
        """Whether all stages have the same cp and dp sizes, so that every rank is in one replica only."""
        return len({(stage.cp, stage.dp) for stage in self.stages}) == 1

    @property
    def has_equal_experts(self) -> bool:
        """Whether every stage has as many copies of its experts as the others."""
        return len({grid.dp for grid in self.experts}) == 1

    @property
    def has_expert_groups(self) -> bool:
        """Whether any stage cuts its experts in another way than the rest of its layers."""
        return cuts_experts_apart(self.tp_sizes, self.ep_sizes, self.etp_sizes)

    @property
    def num_pipeline_groups(self) -> int:
        """Number of pipeline groups of one replica: the largest tp size."""
        return max(self.tp_sizes)

    @property
    def replicas(self) -> tuple[tuple[int, int], ...]:
        """All ``(dp_rank, cp_rank)`` of the largest stage, cp_rank changing fastest."""
        return tuple(product(range(max(self.dp_sizes)), range(max(self.cp_sizes))))

    @property
    def writer_rank(self) -> int:
        """Rank that reports the loss and the progress: the last rank of the last stage, as in Megatron."""
        last = self.stages[-1]
        return self.rank_of(self.num_stages - 1, last.tp - 1, last.cp - 1, last.dp - 1)

    def vocab_multiple(self, stages: Sequence[int] = (0, -1)) -> int:
        """Return the least common multiple of the tp sizes of the stages that hold a part of the vocabulary.

        Args:
            stages: indices of the stages with embedding or head; negative ones count from the end.

        >>> PipelineLayout.from_sizes([2, 1, 3], world_size=6).vocab_multiple()
        6
        """
        return math.lcm(*(self.stages[index].tp for index in stages))

    def rank_of(self, stage: int, tp_rank: int, cp_rank: int = 0, dp_rank: int = 0) -> int:
        """Return the rank with these coordinates. Inverse of :meth:`coord`.

        >>> PipelineLayout.from_sizes([1, 2], world_size=6, order=RankOrder.REPLICA_MAJOR).rank_of(1, 1, dp_rank=1)
        5
        """
        if not 0 <= stage < self.num_stages:
            raise PlanError(f"stage {stage} is none of {self.num_stages}")
        grid = self.stages[stage]
        if not (0 <= tp_rank < grid.tp and 0 <= cp_rank < grid.cp and 0 <= dp_rank < grid.dp):
            raise PlanError(f"tp rank {tp_rank}, cp rank {cp_rank}, dp rank {dp_rank}: stage {stage} is {grid}")
        start = self.first_rank + self._starts[stage]
        return start + tp_rank + grid.tp * cp_rank + self.dp_stride(stage) * dp_rank

    def coord(self, rank: int) -> Coord:
        """Return the coordinates of a rank. Inverse of :meth:`rank_of`."""
        place = rank - self.first_rank
        if not 0 <= place < self.world_size:
            raise PlanError(f"rank {rank} is none of {self.world_size} from {self.first_rank} on")
        replica_major = self.order is RankOrder.REPLICA_MAJOR
        outer, rest = divmod(place, self.dp_stride(0)) if replica_major else (0, place)
        stage = bisect_right(self._starts, rest) - 1
        grid = self.stages[stage]
        rest, tp_rank = divmod(rest - self._starts[stage], grid.tp)
        inner, cp_rank = divmod(rest, grid.cp)
        return Coord(stage, tp_rank, cp_rank, outer if replica_major else inner)

    def uniform_world_size(self, rank: int) -> int:
        """Return the world size that Megatron's checks expect: as if every stage were like the stage of `rank`.

        >>> PipelineLayout.from_sizes((1, 4), world_size=5).uniform_world_size(0)
        2
        """
        return self.stages[self.stage_of(rank)].size * self.num_stages

    def stage_of(self, rank: int) -> int:
        """Return the stage of a rank."""
        return self.coord(rank).stage

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """Return all ranks of a stage, ascending: tp changes fastest, then cp, then dp."""
        grid = self.stages[stage]
        return tuple(
            rank
            for dp_rank in range(grid.dp)
            for cp_rank in range(grid.cp)
            for rank in self.tp_ranks(stage, dp_rank, cp_rank)
        )

    def tp_ranks(self, stage: int, dp_rank: int = 0, cp_rank: int = 0) -> tuple[int, ...]:
        """Return the tensor-parallel group of a stage in one replica, ascending by tp rank."""
        first = self.rank_of(stage, 0, cp_rank, dp_rank)
        return tuple(range(first, first + self.stages[stage].tp))

    def leader(self, stage: int, dp_rank: int = 0, cp_rank: int = 0) -> int:
        """Return tp rank 0 of a stage in one replica."""
        return self.rank_of(stage, 0, cp_rank, dp_rank)

    def pipeline_group(self, t: int, dp_rank: int = 0, cp_rank: int = 0) -> tuple[int, ...]:
        """Return group ``t`` of a replica: one rank per stage, index ``i`` being rank ``t mod tp_i`` of stage ``i``.

        The ranks ascend, so a process group made of them (torch sorts its ranks) keeps the stage as its group rank.

        >>> PipelineLayout.from_sizes([1, 1], world_size=3, cp=[1, 2]).pipeline_group(0, cp_rank=1)
        (0, 2)
        """
        if not 0 <= t < self.num_pipeline_groups:
            raise PlanError(f"pipeline group {t} is none of {self.num_pipeline_groups}")
        return tuple(
            self.rank_of(stage, t % grid.tp, cp_rank % grid.cp, dp_rank % grid.dp)
            for stage, grid in enumerate(self.stages)
        )

    def pipeline_group_of(self, rank: int) -> tuple[int, ...]:
        """Return the pipeline group of a rank's tp rank and replica; the rank is at index ``stage_of(rank)``.

        A rank of a small stage is also in other groups (``t + tp_i``, ...); this one is the first of them.
        """
        coord = self.coord(rank)
        return self.pipeline_group(coord.tp_rank, coord.dp_rank, coord.cp_rank)

    def model_ranks(self, dp_rank: int = 0, cp_rank: int = 0) -> tuple[int, ...]:
        """Return the ranks that together hold the model once: all tp ranks of all stages of a replica, ascending."""
        return tuple(
            rank
            for stage, grid in enumerate(self.stages)
            for rank in self.tp_ranks(stage, dp_rank % grid.dp, cp_rank % grid.cp)
        )

    def expert_coord(self, rank: int) -> ExpertCoord:
        """Return the coordinates of a rank among those that share its stage's experts.

        >>> PipelineLayout.from_sizes([1, 2], world_size=6, ep=[1, 2], etp=1).expert_coord(5)
        ExpertCoord(stage=1, tp_rank=0, ep_rank=1, dp_rank=1)
        """
        stage = self.stage_of(rank)
        grid, dense = self.experts[stage], self.stages[stage]
        # Replicas of the stage need not be neighbours in the world.
        outer, inner = divmod(rank - self.leader(stage), self.dp_stride(stage))
        rest, tp_rank = divmod(outer * dense.tp * dense.cp + inner, grid.tp)
        dp_rank, ep_rank = divmod(rest, grid.ep)
        return ExpertCoord(stage, tp_rank, ep_rank, dp_rank)

    def dp_stride(self, stage: int) -> int:
        """Return the distance between the ranks of a stage at neighbouring dp ranks."""
        if self.order is RankOrder.REPLICA_MAJOR:
            return self._starts[-1] + self.stages[-1].tp * self.stages[-1].cp
        return self.stages[stage].tp * self.stages[stage].cp
