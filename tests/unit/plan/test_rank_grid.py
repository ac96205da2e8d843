"""RankGrid: views and errors beside Megatron's HyperCommGrid."""

from __future__ import annotations

import pytest

from tests.expected.of_megatron import hyper_comm_grid
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.layout.stage_grid import RankGrid


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
    with pytest.raises(ConfigError, match="'xp' is not in view"):
        RankGrid([2], ["tp"]).get_rank_enum("xp")
    with pytest.raises(ConfigError, match="repeat"):
        RankGrid([2], ["tp"]).get_rank_enum(["tp", "tp"])
    with pytest.raises(KeyError, match="not registered"):
        RankGrid([2], ["tp"]).get_rank_enum("tp", view="other")


def test_a_grid_keeps_its_own_copy_of_the_shape() -> None:
    shape, names = [2, 2], ["tp", "dp"]
    grid = RankGrid(shape, names)
    shape[0], names[0] = 7, "x"
    assert (grid.shape, grid.dim_names, grid.size, grid.rank_offset) == ([2, 2], ["tp", "dp"], 4, 0)
