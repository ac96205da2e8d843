"""Boundary spreads, planners, checks and the choice of transport, on cases small enough to be written out by hand."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math

import pytest

from tests.rules.import_rules import sources
from tests.support.plans import is_replicated, link_bytes, reversed_plan
from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.plan.boundary.boundary_plan import (
    MAX_PORTIONS,
    NO_COLLECTIVE,
    BoundaryPlan,
    Collective,
    CollectiveKind,
    Transfer,
    compile_plan,
    cut_into_portions,
    egress_bytes,
    ingress_bytes,
)
from vtp_plugin.plan.boundary.channel_spec import ChannelSpec, pipeline_boundaries
from vtp_plugin.plan.boundary.check_boundary import check, require_valid
from vtp_plugin.plan.boundary.endpoint import (
    Endpoint,
    LocalBoxes,
    Sharding,
    even_cuts,
    local_slices,
    replicated,
    sharded,
)
from vtp_plugin.plan.boundary.message_kind import plan_header
from vtp_plugin.plan.boundary.strategies import known_strategies as rules_module
from vtp_plugin.plan.boundary.strategies.known_strategies import STRATEGIES, TransportRules
from vtp_plugin.plan.boundary.strategies.leaders import plan_rank0
from vtp_plugin.plan.boundary.strategies.slices import plan_divided, plan_sliced
from vtp_plugin.plan.layout.pipeline_layout import Direction, PipelineLayout, StageGrid
from vtp_plugin.plan.layout.replica_map import DpMode
from vtp_plugin.util.index_boxes import Box, intersect

SHAPE = (6, 2, 4)  # [S, B, H]
WHOLE: Box = ((0, 6), (0, 2), (0, 4))


def rows(start: int, stop: int) -> Box:
    """Rows ``start:stop`` of the sequence of a tensor of SHAPE."""
    return (start, stop), (0, 2), (0, 4)


def triples(plan: BoundaryPlan) -> list[tuple[int, int, Box]]:
    """Source, destination and box of every transfer of a plan whose messages are one box each."""
    return [(transfer.src, transfer.dst, box) for transfer in plan.transfers for (box,) in [transfer.boxes]]


def with_transfers(plan: BoundaryPlan, *transfers: Transfer) -> BoundaryPlan:
    return dataclasses.replace(plan, transfers=transfers)


def gather(*ranks: int) -> Collective:
    return Collective(kind=CollectiveKind.GATHER, groups=(ranks,))


def broadcast(*ranks: int) -> Collective:
    return Collective(kind=CollectiveKind.BROADCAST, groups=(ranks,))


def scatter(*ranks: int) -> Collective:
    return Collective(kind=CollectiveKind.SCATTER, groups=(ranks,))


def all_gather(*groups: tuple[int, ...]) -> Collective:
    return Collective(kind=CollectiveKind.ALL_GATHER, groups=groups)


class TestBoxes:
    def test_touching_boxes_do_not_intersect(self) -> None:
        assert intersect(rows(0, 3), rows(3, 6)) is None
        assert intersect(rows(0, 4), rows(3, 6)) == rows(3, 4)


class TestSpread:
    def test_replicated(self) -> None:
        sharding = replicated(SHAPE, (4, 5))
        assert sharding.ranks == (4, 5)
        assert sharding.boxes_of(5) == (WHOLE,)
        assert is_replicated(sharding)

    def test_sharded_unevenly(self) -> None:
        sharding = sharded((7, 2), (0, 1, 2), dim=0)
        own = [sharding.boxes_of(rank) for rank in sharding.ranks]
        assert own == [(((0, 3), (0, 2)),), (((3, 5), (0, 2)),), (((5, 7), (0, 2)),)]
        assert not is_replicated(sharding)

    def test_more_ranks_than_slices(self) -> None:
        assert sharded((1, 2), (0, 1), dim=0).boxes_of(1) == ()

    def test_sharded_over_one_rank_is_replicated(self) -> None:
        assert sharded(SHAPE, (3,), dim=0) == replicated(SHAPE, (3,))

    def test_unknown_rank(self) -> None:
        with pytest.raises(KeyError):
            replicated(SHAPE, (0,)).boxes_of(1)

    def test_ranks_that_hold_the_same(self) -> None:
        # Context parallelism 2 with the usual front and back chunks, tensor parallelism 2.
        sharding = Endpoint(ranks_by_cp=((0, 1), (2, 3))).sharding((8,), is_sharded=False)
        chunks = [((lo, hi),) for lo, hi in even_cuts(8, 4)]
        assert sharding.copies == ((0, 1), (2, 3))
        # The rows of a rank's memory are cut, so here each rank keeps one of the two chunks.
        held = [sharding.divided().boxes_of(rank) for rank in range(4)]
        assert held == [(chunks[place],) for place in (0, 3, 1, 2)]

    def test_partly_shared_boxes_cannot_be_divided(self) -> None:
        front, back = ((0, 2),), ((2, 4),)
        holdings = (LocalBoxes(rank=0, boxes=(front, back)), LocalBoxes(rank=1, boxes=(front,)))
        with pytest.raises(PlanError, match="share some of their boxes"):
            Sharding(shape=(4,), holdings=holdings).divided()

    @pytest.mark.parametrize(
        ("boxes", "message"),
        [
            (([((0, 3),)], [((2, 4),)]), "overlap"),
            (([((0, 3),)], []), "3 elements are held"),
            (([((0, 5),)], []), "leaves the tensor"),
            (([((0, 4),), ((4, 4),)], []), "empty"),
            (([((0, 4),), ((0, 4),)], []), "twice"),
            (([((0, 4), (0, 1))], []), "dimensions"),
        ],
    )
    def test_what_is_not_a_partition_is_refused(self, boxes: tuple[list[Box], list[Box]], message: str) -> None:
        with pytest.raises(PlanError, match=message):
            Sharding(shape=(4,), holdings=tuple(LocalBoxes(rank=r, boxes=tuple(own)) for r, own in enumerate(boxes)))

    def test_rank_listed_twice(self) -> None:
        with pytest.raises(PlanError, match="twice"):
            replicated(SHAPE, (1, 1))

    def test_boxes_of_different_widths_are_not_one_memory(self) -> None:
        with pytest.raises(PlanError, match="different widths"):
            _ = LocalBoxes(rank=0, boxes=(((0, 1), (0, 2)), ((1, 2), (0, 3)))).local_shape


class TestRank0:
    def test_one_transfer_then_broadcast(self) -> None:
        plan = plan_rank0(replicated(SHAPE, (0, 1)), replicated(SHAPE, (2, 3, 4)))
        assert triples(plan) == [(0, 2, WHOLE)]
        assert (plan.start, plan.finish) == (NO_COLLECTIVE, broadcast(2, 3, 4))
        assert plan.participants == (0, 2)
        assert check(plan) == ()

    def test_only_the_leaders_move_bytes(self) -> None:
        plan = plan_rank0(replicated(SHAPE, (0, 1)), replicated(SHAPE, (2, 3)))
        assert link_bytes(plan, itemsize_bytes=2) == {(0, 2): 96}
        assert egress_bytes(plan, itemsize_bytes=2) == {0: 96, 1: 0}
        assert ingress_bytes(plan, itemsize_bytes=2) == {2: 96, 3: 0}

    def test_slices_are_gathered_before_and_scattered_after(self) -> None:
        plan = plan_rank0(sharded(SHAPE, (0, 1), dim=0), sharded(SHAPE, (2, 3, 4), dim=0))
        assert plan.describe() == "gather in (0, 1)\n0 -> 2 [0:6, 0:2, 0:4]\nscatter in (2, 3, 4)"
        assert check(plan) == ()

    @pytest.mark.parametrize("endpoint", [0, 1])
    def test_several_or_no_boxes_are_refused(self, endpoint: int) -> None:
        chunks = Endpoint(ranks_by_cp=((0,), (1,))).sharding((8,), is_sharded=False)
        for sharding in (chunks, sharded((8,), tuple(range(9)), dim=0)):
            shardings = [replicated((8,), (20,)), replicated((8,), (21,))]
            shardings[endpoint] = sharding
            with pytest.raises(ConfigError, match=r"rank0 needs .* use --vtp-transport sliced") as caught:
                plan_rank0(*shardings)
            assert "\n" not in str(caught.value)


class TestSliced:
    def test_sizes_that_do_not_divide(self) -> None:
        plan = plan_sliced(replicated(SHAPE, (0, 1)), replicated(SHAPE, (2, 3, 4)))
        assert triples(plan) == [(0, 2, rows(0, 2)), (0, 3, rows(2, 3)), (1, 3, rows(3, 4)), (1, 4, rows(4, 6))]
        assert egress_bytes(plan, itemsize_bytes=4) == {0: 96, 1: 96}
        assert ingress_bytes(plan, itemsize_bytes=4) == {2: 64, 3: 64, 4: 64}
        assert plan.finish == all_gather((2, 3, 4))

    def test_vocabulary_between_stages_of_three_and_two(self) -> None:
        plan = plan_sliced(sharded((12, 5), (0, 1, 2), dim=0), sharded((12, 5), (7, 8), dim=0))
        assert triples(plan) == [
            *((0, 7, ((0, 4), (0, 5))), (1, 7, ((4, 6), (0, 5)))),
            *((1, 8, ((6, 8), (0, 5))), (2, 8, ((8, 12), (0, 5)))),
        ]

    def test_unequal_context_parallelism(self) -> None:
        # Ranks 1 and 2 have chunks 0 and 3, and chunks 1 and 2: one message each, of two boxes.
        src, dst = Endpoint(ranks_by_cp=((0,),)), Endpoint(ranks_by_cp=((1,), (2,)))
        plan = plan_sliced(*(endpoint.sharding((8,), is_sharded=False) for endpoint in (src, dst)))
        assert plan.describe() == "0 -> 1 [0:2] [6:8]\n0 -> 2 [2:4] [4:6]"
        assert check(plan) == check(reversed_plan(plan)) == ()

    def test_every_context_parallel_rank_completes_its_own_copies(self) -> None:
        src, dst = Endpoint(ranks_by_cp=((0,),)), Endpoint(ranks_by_cp=((1, 2), (3, 4)))
        plan = plan_sliced(*(endpoint.sharding((8,), is_sharded=False) for endpoint in (src, dst)))
        assert triples(plan) == [(0, 1, ((0, 2),)), (0, 2, ((6, 8),)), (0, 3, ((2, 4),)), (0, 4, ((4, 6),))]
        assert plan.finish == all_gather((1, 2), (3, 4))
        assert [plan.finish.group_of(rank) for rank in (2, 3, 0)] == [(1, 2), (3, 4), None]

    def test_ranks_without_a_piece_stay_silent(self) -> None:
        plan = plan_sliced(sharded((2,), (0, 1, 2), dim=0), sharded((2,), (3,), dim=0))
        assert plan.sends_of(1) == plan.transfers[1:]
        assert plan.sends_of(2) == ()
        assert plan.participants == (0, 1, 3)
        assert check(plan) == ()

    def test_large_plans_are_checked_without_touching_elements(self) -> None:
        shape = (131_072, 8, 16_384)
        plan = plan_sliced(replicated(shape, tuple(range(64))), replicated(shape, tuple(range(64, 160))))
        assert check(plan) == ()
        assert sum(link_bytes(plan, itemsize_bytes=2).values()) == 2 * 131_072 * 8 * 16_384


class TestRegistry:
    def test_names(self) -> None:
        planners = {name: strategy.plan for name, strategy in STRATEGIES.items()}
        assert planners == {"rank0": plan_rank0, "sliced": plan_sliced, "divided": plan_divided}

    @pytest.mark.parametrize("name", STRATEGIES)
    def test_plans_carry_their_name(self, name: str) -> None:
        assert STRATEGIES[name].plan(replicated(SHAPE, (0,)), replicated(SHAPE, (1, 2))).strategy == name

    def test_read_only(self) -> None:
        with pytest.raises(TypeError):
            STRATEGIES["rank0"] = STRATEGIES["sliced"]  # type: ignore[index]

    def test_who_asks_what_a_strategy_is_like_reads_its_row(self) -> None:
        asking = {
            module
            for module, source in sources()
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Compare)
            for part in ast.walk(node)
            if isinstance(part, ast.Constant) and part.value in list(STRATEGIES)
        }
        # Words for people: what the rules choose, and which flag decides between slices and the leaders.
        assert asking == {"vtp_plugin.plan.boundary.strategies.known_strategies", "vtp_plugin.cli.plan"}

    def test_shapes_must_agree(self) -> None:
        for strategy in STRATEGIES.values():
            with pytest.raises(PlanError, match=r"the shape is \(4,\) upstream and \(5,\) downstream"):
                strategy.plan(replicated((4,), (0,)), replicated((5,), (1,)))

    def test_the_gradient_of_a_broadcast_comes_from_the_leader_alone(self) -> None:
        plan = reversed_plan(plan_rank0(replicated(SHAPE, (0, 1)), replicated(SHAPE, (2, 3, 4))))
        assert triples(plan) == [(2, 0, WHOLE)]
        assert plan.finish == broadcast(0, 1)

    def test_plans_are_frozen_and_hashable(self) -> None:
        plan = plan_rank0(replicated((4,), (0, 1)), replicated((4,), (2, 3)))
        assert hash(plan) == hash(plan_rank0(plan.src, plan.dst))
        with pytest.raises(dataclasses.FrozenInstanceError):
            plan.strategy = "sliced"  # type: ignore[misc]


class TestCollective:
    def test_rank_in_two_groups(self) -> None:
        with pytest.raises(PlanError, match="twice"):
            all_gather((1, 2), (2, 3))

    def test_none_has_no_members_and_others_have_some(self) -> None:
        for kind, groups in ((CollectiveKind.NONE, ((1,),)), (CollectiveKind.BROADCAST, ())):
            with pytest.raises(PlanError, match="over"):
                Collective(kind=kind, groups=groups)


class TestHeader:
    def test_goes_with_the_broadcast_of_the_leader(self) -> None:
        plan = plan_rank0(sharded(SHAPE, (0, 1), dim=0), sharded(SHAPE, (2, 3), dim=0))
        assert plan_header(plan, 3).describe() == "0 -> 2 [0:3]\nbroadcast in (2, 3)"

    def test_each_rank_has_it_from_its_first_source(self) -> None:
        plan = plan_sliced(sharded(SHAPE, (0, 1), dim=0), sharded(SHAPE, (2, 3, 4), dim=0))
        header = plan_header(plan, 3)
        assert header.describe() == "0 -> 2 [0:3]\n0 -> 3 [0:3]\n1 -> 4 [0:3]"
        assert check(header) == ()


class TestLocalSlices:
    def test_relative_to_the_piece(self) -> None:
        holding = sharded(SHAPE, (0, 1), dim=0).holdings[1]
        assert local_slices(rows(4, 6), holding) == (slice(1, 3), slice(0, 2), slice(0, 4))

    def test_second_box_lies_behind_the_first(self) -> None:
        holding = LocalBoxes(rank=0, boxes=(((6, 8), (0, 2)), ((0, 2), (0, 2))))
        assert local_slices(((1, 2), (0, 2)), holding) == (slice(3, 4), slice(0, 2))

    def test_box_that_is_not_held(self) -> None:
        with pytest.raises(PlanError, match="holds"):
            local_slices(rows(2, 4), sharded(SHAPE, (0, 1), dim=0).holdings[1])

    def test_box_over_two_held_ones(self) -> None:
        with pytest.raises(PlanError, match="holds"):
            local_slices(((0, 2),), LocalBoxes(rank=0, boxes=(((0, 1),), ((1, 2),))))


class TestCheck:
    SHARDS = plan_sliced(sharded((6,), (0, 1), dim=0), sharded((6,), (2, 3, 4), dim=0))
    PAIRS = plan_sliced(replicated((4,), (0, 1)), replicated((4,), (2, 3)))
    GATHERED = plan_sliced(replicated((4,), (0,)), replicated((4,), (2, 3)))
    RANK0 = plan_rank0(replicated((4,), (0, 1)), replicated((4,), (2, 3)))
    SCATTERED = plan_rank0(sharded((4,), (0, 1), dim=0), sharded((4,), (2, 3), dim=0))
    MOVED, INSIDE = "transfer 0 -> 2 [0:4]:", "[0:4] is not inside one box of the"

    def test_duplicated_transfer(self) -> None:
        assert check(with_transfers(self.SHARDS, *self.SHARDS.transfers, self.SHARDS.transfers[0])) == (
            "rank 2 gets [0:2] more than once",
            "2 transfers 0 -> 2, not one",
            "strategy sliced moves 5 elements at source rank 0, more than its 3",
            "strategy sliced moves 4 elements at destination rank 2, more than its 2",
        )

    def test_shifted_box(self) -> None:
        first, *others = self.SHARDS.transfers
        problems = check(with_transfers(self.SHARDS, dataclasses.replace(first, boxes=(((1, 3),),)), *others))
        assert "rank 2 never gets [0:1]" in problems
        assert "rank 2 gets [2:3], which it does not hold" in problems
        assert "transfer 0 -> 2 [1:3]: [1:3] is not inside one box of the destination" in problems

    def test_source_that_does_not_hold_the_box(self) -> None:
        first, *others = self.SHARDS.transfers
        problems = check(with_transfers(self.SHARDS, dataclasses.replace(first, src=1), *others))
        assert problems[0] == "transfer 1 -> 2 [0:2]: the source does not hold [0:2]"

    def test_box_outside_the_tensor(self) -> None:
        first, *others = self.SHARDS.transfers
        for boxes in ((((5, 7),),), (((2, 2),),), (((0, 2), (0, 1)),), ()):
            (problem,) = check(with_transfers(self.SHARDS, dataclasses.replace(first, boxes=boxes), *others))
            assert problem.endswith("a box is empty or leaves the tensor (6,)")

    def test_ranks_of_other_stages(self) -> None:
        first, second = self.PAIRS.transfers
        (problem,) = check(with_transfers(self.PAIRS, dataclasses.replace(first, src=9), second))
        assert problem == "transfer 9 -> 2 [0:4]: 9 is not one of the source ranks (0, 1)"
        (problem,) = check(with_transfers(self.PAIRS, first, dataclasses.replace(second, dst=9)))
        assert problem == "transfer 1 -> 9 [0:4]: 9 is not one of the destination ranks (2, 3)"

    def test_split_transfer_delivers_but_uses_a_pair_twice(self) -> None:
        first, second = self.PAIRS.transfers
        halves = [dataclasses.replace(first, boxes=(box,)) for box in (((0, 2),), ((2, 4),))]
        assert check(with_transfers(self.PAIRS, *halves, second)) == ("2 transfers 0 -> 2, not one",)

    def test_box_across_two_boxes_of_a_rank(self) -> None:
        src = Sharding(shape=(4,), holdings=(LocalBoxes(rank=0, boxes=(((0, 2),), ((2, 4),))),))
        plan = with_transfers(plan_sliced(src, replicated((4,), (1,))), Transfer(src=0, dst=1, boxes=(((0, 4),),)))
        assert check(plan) == ("transfer 0 -> 1 [0:4]: [0:4] is not inside one box of the source",)

    @pytest.mark.parametrize(
        ("plan", "place", "collective", "problems"),
        [
            (RANK0, "finish", NO_COLLECTIVE, ["rank 3 never gets [0:4]"]),
            (GATHERED, "finish", NO_COLLECTIVE, ["rank 2 never gets [2:4]", "rank 3 never gets [0:2]"]),
            (
                SCATTERED,
                "start",
                NO_COLLECTIVE,
                [f"{MOVED} the source does not hold [2:4]", f"{MOVED} {INSIDE} source"],
            ),
            (
                SCATTERED,
                "finish",
                NO_COLLECTIVE,
                [
                    "rank 2 gets [2:4], which it does not hold",
                    "rank 3 never gets [2:4]",
                    f"{MOVED} {INSIDE} destination",
                ],
            ),
            (
                RANK0,
                "finish",
                broadcast(3, 2),
                ["rank 3 never gets [0:4]", "finish broadcast: 2 receives transfers, but 3 is the root"],
            ),
            (
                PAIRS,
                "finish",
                broadcast(2, 3),
                ["rank 3 gets [0:4] more than once", "finish broadcast: 3 receives transfers, but 2 is the root"],
            ),
            (RANK0, "finish", broadcast(2, 3, 5), ["finish broadcast: 5 is not one of the destination ranks (2, 3)"]),
            (RANK0, "finish", gather(2, 3), ["finish gather: it completes nothing"]),
            (RANK0, "start", gather(0, 5), ["start gather: 5 is not one of the source ranks (0, 1)"]),
            (RANK0, "start", scatter(0, 1), ["start scatter: only a gather or a sum can come before the transfers"]),
        ],
    )
    def test_missing_or_misplaced_collective(
        self, plan: BoundaryPlan, place: str, collective: Collective, problems: list[str]
    ) -> None:
        assert check(dataclasses.replace(plan, **{place: collective})) == tuple(problems)

    def test_all_gather_of_other_pieces_than_even_cuts(self) -> None:
        # All elements get to all ranks, but the runtime gathers rows 0:2 from rank 2 and rows 2:4 from rank 3.
        to_2, to_3 = (dataclasses.replace(t, boxes=(box,)) for t, box in zip(
            self.GATHERED.transfers, (((2, 4),), ((0, 2),)), strict=True
        ))  # fmt: skip
        assert check(with_transfers(self.GATHERED, to_2, to_3)) == (
            "finish all-gather: what 2 receives is not rows 0:2 of its memory",
            "finish all-gather: what 3 receives is not rows 2:4 of its memory",
        )

    def test_rank0_on_more_than_the_leaders_link(self) -> None:
        (problem,) = check(dataclasses.replace(self.PAIRS, strategy="rank0"))
        assert problem == "strategy rank0 has transfers on the links [(0, 2), (1, 3)], not on [(0, 2)]"

    def test_sliced_through_one_link(self) -> None:
        plan = plan_rank0(replicated((4,), (0,)), replicated((4,), (2, 3)))
        assert check(dataclasses.replace(plan, strategy="sliced")) == (
            "strategy sliced moves 4 elements at destination rank 2, more than its 2",
        )

    def test_shapes_that_differ(self) -> None:
        (problem,) = check(dataclasses.replace(self.RANK0, dst=replicated((5,), (2, 3))))
        assert problem == "the shape is (4,) at the source and (5,) at the destination"

    def test_require_valid(self) -> None:
        require_valid(self.SHARDS)
        with pytest.raises(PlanError, match=r"rank 2 never gets \[0:2\]"):
            require_valid(with_transfers(self.SHARDS, *self.SHARDS.transfers[1:]))


class TestSide:
    def test_chunks_are_balanced_for_causal_attention(self) -> None:
        endpoint = Endpoint(ranks_by_cp=((0,), (1,), (2,)))
        sharding = endpoint.sharding((12,), is_sharded=False)
        found = [sharding.boxes_of(rank) for rank in endpoint.ranks]
        assert found == [(((0, 2),), ((10, 12),)), (((2, 4),), ((8, 10),)), (((4, 6),), ((6, 8),))]

    def test_slices_cut_both_chunks_together(self) -> None:
        # Each slice is two of six rows: the middle one ends the front chunk and begins the back one.
        sharding = Endpoint(ranks_by_cp=((0, 1, 2), (3, 4, 5))).sharding((12,), is_sharded=True)
        slices = [(((0, 2),),), (((2, 3),), ((9, 10),)), (((10, 12),),)]
        assert [sharding.boxes_of(rank) for rank in (0, 1, 2)] == slices
        assert [sharding.boxes_of(rank) for rank in (3, 4, 5)] == [(((3, 5),),), (((5, 6),), ((6, 7),)), (((7, 9),),)]

    def test_leader_is_the_first_rank(self) -> None:
        assert Endpoint(ranks_by_cp=((4, 5), (6, 7))).ranks == (4, 5, 6, 7)

    @pytest.mark.parametrize(
        ("ranks_by_cp", "length", "is_sharded", "message"),
        [
            (((0, 1),), 7, True, "sequence length 7 cannot be cut for ranks (0, 1) (context-parallel size 1, "
             "tensor-parallel size 2, sequence parallel): use a multiple of 2"),
            (((0, 1), (2, 3)), 6, False, "sequence length 6 cannot be cut for ranks (0, 1, 2, 3) (context-parallel "
             "size 2, tensor-parallel size 2): use a multiple of 4"),
            (((0, 1, 2), (3, 4, 5)), 8, True, "sequence length 8 cannot be cut for ranks (0, 1, 2, 3, 4, 5) "
             "(context-parallel size 2, tensor-parallel size 3, sequence parallel): use a multiple of 12"),
        ],
    )  # fmt: skip
    def test_length_that_does_not_divide(
        self, ranks_by_cp: tuple[tuple[int, ...], ...], length: int, is_sharded: bool, message: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            Endpoint(ranks_by_cp=ranks_by_cp).sharding((length, 1, 4), is_sharded=is_sharded)
        assert str(caught.value) == message

    def test_copies_need_no_length(self) -> None:
        assert is_replicated(Endpoint(ranks_by_cp=((0, 1),)).sharding((7,), is_sharded=False))


class TestChannelSpec:
    ONE_TO_THREE = ChannelSpec(
        name="boundary 0->1, forward",
        src=Endpoint(ranks_by_cp=((0,),)),
        dst=Endpoint(ranks_by_cp=((1, 2, 3),)),
        strategy="sliced",
    )

    def test_members_and_participants(self) -> None:
        leaders_only = dataclasses.replace(self.ONE_TO_THREE, strategy="rank0")
        assert self.ONE_TO_THREE.members == leaders_only.members == (0, 1, 2, 3)
        assert self.ONE_TO_THREE.participants == (0, 1, 2, 3)
        assert leaders_only.participants == (0, 1)

    def test_each_side_has_its_own_way_of_holding(self) -> None:
        plan = self.ONE_TO_THREE.plan((6,), dst_sharded=True)
        assert plan == plan_sliced(replicated((6,), (0,)), sharded((6,), (1, 2, 3), dim=0))
        assert is_replicated(self.ONE_TO_THREE.plan((6,)).dst)

    def test_strategy_that_cannot_carry_the_layout_is_refused_before_any_tensor(self) -> None:
        unequal = dataclasses.replace(self.ONE_TO_THREE, dst=Endpoint(ranks_by_cp=((1,), (2,))), strategy="rank0")
        with pytest.raises(ConfigError, match="use --vtp-transport sliced"):
            _ = unequal.probe


class TestPipelineBoundaries:
    def test_both_directions_of_a_ring_with_replicas(self) -> None:
        layout = PipelineLayout.from_sizes((1, 2), world_size=6)
        boundaries = pipeline_boundaries(layout, is_ring=True)
        expected = [(0, 1, 0, (0,), (2, 3)), (0, 1, 1, (1,), (4, 5)), (1, 0, 0, (2, 3), (0,)), (1, 0, 1, (4, 5), (1,))]
        assert [(b.upstream, b.downstream, b.dp_ranks[0][0], b.src.ranks, b.dst.ranks) for b in boundaries] == expected
        forward, backward = (boundaries[1].channel(direction) for direction in Direction)
        name = "boundary 0->1, replica dp 1 cp 0"
        assert (forward.name, forward.src.ranks, forward.dst.ranks) == (f"{name}, forward", (1,), (4, 5))
        assert (backward.name, backward.src.ranks, backward.dst.ranks) == (f"{name}, backward", (4, 5), (1,))
        assert forward.strategy == backward.strategy == "sliced"

    def test_equal_context_parallelism_is_one_boundary_for_each_rank_of_it(self) -> None:
        layout = PipelineLayout.from_sizes((1, 2), world_size=6, cp=2)
        boundaries = pipeline_boundaries(layout, is_ring=False)
        ranks = [(b.cp_rank, b.src.ranks_by_cp, b.dst.ranks_by_cp) for b in boundaries]
        assert ranks == [(0, ((0,),), ((2, 3),)), (1, ((1,),), ((4, 5),))]

    @pytest.mark.parametrize("mode", DpMode)
    @pytest.mark.parametrize(("dp", "cp"), [((1, 1), (1, 1)), ((2, 2), (1, 1)), ((2, 4), (2, 2)), ((2, 2), (1, 2))])
    def test_no_two_have_the_same_name(self, mode: DpMode, dp: tuple[int, int], cp: tuple[int, int]) -> None:
        """A trace, or an error, tells the messages of replicas apart by their names."""
        layout = PipelineLayout((StageGrid(1, dp=dp[0], cp=cp[0]), StageGrid(2, dp=dp[1], cp=cp[1])))
        names = [b.name(way) for b in pipeline_boundaries(layout, is_ring=False, dp_mode=mode) for way in Direction]
        assert len({*names}) == len(names)
        assert ("replica" in names[0]) == (len(names) > 2)

    @pytest.mark.parametrize("is_ring", [True, False])
    def test_single_stage_has_none(self, is_ring: bool) -> None:
        assert pipeline_boundaries(PipelineLayout.from_sizes((4,), world_size=4), is_ring=is_ring) == ()

    def test_rules_decide_for_every_boundary(self) -> None:
        layout = PipelineLayout.from_sizes((1, 2, 2), world_size=5)
        rules = TransportRules(sites=("edge", "cloud", "cloud"))
        strategies = [b.strategy for b in pipeline_boundaries(layout, is_ring=True, rules=rules)]
        assert strategies == ["rank0", "sliced", "rank0"]


class TestTransportRules:
    LAYOUT = PipelineLayout.from_sizes((1, 4, 4), world_size=9)
    SITES = ("edge", "cloud", "cloud")

    @pytest.mark.parametrize("transport", ["rank0", "sliced", "divided"])
    def test_what_was_asked_for_comes_first(self, transport: str) -> None:
        rules = TransportRules(transport=transport, sites=self.SITES, tensor_bytes=0)
        for upstream in (0, 1):
            assert rules.choose(self.LAYOUT, upstream, upstream + 1) == (transport, "asked for")

    def test_unequal_context_parallelism_has_one_way_only(self) -> None:
        layout = PipelineLayout((StageGrid(2, cp=1), StageGrid(2, cp=2)))
        assert TransportRules(tensor_bytes=0).choose(layout, 0, 1) == ("sliced", "context-parallel sizes differ")
        sites = ("edge", "cloud")
        assert TransportRules(transport="sliced", sites=sites).choose(layout, 0, 1) == ("sliced", "asked for")
        for rules, obstacle in (
            (TransportRules(sites=sites), "it crosses sites"),
            (TransportRules(transport="rank0"), "--vtp-transport is rank0"),
        ):
            with pytest.raises(ConfigError, match=f"0->1 joins context-parallel sizes 1 and 2, .* {obstacle}; .*; use"):
                rules.choose(layout, 0, 1)

    def test_replicas_are_joined_where_context_parallelism_differs(self) -> None:
        layout = PipelineLayout((StageGrid(2, 1, 2), StageGrid(1, 2, 2), StageGrid(1, 2, 2)))
        boundaries = pipeline_boundaries(layout, is_ring=False)
        assert [(b.replica_name, b.src.ranks_by_cp, b.dst.ranks_by_cp) for b in boundaries] == [
            ("replica dp 0, all cp ranks", ((0, 1),), ((4,), (5,))),
            ("replica dp 1, all cp ranks", ((2, 3),), ((6,), (7,))),
            ("replica dp 0 cp 0", ((4,),), ((8,),)),
            ("replica dp 0 cp 1", ((5,),), ((9,),)),
            ("replica dp 1 cp 0", ((6,),), ((10,),)),
            ("replica dp 1 cp 1", ((7,),), ((11,),)),
        ]

    def test_sizes_that_do_not_divide_join_all_replicas_where_the_batch_is_cut(self) -> None:
        layout = PipelineLayout((StageGrid(1, dp=2), StageGrid(2, dp=3)))
        (boundary,) = pipeline_boundaries(layout, is_ring=False, dp_mode=DpMode.SPLIT)
        assert (boundary.src.shares, boundary.dst.shares) == (((0,), (1,)), ((2, 3), (4, 5), (6, 7)))
        plan = boundary.channel(Direction.FORWARD).plan((4, 6, 3))
        assert check(plan) == ()
        found = {(t.src, t.dst) for t in plan.transfers}
        assert found == {*((0, r) for r in range(2, 6)), *((1, r) for r in range(4, 8))}
        header = boundary.channel(Direction.FORWARD).plan_header(4)
        assert header.describe().splitlines()[:3] == ["0 -> 2 [0:1, 0:4]", "0 -> 3 [0:1, 0:4]", "0 -> 4 [0:1, 0:4]"]
        assert len(header.transfers) == 8 and check(header) == ()

    @pytest.mark.parametrize(
        ("mode", "expected"),
        [
            (
                DpMode.MULTIPLEX,
                [
                    ("boundary 0->1, replica dp 0 cp 0, forward", ((0,),), ((2, 3),)),
                    ("boundary 0->1, replica dp 1 cp 0, forward", ((1,),), ((4, 5),)),
                    ("boundary 0->1, replica dp 0->2 cp 0, forward", ((0,),), ((6, 7),)),
                    ("boundary 0->1, replica dp 1->3 cp 0, forward", ((1,),), ((8, 9),)),
                ],
            ),
            (
                DpMode.SPLIT,
                [
                    ("boundary 0->1, replica dp 0->0+1 cp 0, forward", ((0,),), ((2, 3), (4, 5))),
                    ("boundary 0->1, replica dp 1->2+3 cp 0, forward", ((1,),), ((6, 7), (8, 9))),
                ],
            ),
        ],
    )
    def test_unequal_data_parallelism(
        self, mode: DpMode, expected: list[tuple[str, tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]]
    ) -> None:
        layout = PipelineLayout((StageGrid(1, dp=2), StageGrid(2, dp=4), StageGrid(2, dp=4)))
        boundaries = pipeline_boundaries(layout, is_ring=False, dp_mode=mode)
        first = [b for b in boundaries if b.upstream == 0]
        found = [(b.name(Direction.FORWARD), b.src.ranks_by_cp, b.dst.ranks_by_cp) for b in first]
        assert found == expected
        # Between equal stages nothing mixes in either mode.
        assert [(b.src.ranks, b.dst.ranks) for b in boundaries if b.upstream == 1] == [
            (ranks, tuple(rank + 8 for rank in ranks)) for ranks in ((2, 3), (4, 5), (6, 7), (8, 9))
        ]

    @pytest.mark.parametrize("strategy", ["rank0", "sliced"])
    @pytest.mark.parametrize("is_sharded", [False, True])
    def test_split_batch_goes_to_the_replicas_and_comes_back(self, strategy: str, is_sharded: bool) -> None:
        layout = PipelineLayout((StageGrid(1), StageGrid(2, dp=2)))
        rules = TransportRules(transport=strategy)
        (boundary,) = pipeline_boundaries(layout, is_ring=False, rules=rules, dp_mode=DpMode.SPLIT)
        forward = boundary.channel(Direction.FORWARD).plan((4, 6, 3), dst_sharded=is_sharded)
        rows = [((0, 2), (2, 4)), ((0, 4), (0, 4))][not is_sharded]
        assert [forward.dst.boxes_of(rank) for rank in (1, 2, 3, 4)] == [
            ((rows[tp_rank], batch, (0, 3)),) for batch in ((0, 3), (3, 6)) for tp_rank in (0, 1)
        ]
        back = boundary.channel(Direction.BACKWARD).plan((4, 6, 3), src_sharded=is_sharded)
        assert check(forward) == check(back) == ()
        assert back == reversed_plan(forward)
        links = {"rank0": [(0, 1), (0, 3)], "sliced": [(0, 1), (0, 2), (0, 3), (0, 4)]}[strategy]
        assert [(t.src, t.dst) for t in forward.transfers] == links
        assert sorted((t.dst, t.src) for t in back.transfers) == links
        header = boundary.channel(Direction.FORWARD).plan_header(4)
        assert check(header) == ()
        endpoint = boundary.dst
        local = (2 if is_sharded else 4, 3, 3)
        assert endpoint.local_shape((4, 6, 3), is_sharded=is_sharded) == local
        assert endpoint.whole_shape(local, is_sharded=is_sharded) == (4, 6, 3)

    @pytest.mark.parametrize(
        ("upstream", "downstream", "expected"),
        [
            (0, 1, ("rank0", "crosses from site edge to site cloud")),
            (1, 2, ("sliced", "both stages have the same size: rank to rank")),
            (2, 0, ("rank0", "crosses from site cloud to site edge")),
        ],
    )
    def test_sites(self, upstream: int, downstream: int, expected: tuple[str, str]) -> None:
        assert TransportRules(sites=self.SITES).choose(self.LAYOUT, upstream, downstream) == expected

    def test_equal_stages_of_two_sites_go_through_the_leaders(self) -> None:
        rules = TransportRules(sites=("a", "b", "c"))
        assert rules.choose(self.LAYOUT, 1, 2) == ("rank0", "crosses from site b to site c")

    def test_small_tensors_go_through_the_leaders(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rules_module, "SLICED_FROM_BYTES", 1000)
        sliced = "sliced", "the stages' sizes differ: every link carries its share"
        small = "rank0", "tensors of 999 bytes; slices pay off from 1000 bytes on"
        tried = "sliced", "the stages' sizes differ; a run tries rank0 as well at its start and takes the faster one"
        for tensor_bytes, expected in ((None, sliced), (999, small), (1000, tried)):
            rules = TransportRules(tensor_bytes=tensor_bytes)
            assert rules.choose(self.LAYOUT, 0, 1) == expected
            assert rules.rivals(self.LAYOUT, 0, 1) == (("rank0",) if expected is tried else ())
        # Said by hand, between sites, or by one strategy for all: nothing is tried.
        sites = ("a", "b", "b")
        for rules in (
            TransportRules(tensor_bytes=5000, threshold_bytes=5000),
            TransportRules(tensor_bytes=5000, sites=sites),
            TransportRules(tensor_bytes=5000, transport="sliced"),
        ):
            assert rules.rivals(self.LAYOUT, 0, 1) == ()
        found = TransportRules(tensor_bytes=4999, threshold_bytes=5000).choose(self.LAYOUT, 0, 1)
        assert found == ("rank0", "tensors of 4999 bytes; --vtp-transport-threshold allows slices from 5000 bytes on")
        assert TransportRules(tensor_bytes=5000, threshold_bytes=5000).choose(self.LAYOUT, 0, 1) == sliced
        # Equal stages send small tensors rank to rank.
        assert TransportRules(tensor_bytes=999).choose(self.LAYOUT, 1, 2)[0] == "sliced"

    def test_equal_stages_may_be_cut_where_their_ranks_hold_copies(self) -> None:
        large = rules_module.SLICED_FROM_BYTES
        whole = "sliced", "both stages have the same size: rank to rank"
        tried = "divided", "both stages have the same size; a run tries rank to rank (sliced) as well at its start"
        for known, layout, expected in (
            ({}, self.LAYOUT, tried),
            ({}, PipelineLayout((StageGrid(1), StageGrid(2), StageGrid(2, dp=2))), tried),
            ({"is_split": True}, self.LAYOUT, tried),
            ({"tensor_bytes": None}, self.LAYOUT, whole),
            ({"tensor_bytes": large - 1}, self.LAYOUT, whole),
            ({"threshold_bytes": large}, self.LAYOUT, whole),
            ({"is_sharded": True}, self.LAYOUT, whole),
            ({}, PipelineLayout.from_sizes((2, 1, 1), world_size=4), whole),
            ({"is_split": True}, PipelineLayout((StageGrid(1), StageGrid(2), StageGrid(2, dp=2))), whole),
        ):
            rules = TransportRules(**{"tensor_bytes": large, **known})
            assert rules.choose(layout, 1, 2) == expected, (known, layout)
            assert rules.rivals(layout, 1, 2) == (("sliced",) if expected is tried else ())

    @pytest.mark.parametrize("tp", list(itertools.product(range(1, 5), repeat=2)), ids=str)
    def test_what_a_run_tries_needs_no_rank_and_no_group_that_is_not_there(self, tp: tuple[int, int]) -> None:
        layout = PipelineLayout.from_sizes((*tp, 1), world_size=sum(tp) + 1)
        rules = TransportRules(tensor_bytes=rules_module.SLICED_FROM_BYTES)
        boundary = pipeline_boundaries(layout, is_ring=False, rules=rules)[0]
        assert bool(boundary.rivals) is (tp != (1, 1))
        for opened in map(boundary.channel, Direction):
            for rival in boundary.rivals:
                tried = dataclasses.replace(opened, strategy=rival)
                assert set(tried.participants) <= set(opened.participants)
                assert set(tried.gathering_groups) <= set(opened.gathering_groups)


def test_messages_of_a_mebibyte_cross_whole() -> None:
    """Portions of 256 KiB made 4 MiB a third slower between 2 and 3 ranks, `python -m benchmarks.boundary`."""
    shape = (1024, 1, 1024)
    plan = plan_sliced(replicated(shape, (0, 1)), replicated(shape, (2, 3, 4)))
    for rank in plan.dst.ranks:
        received = plan.receives_of(rank)
        assert cut_into_portions(received, lambda one: 4 * one.num_elements) == received
        portions = cut_into_portions(received, lambda one: 64 * one.num_elements)
        assert len(received) < len(portions) <= MAX_PORTIONS * len(received)


@pytest.mark.parametrize(
    ("strategy", "dst", "is_cut"), [("sliced", (4,), False), ("sliced", (4, 5), True), ("rank0", (4, 5), False)]
)
def test_messages_are_cut_only_where_portions_are_swapped(strategy: str, dst: tuple[int, ...], is_cut: bool) -> None:
    shape = (4096, 1, 4096)
    plan = STRATEGIES[strategy].plan(replicated(shape, (0, 1, 2, 3)), replicated(shape, dst))
    compiled = compile_plan(plan, 4, itemsize_bytes=4)
    assert (len(compiled.receives) > len(plan.receives_of(4))) is is_cut
    assert len(compile_plan(plan, 4).receives) == len(plan.receives_of(4))


class TestLargestMessage:
    """What a backend's buffers are sized by."""

    def largest(self, tp: tuple[int, ...], *, mode: DpMode = DpMode.MULTIPLEX, **grid: tuple[int, ...]) -> list[int]:
        sizes = [tp, *grid.values()]
        world = sum(math.prod(stage) for stage in zip(*sizes, strict=True))
        layout = PipelineLayout.from_sizes(tp, world_size=world, **grid)
        rules = TransportRules(transport="sliced", tensor_bytes=1200)
        boundaries = pipeline_boundaries(layout, is_ring=False, rules=rules, dp_mode=mode)
        specs = [boundary.channel(direction) for boundary in boundaries for direction in Direction]
        return [spec.largest_message_bytes or 0 for spec in specs]

    def test_slices(self) -> None:
        assert self.largest((2, 3)) == [400, 400] and self.largest((1, 4)) == [300, 300]

    def test_one_size_sends_all_from_rank_to_rank(self) -> None:
        assert self.largest((2, 2)) == [1200, 1200]

    def test_what_a_run_may_take_instead_counts(self) -> None:
        layout = PipelineLayout.from_sizes((1, 2, 2), world_size=5)
        boundaries = pipeline_boundaries(layout, is_ring=False, rules=TransportRules(tensor_bytes=4 << 20))
        assert [(b.strategy, b.rivals) for b in boundaries] == [("sliced", ("rank0",)), ("divided", ("sliced",))]
        assert {b.channel(direction).largest_message_bytes for b in boundaries for direction in Direction} == {4 << 20}

    def test_longer_pieces_where_context_parallelism_is_narrow(self) -> None:
        # The size is that of the pieces of two ranks: one rank has twice as much, and sends each of two its half.
        assert self.largest((1, 1, 1), cp=(1, 1, 2)) == [2400, 2400, 1200, 1200]

    def test_more_samples_where_microbatches_are_larger(self) -> None:
        assert self.largest((1, 1, 1), dp=(1, 2, 4), mode=DpMode.SPLIT) == [2400] * 2 + [1200] * 4
        assert set(self.largest((1, 1, 1), dp=(1, 2, 4))) == {1200}

    def test_unknown_size(self) -> None:
        layout = PipelineLayout.from_sizes((1, 2), world_size=3)
        (boundary,) = pipeline_boundaries(layout, is_ring=False)
        assert boundary.channel(Direction.FORWARD).largest_message_bytes is None
