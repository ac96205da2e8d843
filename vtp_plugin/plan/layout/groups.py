"""Rank lists of all process groups of a pipeline.

Creating a process group is collective over the world, so every rank must create the same groups in the same order: the
order of the lists is a part of the plan. :class:`LayoutRankGenerator` replaces the rank generator of Megatron's
``initialize_model_parallel`` for stages of different sizes; with a uniform layout it gives the same lists.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import NamedTuple

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout, RankOrder
from vtp_plugin.plan.layout.size_checks import check_replica_major

_AXES = ("tp", "gtp_remat", "cp", "ep", "dp", "pp")


class LayoutRankGenerator:
    """Rank lists along any axes of a pipeline whose stages may differ in size.

    It has the interface of Megatron's ``RankGenerator``: a token such as "tp" or "tp-dp-cp" names the axes along which
    the ranks of a group differ; there is one group for every combination of coordinates along the other axes. Groups
    are ordered by these coordinates, and ranks in a group by theirs, in both cases with the earlier axis of the rank
    order changing faster. The axes are tp, gtp_remat (always 1), cp, ep, pp and dp; the dense generator has ep = 1, the
    expert generator cp = 1 and expert sizes of tp and dp.

    Tokens without "pp" give groups inside the stages, which partition the world. A token with "pp" and "tp" unites the
    ranks of a replica over all stages. If cp or dp sizes differ (or, for the expert generator, the numbers of copies of
    the experts), a rank is in several replicas, and the only group is the world. With "pp" and without "tp", the higher
    ranks of a large stage have no partner in a small one, so a rank of stage ``i`` represents all coordinates that
    equal its coordinates modulo the sizes of its stage. For "pp" these groups are the pipeline groups of the layout;
    Megatron uses the first list that contains a rank.

    A rank of a narrow stage must be in several pipeline groups: Megatron reads a rank's stage and the number of stages
    from its pipeline group, so every rank of a wide stage needs a group with a rank of each stage. A stage of T ranks
    beside a stage of W can only provide T, so each is in W / T groups.

    >>> generator = LayoutRankGenerator(PipelineLayout.from_sizes([1, 2], world_size=6))
    >>> generator.get_ranks("tp")
    [[0], [1], [2, 3], [4, 5]]
    >>> generator.get_ranks("pp")
    [[0, 2], [0, 3], [1, 4], [1, 5]]
    >>> generator.get_ranks("tp-pp")
    [[0, 2, 3], [1, 4, 5]]
    """

    def __init__(self, layout: PipelineLayout, *, expert: bool = False) -> None:
        """Describe the ranks of every stage by axes.

        Args:
            layout: the stages.
            expert: whether this is the generator of the expert groups.

        Raises:
            ConfigError: a replica-major order meets other numbers of copies of the experts than of replicas.
        """
        if expert and layout.order is RankOrder.REPLICA_MAJOR and layout.num_stages > 1:
            check_replica_major(
                [(grid.tp, grid.ep, grid.dp) for grid in layout.experts],
                [(grid.tp, grid.cp, grid.dp) for grid in layout.stages],
            )
        self._layout = layout
        self._dense = LayoutRankGenerator(layout) if expert else None
        self._has_equal_replicas = layout.has_equal_replicas and (not expert or layout.has_equal_experts)
        ranks = _expert_ranks if expert else _dense_ranks
        grids = layout.experts if expert else layout.stages
        self.stages = [ranks(layout, stage) for stage in range(layout.num_stages)]
        self._widest = max(grid.tp for grid in grids)
        axes = [axis for stage in self.stages for axis in stage.axes]
        self._axes = {"tp", "pp", *(axis.name for axis in axes if axis.length > 1)}
        self._lists: dict[frozenset[str], list[list[int]]] = {}

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return the rank lists of the groups along the axes of ``token``. Callers share them and must not change them.

        Args:
            token: names of axes joined by "-", in any order.

        Raises:
            ValueError: an axis is unknown.
            ConfigError: the token has "pp" and "cp" or "dp" but not "tp", and the stages have different cp or dp sizes.
        """
        masked = token.split("-")
        if unknown := set(masked) - set(_AXES):
            raise ValueError(f"unknown axes {sorted(unknown)} in token {token!r}: choose from {_AXES}")
        if self._dense is not None and set(masked) & self._axes == {"pp"}:
            # Megatron asks that both have the same pipeline groups.
            return self._dense.get_ranks("pp")
        if "pp" in masked and not self._has_equal_replicas:
            return self._groups_over_replicas(masked)
        # Many tokens differ only in axes of length 1, and Megatron asks for some of them several times.
        axes = frozenset(masked) & self._axes
        if axes not in self._lists:
            self._lists[axes] = self._groups_along(axes)
        return self._lists[axes]

    def _groups_along(self, masked: frozenset[str]) -> list[list[int]]:
        width = self._widest if "pp" in masked and "tp" not in masked else None
        by_stage = [stage.groups(masked, width) for stage in self.stages]
        if "pp" in masked:
            return [sorted(chain.from_iterable(parts)) for parts in zip(*by_stage, strict=True)]
        if self._layout.order is RankOrder.REPLICA_MAJOR and "dp" not in masked and len(by_stage) > 1:
            # In this order the replica is the slower axis than the stage, for groups as for ranks.
            by_replica = [_cut(groups, self._layout.stages[0].dp) for groups in by_stage]
            by_stage = list(chain.from_iterable(zip(*by_replica, strict=True)))
        return list(chain.from_iterable(by_stage))

    def get_gtp_ranks(self, gtp_remat_size: int) -> list[list[int]]:
        """Return the groups of Megatron's weight rematerialization, each of a single rank.

        Raises:
            ConfigError: the size is not 1.
        """
        if gtp_remat_size != 1:
            raise ConfigError(
                f"gtp_remat size {gtp_remat_size} does not work with a size per stage: leave the GTP options out"
            )
        return self.get_ranks("gtp_remat")

    def _groups_over_replicas(self, masked: list[str]) -> list[list[int]]:
        """Return the groups through stages of different cp or dp sizes: the world, or pipeline groups."""
        layout = self._layout
        if "tp" in masked:
            return [list(range(layout.first_rank, layout.first_rank + layout.world_size))]
        if {"cp", "dp"} & set(masked):
            raise ConfigError(
                f"groups along {'-'.join(masked)} need equal cp and dp sizes on all stages, got {layout.stages}: "
                "use equal sizes"
            )
        by_stage = []
        for stage, grid in enumerate(layout.stages):
            places = [
                layout.leader(stage) + layout.dp_stride(stage) * (dp_rank % grid.dp) + grid.tp * (cp_rank % grid.cp)
                for dp_rank, cp_rank in layout.replicas
            ]
            by_stage.append([place + t % grid.tp for place in places for t in range(layout.num_pipeline_groups)])
        return list(map(list, zip(*by_stage, strict=True)))


class _Axis(NamedTuple):
    """One axis of a stage: its length, and the distance between ranks that are neighbours along it."""

    name: str
    length: int
    stride: int


class _StageRanks(NamedTuple):
    """The ranks of one stage, by arithmetic.

    Attributes:
        first: the first rank.
        axes: the slowest first, tp last; axes of length 1 may be left out.
    """

    first: int
    axes: tuple[_Axis, ...]

    def groups(self, masked: Collection[str], width: int | None) -> list[list[int]]:
        """Return the rank lists along the `masked` axes, one for every combination of coordinates along the others.

        Args:
            masked: names of axes.
            width: tp size of the widest stage, if there shall be as many lists as it needs; tp ranks then repeat.
        """
        outside = [axis for axis in self.axes if axis.name not in masked]
        if width is None:
            starts = _ranks(self.first, outside)
        else:
            tp = outside.pop().length
            starts = [start + place % tp for start in _ranks(self.first, outside) for place in range(width)]
        *slow, (_, length, stride) = _joined([axis for axis in self.axes if axis.name in masked]) or [_Axis("", 1, 1)]
        span = length * stride
        if not slow:
            return [list(range(start, start + span, stride)) for start in starts]
        heads = _ranks(0, slow)
        return [[rank + step for rank in heads for step in range(start, start + span, stride)] for start in starts]


def _ranks(first: int, axes: Sequence[_Axis]) -> list[int]:
    """Return the ranks along some axes from `first` on, the last axis changing fastest."""
    ranks = [first]
    for _, length, stride in _joined(axes):
        ranks = [rank + step for rank in ranks for step in range(0, length * stride, stride)]
    return ranks


def _joined(axes: Sequence[_Axis]) -> list[_Axis]:
    """Merge neighbouring axes without a gap between them: most lists of ranks are then one range, which is fast."""
    joined: list[_Axis] = []
    for axis in axes:
        if joined and joined[-1].stride == axis.length * axis.stride:
            axis = axis._replace(length=joined.pop().length * axis.length)
        joined.append(axis)
    return joined


def _cut(groups: list[list[int]], parts: int) -> list[list[list[int]]]:
    """Cut a list into this many lists of equal length."""
    size = len(groups) // parts
    return [groups[start : start + size] for start in range(0, len(groups), size)]


def _dense_ranks(layout: PipelineLayout, stage: int) -> _StageRanks:
    grid = layout.stages[stage]
    return _stage_ranks(layout, stage, dp=(grid.dp, layout.dp_stride(stage)), cp=(grid.cp, grid.tp), tp=(grid.tp, 1))


def _expert_ranks(layout: PipelineLayout, stage: int) -> _StageRanks:
    """Factor a stage's ranks for the experts: expert tp fastest, then ep, then expert dp."""
    grid, expert = layout.stages[stage], layout.experts[stage]
    block = expert.tp * expert.ep
    # With as many expert replicas as dense ones both are the same blocks, which need not be contiguous in the world.
    stride = layout.dp_stride(stage) if block == grid.tp * grid.cp else block
    return _stage_ranks(layout, stage, dp=(expert.dp, stride), ep=(expert.ep, expert.tp), tp=(expert.tp, 1))


def _stage_ranks(layout: PipelineLayout, stage: int, **axes: tuple[int, int]) -> _StageRanks:
    kept = tuple(_Axis(name, *axis) for name, axis in axes.items() if axis[0] > 1 or name == "tp")
    return _StageRanks(layout.leader(stage), kept)


def rank_generators(layout: PipelineLayout) -> tuple[LayoutRankGenerator, LayoutRankGenerator]:
    """Return the dense and the expert generator; they are one object if the experts have the same sizes.

    Errors are those of :class:`LayoutRankGenerator`.
    """
    dense, expert = LayoutRankGenerator(layout), LayoutRankGenerator(layout, expert=True)
    return dense, dense if dense.stages == expert.stages else expert
