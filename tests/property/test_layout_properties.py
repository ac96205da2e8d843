"""Laws of layouts, groups and grids over random sizes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from tests.expected.group_order import model_parallel_groups
from tests.expected.of_megatron import hyper_comm_grid
from vtp_plugin.plan.layout.grids import ExpertGrid
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout, RankOrder, StageGrid
from vtp_plugin.plan.layout.replica_map import share_of_experts, share_of_model
from vtp_plugin.plan.layout.stage_grid import LayoutRankGenerator, RankGrid

SMALL = st.integers(1, 4)


@st.composite
def layouts(draw: st.DrawFn) -> PipelineLayout:
    """Layouts with one cp and dp for all stages, both orders."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    cp, dp = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    order = draw(st.sampled_from(RankOrder))
    return PipelineLayout.from_sizes(sizes, world_size=sum(sizes) * cp * dp, cp=cp, order=order)


@st.composite
def free_layouts(draw: st.DrawFn) -> PipelineLayout:
    """Layouts in which every stage has its own tp, cp and dp size, besides those of :func:`layouts`."""
    grids = draw(st.lists(st.builds(StageGrid, SMALL, SMALL, SMALL), min_size=1, max_size=5))
    return draw(st.one_of(layouts(), st.just(PipelineLayout(tuple(grids)))))


@given(free_layouts())
def test_coord_and_rank_of_are_inverse(layout: PipelineLayout) -> None:
    for rank in range(layout.world_size):
        coord = layout.coord(rank)
        assert layout.rank_of(coord.stage, coord.tp_rank, coord.cp_rank, coord.dp_rank) == rank
        assert rank in layout.stage_ranks(coord.stage)


@given(free_layouts())
def test_stages_partition_the_world_and_rise(layout: PipelineLayout) -> None:
    stages = [layout.stage_ranks(stage) for stage in range(layout.num_stages)]
    assert sorted(itertools.chain(*stages)) == list(range(layout.world_size))
    assert all(list(ranks) == sorted(ranks) for ranks in stages)
    assert [len(ranks) for ranks in stages] == [grid.size for grid in layout.stages]
    if layout.order is RankOrder.STAGE_MAJOR:
        assert list(itertools.chain(*stages)) == list(range(layout.world_size))


@given(free_layouts())
def test_tp_ranks_are_neighbours_and_start_with_the_leader(layout: PipelineLayout) -> None:
    for stage, grid in enumerate(layout.stages):
        for dp_rank, cp_rank in itertools.product(range(grid.dp), range(grid.cp)):
            ranks = layout.tp_ranks(stage, dp_rank, cp_rank)
            leader = layout.leader(stage, dp_rank, cp_rank)
            assert ranks == tuple(range(leader, leader + grid.tp))


@given(free_layouts())
def test_pipeline_groups(layout: PipelineLayout) -> None:
    seen: set[int] = set()
    for dp_rank, cp_rank in layout.replicas:
        for t in range(layout.num_pipeline_groups):
            ranks = layout.pipeline_group(t, dp_rank, cp_rank)
            assert list(ranks) == sorted(ranks)
            seen.update(ranks)
            places = [layout.coord(rank) for rank in ranks]
            assert [place.stage for place in places] == list(range(layout.num_stages))
            assert all(
                (place.tp_rank, place.cp_rank, place.dp_rank) == (t % grid.tp, cp_rank % grid.cp, dp_rank % grid.dp)
                for place, grid in zip(places, layout.stages, strict=True)
            )
    assert seen == set(range(layout.world_size)), "a rank is in no pipeline group"
    assert all(layout.pipeline_group_of(rank)[layout.stage_of(rank)] == rank for rank in range(layout.world_size))


@given(free_layouts())
def test_every_replica_holds_every_shard_of_the_model_once(layout: PipelineLayout) -> None:
    shards = sorted((stage, tp_rank) for stage, grid in enumerate(layout.stages) for tp_rank in range(grid.tp))
    for replica in layout.replicas:
        places = [layout.coord(rank) for rank in layout.model_ranks(*replica)]
        assert [(place.stage, place.tp_rank) for place in places] == shards


@given(layouts())
def test_model_ranks_partition_the_world(layout: PipelineLayout) -> None:
    replicas = [layout.model_ranks(*replica) for replica in layout.replicas]
    assert sorted(itertools.chain(*replicas)) == list(range(layout.world_size))
    assert {layout.leader(0), layout.rank_of(layout.num_stages - 1, 0)} <= set(replicas[0])
    assert min(itertools.chain(*replicas)) == layout.leader(0) == 0
    assert layout.writer_rank == layout.world_size - 1


@given(free_layouts(), st.sets(st.sampled_from(["tp", "gtp_remat", "cp", "dp"]), min_size=1))
def test_groups_without_pp_partition_the_world_inside_stages(layout: PipelineLayout, axes: set[str]) -> None:
    groups = LayoutRankGenerator(layout).get_ranks("-".join(axes))
    assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
    size_of = {"tp": "tp", "cp": "cp", "dp": "dp"}
    for group in groups:
        (stage,) = {layout.stage_of(rank) for rank in group}
        grid = layout.stages[stage]
        assert len(group) == math.prod(getattr(grid, size_of[axis]) for axis in axes if axis in size_of)
        for axis in {"tp", "cp", "dp"} - axes:
            assert len({getattr(layout.coord(rank), f"{axis}_rank") for rank in group}) == 1


@given(free_layouts())
def test_pipeline_groups_come_as_the_layout_says_and_a_ranks_first_is_its_own(layout: PipelineLayout) -> None:
    wanted = [
        list(layout.pipeline_group(t, *replica))
        for replica in layout.replicas
        for t in range(layout.num_pipeline_groups)
    ]
    # Megatron asks both generators and compares.
    for is_expert in (False, layout.order is RankOrder.STAGE_MAJOR):
        groups = LayoutRankGenerator(layout, expert=is_expert).get_ranks("pp")
        assert groups == wanted
    # The last one written is the first in order.
    first = {rank: ranks for ranks in reversed(wanted) for rank in ranks}
    assert first == {rank: list(layout.pipeline_group_of(rank)) for rank in range(layout.world_size)}


@given(free_layouts())
def test_model_groups_partition_the_world(layout: PipelineLayout) -> None:
    groups = LayoutRankGenerator(layout).get_ranks("tp-gtp_remat-pp")
    if layout.has_equal_replicas:
        assert groups == [list(layout.model_ranks(*replica)) for replica in layout.replicas]
    else:
        assert (
            groups == LayoutRankGenerator(layout, expert=True).get_ranks("tp-ep-pp") == [list(range(layout.world_size))]
        )


@given(layouts(), st.integers(1, 6))
def test_expert_groups_cover_every_stage(layout: PipelineLayout, ep: int) -> None:
    cp, dp = layout.stages[0].cp, layout.stages[0].dp
    if cp * dp % ep or (layout.order is RankOrder.REPLICA_MAJOR and layout.num_stages > 1 and ep != cp):
        return
    expert = LayoutRankGenerator(layout.with_experts(ep), expert=True)
    for token in ("tp", "ep", "dp", "tp-ep", "tp-ep-pp"):
        assert sorted(itertools.chain(*expert.get_ranks(token))) == list(range(layout.world_size)), token
    assert expert.get_ranks("tp") == LayoutRankGenerator(layout).get_ranks("tp")
    assert expert.get_ranks("pp") == LayoutRankGenerator(layout).get_ranks("pp")
    assert {len(group) for group in expert.get_ranks("tp-ep-pp")} == {sum(layout.tp_sizes) * ep}
    last = model_parallel_groups(layout.with_experts(ep))[-1]
    assert sorted(last.ranks) == list(range(layout.world_size))


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[int], list[str], list[str], int]:
    """Shape, names, some of the names in any order, and a rank offset."""
    shape = draw(st.lists(SMALL, min_size=1, max_size=5))
    names = draw(st.permutations(["tp", "cp", "ep", "dp", "pp"]))[: len(shape)]
    dims = draw(st.permutations(names))[: draw(st.integers(0, len(names)))]
    return shape, list(names), list(dims), draw(st.integers(0, 50))


@given(grids())
def test_grid_enumerates_as_megatrons(case: tuple[list[int], list[str], list[str], int]) -> None:
    shape, names, dims, offset = case
    with mock.patch.dict("os.environ", WORLD_SIZE="100000"):
        theirs = hyper_comm_grid()(shape, names, offset)
    ours: RankGrid = RankGrid(shape, names, offset)
    assert ours.get_rank_enum(dims) == theirs.get_rank_enum(dims)
    # Megatron's communicators call this one on a grid, with the dimensions in an order of their own.
    assert ours._gen_rank_enum(dims) == theirs._gen_rank_enum(dims)
    for name in names:
        assert ours.get_rank_enum(name) == theirs.get_rank_enum(name)
    assert (ours.size, ours.shape, ours.dim_names) == (theirs.size, theirs.shape, theirs.dim_names)
    assert sorted(itertools.chain(*ours.get_rank_enum(dims))) == list(range(offset, offset + ours.size))


@st.composite
def expert_layouts(draw: st.DrawFn) -> PipelineLayout:
    """Free layouts whose stages spread their experts as they like."""
    layout = draw(free_layouts().filter(lambda layout: layout.order is RankOrder.STAGE_MAJOR))
    grids = []
    for stage in layout.stages:
        sizes = [(tp, ep) for tp in range(1, stage.size + 1) for ep in range(1, stage.size + 1)]
        tp, ep = draw(st.sampled_from([(stage.tp, 1), *(pair for pair in sizes if stage.size % math.prod(pair) == 0)]))
        grids.append(ExpertGrid(tp=tp, ep=ep, dp=stage.size // (tp * ep)))
    return dataclasses.replace(layout, experts=tuple(grids))


@given(expert_layouts())
def test_the_ranks_of_a_place_are_true(layout: PipelineLayout) -> None:
    """All of a sum are counted once; lists that are equal somewhere are so everywhere, and count the same ranks."""
    world = range(layout.world_size)
    dense, experts = ([place(layout, rank) for rank in world] for place in (share_of_model, share_of_experts))
    for places, widths in (
        (dense, [grid.tp for grid in layout.stages]),
        (experts, [grid.tp * grid.ep for grid in layout.experts]),
    ):
        assert all(place.ranks[place.index] == rank for rank, place in enumerate(places))
        counted = [layout.stage_of(rank) for rank, place in enumerate(places) if place.replica == 0]
        assert [counted.count(stage) for stage in range(layout.num_stages)] == widths
        assert all([*map(layout.stage_of, place.ranks)] == sorted(counted) for place in places)
    is_same = [a.ranks == b.ranks for a, b in zip(dense, experts, strict=True)]
    assert len(set(is_same)) == 1
    assert not is_same[0] or dense == experts
