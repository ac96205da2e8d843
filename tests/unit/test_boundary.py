"""Boundary spreads, planners and checks on cases small enough to be written out by hand."""

from __future__ import annotations

import dataclasses
import doctest
import importlib

import pytest

from vtp_plugin.boundary import (
    NO_FINISH,
    STRATEGIES,
    BoundaryPlan,
    Box,
    Finish,
    FinishKind,
    Holding,
    Spread,
    Transfer,
    check,
    egress_bytes,
    even_cuts,
    ingress_bytes,
    intersect,
    link_bytes,
    local_slices,
    plan_overlap,
    plan_rank0,
    replicated,
    require_valid,
    reversed_plan,
    sharded,
    subtract,
    volume,
)
from vtp_plugin.errors import ConfigError

SHAPE = (6, 2, 4)  # [S, B, H]
WHOLE: Box = ((0, 6), (0, 2), (0, 4))


def rows(start: int, stop: int) -> Box:
    """Rows ``start:stop`` of the sequence of a tensor of SHAPE."""
    return (start, stop), (0, 2), (0, 4)


def triples(plan: BoundaryPlan) -> list[tuple[int, int, Box]]:
    return [(transfer.src, transfer.dst, transfer.box) for transfer in plan.transfers]


def with_transfers(plan: BoundaryPlan, *transfers: Transfer) -> BoundaryPlan:
    return dataclasses.replace(plan, transfers=transfers)


@pytest.mark.parametrize("module", ["spread", "plan", "check"])
def test_examples_in_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"vtp_plugin.boundary.{module}"))
    assert result.attempted > 10
    assert result.failed == 0


class TestBoxes:
    def test_even_cuts_give_the_larger_parts_first(self) -> None:
        assert even_cuts(10, 4) == ((0, 3), (3, 6), (6, 8), (8, 10))

    def test_even_cuts_of_fewer_elements_than_parts_end_empty(self) -> None:
        assert even_cuts(2, 4) == ((0, 1), (1, 2), (2, 2), (2, 2))

    def test_touching_boxes_do_not_intersect(self) -> None:
        assert intersect(rows(0, 3), rows(3, 6)) is None
        assert intersect(rows(0, 4), rows(3, 6)) == rows(3, 4)

    def test_a_hole_in_the_middle_leaves_a_frame(self) -> None:
        frame = subtract(((0, 3), (0, 3)), [((1, 2), (1, 2))])
        assert sum(volume(box) for box in frame) == 8
        assert all(intersect(box, ((1, 2), (1, 2))) is None for box in frame)

    def test_subtracting_a_box_from_itself_leaves_nothing(self) -> None:
        assert subtract(WHOLE, [WHOLE]) == ()


class TestSpread:
    def test_replicated(self) -> None:
        spread = replicated(SHAPE, (4, 5))
        assert spread.ranks == (4, 5)
        assert spread.boxes_of(5) == (WHOLE,)
        assert spread.is_replicated

    def test_sharded_unevenly(self) -> None:
        spread = sharded((7, 2), (0, 1, 2), dim=0)
        assert [spread.boxes_of(rank) for rank in spread.ranks] == [
            (((0, 3), (0, 2)),),
            (((3, 5), (0, 2)),),
            (((5, 7), (0, 2)),),
        ]
        assert not spread.is_replicated

    def test_more_ranks_than_slices(self) -> None:
        assert sharded((1, 2), (0, 1), dim=0).boxes_of(1) == ()

    def test_sharded_over_one_rank_is_replicated(self) -> None:
        assert sharded(SHAPE, (3,), dim=0) == replicated(SHAPE, (3,))

    def test_unknown_rank(self) -> None:
        with pytest.raises(KeyError):
            replicated(SHAPE, (0,)).boxes_of(1)

    def test_replicas_collect_the_boxes_of_the_same_holders(self) -> None:
        # Context parallelism 2 with the usual front and back chunks, tensor parallelism 2.
        zigzag = {0: (3, 0), 1: (3, 0), 2: (1, 2), 3: (1, 2)}
        chunks = [((lo, hi),) for lo, hi in even_cuts(8, 4)]
        holdings = tuple(Holding(rank=r, boxes=tuple(chunks[c] for c in own)) for r, own in zigzag.items())
        assert Spread(shape=(8,), holdings=holdings).replicas() == {
            (0, 1): (chunks[0], chunks[3]),
            (2, 3): (chunks[1], chunks[2]),
        }

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
        with pytest.raises(AssertionError, match=message):
            Spread(shape=(4,), holdings=tuple(Holding(rank=r, boxes=tuple(own)) for r, own in enumerate(boxes)))

    def test_rank_listed_twice(self) -> None:
        with pytest.raises(AssertionError, match="twice"):
            replicated(SHAPE, (1, 1))


class TestRank0:
    def test_one_transfer_then_broadcast(self) -> None:
        plan = plan_rank0(replicated(SHAPE, (0, 1)), replicated(SHAPE, (2, 3, 4)))
        assert triples(plan) == [(0, 2, WHOLE)]
        assert plan.finish == Finish(kind=FinishKind.BROADCAST, ranks=(2, 3, 4), root=2)
        assert plan.participants == (0, 2)
        assert check(plan) == ()

    def test_single_receiver_needs_no_finish(self) -> None:
        plan = plan_rank0(replicated(SHAPE, (0, 1)), replicated(SHAPE, (2,)))
        assert plan.finish == NO_FINISH
        assert check(plan) == ()

    def test_only_the_leaders_move_bytes(self) -> None:
        plan = plan_rank0(replicated(SHAPE, (0, 1)), replicated(SHAPE, (2, 3)))
        assert link_bytes(plan, itemsize_bytes=2) == {(0, 2): 96}
        assert egress_bytes(plan, itemsize_bytes=2) == {0: 96, 1: 0}
        assert ingress_bytes(plan, itemsize_bytes=2) == {2: 96, 3: 0}

    @pytest.mark.parametrize("side", ["upstream", "downstream"])
    def test_sharded_sides_are_refused(self, side: str) -> None:
        spreads = [replicated(SHAPE, (0, 1)), replicated(SHAPE, (2, 3))]
        spreads[side == "downstream"] = sharded(SHAPE, spreads[side == "downstream"].ranks, dim=0)
        with pytest.raises(ConfigError, match=f"{side}.*sequence-parallel boundaries need another strategy") as caught:
            plan_rank0(*spreads)
        assert "\n" not in str(caught.value)


class TestOverlap:
    def test_equal_replicated_stages_are_joined_rank_by_rank(self) -> None:
        plan = plan_overlap(replicated(SHAPE, (0, 1, 2)), replicated(SHAPE, (3, 4, 5)))
        assert triples(plan) == [(0, 3, WHOLE), (1, 4, WHOLE), (2, 5, WHOLE)]
        assert plan.finish == NO_FINISH

    def test_equal_sharded_stages_are_joined_rank_by_rank(self) -> None:
        plan = plan_overlap(sharded(SHAPE, (0, 1), dim=0), sharded(SHAPE, (2, 3), dim=0))
        assert triples(plan) == [(0, 2, rows(0, 3)), (1, 3, rows(3, 6))]

    def test_a_narrow_replicated_source_takes_turns(self) -> None:
        plan = plan_overlap(replicated(SHAPE, (0, 1)), replicated(SHAPE, (2, 3, 4)))
        assert triples(plan) == [(0, 2, WHOLE), (1, 3, WHOLE), (0, 4, WHOLE)]

    def test_shards_of_a_replicated_source_come_from_all_its_ranks(self) -> None:
        plan = plan_overlap(replicated(SHAPE, (0, 1)), sharded(SHAPE, (2, 3), dim=0))
        assert triples(plan) == [(0, 2, rows(0, 3)), (1, 3, rows(3, 6))]

    def test_sizes_that_do_not_divide(self) -> None:
        plan = plan_overlap(sharded(SHAPE, (0, 1), dim=0), sharded(SHAPE, (2, 3, 4), dim=0))
        assert triples(plan) == [(0, 2, rows(0, 2)), (0, 3, rows(2, 3)), (1, 3, rows(3, 4)), (1, 4, rows(4, 6))]
        assert egress_bytes(plan, itemsize_bytes=4) == {0: 96, 1: 96}
        assert ingress_bytes(plan, itemsize_bytes=4) == {2: 64, 3: 64, 4: 64}

    def test_vocabulary_between_stages_of_three_and_two(self) -> None:
        plan = plan_overlap(sharded((12, 5), (0, 1, 2), dim=0), sharded((12, 5), (7, 8), dim=0))
        assert triples(plan) == [
            (0, 7, ((0, 4), (0, 5))),
            (1, 7, ((4, 6), (0, 5))),
            (1, 8, ((6, 8), (0, 5))),
            (2, 8, ((8, 12), (0, 5))),
        ]

    def test_a_rank_with_several_boxes_gets_one_transfer_for_each(self) -> None:
        chunks = [((lo, hi),) for lo, hi in even_cuts(8, 4)]
        zigzag = Spread(
            shape=(8,),
            holdings=(
                Holding(rank=1, boxes=(chunks[0], chunks[3])),
                Holding(rank=2, boxes=(chunks[1], chunks[2])),
            ),
        )
        plan = plan_overlap(replicated((8,), (0,)), zigzag)
        # Chunks 1 and 2 touch, but lie in two pieces of memory: they stay two transfers.
        assert triples(plan) == [(0, 1, chunks[0]), (0, 1, chunks[3]), (0, 2, chunks[1]), (0, 2, chunks[2])]
        assert check(plan) == ()
        assert check(reversed_plan(plan)) == ()

    def test_holders_of_several_boxes_share_the_destinations(self) -> None:
        # Ranks 0 and 1 hold chunks 0 and 3, ranks 2 and 3 hold chunks 1 and 2; each destination needs one chunk.
        chunks = [((lo, hi),) for lo, hi in even_cuts(8, 4)]
        own = [(chunks[0], chunks[3])] * 2 + [(chunks[1], chunks[2])] * 2
        src = Spread(shape=(8,), holdings=tuple(Holding(rank=r, boxes=boxes) for r, boxes in enumerate(own)))
        plan = plan_overlap(src, sharded((8,), (4, 5, 6, 7), dim=0))
        assert triples(plan) == [(0, 4, chunks[0]), (2, 5, chunks[1]), (3, 6, chunks[2]), (1, 7, chunks[3])]

    def test_ranks_without_a_piece_stay_silent(self) -> None:
        plan = plan_overlap(sharded((2,), (0, 1, 2), dim=0), sharded((2,), (3,), dim=0))
        assert plan.sends_of(2) == ()
        assert plan.participants == (0, 1, 3)
        assert check(plan) == ()

    def test_queries_by_rank(self) -> None:
        plan = plan_overlap(sharded(SHAPE, (0, 1), dim=0), sharded(SHAPE, (2, 3, 4), dim=0))
        assert plan.sends_of(1) == plan.transfers[2:]
        assert plan.receives_of(3) == plan.transfers[1:3]
        assert plan.sends_of(3) == plan.receives_of(0) == ()

    def test_large_plans_are_checked_without_touching_elements(self) -> None:
        shape = (131_072, 8, 16_384)
        plan = plan_overlap(sharded(shape, tuple(range(64)), dim=0), sharded(shape, tuple(range(64, 160)), dim=0))
        assert check(plan) == ()
        assert sum(link_bytes(plan, itemsize_bytes=2).values()) == 2 * 131_072 * 8 * 16_384


class TestRegistry:
    def test_names(self) -> None:
        assert dict(STRATEGIES) == {"rank0": plan_rank0, "direct": plan_overlap}

    @pytest.mark.parametrize("name", STRATEGIES)
    def test_plans_carry_their_name(self, name: str) -> None:
        assert STRATEGIES[name](replicated(SHAPE, (0,)), replicated(SHAPE, (1, 2))).strategy == name

    def test_read_only(self) -> None:
        with pytest.raises(TypeError):
            STRATEGIES["rank0"] = plan_overlap  # type: ignore[index]

    def test_shapes_must_agree(self) -> None:
        for planner in STRATEGIES.values():
            with pytest.raises(AssertionError, match="shape"):
                planner(replicated((4,), (0,)), replicated((5,), (1,)))

    def test_the_gradient_of_a_broadcast_comes_from_the_leader_alone(self) -> None:
        plan = reversed_plan(plan_rank0(replicated(SHAPE, (0, 1)), replicated(SHAPE, (2, 3, 4))))
        assert triples(plan) == [(2, 0, WHOLE)]
        assert plan.finish == Finish(kind=FinishKind.BROADCAST, ranks=(0, 1), root=0)


class TestFinish:
    def test_root_is_a_member(self) -> None:
        with pytest.raises(AssertionError, match="root"):
            Finish(kind=FinishKind.BROADCAST, ranks=(1, 2), root=3)

    def test_none_has_no_members(self) -> None:
        with pytest.raises(AssertionError, match="no members"):
            Finish(kind=FinishKind.NONE, ranks=(1,), root=None)


class TestLocalSlices:
    def test_relative_to_the_piece(self) -> None:
        holding = sharded(SHAPE, (0, 1), dim=0).holdings[1]
        assert local_slices(rows(4, 6), holding) == (slice(1, 3), slice(0, 2), slice(0, 4))

    def test_box_that_is_not_held(self) -> None:
        with pytest.raises(AssertionError, match="holds"):
            local_slices(rows(2, 4), sharded(SHAPE, (0, 1), dim=0).holdings[1])

    def test_several_boxes_are_not_one_local_tensor(self) -> None:
        with pytest.raises(AssertionError, match="not one"):
            local_slices(((0, 1),), Holding(rank=0, boxes=(((0, 1),), ((3, 4),))))


class TestCheck:
    DIRECT = plan_overlap(sharded((6,), (0, 1), dim=0), sharded((6,), (2, 3, 4), dim=0))
    COPIES = plan_overlap(replicated((4,), (0, 1)), replicated((4,), (2, 3)))
    RANK0 = plan_rank0(replicated((4,), (0, 1)), replicated((4,), (2, 3)))

    def test_dropped_transfer(self) -> None:
        assert check(with_transfers(self.DIRECT, *self.DIRECT.transfers[1:])) == ("rank 2 never gets [0:2]",)

    def test_duplicated_transfer(self) -> None:
        broken = with_transfers(self.DIRECT, *self.DIRECT.transfers, self.DIRECT.transfers[0])
        assert check(broken) == (
            "rank 2 gets [0:2] more than once",
            "2 transfers 0 -> 2 from [0:3] to [0:2], not one",
        )

    def test_shifted_transfer(self) -> None:
        first, *others = self.DIRECT.transfers
        problems = check(with_transfers(self.DIRECT, dataclasses.replace(first, box=((1, 3),)), *others))
        assert "rank 2 never gets [0:1]" in problems
        assert "rank 2 gets [2:3], which it does not hold" in problems

    def test_source_that_does_not_hold_the_box(self) -> None:
        first, *others = self.DIRECT.transfers
        problems = check(with_transfers(self.DIRECT, dataclasses.replace(first, src=1), *others))
        assert problems[0] == "transfer 1 -> 2 [0:2]: the source does not hold [0:2]"

    def test_box_outside_the_tensor(self) -> None:
        first, *others = self.DIRECT.transfers
        for box in (((5, 7),), ((2, 2),), ((0, 2), (0, 1))):
            (problem,) = check(with_transfers(self.DIRECT, dataclasses.replace(first, box=box), *others))
            assert problem.endswith("is empty or leaves the tensor (6,)")

    def test_ranks_of_other_stages(self) -> None:
        first, second = self.COPIES.transfers
        (problem,) = check(with_transfers(self.COPIES, dataclasses.replace(first, src=9), second))
        assert problem == "transfer 9 -> 2 [0:4]: 9 is not one of the source ranks (0, 1)"
        (problem,) = check(with_transfers(self.COPIES, first, dataclasses.replace(second, dst=9)))
        assert problem == "transfer 1 -> 9 [0:4]: 9 is not one of the destination ranks (2, 3)"

    def test_split_transfer_delivers_but_uses_a_pair_twice(self) -> None:
        first, second = self.COPIES.transfers
        halves = [dataclasses.replace(first, box=box) for box in (((0, 2),), ((2, 4),))]
        assert check(with_transfers(self.COPIES, *halves, second)) == (
            "2 transfers 0 -> 2 from [0:4] to [0:4], not one",
        )

    def test_transfer_across_two_boxes_of_a_rank(self) -> None:
        src = Spread(shape=(4,), holdings=(Holding(rank=0, boxes=(((0, 2),), ((2, 4),))),))
        plan = with_transfers(plan_overlap(src, replicated((4,), (1,))), Transfer(src=0, dst=1, box=((0, 4),)))
        (problem,) = check(plan)
        assert "does not lie inside one box of each side" in problem

    def test_missing_broadcast(self) -> None:
        assert check(dataclasses.replace(self.RANK0, finish=NO_FINISH)) == ("rank 3 never gets [0:4]",)

    def test_broadcast_from_a_rank_that_received_nothing(self) -> None:
        broken = Finish(kind=FinishKind.BROADCAST, ranks=(2, 3), root=3)
        assert check(dataclasses.replace(self.RANK0, finish=broken)) == ("rank 3 never gets [0:4]",)

    def test_broadcast_over_what_was_sent_directly(self) -> None:
        assert check(dataclasses.replace(self.COPIES, finish=self.RANK0.finish)) == (
            "rank 3 gets [0:4] more than once",
        )

    def test_broadcast_to_another_stage(self) -> None:
        broken = Finish(kind=FinishKind.BROADCAST, ranks=(2, 3, 5), root=2)
        (problem,) = check(dataclasses.replace(self.RANK0, finish=broken))
        assert problem == "finish broadcast: 5 is not one of the destination ranks (2, 3)"

    def test_rank0_on_more_than_the_leaders_link(self) -> None:
        (problem,) = check(dataclasses.replace(self.COPIES, strategy="rank0"))
        assert problem == "strategy rank0 has transfers on the links [(0, 2), (1, 3)], not on [(0, 2)]"

    def test_shapes_that_differ(self) -> None:
        (problem,) = check(dataclasses.replace(self.RANK0, dst=replicated((5,), (2, 3))))
        assert problem == "the shape is (4,) at the source and (5,) at the destination"

    def test_require_valid(self) -> None:
        require_valid(self.DIRECT)
        with pytest.raises(AssertionError, match=r"rank 2 never gets \[0:2\]"):
            require_valid(with_transfers(self.DIRECT, *self.DIRECT.transfers[1:]))


def test_plans_are_frozen_and_hashable() -> None:
    plan = TestCheck.RANK0
    assert hash(plan) == hash(plan_rank0(plan.src, plan.dst))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.strategy = "direct"  # type: ignore[misc]
