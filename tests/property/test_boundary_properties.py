"""Laws of boundary plans over random spreads, against an element-by-element oracle and a simulated delivery."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter

import numpy as np
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from vtp_plugin.boundary import (
    BoundaryPlan,
    Box,
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
    reversed_plan,
    sharded,
    subtract,
    volume,
    whole_box,
)

SETTINGS = settings(max_examples=150, deadline=None)
DOWNSTREAM = 1000  # first rank that a downstream stage may have

type Pieces = dict[int, list[np.ndarray]]
"""Rank -> one array per box that it holds."""


# --- random spreads and plans ----------------------------------------------------------------------


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """Shapes of up to three dimensions; the first may be longer than the most ranks and shorter than some."""
    return (draw(st.integers(1, 20)), *draw(st.lists(st.integers(1, 4), max_size=2)))


@st.composite
def grouped(draw: st.DrawFn, shape: tuple[int, ...], ranks: tuple[int, ...]) -> Spread:
    """Cut one dimension, deal the pieces to groups of ranks: shards with copies and with several boxes each."""
    dim = draw(st.integers(0, len(shape) - 1))
    cuts = [cut for cut in even_cuts(shape[dim], draw(st.integers(1, 8))) if cut[0] < cut[1]]
    num_groups = draw(st.integers(1, min(len(cuts), len(ranks))))
    dealt = draw(st.permutations([(*whole_box(shape)[:dim], cut, *whole_box(shape)[dim + 1 :]) for cut in cuts]))
    group_of = [*range(num_groups)] + [draw(st.integers(0, num_groups - 1)) for _ in ranks[num_groups:]]
    return Spread(
        shape=shape,
        holdings=tuple(
            Holding(rank=rank, boxes=tuple(dealt[group::num_groups]))
            for rank, group in zip(ranks, draw(st.permutations(group_of)), strict=True)
        ),
    )


@st.composite
def spreads(draw: st.DrawFn, shape: tuple[int, ...], first_rank: int) -> Spread:
    """Replicated, sharded or grouped over 1 to 16 ranks in any order."""
    num_ranks = draw(st.integers(1, 16))
    ranks = tuple(first_rank + rank for rank in draw(st.permutations(range(num_ranks))))
    match draw(st.sampled_from(["replicated", "sharded", "grouped"])):
        case "replicated":
            return replicated(shape, ranks)
        case "sharded":
            return sharded(shape, ranks, draw(st.integers(0, len(shape) - 1)))
        case _:
            return draw(grouped(shape, ranks))


@st.composite
def direct_plans(draw: st.DrawFn) -> BoundaryPlan:
    shape = draw(shapes())
    return plan_overlap(draw(spreads(shape, 0)), draw(spreads(shape, DOWNSTREAM)))


@st.composite
def rank0_plans(draw: st.DrawFn) -> BoundaryPlan:
    shape = draw(shapes())
    num_src, num_dst = draw(st.integers(1, 16)), draw(st.integers(1, 16))
    downstream = tuple(range(DOWNSTREAM, DOWNSTREAM + num_dst))
    return plan_rank0(replicated(shape, tuple(range(num_src))), replicated(shape, downstream))


def plans() -> st.SearchStrategy[BoundaryPlan]:
    return st.one_of(direct_plans(), rank0_plans())


# --- the oracle: elements one by one, and a delivery with real arrays ------------------------------


def elements(*boxes: Box) -> Counter[tuple[int, ...]]:
    """Count how often each element, as its index, is in the boxes."""
    return Counter(index for box in boxes for index in itertools.product(*(range(*interval) for interval in box)))


def delivers(plan: BoundaryPlan) -> bool:
    """Whether every sent element is held by its source and every rank gets exactly its elements, each once."""
    held = {h.rank: elements(*h.boxes) for h in plan.src.holdings}
    received: dict[int, Counter[tuple[int, ...]]] = {rank: Counter() for rank in plan.dst.ranks}
    for transfer in plan.transfers:
        sent = elements(transfer.box)
        if not sent or transfer.dst not in received or not sent <= held.get(transfer.src, Counter()):
            return False
        received[transfer.dst] += sent
    if plan.finish.kind is FinishKind.BROADCAST:
        assert plan.finish.root is not None
        from_root = received[plan.finish.root].copy()
        for rank in set(plan.finish.ranks) - {plan.finish.root}:
            received[rank] += from_root
    return all(received[holding.rank] == elements(*holding.boxes) for holding in plan.dst.holdings)


def cut(tensor: np.ndarray, spread: Spread) -> Pieces:
    """Give each rank copies of its boxes of the global tensor."""
    return {
        holding.rank: [tensor[tuple(slice(*interval) for interval in box)].copy() for box in holding.boxes]
        for holding in spread.holdings
    }


def window(pieces: Pieces, spread: Spread, rank: int, box: Box) -> np.ndarray:
    """Return the view of a rank's memory that is the global box."""
    for held, piece in zip(spread.boxes_of(rank), pieces[rank], strict=True):
        if intersect(box, held) == box:
            return piece[local_slices(box, Holding(rank=rank, boxes=(held,)))]
    raise AssertionError(f"rank {rank} does not hold {box}")


def carry_out(plan: BoundaryPlan, tensor: np.ndarray) -> Pieces:
    """Run the plan on arrays, as the runtime would: only `plan.src` pieces are read, only `plan.dst` pieces written."""
    upstream = cut(tensor, plan.src)
    downstream = cut(np.full_like(tensor, -1), plan.dst)
    for transfer in plan.transfers:
        target = window(downstream, plan.dst, transfer.dst, transfer.box)
        assert (target == -1).all(), "an element arrives twice"
        target[...] = window(upstream, plan.src, transfer.src, transfer.box)
    if plan.finish.kind is FinishKind.BROADCAST:
        assert plan.finish.root is not None
        for rank in plan.finish.ranks:
            for target, source in zip(downstream[rank], downstream[plan.finish.root], strict=True):
                target[...] = source
    return downstream


# --- laws of every plan ----------------------------------------------------------------------------


@SETTINGS
@given(plans())
def test_plans_are_valid(plan: BoundaryPlan) -> None:
    assert check(plan) == ()
    assert delivers(plan)


@SETTINGS
@given(plans())
def test_delivery_rebuilds_every_piece(plan: BoundaryPlan) -> None:
    tensor = np.arange(math.prod(plan.src.shape)).reshape(plan.src.shape)
    received, wanted = carry_out(plan, tensor), cut(tensor, plan.dst)
    for rank in plan.dst.ranks:
        for got, want in zip(received[rank], wanted[rank], strict=True):
            np.testing.assert_array_equal(got, want)


@SETTINGS
@given(plans())
def test_reversal(plan: BoundaryPlan) -> None:
    back = reversed_plan(plan)
    assert (back.src, back.dst, back.strategy) == (plan.dst, plan.src, plan.strategy)
    assert check(back) == ()
    assert reversed_plan(back) == plan


@SETTINGS
@given(plans())
def test_describe_names_every_transfer(plan: BoundaryPlan) -> None:
    assert len(plan.describe().splitlines()) == len(plan.transfers) + (plan.finish.kind is not FinishKind.NONE)


@SETTINGS
@given(plans(), st.integers(1, 8))
def test_bytes_add_up(plan: BoundaryPlan, itemsize_bytes: int) -> None:
    total = sum(volume(transfer.box) for transfer in plan.transfers) * itemsize_bytes
    assert sum(link_bytes(plan, itemsize_bytes).values()) == total
    assert sum(egress_bytes(plan, itemsize_bytes).values()) == total
    assert sum(ingress_bytes(plan, itemsize_bytes).values()) == total


# --- laws of each planner --------------------------------------------------------------------------


@SETTINGS
@given(rank0_plans())
def test_rank0_sends_the_whole_tensor_over_one_link(plan: BoundaryPlan) -> None:
    assert link_bytes(plan, itemsize_bytes=1) == {(plan.src.ranks[0], plan.dst.ranks[0]): math.prod(plan.src.shape)}
    assert reversed_plan(plan) == plan_rank0(plan.dst, plan.src)


@SETTINGS
@given(direct_plans())
def test_direct_brings_each_rank_its_own_bytes(plan: BoundaryPlan) -> None:
    own = {holding.rank: sum(map(volume, holding.boxes)) for holding in plan.dst.holdings}
    assert ingress_bytes(plan, itemsize_bytes=1) == own


@SETTINGS
@given(direct_plans())
def test_direct_has_one_transfer_for_each_pair_of_boxes(plan: BoundaryPlan) -> None:
    pairs = Counter((transfer.src, transfer.dst) for transfer in plan.transfers)
    for (src, dst), num_transfers in pairs.items():
        assert num_transfers <= len(plan.src.boxes_of(src)) * len(plan.dst.boxes_of(dst))


@SETTINGS
@given(st.data())
def test_direct_between_equal_spreads_joins_rank_to_rank(data: st.DataObject) -> None:
    src = data.draw(spreads(data.draw(shapes()), 0))
    moved = tuple(dataclasses.replace(holding, rank=holding.rank + DOWNSTREAM) for holding in src.holdings)
    plan = plan_overlap(src, Spread(shape=src.shape, holdings=moved))
    assert all(transfer.dst == transfer.src + DOWNSTREAM for transfer in plan.transfers)
    assert {h.rank: sorted(h.boxes) for h in src.holdings} == {
        rank: [transfer.box for transfer in plan.sends_of(rank)] for rank in src.ranks
    }


@SETTINGS
@given(shapes(), st.integers(1, 16), st.integers(1, 16))
def test_direct_from_copies_takes_turns(shape: tuple[int, ...], num_src: int, num_dst: int) -> None:
    src = replicated(shape, tuple(range(num_src)))
    plan = plan_overlap(src, replicated(shape, tuple(range(DOWNSTREAM, DOWNSTREAM + num_dst))))
    assert [transfer.src for transfer in plan.transfers] == [i % num_src for i in range(num_dst)]


# --- check finds what is broken --------------------------------------------------------------------


def shifted(transfer: Transfer, dim: int, step: int) -> Transfer:
    start, stop = transfer.box[dim]
    moved = (*transfer.box[:dim], (start + step, stop + step), *transfer.box[dim + 1 :])
    return dataclasses.replace(transfer, box=moved)


@st.composite
def corrupted(draw: st.DrawFn, plan: BoundaryPlan) -> BoundaryPlan:
    """Drop, double, shift, shrink, redirect or re-source one transfer, or drop the finish."""
    position = draw(st.integers(0, len(plan.transfers) - 1))
    one = plan.transfers[position]
    dim = draw(st.integers(0, len(one.box) - 1))
    start, stop = one.box[dim]
    kind = draw(st.sampled_from(["drop", "double", "shift", "shrink", "redirect", "resource", "finish"]))
    event(kind)
    match kind:
        case "drop":
            new = []
        case "double":
            new = [one, one]
        case "shift":
            new = [shifted(one, dim, draw(st.sampled_from([-1, 1])))]
        case "shrink":
            new = [dataclasses.replace(one, box=(*one.box[:dim], (start, stop - 1), *one.box[dim + 1 :]))]
        case "redirect":
            new = [dataclasses.replace(one, dst=draw(st.sampled_from((*plan.dst.ranks, 999))))]
        case "resource":
            new = [dataclasses.replace(one, src=draw(st.sampled_from((*plan.src.ranks, 999))))]
        case _:
            return dataclasses.replace(plan, finish=plan_overlap(plan.src, plan.dst).finish)
    return dataclasses.replace(plan, transfers=(*plan.transfers[:position], *new, *plan.transfers[position + 1 :]))


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_check_agrees_with_the_oracle_on_corrupted_plans(data: st.DataObject) -> None:
    plan = data.draw(plans())
    broken = data.draw(corrupted(plan))
    assume(broken != plan)
    problems = check(broken)
    if not delivers(broken):
        assert problems
    elif problems:
        # Delivered all the same, from another holder: only the promise of the strategy can be broken.
        assert all("strategy rank0" in problem for problem in problems)


@SETTINGS
@given(plans(), st.data())
def test_dropped_doubled_and_shifted_transfers_are_always_found(plan: BoundaryPlan, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(plan.transfers) - 1))
    one, others = plan.transfers[position], plan.transfers[:position] + plan.transfers[position + 1 :]
    dim, step = data.draw(st.integers(0, len(one.box) - 1)), data.draw(st.sampled_from([-1, 1]))
    for broken in (others, (*others, one, one), (*others, shifted(one, dim, step))):
        assert check(dataclasses.replace(plan, transfers=broken))


@SETTINGS
@given(plans(), st.data())
def test_order_of_transfers_does_not_matter_to_the_check(plan: BoundaryPlan, data: st.DataObject) -> None:
    shuffled = tuple(data.draw(st.permutations(plan.transfers)))
    assert check(dataclasses.replace(plan, transfers=shuffled)) == ()


# --- box arithmetic --------------------------------------------------------------------------------


@st.composite
def boxes(draw: st.DrawFn, num_dims: int) -> Box:
    pairs = [draw(st.tuples(st.integers(0, 6), st.integers(0, 6))) for _ in range(num_dims)]
    return tuple((min(pair), max(pair)) for pair in pairs)


@SETTINGS
@given(st.data())
def test_subtract_and_intersect_agree_with_sets(data: st.DataObject) -> None:
    num_dims = data.draw(st.integers(1, 3))
    box = data.draw(boxes(num_dims))
    holes = data.draw(st.lists(boxes(num_dims), max_size=4))
    left = subtract(box, holes)
    # Counters: the remaining boxes are disjoint when each element counts once.
    assert elements(*left) == Counter(set(elements(box)) - set(elements(*holes)))
    for hole in holes:
        common = intersect(box, hole)
        assert set(elements(box)) & set(elements(hole)) == (set(elements(common)) if common is not None else set())


@SETTINGS
@given(st.integers(0, 40), st.integers(1, 16))
def test_even_cuts(length: int, parts: int) -> None:
    cuts = even_cuts(length, parts)
    sizes = [stop - start for start, stop in cuts]
    assert [index for start, stop in cuts for index in range(start, stop)] == list(range(length))
    assert len(cuts) == parts
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
