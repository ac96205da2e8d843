"""Plans of bridges between random grids, against one process that has the whole tensors."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.expected import bridge_values
from tests.expected.bridge_values import Arrays, Sizes
from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.plan.boundary.boundary_plan import (
    MIN_PORTION_BYTES,
    BoundaryPlan,
    CollectiveKind,
    compile_plan,
    cut_into_portions,
    egress_bytes,
    ingress_bytes,
    swaps,
)
from vtp_plugin.plan.boundary.bridge_spec import BridgeSpec, unit_widths
from vtp_plugin.plan.boundary.check_boundary import check
from vtp_plugin.plan.boundary.endpoint import (
    BridgeEndpoint,
    LocalBoxes,
    SequenceCut,
    Sharding,
    boundary_ranks,
    even_cuts,
    local_shape,
    local_slices,
    require_disjoint,
)
from vtp_plugin.plan.boundary.strategies.in_place import plan_in_place, plans_of_gradient
from vtp_plugin.util.index_boxes import intersect

SETTINGS = settings(max_examples=150)
DOWNSTREAM = 100


@st.composite
def grids(draw: st.DrawFn) -> Sizes:
    """Up to 8 ranks, and any way to hold a sequence."""
    tp = draw(st.integers(1, 8))
    cp = draw(st.integers(1, 8 // tp))
    dp = draw(st.integers(1, 8 // (tp * cp)))
    sequence = draw(st.sampled_from(["whole", "whole", "plain", "zigzag"]))
    return Sizes(tp=tp, cp=cp, dp=dp, sequence=sequence, is_sharded=draw(st.booleans()))


@st.composite
def exchanges(draw: st.DrawFn, *, is_in_place: bool = False) -> tuple[Sizes, Sizes, list[np.ndarray]]:
    """Two grids, and the units of a batch: of any length, also none, as are those of images."""
    src = draw(grids())
    dst = draw(grids().filter(lambda one: not is_in_place or one.num_ranks == src.num_ranks))
    num_dims = draw(st.sampled_from([2, 3]))
    if num_dims == 2:
        src, dst = (
            Sizes(
                tp=s.tp,
                cp=s.cp,
                dp=s.dp,
                sequence="plain" if s.sequence == "zigzag" else s.sequence,
                is_sharded=s.is_sharded,
            )
            for s in (src, dst)
        )
    num_units = math.lcm(src.num_shares(num_dims), dst.num_shares(num_dims))
    widths = draw(st.lists(st.integers(0, 3), min_size=num_units, max_size=num_units))
    rows = math.lcm(src.step(), dst.step()) * draw(st.integers(1, 2))
    depth = draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    event(f"{num_dims} dimensions, dp {src.dp} -> {dst.dp}")
    shapes = [(rows, width, depth) if num_dims == 3 else (width, 5) for width in widths]
    return src, dst, [random.integers(-99, 99, shape) for shape in shapes]


def spec_of(src: Sizes, dst: Sizes, num_dims: int) -> BridgeSpec:
    return BridgeSpec.between("a -> b", src.end(0), dst.end(DOWNSTREAM), num_dims=num_dims)


def shape_of(units: list[np.ndarray]) -> tuple[int, int, int]:
    """Return the shape of the plans for a batch."""
    rows, depth = (len(units[0]), units[0].shape[2]) if units[0].ndim == 3 else (units[0].shape[1], 1)
    return rows, len(units), depth


def as_planned(tensor: np.ndarray) -> np.ndarray:
    """Turn `[tokens, H]` into `[H, tokens, 1]`."""
    return tensor if tensor.ndim == 3 else tensor.T[:, :, None]


def carry_out(plan: BoundaryPlan, tensors: Arrays, widths: list[int]) -> Arrays:
    """Do what a plan says with real arrays. What nobody wrote stays a number that no tensor has."""

    def where(rank: int, sharding: Sharding, box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
        return local_slices(box, LocalBoxes(rank=rank, boxes=sharding.boxes_of(rank)), widths)

    memory = {rank: as_planned(tensor) for rank, tensor in tensors.items()}
    sent = memory
    if plan.start.kind is CollectiveKind.SUM:
        sent = {rank: sum(memory[member] for member in group) for group in plan.start.groups for rank in group}
    landed: Arrays = {}
    for holding in plan.dst.holdings:
        landed[holding.rank] = np.full(local_shape(holding, widths), 10**9)
    for transfer in plan.transfers:
        for box in transfer.boxes:
            source = sent[transfer.src][where(transfer.src, plan.src, box)]
            landed[transfer.dst][where(transfer.dst, plan.dst, box)] = source
    result = {rank: tensor.copy() for rank, tensor in landed.items()}
    for group in plan.finish.groups:
        for member, (start, stop) in zip(group, even_cuts(len(landed[group[0]]), len(group)), strict=True):
            for rank in group:
                result[rank][start:stop] = landed[member][start:stop]
    return {
        rank: tensor if next(iter(tensors.values())).ndim == 3 else tensor[:, :, 0].T for rank, tensor in result.items()
    }


def assert_same(got: Arrays, wanted: Arrays) -> None:
    assert got.keys() == wanted.keys()
    for rank, tensor in wanted.items():
        np.testing.assert_array_equal(got[rank], tensor, err_msg=f"rank {rank}")


@SETTINGS
@given(exchanges())
def test_forward_brings_every_rank_its_part(exchange: tuple[Sizes, Sizes, list[np.ndarray]]) -> None:
    src, dst, units = exchange
    plan = spec_of(src, dst, units[0].ndim).plan(shape_of(units))
    assert check(plan) == ()
    widths = [unit.shape[1 if unit.ndim == 3 else 0] for unit in units]
    got = carry_out(plan, bridge_values.cut(units, src, 0), widths)
    assert_same(got, bridge_values.cut(units, dst, DOWNSTREAM))


@SETTINGS
@given(exchanges())
def test_backward_is_the_adjoint(exchange: tuple[Sizes, Sizes, list[np.ndarray]]) -> None:
    src, dst, units = exchange
    spec = spec_of(src, dst, units[0].ndim)
    plan = spec.reversed().plan(shape_of(units))
    assert check(plan) == ()
    random = np.random.default_rng(len(units))
    grads = bridge_values.cotangents(units, dst, DOWNSTREAM, lambda shape: random.integers(-99, 99, shape))
    widths = [unit.shape[1 if unit.ndim == 3 else 0] for unit in units]
    got = carry_out(plan, grads, widths)
    wanted = bridge_values.gradient(units, dst, DOWNSTREAM, grads)
    assert_same(got, bridge_values.cut(wanted, src, 0))
    # <A x, y> = <x, A* y>, in whole numbers and so exactly.
    forwarded = carry_out(spec.plan(shape_of(units)), bridge_values.cut(units, src, 0), widths)
    assert bridge_values.dst_inner(forwarded, grads, dst, DOWNSTREAM) == bridge_values.inner(units, wanted)


@st.composite
def modules(draw: st.DrawFn, first_rank: int, *, is_last: bool) -> tuple[Sizes, BridgeEndpoint, np.ndarray]:
    """A grid of up to 8 ranks with stages, its dimensions in any order, and the ranks at the bridge by (dp, cp, tp)."""
    sizes = draw(grids())
    pp = draw(st.integers(1, 8 // sizes.num_ranks))
    lengths = {"tp": sizes.tp, "cp": sizes.cp, "pp": pp, "dp": sizes.dp}
    names = draw(st.permutations(list(lengths)))
    shape = [lengths[name] for name in names]
    end = BridgeEndpoint(
        ranks=boundary_ranks(shape, names, first_rank, is_last=is_last),
        sequence=SequenceCut(sizes.sequence),
        is_sharded=sizes.is_sharded,
    )
    # The first dimension changes fastest.
    numbers = (first_rank + np.arange(math.prod(shape))).reshape(shape, order="F")
    numbers = numbers.transpose([names.index(name) for name in ("pp", "dp", "cp", "tp")])
    return sizes, end, numbers[-1 if is_last else 0].ravel()


@SETTINGS
@given(modules(0, is_last=True), modules(DOWNSTREAM, is_last=False), st.integers(1, 2))
def test_grids_with_stages_send_from_the_last_one_to_the_first_and_back(
    src: tuple[Sizes, BridgeEndpoint, np.ndarray], dst: tuple[Sizes, BridgeEndpoint, np.ndarray], depth: int
) -> None:
    (src_sizes, src_end, src_ranks), (dst_sizes, dst_end, dst_ranks) = src, dst
    spec = BridgeSpec.between("a -> b", src_end, dst_end, num_dims=3)
    random = np.random.default_rng(depth)
    rows = math.lcm(src_sizes.step(), dst_sizes.step())
    units = [random.integers(-99, 99, (rows, 1, depth)) for _ in range(spec.num_units)]

    def at(ranks: np.ndarray, parts: Arrays) -> Arrays:
        """Give the parts, which are numbered through, to the ranks at the bridge."""
        return {int(rank): part for rank, part in zip(ranks, parts.values(), strict=True)}

    grads = bridge_values.cotangents(units, dst_sizes, 0, lambda shape: random.integers(-99, 99, shape))
    wanted = bridge_values.gradient(units, dst_sizes, 0, grads)
    held, taken = (
        at(src_ranks, bridge_values.cut(units, src_sizes, 0)),
        at(dst_ranks, bridge_values.cut(units, dst_sizes, 0)),
    )
    forward, backward = spec.plan(shape_of(units)), spec.reversed().plan(shape_of(units))
    assert check(forward) == () == check(backward)
    widths = [1] * len(units)
    assert_same(carry_out(forward, held, widths), taken)
    assert_same(
        carry_out(backward, at(dst_ranks, grads), widths), at(src_ranks, bridge_values.cut(wanted, src_sizes, 0))
    )


@SETTINGS
@given(exchanges(is_in_place=True))
def test_in_place_moves_only_what_a_rank_does_not_hold(exchange: tuple[Sizes, Sizes, list[np.ndarray]]) -> None:
    src, dst, units = exchange
    spec = BridgeSpec.between("a -> b", src.end(0), dst.end(0), num_dims=units[0].ndim)
    plan = plan_in_place(*spec.shardings(shape_of(units)))
    assert check(plan) == ()
    widths = [unit.shape[1 if unit.ndim == 3 else 0] for unit in units]
    assert_same(carry_out(plan, bridge_values.cut(units, src, 0), widths), bridge_values.cut(units, dst, 0))
    for transfer in plan.transfers:
        held = plan.src.boxes_of(transfer.dst)
        if transfer.src != transfer.dst:
            assert not any(intersect(box, own) for box in transfer.boxes for own in held)


def every_grid(num_ranks: int) -> list[Sizes]:
    """List the grids of so many ranks, with all that they may hold of a tensor `[S, B, H]`."""
    sizes = [
        (tp, cp, num_ranks // (tp * cp))
        for tp in range(1, num_ranks + 1)
        for cp in range(1, num_ranks + 1)
        if num_ranks % (tp * cp) == 0
    ]
    return [
        Sizes(tp=tp, cp=cp, dp=dp, sequence=sequence, is_sharded=is_sharded)
        for tp, cp, dp in sizes
        for sequence in (("whole", "plain", "zigzag") if cp > 1 else ("whole",))
        for is_sharded in ((False, True) if tp > 1 else (False,))
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, pytest.param(6, marks=pytest.mark.full)])
def test_in_place_gradients_are_the_adjoint_for_every_pair_of_grids(num_ranks: int) -> None:
    """<A x, y> = <x, A* y>, in whole numbers and so exactly; copies count once."""
    random = np.random.default_rng(num_ranks)
    for src, dst in itertools.product(every_grid(num_ranks), repeat=2):
        num_rows = math.lcm(src.step(), dst.step())
        units = [random.integers(-99, 99, (num_rows, 1, 2)) for _ in range(math.lcm(src.dp, dst.dp))]
        grads = bridge_values.cotangents(units, dst, 0, lambda shape: random.integers(-99, 99, shape))
        spec = BridgeSpec.between("a -> b", src.end(0), dst.end(0), num_dims=3)
        shardings, widths = spec.shardings(shape_of(units)), [1] * len(units)
        forwarded = carry_out(plan_in_place(*shardings), bridge_values.cut(units, src, 0), widths)
        assert_same(forwarded, bridge_values.cut(units, dst, 0))
        plans = plans_of_gradient(*shardings, spec.dst_end.summands)
        parts = [carry_out(plan, grads, widths) for plan in plans]
        got = {rank: sum(part[rank] for part in parts) for rank in grads}
        wanted = bridge_values.gradient(units, dst, 0, grads)
        assert_same(got, bridge_values.cut(wanted, src, 0))
        assert bridge_values.dst_inner(forwarded, grads, dst, 0) == bridge_values.inner(units, wanted), (
            f"{src} -> {dst}"
        )


@SETTINGS
@given(exchanges())
def test_every_link_carries_its_share_once(exchange: tuple[Sizes, Sizes, list[np.ndarray]]) -> None:
    src, dst, units = exchange
    spec = spec_of(src, dst, units[0].ndim)
    for plan in (one.plan(shape_of(units)) for one in (spec, spec.reversed())):
        num_elements = math.prod(plan.src.shape)
        assert sum(transfer.num_elements for transfer in plan.transfers) == num_elements
        assert sum(egress_bytes(plan, 1).values()) == sum(ingress_bytes(plan, 1).values()) == num_elements
        assert len({(transfer.src, transfer.dst) for transfer in plan.transfers}) == len(plan.transfers)


@SETTINGS
@given(grids(), grids())
def test_headers_tell_each_rank_of_the_shares_that_it_gets(src: Sizes, dst: Sizes) -> None:
    spec = spec_of(src, dst, 3)
    plan = spec.plan_header(spec.header_codec(spec.src.ranks[0]).length)
    assert check(plan) == () == check(spec.probe)
    per_src, per_dst = spec.num_units // src.dp, spec.num_units // dst.dp
    for rank, d, _, _ in dst.coordinates(DOWNSTREAM):
        wanted = {unit // per_src for unit in range(d * per_dst, (d + 1) * per_dst)}
        assert {box[0][0] for transfer in plan.receives_of(rank) for box in transfer.boxes} == wanted
        for transfer in plan.receives_of(rank):
            assert transfer.boxes[0] in plan.src.boxes_of(transfer.src)
        assert spec.units_of(rank) == range(d * per_dst, (d + 1) * per_dst)


def test_a_sum_that_is_left_out_or_made_up_is_found() -> None:
    src, dst = Sizes(tp=1, cp=1, dp=1), Sizes(tp=2, cp=2, dp=1)
    plan = spec_of(src, dst, 3).reversed().plan((8, 1, 1))
    assert plan.start.groups == ((100, 102), (101, 103))
    lost = dataclasses.replace(plan, start=plan.finish)
    assert check(lost) == ("start: the values of () are added up, not those of ((100, 102), (101, 103))",)
    copies = dataclasses.replace(plan, src=dataclasses.replace(plan.src, summands=()))
    assert check(copies) == ("start: the values of ((100, 102), (101, 103)) are added up, not those of ()",)


def test_summands_hold_one_tensor() -> None:
    halves = tuple(LocalBoxes(rank=rank, boxes=(((2 * rank, 2 * rank + 2),),)) for rank in range(2))
    with pytest.raises(PlanError, match="hold different boxes"):
        Sharding(shape=(4,), holdings=halves, summands=((0, 1),))
    with pytest.raises(PlanError, match="summands"):
        Sharding(shape=(4,), holdings=halves, summands=((0,),))


@pytest.mark.parametrize(
    ("length", "num_units", "sizes", "problem"),
    [
        (5, 2, None, "a share of 5 along the batch cannot be cut into 2 equal parts"),
        (6, 2, [1, 2, 3], "bridge split metadata has 3 entries"),
        (6, 2, [2, 2], "bridge split metadata sums to 4"),
        (0, 2, [], "bridge split metadata has 0 entries"),
    ],
)
def test_shares_that_cannot_be_cut(length: int, num_units: int, sizes: list[int] | None, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        unit_widths(length, num_units, sizes)


def test_text_only_batches_have_units_of_no_length() -> None:
    assert unit_widths(0, 3) == (0, 0, 0)


def test_grids_that_overlap_in_part() -> None:
    with pytest.raises(ConfigError, match="of the ranks 0 to 3 and 2 to 5, have the ranks 2, 3 in common"):
        require_disjoint(range(4), range(2, 6))


def test_tokens_cannot_be_cut_in_zigzag() -> None:
    end = BridgeEndpoint(ranks=(((0,), (1,)),), sequence=SequenceCut.ZIGZAG)
    with pytest.raises(ConfigError, match="zig-zag"):
        BridgeSpec.between("a -> b", end, BridgeEndpoint(ranks=(((2,),),)), num_dims=2)


@SETTINGS
@given(exchanges(), st.integers(1, 5))
def test_portions_arrive_before_they_are_swapped_and_each_row_is_swapped_once(
    exchange: tuple[Sizes, Sizes, list[np.ndarray]], elements_per_portion: int
) -> None:
    src, dst, units = exchange
    spec = spec_of(src, dst, units[0].ndim)
    plan = spec.plan(shape_of(units))
    for rank in plan.finish.ranks:
        holding = LocalBoxes(rank=rank, boxes=plan.dst.boxes_of(rank))
        messages = cut_into_portions(
            plan.receives_of(rank), lambda one: one.num_elements * MIN_PORTION_BYTES // elements_per_portion
        )
        for source in plan.src.ranks:
            # Both ends of a link must have one order of its messages.
            ours = [one for one in messages if one.src == source]
            sent = cut_into_portions(
                plan.sends_of(source), lambda one: one.num_elements * MIN_PORTION_BYTES // elements_per_portion
            )
            assert ours == [one for one in sent if one.dst == rank]
        arrived = np.zeros(holding.local_shape, int)
        left = list(swaps(messages, lambda box, holding=holding: local_slices(box, holding)[0].start))
        given_away = np.zeros(len(arrived), int)
        for number, message in enumerate(messages, 1):
            for box in message.boxes:
                arrived[local_slices(box, holding)] += 1
            while left and left[0].num_arrived <= number:
                swap = left.pop(0)
                assert (arrived[swap.start : swap.stop] == 1).all()
                given_away[swap.start : swap.stop] += 1
        event(f"{min(len(messages), 12)} messages")
        assert not left
        assert (given_away == arrived[:, 0, 0]).all() and arrived.max(initial=1) == 1


@SETTINGS
@given(exchanges(), st.sampled_from([None, (1, 0, 2), (2, 1, 0)]), st.sampled_from([None, MIN_PORTION_BYTES // 2]))
def test_what_ranks_compile_moves_what_the_plan_says(
    exchange: tuple[Sizes, Sizes, list[np.ndarray]], order: tuple[int, ...] | None, itemsize_bytes: int | None
) -> None:
    """Each rank does its part with its own tensors alone; of buffers and blocks of memory torch is the judge."""
    src, dst, units = exchange
    plan = spec_of(src, dst, units[0].ndim).plan(shape_of(units))
    widths = [as_planned(unit).shape[1] for unit in units]
    order = order if all(len(one.boxes) == 1 for one in plan.transfers) else None
    turn = order or (0, 1, 2)
    sent: dict[int, torch.Tensor] = {}
    under_way: dict[tuple[int, int], list[torch.Tensor]] = {}
    for rank in plan.src.ranks:
        compiled = compile_plan(plan, rank, itemsize_bytes=itemsize_bytes, widths=widths, memory_order=order)
        assert compiled.held is not None and compiled.wanted is None and not compiled.receives
        sent[rank] = torch.arange(math.prod(compiled.held)).reshape(compiled.held) + 10**5 * rank
        for one in compiled.sends:
            pieces = [sent[rank][part].permute(turn).flatten() for part in one.parts or [()]]
            under_way.setdefault((rank, one.peer), []).append(torch.cat(pieces))
    for rank in plan.dst.ranks:
        compiled = compile_plan(plan, rank, itemsize_bytes=itemsize_bytes, widths=widths, memory_order=order)
        assert compiled.wanted is not None and compiled.held is None and not compiled.sends
        got = torch.full([compiled.wanted[dim] for dim in turn], -1).permute([turn.index(dim) for dim in range(3)])
        for one in compiled.receives:
            message = under_way[one.peer, rank].pop(0)
            targets = [got[part].permute(turn) for part in one.parts or [()]]
            assert (one.buffer is None) == (len(targets) == 1 and targets[0].is_contiguous())
            buffer = message.view(targets[0].shape if one.buffer is None else one.buffer)
            for target, piece in zip(targets, buffer.split(one.lengths or [len(buffer)]), strict=True):
                target.copy_(piece)
        wanted = torch.full(compiled.wanted, -1)
        for transfer in plan.receives_of(rank):
            source, target = (
                LocalBoxes(rank=one, boxes=sharding.boxes_of(one))
                for one, sharding in ((transfer.src, plan.src), (rank, plan.dst))
            )
            for box in transfer.boxes:
                piece = sent[transfer.src][local_slices(box, source, widths)]
                wanted[local_slices(box, target, widths)] = piece
        assert torch.equal(got, wanted)
    assert not any(under_way.values())
