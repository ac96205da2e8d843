"""RankGrid: groups, views and errors with a recording factory, and bound to torch beside Megatron's HyperCommGrid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.expected.of_megatron import hyper_comm_grid
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.layout.stage_grid import RankGrid


class ProcessGroupGrid(RankGrid[dist.ProcessGroup]):
    """A grid of ranks whose ``create_pg`` makes torch process groups.

    ``create_pg`` is collective over the whole world and takes the keyword arguments of
    ``torch.distributed.new_subgroups_by_enumeration`` (timeout, pg_options, group_desc). A rank outside the grid gets
    None.
    """

    def __init__(
        self, shape: Sequence[int], dim_names: Sequence[str], rank_offset: int = 0, backend: str | None = None
    ) -> None:
        """Describe the grid in the initialised world.

        Args:
            shape: length of every dimension.
            dim_names: name of every dimension, the first one changing fastest over the ranks.
            rank_offset: first rank of the grid.
            backend: backend of the groups; None means the default group's.

        Raises:
            ConfigError: see :class:`~vtp_plugin.plan.layout.stage_grid.RankGrid`.
            RuntimeError: torch.distributed is not initialised, or the grid is larger than the rest of the world.
        """
        if not dist.is_initialized():
            raise RuntimeError("a process-group grid needs the world: call torch.distributed.init_process_group first")
        super().__init__(
            shape,
            dim_names,
            rank_offset,
            backend,
            world_size=dist.get_world_size(),
            rank=dist.get_rank(),
            make_groups=_make_groups,
            destroy_group=dist.destroy_process_group,
        )


def _make_groups(
    rank_lists: list[list[int]], backend: str | None, options: Mapping[str, Any]
) -> dist.ProcessGroup | None:
    """Create one group per rank list, in order, on every rank of the world, and return this rank's."""
    own, _ = dist.new_subgroups_by_enumeration(rank_lists, backend=backend, **options)
    return own if isinstance(own, dist.ProcessGroup) else None


class Factory:
    """Makes groups that are just the rank list of one rank, and records the calls."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.made: list[tuple[list[list[int]], str | None, dict[str, object]]] = []
        self.destroyed: list[list[int]] = []

    def make(self, ranks: list[list[int]], backend: str | None, options: Mapping[str, object]) -> list[int] | None:
        self.made.append((ranks, backend, dict(options)))
        return next((group for group in ranks if self.rank in group), None)

    def grid(self, rank_offset: int = 0) -> RankGrid[list[int]]:
        return RankGrid(
            [2, 3],
            ["tp", "dp"],
            rank_offset,
            "gloo",
            rank=self.rank,
            make_groups=self.make,
            destroy_group=self.destroyed.append,
        )


def test_groups_are_made_once_from_the_enumeration() -> None:
    factory = Factory(rank=3)
    grid = factory.grid()
    assert grid.create_pg("dp", group_desc="DP") == [1, 3, 5]
    assert factory.made == [([[0, 2, 4], [1, 3, 5]], "gloo", {"group_desc": "DP"})]
    assert grid.get_pg(["dp"]) == [1, 3, 5]
    with pytest.raises(KeyError, match="already been created"):
        grid.create_pg("dp")
    with pytest.raises(KeyError, match="call create_pg first"):
        grid.get_pg("tp")
    assert grid.create_pg(["dp", "tp"]) == grid.get_pg(["tp", "dp"]) == [0, 1, 2, 3, 4, 5]
    grid.destroy()
    assert factory.destroyed == [[1, 3, 5], [0, 1, 2, 3, 4, 5]]
    assert grid.create_pg("dp") == [1, 3, 5]


def test_a_rank_outside_the_grid_gets_no_group_and_destroys_none() -> None:
    factory = Factory(rank=0)
    grid = factory.grid(rank_offset=2)
    assert grid.create_pg("dp") is None
    assert grid.get_pg("dp") is None
    grid.destroy()
    assert factory.destroyed == []
    assert not grid.is_current_rank_in_grid()
    assert [rank for rank in range(10) if grid.contains(rank)] == [2, 3, 4, 5, 6, 7]


def test_views_share_groups_with_the_base() -> None:
    factory = Factory(rank=1)
    grid = factory.grid()
    grid.register_view("expert", [2, 3, 1], ["tp", "ep", "edp"], shared_dims=["tp"])
    tp = grid.create_pg("tp", view="expert")
    assert grid.get_pg("tp") is tp and grid.get_pg("tp", view="base") is tp
    assert grid.create_pg("ep", view="expert") == [1, 3, 5]
    with pytest.raises(KeyError):
        grid.create_pg("tp")
    with pytest.raises(KeyError, match="not registered"):
        grid.get_pg("tp", view="other")
    grid.destroy()
    assert len(factory.destroyed) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("base", [6], ["x"]), "already registered"),
        (("v", [6], ["x", "y"]), "differ in length"),
        (("v", [2, 3], ["x", "x"]), "repeats a name"),
        (("v", [0, 3], ["x", "y"]), "must be positive"),
        (("v", [2, 2], ["x", "y"]), "has 4 ranks, but the grid has 6"),
        (("v", [2, 3], ["tp", "y"], ["tp", "tp"]), "repeats a name in the shared"),
        (("v", [2, 3], ["x", "y"], ["x"]), "'x' is not in view 'base'"),
        (("v", [2, 3], ["x", "y"], ["tp"]), "'tp' is not in view 'v'"),
        (("v", [3, 2], ["dp", "y"], ["dp"]), "forms other groups"),
        (("v", [3, 2], ["dp", "tp"], ["dp", "tp"]), "forms other groups"),
    ],
)
def test_wrong_views_are_refused_as_by_megatron(
    arguments: tuple[object, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ConfigError, match=message):
        RankGrid([2, 3], ["tp", "dp"]).register_view(*arguments)  # pyright: ignore[reportArgumentType]
    grid = hyper_comm_grid()([2, 3], ["tp", "dp"])
    with pytest.raises(ValueError):
        grid.register_view(*arguments)


def test_wrong_grids_are_refused() -> None:
    with pytest.raises(ConfigError, match="differ in length"):
        RankGrid([2], ["tp", "dp"])
    with pytest.raises(ConfigError, match="rank_offset"):
        RankGrid([2], ["tp"], -1)
    with pytest.raises(RuntimeError, match="world has 4"):
        RankGrid([2, 2], ["tp", "dp"], 1, world_size=4)
    with pytest.raises(ConfigError, match="'xp' is not in view"):
        RankGrid([2], ["tp"]).get_rank_enum("xp")
    with pytest.raises(ConfigError, match="repeat"):
        RankGrid([2], ["tp"]).get_rank_enum(["tp", "tp"])
    with pytest.raises(RuntimeError, match="make_groups"):
        RankGrid([2], ["tp"]).create_pg("tp")
    with pytest.raises(RuntimeError, match="give rank"):
        RankGrid([2], ["tp"]).is_current_rank_in_grid()


def test_a_grid_keeps_its_own_copy_of_the_shape() -> None:
    shape, names = [2, 2], ["tp", "dp"]
    grid = RankGrid(shape, names)
    shape[0], names[0] = 7, "x"
    assert (grid.shape, grid.dim_names, grid.size, grid.rank_offset) == ([2, 2], ["tp", "dp"], 4, 0)


@pytest.fixture(params=[0, 3, 9])
def fake_rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One rank of a world of ten; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=10)
    yield request.param
    dist.destroy_process_group()


def test_the_bound_grid_acts_like_hyper_comm_grid(fake_rank: int) -> None:
    grids = [cls([2, 2, 2], ["tp", "cp", "dp"], 1) for cls in (hyper_comm_grid(), ProcessGroupGrid)]
    for grid in grids:
        grid.register_view("expert", [4, 2], ["etp", "dp"], ["dp"])
    for dims, view in (("tp", None), (["cp", "dp"], None), ("etp", "expert"), ("dp", "expert")):
        theirs, ours = (grid.create_pg(dims, view=view, group_desc="G") for grid in grids)
        assert (theirs is None) == (ours is None) == (not 1 <= fake_rank <= 8)
        if theirs is not None and ours is not None:
            assert dist.get_process_group_ranks(theirs) == dist.get_process_group_ranks(ours)
            assert ours.group_desc == "G"
        assert grids[1].get_pg(dims, view=view) is ours
    assert grids[1].is_current_rank_in_grid() == grids[0].is_current_rank_in_grid() == (1 <= fake_rank <= 8)
    mine = grids[1].get_pg("tp")
    grids[1].destroy()
    if mine is not None:
        with pytest.raises(KeyError):
            dist.get_process_group_ranks(mine)
    with pytest.raises(KeyError):
        grids[1].get_pg("tp")


def test_the_bound_grid_needs_a_world() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        ProcessGroupGrid([2], ["tp"])
