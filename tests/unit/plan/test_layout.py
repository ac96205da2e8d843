"""Layouts by hand-written examples, and their groups against Megatron's own generator and start-up function."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.expected.group_order import GroupSpec, model_parallel_groups
from vtp_plugin.errors import ConfigError, LayoutError
from vtp_plugin.plan.layout.grids import ExpertGrid
from vtp_plugin.plan.layout.pipeline_layout import (
    ChannelId,
    Coord,
    Direction,
    PipelineLayout,
    RankOrder,
    StageGrid,
    describe_layout,
    format_ranks,
)
from vtp_plugin.plan.layout.stage_grid import LayoutRankGenerator

MEGATRON_ORDER = {RankOrder.STAGE_MAJOR: "tp-cp-ep-dp-pp", RankOrder.REPLICA_MAJOR: "tp-cp-ep-pp-dp"}
# Every token that initialize_model_parallel and create_all_gather_groups ask for, and a few more.
DENSE_TOKENS = (
    *("tp", "cp", "dp", "pp", "gtp_remat", "dp-cp", "gtp_remat-dp", "gtp_remat-dp-cp", "tp-gtp_remat-pp"),
    *("tp-gtp_remat-dp-cp", "tp-gtp_remat-dp", "tp-cp", "tp-pp", "cp-pp", "dp-pp", "tp-cp-dp-pp"),
)
EXPERT_TOKENS = (
    *("tp", "ep", "dp", "pp", "gtp_remat", "tp-ep", "tp-ep-pp", "tp-ep-gtp_remat-pp", "gtp_remat-dp"),
    *("ep-dp", "ep-pp"),
)
# tp, cp, pp, dp, ep
SIZES = [
    sizes
    for sizes in itertools.product((1, 2, 3), (1, 2), (1, 2, 3), (1, 2, 4), (1, 2, 4))
    if sizes[1] * sizes[3] % sizes[4] == 0
]


def uniform(tp: int, cp: int, pp: int, dp: int, order: RankOrder) -> PipelineLayout:
    """Return a layout of pp equal stages."""
    return PipelineLayout.from_sizes([tp] * pp, world_size=tp * cp * pp * dp, cp=cp, order=order)


def megatron_allows(tp: int, cp: int, pp: int, dp: int, ep: int, order: RankOrder) -> bool:
    """Whether initialize_model_parallel accepts the sizes (its assertion on orders that do not end in pp)."""
    return order is RankOrder.STAGE_MAJOR or pp == 1 or cp * dp // ep == dp


PARITY = [(*sizes, order) for order in RankOrder for sizes in SIZES if megatron_allows(*sizes, order)]


def test_the_parity_grid_is_large_in_both_orders() -> None:
    for order in RankOrder:
        assert sum(case[-1] is order for case in PARITY) >= 40


@pytest.mark.needs("groups_of_0_19")
@pytest.mark.parametrize(("tp", "cp", "pp", "dp", "ep", "order"), PARITY)
def test_uniform_groups_are_megatrons(tp: int, cp: int, pp: int, dp: int, ep: int, order: RankOrder) -> None:
    layout = uniform(tp, cp, pp, dp, order)
    inject = parallel_state._inject_gtp_remat_axis
    dense = parallel_state.RankGenerator(
        tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=inject(MEGATRON_ORDER[order], after="tp"), gtp_remat=1
    )
    expert = parallel_state.RankGenerator(
        tp=tp, ep=ep, dp=cp * dp // ep, pp=pp, cp=1, order=inject(MEGATRON_ORDER[order], after="ep"), gtp_remat=1
    )
    ours = LayoutRankGenerator(layout), LayoutRankGenerator(layout.with_experts(ep), expert=True)
    assert {t: ours[0].get_ranks(t) for t in DENSE_TOKENS} == {t: dense.get_ranks(t) for t in DENSE_TOKENS}
    assert {t: ours[1].get_ranks(t) for t in EXPERT_TOKENS} == {t: expert.get_ranks(t) for t in EXPERT_TOKENS}
    assert ours[0].get_gtp_ranks(1) == dense.get_gtp_ranks(1)


@pytest.mark.needs("groups_of_0_19")
@pytest.mark.parametrize(("tp", "etp", "ep", "pp", "dp"), [(2, 1, 2, 2, 2), (4, 2, 4, 2, 2), (2, 4, 1, 3, 2)])
def test_explicit_expert_tp_of_a_uniform_layout(tp: int, etp: int, ep: int, pp: int, dp: int) -> None:
    expert = parallel_state.RankGenerator(
        tp=etp, ep=ep, dp=tp * dp // (etp * ep), pp=pp, cp=1, order="tp-cp-ep-gtp_remat-dp-pp", gtp_remat=1
    )
    layout = uniform(tp, 1, pp, dp, RankOrder.STAGE_MAJOR)
    ours = LayoutRankGenerator(layout.with_experts(ep, etp), expert=True)
    for token in EXPERT_TOKENS:
        assert ours.get_ranks(token) == expert.get_ranks(token), token
    assert ours.get_ranks("pp") == LayoutRankGenerator(layout).get_ranks("pp")


@contextmanager
def fake_world(rank: int, world_size: int) -> Generator[None]:
    """A world in this process: groups are made, nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[GroupSpec]:
    """Groups that Megatron creates, in order; its own function still creates them, on the fake backend.

    A real gloo group over a FakeStore ends the process with a segmentation fault.
    """
    specs: list[GroupSpec] = []
    create_group = parallel_state.create_group

    def record(ranks: list[int], *, group_desc: str, **_: object) -> object:
        specs.append(GroupSpec(group_desc, tuple(ranks)))
        return create_group(ranks, group_desc=group_desc)

    monkeypatch.setattr(parallel_state, "create_group", record)
    return specs


@pytest.mark.needs("groups_of_0_19")
@pytest.mark.parametrize("gloo", [False, True])
@pytest.mark.parametrize(("tp", "cp", "pp", "dp", "ep", "order"), PARITY[::9])
def test_uniform_creation_order_is_megatrons(
    recorded: list[GroupSpec], tp: int, cp: int, pp: int, dp: int, ep: int, order: RankOrder, gloo: bool
) -> None:
    layout = uniform(tp, cp, pp, dp, order)
    with fake_world(0, layout.world_size):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            order=MEGATRON_ORDER[order],
            create_gloo_process_groups=gloo,
        )
    assert tuple(recorded) == model_parallel_groups(layout.with_experts(ep), gloo=gloo)


@pytest.mark.needs("groups_of_0_19")
@pytest.mark.parametrize("order", list(RankOrder))
@pytest.mark.parametrize(
    ("sizes", "cp", "dp", "ep"),
    [((1, 2), 1, 1, 1), ((2, 3), 1, 2, 1), ((3, 1, 2), 2, 1, 2), ((1, 4, 4), 1, 1, 1), ((2, 1), 2, 2, 2)],
)
def test_unequal_creation_order_with_injected_generators(
    recorded: list[GroupSpec],
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, ...],
    cp: int,
    dp: int,
    ep: int,
    order: RankOrder,
) -> None:
    layout = PipelineLayout.from_sizes(sizes, world_size=sum(sizes) * cp * dp, cp=cp, order=order)
    planned = model_parallel_groups(layout.with_experts(ep))
    for rank in range(layout.world_size):
        recorded.clear()
        generators = [LayoutRankGenerator(layout), LayoutRankGenerator(layout.with_experts(ep), expert=True)]
        monkeypatch.setattr(parallel_state, "RankGenerator", lambda g=generators, **_: g.pop(0))
        tp = sizes[layout.stage_of(rank)]
        with fake_world(rank, layout.world_size):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=len(sizes),
                context_parallel_size=cp,
                expert_model_parallel_size=ep,
                order=MEGATRON_ORDER[order],
                create_gloo_process_groups=False,
                local_world_size=tp * len(sizes) * cp * dp,
            )
            assert parallel_state.get_tensor_model_parallel_world_size() == tp
            assert parallel_state.get_tensor_model_parallel_rank() == layout.coord(rank).tp_rank
        assert tuple(recorded) == planned


def test_unequal_groups_by_hand() -> None:
    layout = PipelineLayout.from_sizes([2, 3], world_size=10)
    generator = LayoutRankGenerator(layout)
    assert generator.get_ranks("tp") == [[0, 1], [2, 3], [4, 5, 6], [7, 8, 9]]
    assert generator.get_ranks("dp") == [[0, 2], [1, 3], [4, 7], [5, 8], [6, 9]]
    assert generator.get_ranks("pp") == [[0, 4], [1, 5], [0, 6], [2, 7], [3, 8], [2, 9]]
    assert generator.get_ranks("tp-gtp_remat-pp") == [[0, 1, 4, 5, 6], [2, 3, 7, 8, 9]]
    expert = LayoutRankGenerator(layout.with_experts(2), expert=True)
    assert expert.get_ranks("ep") == generator.get_ranks("dp")
    assert expert.get_ranks("tp-ep-pp") == [list(range(10))]
    assert expert.get_ranks("dp") == [[rank] for rank in range(10)]


def test_layout_by_hand_in_both_orders() -> None:
    stage_major = PipelineLayout.from_sizes([1, 2], world_size=12, cp=2)
    assert stage_major.stage_ranks(0) == (0, 1, 2, 3)
    assert stage_major.coord(11) == Coord(1, 1, 1, 1)
    assert stage_major.tp_ranks(1, dp_rank=1, cp_rank=0) == (8, 9)
    assert stage_major.pipeline_group_of(9) == (2, 9)
    assert stage_major.replicas == ((0, 0), (0, 1), (1, 0), (1, 1))
    replica_major = PipelineLayout.from_sizes([1, 2], world_size=12, cp=2, order=RankOrder.REPLICA_MAJOR)
    assert replica_major.stage_ranks(0) == (0, 1, 6, 7)
    assert replica_major.coord(11) == Coord(1, 1, 1, 1)
    assert replica_major.model_ranks(dp_rank=1, cp_rank=1) == (7, 10, 11)
    assert replica_major.leader(1, dp_rank=1, cp_rank=1) == 10
    assert stage_major.writer_rank == replica_major.writer_rank == 11


def test_sizes_of_a_layout() -> None:
    layout = PipelineLayout.from_sizes([4, 1, 6], world_size=22)
    assert (layout.world_size, layout.num_stages, layout.tp_sizes, layout.num_pipeline_groups) == (22, 3, (4, 1, 6), 6)
    assert layout.vocab_multiple() == 12
    assert layout.vocab_multiple(stages=(0, 1)) == 4
    assert not layout.is_uniform
    assert PipelineLayout.from_sizes([2, 2], world_size=8).is_uniform
    assert layout == PipelineLayout(tuple(StageGrid(tp, dp=2) for tp in (4, 1, 6)))


def test_stages_of_different_cp_and_dp_sizes() -> None:
    layout = PipelineLayout((StageGrid(1), StageGrid(2, dp=2), StageGrid(1, cp=2)))
    assert layout.stage_ranks(1) == (1, 2, 3, 4)
    assert layout.coord(4) == Coord(1, 1, 0, 1)
    assert layout.replicas == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert layout.pipeline_group(0) == (0, 1, 5)
    assert layout.pipeline_group(1, dp_rank=1, cp_rank=1) == (0, 4, 6)
    found = (layout.pipeline_group_of(0), layout.pipeline_group_of(4), layout.pipeline_group_of(6))
    assert found == ((0, 1, 5), (0, 4, 5), (0, 1, 6))
    assert layout.model_ranks(1, 1) == (0, 3, 4, 6)
    generator = LayoutRankGenerator(layout)
    assert generator.get_ranks("dp") == [[0], [1, 3], [2, 4], [5], [6]]
    assert generator.get_ranks("cp") == [[0], [1], [2], [3], [4], [5, 6]]
    assert generator.get_ranks("tp-pp") == [list(range(7))]
    assert generator.get_ranks("pp")[:3] == [[0, 1, 5], [0, 2, 5], [0, 1, 6]]
    with pytest.raises(ConfigError, match="along cp-pp need equal cp and dp"):
        generator.get_ranks("cp-pp")
    with pytest.raises(ConfigError, match="rank order tp-cp-pp-dp needs equal"):
        PipelineLayout(layout.stages, RankOrder.REPLICA_MAJOR)


@pytest.mark.parametrize(
    ("sizes", "world_size", "cp", "message"),
    [
        ([1, 2], 4, 1, r"^--vtp-size-list 1,2 needs 3 processes, or a multiple of 3; this run has 4; start 3 or 6, or"),
        ([2, 2], 3, 2, r"2,2 with --context-parallel-size 2 needs 8 processes, or a multiple of 8; .*; start 8, or"),
        ([], 4, 1, "empty"),
        ([1, 0], 4, 1, "tp size of stage 1 must be a positive integer, got 0"),
        ([1, -2], 4, 1, "got -2"),
        ([1, True], 4, 1, "got True"),
        ([1, "2"], 4, 1, "got '2'"),
        ([1, 1], 4, 0, "context-parallel size of stage 0"),
        ([1, 1], 4, [1, 0], "context-parallel size of stage 1 must be a positive integer, got 0"),
        (
            [1, 1],
            4,
            [1, 2, 1],
            "3 context-parallel sizes 1,2,1; there are 2 stages \\(TP sizes 1,1\\); give one size per",
        ),
        ([2, 1], 5, [1, 2], r"2,1 with --vtp-cp-list 1,2 needs 4 processes, or a multiple of 4; .*; start 4 or 8, or"),
        ([1, 1], 0, 1, "world size"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: list[int], world_size: int, cp: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        PipelineLayout.from_sizes(sizes, world_size=world_size, cp=cp)
    assert "\n" not in str(caught.value)


def test_data_parallel_sizes_of_stages() -> None:
    layout = PipelineLayout.from_sizes([1, 2], world_size=5, dp=[1, 2])
    assert layout.stages == (StageGrid(1), StageGrid(2, dp=2))
    assert layout.dp_sizes == (1, 2) and not layout.has_equal_replicas and not layout.is_uniform
    assert [layout.uniform_world_size(rank) for rank in range(5)] == [2, 8, 8, 8, 8]
    assert PipelineLayout.from_sizes([1, 2], world_size=6, dp=[2, 2]) == PipelineLayout.from_sizes([1, 2], world_size=6)


@pytest.mark.parametrize(
    ("world_size", "dp", "message"),
    [
        (
            6,
            [1, 2],
            r"need 5 processes \(tp \* cp \* dp of each: 1 \* 1 \* 1 \+ 2 \* 1 \* 2\); this run has 6; start 5",
        ),
        (5, [1, 2, 2], "3 data-parallel sizes 1,2,2; there are 2 stages \\(TP sizes 1,2\\); give one size per stage"),
        (5, [1, 0], "the data-parallel size of stage 1 must be a positive integer, got 0"),
    ],
)
def test_data_parallel_sizes_that_do_not_fit_are_refused(world_size: int, dp: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PipelineLayout.from_sizes([1, 2], world_size=world_size, dp=dp)


def test_expert_sizes_that_do_not_fit_are_refused() -> None:
    layout = PipelineLayout.from_sizes([1, 2], world_size=9)
    with pytest.raises(ConfigError, match="divides 3"):
        LayoutRankGenerator(layout.with_experts(2), expert=True)
    with pytest.raises(ConfigError, match="got 0"):
        layout.with_experts(0)
    with pytest.raises(ConfigError, match=r"tp 2 \* ep 1 = 2 do not divide .* = 3 ranks"):
        PipelineLayout.from_sizes([3, 3], world_size=6, etp=2)
    replica_major = PipelineLayout.from_sizes([1, 2], world_size=12, order=RankOrder.REPLICA_MAJOR)
    with pytest.raises(ConfigError, match="has 2 copies of its experts"):
        LayoutRankGenerator(replica_major.with_experts(2), expert=True)
    with pytest.raises(ConfigError, match="gtp_remat size 2"):
        LayoutRankGenerator(layout).get_gtp_ranks(2)
    with pytest.raises(ValueError, match="xp"):
        LayoutRankGenerator(layout).get_ranks("tp-xp")
    with pytest.raises(ConfigError, match="at least one stage"):
        PipelineLayout(())


def test_experts_that_do_not_fill_their_stage_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"stage 1 has 4 ranks; its experts' sizes tp \* ep \* dp = 1 \* 2 \* 1 must"):
        PipelineLayout((StageGrid(1, 1, 2), StageGrid(2, 1, 2)), experts=(ExpertGrid(1, 2, 1), ExpertGrid(1, 2, 1)))


def test_unequal_copies_of_experts_by_hand() -> None:
    """Ranks 0 and 1 each have all experts; ranks 2 to 5 have two copies of each, in halves."""
    layout = PipelineLayout.from_sizes([1, 2], world_size=6, ep=[1, 2], etp=1)
    assert [grid.dp for grid in layout.experts] == [2, 2] and layout.has_equal_experts and layout.has_expert_groups
    expert = LayoutRankGenerator(layout, expert=True)
    assert expert.get_ranks("tp") == [[rank] for rank in range(6)]
    assert expert.get_ranks("ep") == [[0], [1], [2, 3], [4, 5]]
    assert expert.get_ranks("dp") == [[0, 1], [2, 4], [3, 5]]
    assert expert.get_ranks("tp-ep-pp") == [[0, 2, 3], [1, 4, 5]]
    # Without halves there are four copies beside two: no group holds each expert once, and sums take the world.
    unequal = layout.with_experts(1, 1)
    assert [grid.dp for grid in unequal.experts] == [2, 4] and not unequal.has_equal_experts
    expert = LayoutRankGenerator(unequal, expert=True)
    assert expert.get_ranks("dp") == [[0, 1], [2, 3, 4, 5]]
    assert expert.get_ranks("tp-ep-pp") == [list(range(6))]
    assert expert.get_ranks("pp") == LayoutRankGenerator(unequal).get_ranks("pp")
    assert not PipelineLayout.from_sizes([1, 2], world_size=6).has_expert_groups
    assert not PipelineLayout.from_sizes([1, 1], world_size=4, ep=[1, 2]).is_uniform


@pytest.mark.parametrize("order", list(RankOrder))
def test_places_in_the_experts_match_the_groups(order: RankOrder) -> None:
    layout = PipelineLayout.from_sizes([2, 4], world_size=12, order=order)
    layout = layout.with_experts([2, 4], 1) if order is RankOrder.STAGE_MAJOR else layout.with_experts([2, 2], [1, 2])
    expert = LayoutRankGenerator(layout, expert=True)
    for token, axis in (("tp", "tp_rank"), ("ep", "ep_rank"), ("dp", "dp_rank")):
        for ranks in expert.get_ranks(token):
            coords = [layout.expert_coord(rank) for rank in ranks]
            assert [getattr(coord, axis) for coord in coords] == list(range(len(ranks))), (token, ranks)


def test_describe_shows_stages_and_stays_short() -> None:
    text = describe_layout(PipelineLayout.from_sizes([1, 4], world_size=5000, order=RankOrder.REPLICA_MAJOR))
    lines = text.splitlines()
    assert lines[0].split() == ["stage", "tp", "cp", "dp", "ranks", "leaders"]
    assert lines[2].split()[:4] == ["1", "4", "1", "1000"]
    assert "1-4,6-9" in lines[2] and "(4000 ranks)" in lines[2]
    assert lines[-1] == "ranks are numbered in the order tp-cp-pp-dp; rank 4999 writes the log"
    assert all(len(line) < 140 and line == line.rstrip() for line in lines)
    assert format_ranks([]) == ""


@pytest.mark.parametrize("order", list(RankOrder))
def test_places_are_arithmetic_not_scans(order: RankOrder) -> None:
    # With two thousand million ranks any scan or table would run out of memory or of the test's time.
    layout = PipelineLayout.from_sizes([1, 2, 7] * 100, world_size=2_000_000_000, cp=2, order=order)
    for rank in (0, 1, 999_999_999, 1_234_567_890, 1_999_999_999):
        coord = layout.coord(rank)
        assert layout.rank_of(coord.stage, coord.tp_rank, coord.cp_rank, coord.dp_rank) == rank
    assert layout.writer_rank == 1_999_999_999


class TestChannelId:
    def test_order_is_by_upstream_then_downstream_then_forward_first(self) -> None:
        ids = [ChannelId.between(*ends, direction) for ends in ((0, 1), (0, 2), (2, 0)) for direction in Direction]
        assert sorted([ids[i] for i in (3, 0, 5, 1, 4, 2)]) == ids
        assert [(channel.src, channel.dst) for channel in ids] == [(0, 1), (1, 0), (0, 2), (2, 0), (2, 0), (0, 2)]

    def test_both_directions_between_two_workers_differ_from_the_wrap_around(self) -> None:
        backward, around = ChannelId.between(0, 2, Direction.BACKWARD), ChannelId.between(2, 0, Direction.FORWARD)
        assert (backward.src, backward.dst) == (around.src, around.dst) and backward != around
        assert backward.opposite == ChannelId.between(0, 2, Direction.FORWARD)
        assert (around.upstream, around.downstream) == (2, 0) == (around.opposite.upstream, around.opposite.downstream)
