"""An N-dimensional grid of ranks with the public API of Megatron's HyperCommGrid, without torch.

The grid enumerates rank lists by integer arithmetic. Creating a process group from such lists is injected
(``make_groups``), so the same class plans on a laptop and runs in a job. Exception types are those of HyperCommGrid
(ConfigError is a ValueError), so callers written for one work with the other.

`vtp_plugin.plan.layout.stage_grid` makes a grid of stages that differ out of such grids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from vtp_plugin.errors import ConfigError

GroupT = TypeVar("GroupT")

_BASE = "base"


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


class RankGrid(Generic[GroupT]):
    """A rectangle of ranks with named dimensions, and the process groups made along them.

    It covers the ranks ``rank_offset .. rank_offset + size - 1``. The first dimension changes fastest, as in the order
    argument of Megatron's ``initialize_model_parallel``. For each combination of dimensions a group is created at most
    once. ``create_pg`` is collective: every rank of the world calls it, in the same order, members or not.

    Attributes:
        shape: length of every dimension.
        dim_names: name of every dimension.
        rank_offset: first rank of the grid.
        size: number of ranks of the grid.
        backend: backend that is handed to ``make_groups``; None means its default.

    >>> grid = RankGrid([2, 2, 2], ["tp", "cp", "dp"], rank_offset=1)
    >>> grid.get_rank_enum("cp")
    [[1, 3], [2, 4], [5, 7], [6, 8]]
    >>> grid.get_rank_enum(["tp", "dp"])
    [[1, 2, 5, 6], [3, 4, 7, 8]]
    """

    def __init__(
        self,
        shape: Sequence[int],
        dim_names: Sequence[str],
        rank_offset: int = 0,
        backend: str | None = None,
        *,
        world_size: int | None = None,
        rank: int | None = None,
        make_groups: Callable[[list[list[int]], str | None, Mapping[str, object]], GroupT | None] | None = None,
        destroy_group: Callable[[GroupT], None] | None = None,
    ) -> None:
        """Describe the grid; nothing is created.

        Args:
            shape: length of every dimension.
            dim_names: name of every dimension, all different.
            rank_offset: first rank of the grid.
            backend: backend that is handed to ``make_groups``.
            world_size: number of ranks of the world, to check that the grid fits; None skips the check.
            rank: the rank of this process, for :meth:`is_current_rank_in_grid`; None in a pure plan.
            make_groups: creates the groups of all the given rank lists and returns the one that this process is in,
                or None. It gets the lists, the backend and the keyword arguments of ``create_pg``.
            destroy_group: ends a group that this process is in.

        Raises:
            ConfigError: names and lengths do not match, or a length, a name or the offset is invalid.
            RuntimeError: the grid is larger than the rest of the world.
        """
        self._views = {_BASE: _make_view(_BASE, shape, dim_names)}
        if rank_offset < 0:
            raise ConfigError(f"rank_offset must not be negative, got {rank_offset}: give the grid's first rank")
        self.shape = list(shape)
        self.dim_names = list(dim_names)
        self.rank_offset = rank_offset
        self.size = math.prod(shape)
        self.backend = backend
        if world_size is not None and rank_offset + self.size > world_size:
            raise RuntimeError(
                f"grid {self.shape} at rank offset {rank_offset} needs ranks up to {rank_offset + self.size - 1}, "
                f"but the world has {world_size}: make the grid smaller or start more processes"
            )
        self._rank = rank
        self._make_groups = make_groups
        self._destroy_group = destroy_group
        self._groups: dict[tuple[str, tuple[str, ...]], GroupT | None] = {}

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
        base = self._views[_BASE]
        # Dimension by dimension is enough: equal lists mean equal length and stride, so combinations agree as well.
        for dim in view.shared_dims:
            if base.enumerate(base.sorted_dims(dim), 0) != view.enumerate(view.sorted_dims(dim), 0):
                raise ConfigError(
                    f"shared dimension {dim!r} forms other groups in view {name!r} than in the base view: "
                    "do not share it, or order the dimensions alike"
                )
        self._views[name] = view

    def create_pg(self, dims: str | Sequence[str], *, view: str | None = None, **kwargs: object) -> GroupT | None:
        """Create the groups along ``dims`` and return the one that this process is in (None if in none).

        Args:
            dims: one dimension or several, in any order.
            view: a registered view; None is the grid itself.
            kwargs: handed to ``make_groups`` (for torch: timeout, pg_options, group_desc).

        Raises:
            ConfigError: a dimension is unknown.
            KeyError: the view is unknown, or the groups exist already: the options of the first call would win
                silently.
            RuntimeError: the grid was made without ``make_groups``.
        """
        owner, ordered = self._owner(dims, view)
        if (owner.name, ordered) in self._groups:
            raise KeyError(f"process group {dims} of view {owner.name!r} has already been created: use get_pg")
        if self._make_groups is None:
            raise RuntimeError("this grid only plans: give make_groups to create process groups")
        group = self._make_groups(owner.enumerate(ordered, self.rank_offset), self.backend, kwargs)
        self._groups[owner.name, ordered] = group
        return group

    def get_pg(self, dims: str | Sequence[str], *, view: str | None = None) -> GroupT | None:
        """Return the group that :meth:`create_pg` made for the same dimensions.

        Raises:
            ConfigError: a dimension is unknown.
            KeyError: the view is unknown or the group has not been created.
        """
        owner, ordered = self._owner(dims, view)
        if (owner.name, ordered) not in self._groups:
            raise KeyError(f"process group {dims} of view {owner.name!r} has not been created: call create_pg first")
        return self._groups[owner.name, ordered]

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

    def is_current_rank_in_grid(self) -> bool:
        """Whether this process's rank belongs to the grid.

        Raises:
            RuntimeError: the grid was made without a rank.
        """
        if self._rank is None:
            raise RuntimeError("this grid only plans: give rank to ask whether it is in the grid")
        return self.contains(self._rank)

    def contains(self, rank: int) -> bool:
        """Whether ``rank`` belongs to the grid."""
        return self.rank_offset <= rank < self.rank_offset + self.size

    def destroy(self) -> None:
        """End every group that this process is in, each once, and forget all groups, so they can be created again."""
        mine = {id(group): group for group in self._groups.values() if group is not None}
        self._groups.clear()
        for group in mine.values():
            if self._destroy_group is not None:
                self._destroy_group(group)

    def _gen_rank_enum(self, dims: Sequence[str]) -> list[list[int]]:
        """Enumerate ``dims`` in the given order, the last one fastest.

        Not sorted like :meth:`get_rank_enum`. Megatron's bridge and multi-module communicators call this name on the
        grid they are given.
        """
        return self._views[_BASE].enumerate(dims, self.rank_offset)

    def _view(self, name: str | None) -> _View:
        chosen = _BASE if name is None else name
        if chosen not in self._views:
            raise KeyError(f"view {chosen!r} is not registered: choose from {sorted(self._views)}")
        return self._views[chosen]

    def _owner(self, dims: str | Sequence[str], view: str | None) -> tuple[_View, tuple[str, ...]]:
        """Return the view that stores the group along ``dims``, and its sorted dimensions.

        A view's shared dimensions are the base's groups: they are created and destroyed once.
        """
        chosen = self._view(view)
        ordered = chosen.sorted_dims(dims)
        if all(dim in chosen.shared_dims for dim in ordered):
            chosen = self._views[_BASE]
            ordered = chosen.sorted_dims(ordered)
        return chosen, ordered


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
