"""Grids whose stages differ: with equal stages the lists of Megatron's grid, with others those of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest

from tests.expected.of_megatron import hyper_comm_grid
from tests.support.pool import run_code
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.layout.stage_grid import StageRanks

NAMES = ["tp", "cp", "dp", "pp"]
EXPERT = ["expt_tp", "ep", "expt_dp", "pp"]


def subsets(names: Sequence[str]) -> list[list[str]]:
    return [list(some) for count in range(1, 5) for some in combinations(names, count)]


@pytest.mark.parametrize("sizes", [(2, 1, 2), (2, 2, 3), (1, 1, 1), (4, 1, 1)])
def test_equal_stages_have_the_lists_of_megatrons_grid(monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "64")
    tp, cp, dp = sizes
    theirs = hyper_comm_grid()([*sizes, 3], NAMES, 5)
    ours = StageRanks([sizes] * 3, 5)
    assert (ours.shape_at(5), ours.size, ours.dim_names) == (theirs.shape, theirs.size, theirs.dim_names)
    for dims in subsets(NAMES):
        assert ours.get_rank_enum(dims) == theirs.get_rank_enum(dims), dims
    shape = [tp * cp, dp, 1, 3]
    theirs.register_view("expert", shape, EXPERT, ["pp"])
    ours.register_view("expert", shape, EXPERT, ["pp"])
    for dims in subsets(EXPERT):
        assert ours.get_rank_enum(dims, view="expert") == theirs.get_rank_enum(dims, view="expert"), dims


def test_other_stages_have_the_lists_of_each() -> None:
    grid = StageRanks([(1, 2, 1), (2, 2, 1)], 3)
    assert [grid.shape_at(rank) for rank in (0, 3, 5)] == [[1, 2, 1, 2], [1, 2, 1, 2], [2, 2, 1, 2]]
    assert grid.get_rank_enum("tp") == [[3], [4], [5, 6], [7, 8]]
    assert grid.get_rank_enum("pp") == [[3, 5], [3, 6], [4, 7], [4, 8]]
    assert grid.get_rank_enum(["tp", "pp"]) == [[3, 5, 6], [4, 7, 8]]
    first, last = (grid.boundary(is_last=is_last) for is_last in (False, True))
    assert (first.shape, first.rank_offset, last.shape, last.rank_offset) == ([1, 2, 1, 1], 3, [2, 2, 1, 1], 5)
    grid.register_view("expert", [[1, 1, 2, 2], [2, 1, 2, 2]], EXPERT, ["pp"])
    assert grid.get_rank_enum("expt_dp", view="expert") == [[3, 4], [5, 7], [6, 8]]
    assert grid.get_rank_enum(["expt_tp", "ep", "pp"], view="expert") == [[3, 5, 6], [4, 7, 8]]
    assert grid.stored_under("pp", "expert") == grid.stored_under(["pp"], None)
    with pytest.raises(ConfigError, match=r"the stages have 1, 4 of them; give all stages as many"):
        grid.register_view("wide", [[1, 1, 2, 2], [4, 1, 1, 2]], EXPERT, ["pp"])
        grid.get_rank_enum(["expt_dp", "pp"], view="wide")


def test_stages_with_different_replicas_have_one_model_group() -> None:
    grid = StageRanks([(1, 1, 2), (2, 2, 1), (1, 2, 2)], 3)
    assert grid.describe() == "tp 1,2,1 cp 1,2,2 dp 2,1,2 on ranks 3 to 12"
    assert grid.get_rank_enum("dp") == [[3, 4], [5], [6], [7], [8], [9, 11], [10, 12]]
    assert grid.get_rank_enum(["dp", "cp"]) == [[3, 4], [5, 7], [6, 8], [9, 10, 11, 12]]
    assert grid.get_rank_enum(["tp", "pp"]) == grid.get_rank_enum(["tp", "cp", "dp", "pp"]) == [list(range(3, 13))]
    assert grid.place(["tp", "cp", "dp", "pp"], 3) is None
    places = [grid.place(["tp", "pp"], rank) for rank in range(3, 13)]
    assert all(place is not None and place.size == 4 for place in places)
    found = [(place.index, place.replica) for place in places if place is not None]
    assert found == [(0, 0), (0, 1), (1, 0), (2, 0), (1, 1), (2, 1), (3, 0), (3, 1), (3, 2), (3, 3)]
    # Every pipeline group has a rank of each stage, and every rank is in one.
    groups = grid.get_rank_enum("pp")
    assert {rank for group in groups for rank in group} == set(range(3, 13))
    assert all([grid.layout.stage_of(rank) for rank in group] == [0, 1, 2] for group in groups)
    # Two replicas of experts beside one: together as many ranks, so a list for each.
    grid.register_view("expert", [[1, 1, 2, 3], [2, 2, 1, 3], [1, 2, 2, 3]], EXPERT, ["pp"])
    place = grid.place(["expt_tp", "ep", "pp"], 12, view="expert")
    assert place is not None and (place.index, place.size, place.replica) == (6, 7, 1)


@pytest.mark.parametrize(
    ("stages", "offset", "line"),
    [
        ([(1, 1)], 0, r"a stage \(1, 1\); give \(tp, cp, dp\) of every stage"),
        ([(1, 1, 0)], 0, "the dp size of a stage"),
        ([(1, 1, 1)], -1, "rank_offset must not be negative"),
        ([], 0, "at least one stage"),
    ],
)
def test_wrong_stages(stages: list[tuple[int, ...]], offset: int, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        StageRanks(stages, offset)


@pytest.mark.parametrize(
    ("shape", "shared", "line"),
    [
        ([[1, 1, 1, 2], [1, 1, 1, 2]], ["pp"], "give a shape with the same product"),
        ([[1, 1, 1, 2]], ["pp"], "give one list of 4 lengths for every one of 2 stages"),
        ([[1, 1, 1, 3], [2, 1, 1, 3]], ["pp"], "has 3 stages, the grid has 2"),
        ([[1, 1, 1, 2], [2, 1, 1, 2]], [], "must share pp"),
    ],
)
def test_wrong_views(shape: list[list[int]], shared: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        StageRanks([(1, 1, 1), (2, 1, 1)]).register_view("expert", shape, EXPERT, shared)


def test_it_needs_the_plugins_communicator() -> None:
    hyper_comm_grid()
    run_code(
        """
    from vtp_plugin.bridge import StageCommGrid
    from vtp_plugin.errors import ConfigError

    try:
        StageCommGrid([(1, 1, 1)])
    except ConfigError as error:
        assert "call vtp_plugin.apply(bridges=True) first" in str(error)
    else:
        raise AssertionError("not refused")
    """
    )


def test_several_chunks_a_stage_are_refused() -> None:
    hyper_comm_grid()
    run_code(
        """
    import torch
    import vtp_plugin
    from tests.support.pool import init_gloo
    from vtp_plugin.errors import ConfigError

    vtp_plugin.apply(device="cpu", bridges=True)
    rank = init_gloo()
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.transformer.transformer_config import TransformerConfig
    from vtp_plugin.bridge import StageCommGrid

    grid = StageCommGrid([(1, 1, 1), (1, 1, 1)])
    grid.create_pg("tp")
    config = TransformerConfig(
        num_layers=4,
        hidden_size=4,
        num_attention_heads=1,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
    )
    communicator = P2PCommunicator(grid.create_pg("pp"), config)
    try:
        if rank == 0:
            communicator.send_forward(torch.zeros(1, 1, 4), False)
        else:
            communicator.recv_forward((1, 1, 4), False)
    except ConfigError as error:
        assert "virtual_pipeline_model_parallel_size=2 in a module with stages of tp 1,1" in str(error)
    else:
        raise AssertionError("not refused")
    """,
        world_size=2,
    )
