"""A grid of ranks whose pipeline stages have sizes of their own, with the interface of Megatron's HyperCommGrid.

It enumerates rank lists by arithmetic, as :class:`~vtp_plugin.plan.layout.rank_grid.RankGrid` does for a rectangle.
Groups inside a stage are those of the stage's own rectangle. A pipeline group has one rank of every stage. If sizes
differ, a rank of a narrow stage is in several of them; its own is the first.

A group through all stages that unites ranks of each, such as along `tp` and `pp`, holds the module once. If the stages
have different numbers of replicas there is no such list of ranks for each: then the list is the whole module, and
:meth:`StageRanks.place` says which of its ranks are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.layout.groups import LayoutRankGenerator
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout, StageGrid
from vtp_plugin.plan.layout.rank_grid import RankGrid
from vtp_plugin.plan.layout.share import RankShare

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
        self._stages: tuple[RankGrid[None], ...] = tuple(
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

    def boundary(self, *, is_last: bool) -> RankGrid[None]:
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
