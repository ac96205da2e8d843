"""Which rank stands where: replicas, groups, and the grid of a stage.

Rank lists of all process groups of a pipeline.

Creating a process group is collective over the world, so every rank must create the same groups in the same order: the
order of the lists is a part of the plan. :class:`LayoutRankGenerator` replaces the rank generator of Megatron's
``initialize_model_parallel`` for stages of different sizes; with a uniform layout it gives the same lists.

An N-dimensional grid of ranks enumerates rank lists as Megatron's HyperCommGrid does, by integer arithmetic. Exception
types are those of HyperCommGrid (ConfigError is a ValueError), so callers written for one work with the other.

A grid of ranks whose pipeline stages have sizes of their own, with the interface of Megatron's HyperCommGrid.

It enumerates rank lists by arithmetic, as :class:`~vtp_plugin.plan.layout.stage_grid.RankGrid` does for a rectangle.
Groups inside a stage are those of the stage's own rectangle. A pipeline group has one rank of every stage. If sizes
differ, a rank of a narrow stage is in several of them; its own is the first.

A group through all stages that unites ranks of each, such as along `tp` and `pp`, holds the module once. If the stages
have different numbers of replicas there is no such list of ranks for each: then the list is the whole module, and
:meth:`StageRanks.place` says which of its ranks are counted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.layout.grids import check_replica_major
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout, RankOrder, StageGrid
from vtp_plugin.plan.layout.replica_map import RankShare

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


_BASE_OF_GRID = "base"


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """One factorization of the grid's ranks into named dimensions, the first dimension changing fastest."""

    name: str
    shape: tuple[int, ...]
    dim_names: tuple[str, ...]
    shared_dims: tuple[str, ...] = ()

    def sorted_dims(self, dims: str | Sequence[str]) -> tuple[str, ...]:
        """Return the requested dimensions from the slowest to the fastest.

        Raises:
            ConfigError: a dimension is unknown or named twice.
        """
        names = (dims,) if isinstance(dims, str) else tuple(dims)
        for name in names:
            if name not in self.dim_names:
                raise ConfigError(f"dimension {name!r} is not in view {self.name!r}: choose from {self.dim_names}")
        if len(set(names)) != len(names):
            raise ConfigError(f"dimensions {names} repeat a name: name each dimension once")
        return tuple(name for name in reversed(self.dim_names) if name in names)

    def enumerate(self, dims: Sequence[str], first_rank: int) -> list[list[int]]:
        """Return the rank lists over ``dims`` (slowest first), one for every combination along the other dimensions."""
        others = [name for name in reversed(self.dim_names) if name not in dims]
        inside = self._offsets(dims)
        return [[first_rank + start + offset for offset in inside] for start in self._offsets(others)]

    def _offsets(self, dims: Sequence[str]) -> list[int]:
        """Return the rank offsets along ``dims``, the last of them changing fastest."""
        offsets = [0]
        for name in dims:
            index = self.dim_names.index(name)
            stride = math.prod(self.shape[:index])
            offsets = [offset + stride * i for offset in offsets for i in range(self.shape[index])]
        return offsets


class RankGrid:
    """A rectangle of ranks with named dimensions.

    It covers the ranks ``rank_offset .. rank_offset + size - 1``. The first dimension changes fastest, as in the order
    argument of Megatron's ``initialize_model_parallel``.

    Attributes:
        shape: length of every dimension.
        dim_names: name of every dimension.
        rank_offset: first rank of the grid.
        size: number of ranks of the grid.

    >>> grid = RankGrid([2, 2, 2], ["tp", "cp", "dp"], rank_offset=1)
    >>> grid.get_rank_enum("cp")
    [[1, 3], [2, 4], [5, 7], [6, 8]]
    >>> grid.get_rank_enum(["tp", "dp"])
    [[1, 2, 5, 6], [3, 4, 7, 8]]
    """

    def __init__(self, shape: Sequence[int], dim_names: Sequence[str], rank_offset: int = 0) -> None:
        """Describe the grid.

        Args:
            shape: length of every dimension.
            dim_names: name of every dimension, all different.
            rank_offset: first rank of the grid.

        Raises:
            ConfigError: names and lengths do not match, or a length, a name or the offset is invalid.
        """
        self._views = {_BASE_OF_GRID: _make_view(_BASE_OF_GRID, shape, dim_names)}
        if rank_offset < 0:
            raise ConfigError(f"rank_offset must not be negative, got {rank_offset}: give the grid's first rank")
        self.shape = list(shape)
        self.dim_names = list(dim_names)
        self.rank_offset = rank_offset
        self.size = math.prod(shape)

    def register_view(
        self, name: str, shape: Sequence[int], dim_names: Sequence[str], shared_dims: Sequence[str] | None = None
    ) -> None:
        """Add another factorization of the same ranks, to be used through ``view=name``.

        Args:
            name: name of the view; "base" is the grid itself.
            shape: length of every dimension; the product is the grid's size.
            dim_names: name of every dimension.
            shared_dims: dimensions whose groups the view shares with the base instead of making its own.

        Raises:
            ConfigError: the name is taken, the shape does not fit, or a shared dimension enumerates other groups than
                in the base view.
        """
        if name in self._views:
            raise ConfigError(f"view {name!r} is already registered: choose another name")
        view = _make_view(name, shape, dim_names, shared_dims or ())
        if math.prod(view.shape) != self.size:
            raise ConfigError(
                f"view {name!r} of shape {list(shape)} has {math.prod(view.shape)} ranks, but the grid has "
                f"{self.size}: give a shape with the same product"
            )
        base = self._views[_BASE_OF_GRID]
        # Dimension by dimension is enough: equal lists mean equal length and stride, so combinations agree as well.
        for dim in view.shared_dims:
            if base.enumerate(base.sorted_dims(dim), 0) != view.enumerate(view.sorted_dims(dim), 0):
                raise ConfigError(
                    f"shared dimension {dim!r} forms other groups in view {name!r} than in the base view: "
                    "do not share it, or order the dimensions alike"
                )
        self._views[name] = view

    def get_rank_enum(self, dims: str | Sequence[str], *, view: str | None = None) -> list[list[int]]:
        """Return the rank lists that :meth:`create_pg` uses for the same dimensions.

        Inside a list and in the list of lists, earlier dimensions change faster. The lists are a partition of the
        grid's ranks.

        Raises:
            ConfigError: a dimension is unknown.
            KeyError: the view is unknown.
        """
        chosen = self._view(view)
        return chosen.enumerate(chosen.sorted_dims(dims), self.rank_offset)

    def shared_dims(self, view: str) -> frozenset[str]:
        """Return the dimensions whose groups a view shares with the base.

        Raises:
            KeyError: the view is unknown.
        """
        return frozenset(self._view(view).shared_dims)

    def _gen_rank_enum(self, dims: Sequence[str]) -> list[list[int]]:
        """Enumerate ``dims`` in the given order, the last one fastest.

        Not sorted like :meth:`get_rank_enum`. Megatron's bridge and multi-module communicators call this name on the
        grid they are given.
        """
        return self._views[_BASE_OF_GRID].enumerate(dims, self.rank_offset)

    def _view(self, name: str | None) -> _View:
        chosen = _BASE_OF_GRID if name is None else name
        if chosen not in self._views:
            raise KeyError(f"view {chosen!r} is not registered: choose from {sorted(self._views)}")
        return self._views[chosen]


def _make_view(name: str, shape: Sequence[int], dim_names: Sequence[str], shared_dims: Sequence[str] = ()) -> _View:
    """Check the parts of a view and freeze them."""
    if len(shape) != len(dim_names):
        raise ConfigError(f"shape {list(shape)} and names {list(dim_names)} differ in length: name every dimension")
    if len(set(dim_names)) != len(dim_names):
        raise ConfigError(f"view {name!r} repeats a name in {list(dim_names)}: name every dimension differently")
    if any(length < 1 for length in shape):
        raise ConfigError(f"view {name!r} has shape {list(shape)}: all lengths must be positive")
    if len(set(shared_dims)) != len(shared_dims):
        raise ConfigError(f"view {name!r} repeats a name in the shared dimensions {list(shared_dims)}: name each once")
    return _View(name=name, shape=tuple(shape), dim_names=tuple(dim_names), shared_dims=tuple(shared_dims))


_INSIDE = ("tp", "cp", "dp")
_NAMES = (*_INSIDE, "pp")
_BASE = "base"
_REPLICAS = frozenset({"cp", "dp", "expt_dp"})
"""Dimensions along which ranks hold the same weights, under the names that Megatron gives them."""


class StageRanks:
    """The ranks of a module's stages, and its rank lists along any dimensions. It creates no groups.

    Attributes:
        layout: the stages and their ranks.
        dim_names: `tp`, `cp`, `dp` and `pp`; the first changes fastest.

    >>> ranks = StageRanks([(1, 1, 1), (2, 1, 1)], rank_offset=4)
    >>> ranks.get_rank_enum("tp"), ranks.get_rank_enum("pp"), ranks.get_rank_enum(["tp", "pp"])
    ([[4], [5, 6]], [[4, 5], [4, 6]], [[4, 5, 6]])
    """

    def __init__(self, stages: Sequence[Sequence[int]], rank_offset: int = 0) -> None:
        """Describe the stages.

        Args:
            stages: tensor-, context- and data-parallel size of every stage.
            rank_offset: first rank.

        Raises:
            ConfigError: a stage has no three positive sizes.
        """
        for stage in stages:
            if len(stage) != len(_INSIDE):
                raise ConfigError(f"a stage {tuple(stage)}; give (tp, cp, dp) of every stage")
        if rank_offset < 0:
            raise ConfigError(f"rank_offset must not be negative, got {rank_offset}: give the grid's first rank")
        self.layout = PipelineLayout(tuple(StageGrid(*stage) for stage in stages), first_rank=rank_offset)
        self.dim_names = list(_NAMES)
        self._lists = LayoutRankGenerator(self.layout)
        self._stages: tuple[RankGrid, ...] = tuple(
            RankGrid([stage.tp, stage.cp, stage.dp], _INSIDE, self.layout.leader(index))
            for index, stage in enumerate(self.layout.stages)
        )
        self._names: dict[str, frozenset[str]] = {_BASE: frozenset(_NAMES)}

    @property
    def rank_offset(self) -> int:
        """First rank of the module."""
        return self.layout.first_rank

    @property
    def size(self) -> int:
        """Number of ranks of the module."""
        return self.layout.world_size

    def contains(self, rank: int) -> bool:
        """Whether a rank belongs to the module."""
        return self.rank_offset <= rank < self.rank_offset + self.size

    def shape_at(self, rank: int) -> list[int]:
        """Return the sizes that a rank sees: of its stage, and the number of stages; outside those of stage 0."""
        stage = self.layout.stages[self.layout.stage_of(rank) if self.contains(rank) else 0]
        return [stage.tp, stage.cp, stage.dp, self.layout.num_stages]

    def boundary(self, *, is_last: bool) -> RankGrid:
        """Return the first or the last stage as a grid of its own, of one stage."""
        index = self.layout.num_stages - 1 if is_last else 0
        stage = self.layout.stages[index]
        return RankGrid([stage.tp, stage.cp, stage.dp, 1], _NAMES, self.layout.leader(index))

    def register_view(
        self,
        name: str,
        shape: Sequence[int] | Sequence[Sequence[int]],
        dim_names: Sequence[str],
        shared_dims: Sequence[str] | None = None,
    ) -> None:
        """Add another factorization of the ranks of every stage, to be used through ``view=name``.

        Args:
            name: name of the view.
            shape: length of every dimension, `pp` included, one list for every stage; one flat list stands for all.
            dim_names: name of every dimension.
            shared_dims: dimensions whose groups are those of the base; `pp` must be among them.

        Raises:
            ConfigError: the name is taken, a shape does not fit its stage, or stages are cut differently.
        """
        flat = [length for length in shape if isinstance(length, int)]
        shapes = [flat] * len(self._stages) if flat else [list(one) for one in shape if not isinstance(one, int)]
        if name in self._names:
            raise ConfigError(f"view {name!r} is already registered: choose another name")
        shared = [*(shared_dims or ())]
        if "pp" not in dim_names or "pp" not in shared:
            raise ConfigError(f"view {name!r} of a grid of stages must share pp; add it to dim_names and shared_dims")
        if len(shapes) != len(self._stages) or any(len(one) != len(dim_names) for one in shapes):
            raise ConfigError(
                f"view {name!r} has the shape {list(shape)}: give one list of {len(dim_names)} lengths for every one "
                f"of {len(self._stages)} stages"
            )
        place = list(dim_names).index("pp")
        for stage, lengths in zip(self._stages, shapes, strict=True):
            if lengths[place] != len(self._stages):
                raise ConfigError(
                    f"view {name!r} has {lengths[place]} stages, the grid has {len(self._stages)}: give that number"
                )
            inside = [*zip(dim_names, lengths, strict=True)]
            del inside[place]
            names = [one for one, _ in inside]
            stage.register_view(name, [length for _, length in inside], names, [one for one in shared if one != "pp"])
        self._names[name] = frozenset(dim_names)

    def get_rank_enum(self, dims: str | Sequence[str], *, view: str | None = None) -> list[list[int]]:
        """Return the rank lists along some dimensions; of `pp` alone, the pipeline groups.

        Raises:
            ConfigError: a dimension is unknown, or the stages have no groups along `pp` and such dimensions.
            KeyError: the view is unknown.
        """
        names, chosen = self._named(dims, view)
        in_base = chosen == _BASE and (self.layout.has_equal_replicas or not {"tp", "pp"} <= names)
        if in_base or names == {"pp"}:
            return [list(ranks) for ranks in self._lists.get_ranks("-".join(name for name in _NAMES if name in names))]
        inside = self._inside(names, chosen)
        if "pp" not in names:
            return list(chain.from_iterable(inside))
        if self.place(dims, self.rank_offset, view=view) is not None:
            return [list(range(self.rank_offset, self.rank_offset + self.size))]
        return [sorted(chain.from_iterable(parts)) for parts in zip(*inside, strict=True)]

    def place(self, dims: str | Sequence[str], rank: int, *, view: str | None = None) -> RankShare | None:
        """Return a rank's share of a group through stages that have different numbers of such groups inside.

        Args:
            dims: dimensions of the group.
            rank: global rank of the module.
            view: a registered view.

        Returns:
            The share; None if the group is a plain list of ranks.

        >>> ranks = StageRanks([(2, 1, 1), (1, 1, 2)])
        >>> [ranks.place(["tp", "pp"], rank) for rank in (1, 3)]
        [RankShare(ranks=(0, 1, 2), index=1, replica=0), RankShare(ranks=(0, 1, 3), index=2, replica=1)]

        Raises:
            ConfigError: a dimension is unknown; or without it the ranks hold other weights, so that none counts for
                the others.
            KeyError: the view is unknown.
        """
        names, chosen = self._named(dims, view)
        if "pp" not in names or names == {"pp"} or (chosen == _BASE and self.layout.has_equal_replicas):
            return None
        inside = self._inside(names, chosen)
        counts = [len(groups) for groups in inside]
        if len(set(counts)) == 1:
            return None
        if others := sorted(self._names[chosen] - names - _REPLICAS):
            raise ConfigError(
                f"groups along {'-'.join(sorted(names))} of view {chosen!r}: the stages have "
                f"{', '.join(map(str, counts))} of them; give all stages as many, or add {', '.join(others)}"
            )
        stage = self.layout.stage_of(rank)
        replica = next(number for number, group in enumerate(inside[stage]) if rank in group)
        ranks = tuple(chain.from_iterable(groups[replica % len(groups)] for groups in inside))
        return RankShare(ranks, ranks.index(rank), replica)

    def _named(self, dims: str | Sequence[str], view: str | None) -> tuple[frozenset[str], str]:
        """Check the names of dimensions and of their view."""
        names = frozenset((dims,) if isinstance(dims, str) else dims)
        chosen = _BASE if view is None else view
        if chosen not in self._names:
            raise KeyError(f"view {chosen!r} is not registered: choose from {sorted(self._names)}")
        if unknown := sorted(names - self._names[chosen]):
            raise ConfigError(f"dimension {unknown[0]!r} is not in view {chosen!r}: choose from {self._names[chosen]}")
        return names, chosen

    def _inside(self, names: frozenset[str], view: str) -> list[list[list[int]]]:
        """List the groups along some dimensions inside every stage."""
        return [grid.get_rank_enum(sorted(names - {"pp"}), view=view) for grid in self._stages]

    def _gen_rank_enum(self, dims: Sequence[str]) -> list[list[int]]:
        """Enumerate under the name that Megatron's multi-module communicator calls; always sorted."""
        return self.get_rank_enum(dims)

    def stored_under(self, dims: str | Sequence[str], view: str | None) -> tuple[str, frozenset[str]]:
        """Name the groups along some dimensions: a view's shared dimensions are the base's groups."""
        names = frozenset((dims,) if isinstance(dims, str) else dims)
        chosen = _BASE if view is None else view
        if chosen == _BASE or names == {"pp"}:
            return _BASE, names
        if chosen not in self._names:
            raise KeyError(f"view {chosen!r} is not registered: choose from {sorted(self._names)}")
        shared = self._stages[0].shared_dims(chosen)
        return (_BASE if names <= shared | {"pp"} else chosen), names

    def describe(self) -> str:
        """Write the sizes for people: `tp 1,4,4 dp 2 on ranks 4 to 21`."""
        layout = self.layout
        rest = "".join(
            f" {name} {sizes[0] if len(set(sizes)) == 1 else ','.join(map(str, sizes))}"
            for name, sizes in (("cp", layout.cp_sizes), ("dp", layout.dp_sizes))
            if max(sizes) > 1
        )
        last = self.rank_offset + self.size - 1
        return f"tp {','.join(map(str, layout.tp_sizes))}{rest} on ranks {self.rank_offset} to {last}"


class Grid(Protocol):
    """What is read of Megatron's ``HyperCommGrid``."""

    dim_names: Sequence[str]
    shape: Sequence[int]
    rank_offset: int


def layout_of_grid(grid: Grid | StageRanks) -> PipelineLayout:
    """Return the stages of a module.

    Raises:
        ConfigError: the ranks of a stage do not follow each other.

    >>> from types import SimpleNamespace
    >>> grid = SimpleNamespace(dim_names=["tp", "dp", "pp"], shape=[2, 1, 2], rank_offset=4)
    >>> layout_of_grid(grid).tp_sizes, layout_of_grid(grid).leader(1)
    ((2, 2), 6)
    """
    if isinstance(grid, StageRanks):
        return grid.layout
    sizes = dict(zip(grid.dim_names, grid.shape, strict=True))
    used = [name for name in grid.dim_names if sizes[name] > 1]
    if sizes.get("pp", 1) > 1 and used != [name for name in _NAMES if name in used]:
        raise ConfigError(
            f"a grid with the dimensions {', '.join(used)}; a planned schedule needs the ranks of a stage next to each "
            "other: give the dimensions in the order tp, cp, dp, pp"
        )
    stage = StageGrid(*(sizes.get(name, 1) for name in _INSIDE))
    return PipelineLayout((stage,) * sizes.get("pp", 1), first_rank=grid.rank_offset)
