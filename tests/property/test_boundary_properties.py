"""Laws of boundary plans over random layouts, against a simulation that moves numbered elements through real arrays."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from tests.support.plans import is_replicated, link_bytes, reversed_plan
from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.plan.boundary.boundary_plan import (
    NO_COLLECTIVE,
    BoundaryPlan,
    Collective,
    CollectiveKind,
    Transfer,
    egress_bytes,
    ingress_bytes,
)
from vtp_plugin.plan.boundary.channel_spec import ChannelSpec, PipelineBoundary
from vtp_plugin.plan.boundary.check_boundary import check
from vtp_plugin.plan.boundary.endpoint import (
    Endpoint,
    LocalBoxes,
    Shape,
    Sharding,
    even_cuts,
    local_slices,
    num_rows,
    replicated,
    rows_of,
    sharded,
)
from vtp_plugin.plan.boundary.message_kind import plan_header
from vtp_plugin.plan.boundary.strategies.known_strategies import STRATEGIES
from vtp_plugin.plan.boundary.strategies.leaders import plan_rank0
from vtp_plugin.plan.boundary.strategies.slices import plan_sliced
from vtp_plugin.plan.layout.pipeline_layout import Direction
from vtp_plugin.util.index_boxes import Box, intersect, overlaps, subtract, whole_box

SETTINGS = settings(max_examples=100)
DOWNSTREAM = 1000  # first rank that a downstream stage may have
MANY_ROWS = 1 << 20

# --- random stages, tensors and plans --------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """Two sides of a pipeline, what each of them wants, and a tensor that divides for both."""

    src: Endpoint
    dst: Endpoint
    src_sharded: bool
    dst_sharded: bool
    shape: Shape

    def spec(self, strategy: str) -> ChannelSpec:
        return ChannelSpec(name="boundary", src=self.src, dst=self.dst, strategy=strategy)

    def plan(self, strategy: str) -> BoundaryPlan:
        return self.spec(strategy).plan(self.shape, src_sharded=self.src_sharded, dst_sharded=self.dst_sharded)

    @property
    def is_for_rank0(self) -> bool:
        """Whether every rank has all of the tensor, or one piece that no other rank has."""
        both = (self.src, self.src_sharded), (self.dst, self.dst_sharded)
        # Under context parallelism a rank has two chunks, or with slices of an even number one part of one of them.
        return all(
            len(endpoint.ranks_by_cp) == 1 or (cut and len(endpoint.ranks_by_cp[0]) % 2 == 0) for endpoint, cut in both
        )


def stage(tp: int, cp: int, first_rank: int) -> Endpoint:
    return Endpoint(ranks_by_cp=tuple(tuple(range(first_rank + tp * i, first_rank + tp * (i + 1))) for i in range(cp)))


def is_legal(length: int, tp: int, cp: int, *, is_sharded: bool) -> bool:
    """Restate which sequences divide: equal chunks, two for each context-parallel rank, and equal slices of both."""
    return length % (2 * cp if cp > 1 else 1) == 0 and (length // cp) % (tp if is_sharded else 1) == 0


def legal_step(tp: int, cp: int, *, is_sharded: bool) -> int:
    return next(n for n in itertools.count(1) if is_legal(n, tp, cp, is_sharded=is_sharded))


@st.composite
def exchanges(draw: st.DrawFn, max_cp: int = 4) -> Exchange:
    """Sizes up to 16, context-parallel sizes up to 4, copies or slices on either side, any length that divides."""
    sizes = [(draw(st.integers(1, 16)), draw(st.integers(1, max_cp)), draw(st.booleans())) for _ in range(2)]
    if draw(st.integers(0, 3)) == 0:
        sizes[1] = sizes[0]
    step = math.lcm(*(legal_step(tp, cp, is_sharded=is_sharded) for tp, cp, is_sharded in sizes))
    rest = tuple(draw(st.lists(st.integers(1, 2), max_size=2)))
    (src_tp, src_cp, src_sharded), (dst_tp, dst_cp, dst_sharded) = sizes
    return Exchange(
        src=stage(src_tp, src_cp, 0),
        dst=stage(dst_tp, dst_cp, DOWNSTREAM),
        src_sharded=src_sharded,
        dst_sharded=dst_sharded,
        shape=(step * draw(st.integers(1, max(2, 48 // step))), *rest),
    )


@st.composite
def grouped(draw: st.DrawFn, shape: Shape, ranks: tuple[int, ...]) -> Sharding:
    """Cut the rows, deal the pieces to groups of ranks: shards with copies, several boxes each, in any order."""
    cuts = [cut for cut in even_cuts(shape[0], draw(st.integers(1, 8))) if cut[0] < cut[1]]
    num_groups = draw(st.integers(1, min(len(cuts), len(ranks))))
    dealt = draw(st.permutations([(cut, *whole_box(shape)[1:]) for cut in cuts]))
    group_of = [*range(num_groups)] + [draw(st.integers(0, num_groups - 1)) for _ in ranks[num_groups:]]
    holdings = zip(ranks, draw(st.permutations(group_of)), strict=True)
    return Sharding(
        shape=shape,
        holdings=tuple(LocalBoxes(rank=rank, boxes=tuple(dealt[group::num_groups])) for rank, group in holdings),
    )


@st.composite
def shardings(draw: st.DrawFn, shape: Shape, first_rank: int) -> Sharding:
    """Replicated, sharded or grouped over 1 to 16 ranks in any order."""
    ranks = tuple(first_rank + rank for rank in draw(st.permutations(range(draw(st.integers(1, 16))))))
    match draw(st.sampled_from(["replicated", "sharded", "grouped"])):
        case "replicated":
            return replicated(shape, ranks)
        case "sharded":
            return sharded(shape, ranks, draw(st.integers(0, len(shape) - 1)))
        case _:
            return draw(grouped(shape, ranks))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Shapes of up to three dimensions; the first may be longer than the most ranks and shorter than some."""
    return (draw(st.integers(1, 40)), *draw(st.lists(st.integers(1, 3), max_size=2)))


@st.composite
def plans(draw: st.DrawFn) -> BoundaryPlan:
    """Plans of pipelines and of spreads that no pipeline has, of both strategies."""
    if draw(st.booleans()):
        exchange = draw(exchanges())
        return exchange.plan(draw(st.sampled_from(["rank0", "sliced"])) if exchange.is_for_rank0 else "sliced")
    shape = draw(shapes())
    src, dst = draw(shardings(shape, 0)), draw(shardings(shape, DOWNSTREAM))
    return plan_sliced(src, dst)


# --- the oracle: a delivery with real arrays -------------------------------------------------------


class NotDeliveredError(Exception):
    """A plan cannot be carried out, or leaves a rank without its elements."""


@dataclasses.dataclass
class Memory:
    """A rank's tensor, with the number of times that each element arrived."""

    values: np.ndarray
    counts: np.ndarray

    @classmethod
    def empty(cls, holding: LocalBoxes, num_dims: int) -> Memory:
        shape = holding.local_shape if holding.boxes else (0,) * num_dims
        return cls(np.full(shape, -1), np.zeros(shape, dtype=int))

    def put(self, where: tuple[slice, ...], values: np.ndarray, counts: np.ndarray | int = 1) -> None:
        if self.values[where].shape != values.shape:  # numpy would repeat a single row
            raise NotDeliveredError(f"{values.shape} does not fit")
        self.values[where] = values
        self.counts[where] += counts


def own_part(tensor: np.ndarray, holding: LocalBoxes) -> np.ndarray:
    """Lay the boxes of a rank one behind the other; independent of :func:`local_slices`."""
    parts = [tensor[tuple(slice(*interval) for interval in box)] for box in holding.boxes]
    return np.concatenate(parts) if parts else np.empty((0,) * tensor.ndim)


def after_start(plan: BoundaryPlan, tensor: np.ndarray) -> dict[int, np.ndarray]:
    """Do the start: the memory of every source rank that its transfers read."""
    own = {holding.rank: own_part(tensor, holding) for holding in plan.src.holdings}
    memory = dict(own)
    for root, *others in plan.start.groups:
        holding = plan.sent_from(root)
        gathered = np.full(holding.local_shape, -1)
        for rank in (root, *others):
            member = LocalBoxes(rank=rank, boxes=plan.src.boxes_of(rank))
            for box in member.boxes:
                gathered[local_slices(box, holding)] = own[rank][local_slices(box, member)]
        memory[root] = gathered
    return memory


def after_transfers(plan: BoundaryPlan, upstream: dict[int, np.ndarray], num_dims: int) -> dict[int, Memory]:
    """Send every transfer as one message: what each destination rank has before the finish."""
    landed = {rank: Memory.empty(plan.lands_in(rank), num_dims) for rank in plan.dst.ranks}
    for transfer in plan.transfers:
        src, dst = plan.sent_from(transfer.src), plan.lands_in(transfer.dst)
        message = np.concatenate([upstream[transfer.src][local_slices(box, src)].ravel() for box in transfer.boxes])
        for box in transfer.boxes:
            where = local_slices(box, dst)
            size = landed[transfer.dst].values[where].size
            landed[transfer.dst].put(where, message[:size].reshape(landed[transfer.dst].values[where].shape))
            message = message[size:]
    return landed


def finish(plan: BoundaryPlan, landed: dict[int, Memory], num_dims: int) -> dict[int, Memory]:
    """Do the finish as the runtime does: whole tensors, even cuts of rows, or boxes of the root's memory."""
    memory = {rank: Memory(one.values.copy(), one.counts.copy()) for rank, one in landed.items()}
    everything = (slice(None),) * num_dims
    for group in plan.finish.groups:
        root = group[0]
        if plan.finish.kind is CollectiveKind.SCATTER:
            memory[root] = Memory.empty(LocalBoxes(rank=root, boxes=plan.dst.boxes_of(root)), num_dims)
        for rank, member in itertools.product(group, range(len(group))):
            start, stop = even_cuts(len(landed[group[member]].values), len(group))[member]
            source, where = landed[group[member]], (slice(start, stop), *everything[1:])
            match plan.finish.kind:
                case CollectiveKind.BROADCAST if member == 0 and rank != root:
                    memory[rank].put(everything, landed[root].values, landed[root].counts)
                case CollectiveKind.ALL_GATHER if rank != group[member]:
                    memory[rank].put(where, source.values[where], source.counts[where])
                case CollectiveKind.SCATTER if member == 0:
                    own = LocalBoxes(rank=rank, boxes=plan.dst.boxes_of(rank))
                    for box in own.boxes:
                        cut = local_slices(box, plan.lands_in(root))
                        memory[rank].put(local_slices(box, own), landed[root].values[cut], landed[root].counts[cut])
                case _:
                    pass
    return memory


def deliver(plan: BoundaryPlan) -> None:
    """Carry out a plan.

    Raises:
        NotDeliveredError: A rank is unknown, a box is not in a rank's memory, or an element comes not exactly once.
    """
    if not {t.src for t in plan.transfers} | set(plan.start.ranks) <= set(plan.src.ranks):
        raise NotDeliveredError("unknown source")
    if not {t.dst for t in plan.transfers} | set(plan.finish.ranks) <= set(plan.dst.ranks):
        raise NotDeliveredError("unknown destination")
    tensor = np.arange(math.prod(plan.src.shape)).reshape(plan.src.shape)
    try:
        memory = finish(plan, after_transfers(plan, after_start(plan, tensor), tensor.ndim), tensor.ndim)
    except (PlanError, ValueError) as error:  # a box is not held; a shape does not fit
        raise NotDeliveredError(str(error)) from error
    for holding in plan.dst.holdings:
        got = memory[holding.rank]
        if not np.array_equal(got.values, own_part(tensor, holding)) or (got.counts != 1).any():
            raise NotDeliveredError(f"rank {holding.rank}")


def delivers(plan: BoundaryPlan) -> bool:
    try:
        deliver(plan)
    except NotDeliveredError:
        return False
    return True


def fair_elements(sharding: Sharding, rank: int) -> int:
    """Count the elements of the even cut that falls to a rank among those that hold the same."""
    boxes = sharding.boxes_of(rank)
    group = [holding.rank for holding in sharding.holdings if holding.boxes == boxes]
    length, width = num_rows(boxes), math.prod(stop - start for start, stop in boxes[0][1:]) if boxes else 0
    index = group.index(rank)
    return (-(-length * (index + 1) // len(group)) + (-length * index // len(group))) * width


def keeps_promise(plan: BoundaryPlan) -> bool:
    """Whether links carry what the strategy says, restated."""
    links = Counter((transfer.src, transfer.dst) for transfer in plan.transfers)
    if plan.strategy == "rank0":
        return links == Counter([(plan.src.ranks[0], plan.dst.ranks[0])])
    is_paired = [holding.boxes for holding in plan.src.holdings] == [holding.boxes for holding in plan.dst.holdings]
    for sharding, transfers_of in ((plan.src, plan.sends_of), (plan.dst, plan.receives_of)):
        for holding in sharding.holdings:
            held = sum(math.prod(stop - start for start, stop in box) for box in holding.boxes)
            share = held if is_paired else fair_elements(sharding, holding.rank)
            if sum(transfer.num_elements for transfer in transfers_of(holding.rank)) > share:
                return False
    return max(links.values(), default=0) <= 1


# --- laws of every plan ----------------------------------------------------------------------------


@settings(SETTINGS, max_examples=300)
@given(plans())
def test_plans_are_proved_and_deliver(plan: BoundaryPlan) -> None:
    event(f"{plan.strategy}, start {plan.start.kind}, finish {plan.finish.kind}")
    assert check(plan) == ()
    deliver(plan)
    assert keeps_promise(plan)


@SETTINGS
@given(plans())
def test_reversal(plan: BoundaryPlan) -> None:
    back = reversed_plan(plan)
    assert (back.src, back.dst, back.strategy) == (plan.dst, plan.src, plan.strategy)
    assert check(back) == ()
    assert reversed_plan(back) == plan


@SETTINGS
@given(plans())
def test_describe_names_every_transfer_and_group(plan: BoundaryPlan) -> None:
    num_lines = len(plan.start.groups) + len(plan.transfers) + len(plan.finish.groups)
    assert len(plan.describe().splitlines()) == num_lines


@SETTINGS
@given(plans(), st.integers(1, 8))
def test_bytes_add_up(plan: BoundaryPlan, itemsize_bytes: int) -> None:
    total = sum(transfer.num_elements for transfer in plan.transfers) * itemsize_bytes
    assert sum(link_bytes(plan, itemsize_bytes).values()) == total
    assert sum(egress_bytes(plan, itemsize_bytes).values()) == total
    assert sum(ingress_bytes(plan, itemsize_bytes).values()) == total


# --- rank0 -----------------------------------------------------------------------------------------


@SETTINGS
@given(exchanges())
def test_rank0_sends_the_whole_tensor_over_one_link_or_refuses(exchange: Exchange) -> None:
    event(f"applies: {exchange.is_for_rank0}")
    if not exchange.is_for_rank0:
        with pytest.raises(ConfigError, match="rank0 needs one slice or a whole copy on each rank"):
            exchange.plan("rank0")
        return
    plan = exchange.plan("rank0")
    leaders = plan.src.ranks[0], plan.dst.ranks[0]
    assert check(plan) == ()
    assert link_bytes(plan, itemsize_bytes=1) == {leaders: math.prod(exchange.shape)}
    # What several ranks hold in slices goes through the leader: gathered before, scattered after.
    src_in_slices, dst_in_slices = not is_replicated(plan.src), not is_replicated(plan.dst)
    assert plan.start.kind == ("gather" if src_in_slices else "none")
    assert plan.finish.kind == ("none" if len(plan.dst.ranks) == 1 else "scatter" if dst_in_slices else "broadcast")


# --- sliced ----------------------------------------------------------------------------------------


def held_rows(endpoint: Endpoint, length: int) -> int:
    return length // len(endpoint.ranks_by_cp)


@SETTINGS
@given(exchanges())
def test_sliced_gives_every_link_at_most_its_share(exchange: Exchange) -> None:
    plan = exchange.plan("sliced")
    width = math.prod(exchange.shape[1:])
    is_paired = [h.boxes for h in plan.src.holdings] == [h.boxes for h in plan.dst.holdings]
    assume(not is_paired)
    for endpoint, elements in ((exchange.src, egress_bytes(plan, 1)), (exchange.dst, ingress_bytes(plan, 1))):
        most = math.ceil(held_rows(endpoint, exchange.shape[0]) / len(endpoint.ranks_by_cp[0]))
        assert max(elements.values()) <= most * width
        assert sum(elements.values()) == math.prod(exchange.shape)
    assert max(Counter((t.src, t.dst) for t in plan.transfers).values()) == 1
    # Only copies need completing; slices are where they belong.
    wants_copies = not exchange.dst_sharded and len(exchange.dst.ranks_by_cp[0]) > 1
    expected = exchange.dst.ranks_by_cp if wants_copies else ()
    assert plan.finish.groups == expected and plan.finish.kind == ("all-gather" if wants_copies else "none")
    assert plan.start == NO_COLLECTIVE


@SETTINGS
@given(exchanges(), st.integers(1, 48))
def test_sliced_without_context_parallelism_has_the_fewest_transfers(exchange: Exchange, length: int) -> None:
    # Two sets of even cuts share gcd(a, b) - 1 inner cuts, so together they make a + b - gcd(a, b) pieces.
    src, dst = exchange.src.ranks_by_cp[0], exchange.dst.ranks_by_cp[0]
    assume(len(src) != len(dst))
    few, many = (plan_sliced(replicated((n,), src), replicated((n,), dst)) for n in (length, MANY_ROWS))
    num_overlaps = len(src) + len(dst) - math.gcd(len(src), len(dst))
    assert len(few.transfers) <= min(num_overlaps, length)
    assert len(many.transfers) == num_overlaps


@SETTINGS
@given(exchanges(), st.sampled_from(tuple(STRATEGIES)))
def test_prototype_is_the_probe_but_for_the_numbers_of_the_ranks(exchange: Exchange, strategy: str) -> None:
    spec = exchange.spec(strategy)
    try:
        probe = spec.probe
    except ConfigError:
        with pytest.raises(ConfigError):
            _ = spec.prototype
        return
    prototype, place = spec.prototype, spec.members.index
    assert [(t.src, t.dst, t.boxes) for t in prototype.transfers] == [
        (place(t.src), place(t.dst), t.boxes) for t in probe.transfers
    ]
    for ours, theirs in ((prototype.start, probe.start), (prototype.finish, probe.finish)):
        assert (ours.kind, ours.groups) == (theirs.kind, tuple(tuple(map(place, group)) for group in theirs.groups))
    assert spec.participants == probe.participants
    assert spec.gathering_groups == (probe.finish.groups if probe.finish.kind is CollectiveKind.ALL_GATHER else ())


@SETTINGS
@given(exchanges())
def test_every_plan_keeps_to_the_links_of_the_probe(exchange: Exchange) -> None:
    # The probe's links are the ones that are warmed up: a plan for another length must not need a new one.
    spec = exchange.spec("sliced")
    warm = {(transfer.src, transfer.dst) for transfer in spec.probe.transfers}
    assert {(transfer.src, transfer.dst) for transfer in exchange.plan("sliced").transfers} <= warm
    assert spec.participants == tuple(sorted({rank for link in warm for rank in link}))
    assert set(spec.participants) <= set(spec.members)


@SETTINGS
@given(st.data())
def test_sliced_between_equal_sides_joins_rank_to_rank(data: st.DataObject) -> None:
    src = data.draw(shardings(data.draw(shapes()), 0))
    moved = tuple(dataclasses.replace(holding, rank=holding.rank + DOWNSTREAM) for holding in src.holdings)
    plan = plan_sliced(src, Sharding(shape=src.shape, holdings=moved))
    assert [(t.src, t.dst) for t in plan.transfers] == [(h.rank, h.rank + DOWNSTREAM) for h in src.holdings if h.boxes]
    assert all(transfer.boxes == tuple(sorted(src.boxes_of(transfer.src))) for transfer in plan.transfers)
    assert plan.start == plan.finish == NO_COLLECTIVE


# --- boundaries of a pipeline -----------------------------------------------------------------------


@SETTINGS
@given(exchanges(), st.sampled_from(sorted(STRATEGIES)))
def test_gradients_take_the_way_back(exchange: Exchange, strategy: str) -> None:
    assume(not STRATEGIES[strategy].has_leaders or exchange.is_for_rank0)
    boundary = PipelineBoundary(
        upstream=0,
        downstream=1,
        dp_ranks=((0,), (0,)),
        workers=(0, 1),
        cp_rank=0,
        src=exchange.src,
        dst=exchange.dst,
        strategy=strategy,
    )
    back = boundary.channel(Direction.BACKWARD).plan(
        exchange.shape, src_sharded=exchange.dst_sharded, dst_sharded=exchange.src_sharded
    )
    assert back == reversed_plan(exchange.plan(strategy))


@SETTINGS
@given(exchanges(), st.sampled_from(sorted(STRATEGIES)), st.integers(1, 5))
def test_header_reaches_every_rank_once_over_links_of_the_plan(exchange: Exchange, strategy: str, length: int) -> None:
    has_rank0 = len(exchange.src.ranks_by_cp) == len(exchange.dst.ranks_by_cp) == 1
    assume(not STRATEGIES[strategy].has_leaders or has_rank0)
    spec = exchange.spec(strategy)
    header = spec.plan_header(length)
    assert (header.src.shape, header.src.ranks, header.dst.ranks) == ((length,), exchange.src.ranks, exchange.dst.ranks)
    assert is_replicated(header.dst) and check(header) == ()
    deliver(header)
    links = {(transfer.src, transfer.dst) for transfer in spec.probe.transfers}
    assert {(transfer.src, transfer.dst) for transfer in header.transfers} <= links
    plan = exchange.plan(strategy)
    if all(plan.receives_of(rank) for rank in plan.dst.ranks):
        assert {(t.src, t.dst) for t in plan_header(plan, length).transfers} <= {(t.src, t.dst) for t in plan.transfers}


@SETTINGS
@given(st.integers(1, 16), st.integers(1, 4), st.booleans(), st.integers(1, 3), st.data())
def test_side_spreads_exactly_the_sequences_that_divide(
    tp: int, cp: int, is_sharded: bool, width: int, data: st.DataObject
) -> None:
    step = legal_step(tp, cp, is_sharded=is_sharded)
    length = data.draw(st.integers(1, 3).map(lambda number: number * step) | st.integers(1, 200))
    endpoint = stage(tp, cp, 0)
    if not is_legal(length, tp, cp, is_sharded=is_sharded):
        with pytest.raises(
            ConfigError, match=f"sequence length {length} cannot be cut .*: use a multiple of"
        ) as caught:
            endpoint.sharding((length, width), is_sharded=is_sharded)
        way_out = int(str(caught.value).split()[-1])
        assert endpoint.sharding((way_out, width), is_sharded=is_sharded)
        return
    sharding = endpoint.sharding((length, width), is_sharded=is_sharded)
    # Restated: chunk i and its counterpart from the back for context-parallel rank i, then even slices of both.
    rows = np.arange(length)
    for cp_rank, ranks in enumerate(endpoint.ranks_by_cp):
        chunks = rows.reshape(2 * cp, -1)[[cp_rank, 2 * cp - 1 - cp_rank]] if cp > 1 else rows
        slices = np.split(chunks.ravel(), tp) if is_sharded else [chunks.ravel()] * tp
        for rank, expected in zip(ranks, slices, strict=True):
            holding = LocalBoxes(rank=rank, boxes=sharding.boxes_of(rank))
            np.testing.assert_array_equal(
                own_part(rows[:, None], dataclasses.replace(holding, boxes=columns(holding))), expected[:, None]
            )
            # What a rank has, times the number of parts, is the whole: headers carry one and are read as the other.
            parts = endpoint.num_parts(is_sharded=is_sharded)
            assert holding.local_shape == (length // parts, width) and length % parts == 0


def columns(holding: LocalBoxes) -> tuple[Box, ...]:
    """Cut the boxes of a rank down to the first column."""
    return tuple((rows, (0, 1)) for rows, _ in holding.boxes)


# --- check finds what is broken --------------------------------------------------------------------


def moved(box: Box, dim: int, start: int, stop: int) -> Box:
    """Move the ends of one interval of a box."""
    return (*box[:dim], (box[dim][0] + start, box[dim][1] + stop), *box[dim + 1 :])


@st.composite
def broken_transfer(draw: st.DrawFn, plan: BoundaryPlan, one: Transfer) -> list[Transfer]:
    """Drop, double, split, redirect or re-source a message, or damage one of its boxes."""
    kind = draw(
        st.sampled_from(
            ["drop", "double", "split", "redirect", "resource", "lose box", "repeat box", "shift", "shrink"]
        )
    )
    event(kind)
    position = draw(st.integers(0, len(one.boxes) - 1))
    box, others = one.boxes[position], (*one.boxes[:position], *one.boxes[position + 1 :])
    dim = draw(st.integers(0, len(box) - 1))
    match kind:
        case "drop":
            return []
        case "double":
            return [one, one]
        case "split":
            parts = [
                moved(box, 0, start, stop - len(range(*box[0]))) for start, stop in even_cuts(len(range(*box[0])), 2)
            ]
            return [dataclasses.replace(one, boxes=(*others, parts[0])), dataclasses.replace(one, boxes=(parts[1],))]
        case "redirect":
            return [dataclasses.replace(one, dst=draw(st.sampled_from((*plan.dst.ranks, 999))))]
        case "resource":
            return [dataclasses.replace(one, src=draw(st.sampled_from((*plan.src.ranks, 999))))]
        case "lose box":
            return [dataclasses.replace(one, boxes=others)] if others else []
        case "repeat box":
            return [dataclasses.replace(one, boxes=(*one.boxes, box))]
        case "shift":
            step = draw(st.sampled_from([-1, 1]))
            return [dataclasses.replace(one, boxes=(*others, moved(box, dim, step, step)))]
        case _:
            return [
                dataclasses.replace(one, boxes=(*others, moved(box, dim, *draw(st.sampled_from([(0, -1), (1, 0)])))))
            ]


@st.composite
def broken_finish(draw: st.DrawFn, plan: BoundaryPlan) -> Collective:
    """Leave the finish out, or do another one, with other members or another root."""
    groups = plan.finish.groups or (plan.dst.ranks,)
    kind = draw(st.sampled_from(["none", "other kind", "other root", "member lost", "stranger"]))
    event(f"finish: {kind}")
    first, *others = groups
    match kind:
        case "none":
            return NO_COLLECTIVE
        case "other kind":
            kinds = [CollectiveKind.BROADCAST, CollectiveKind.SCATTER, CollectiveKind.ALL_GATHER]
            return Collective(kind=draw(st.sampled_from(kinds)), groups=groups)
        case "other root":
            first = (*first[1:], first[0])
        case "member lost":
            first = first[:-1] or first
        case _:
            first = (*first, 999)
    kept = plan.finish.kind if plan.finish.groups else CollectiveKind.BROADCAST
    return Collective(kind=kept, groups=(first, *others))


@st.composite
def corrupted(draw: st.DrawFn, plan: BoundaryPlan) -> BoundaryPlan:
    """Damage one transfer, the finish, or the start."""
    where = draw(st.sampled_from(["transfer", "transfer", "transfer", "finish", "start"]))
    if where == "finish":
        return dataclasses.replace(plan, finish=draw(broken_finish(plan)))
    if where == "start":
        wrong = Collective(
            kind=CollectiveKind.GATHER, groups=(tuple(draw(st.permutations(plan.src.ranks))[1:]) or (0,),)
        )
        return dataclasses.replace(plan, start=draw(st.sampled_from([NO_COLLECTIVE, wrong])))
    position = draw(st.integers(0, len(plan.transfers) - 1))
    new = draw(broken_transfer(plan, plan.transfers[position]))
    return dataclasses.replace(plan, transfers=(*plan.transfers[:position], *new, *plan.transfers[position + 1 :]))


@settings(SETTINGS, max_examples=600)
@given(st.data())
def test_check_agrees_with_the_oracle_on_corrupted_plans(data: st.DataObject) -> None:
    plan = data.draw(plans())
    broken = data.draw(corrupted(plan))
    assume(broken != plan)
    is_good = delivers(broken) and keeps_promise(broken)
    event(f"good: {is_good}")
    assert (check(broken) == ()) == is_good, check(broken)


@SETTINGS
@given(plans(), st.data())
def test_order_of_transfers_does_not_matter_to_the_check(plan: BoundaryPlan, data: st.DataObject) -> None:
    shuffled = tuple(data.draw(st.permutations(plan.transfers)))
    assert check(dataclasses.replace(plan, transfers=shuffled)) == ()


# --- box and row arithmetic ------------------------------------------------------------------------


def elements(boxes: Sequence[Box]) -> Counter[tuple[int, ...]]:
    """Count how often each element, as its index, is in the boxes."""
    return Counter(index for box in boxes for index in itertools.product(*(range(*interval) for interval in box)))


@st.composite
def random_boxes(draw: st.DrawFn, num_dims: int) -> Box:
    pairs = [draw(st.tuples(st.integers(0, 6), st.integers(0, 6))) for _ in range(num_dims)]
    return tuple((min(pair), max(pair)) for pair in pairs)


@SETTINGS
@given(st.data())
def test_subtract_intersect_and_overlaps_agree_with_sets(data: st.DataObject) -> None:
    num_dims = data.draw(st.integers(1, 3))
    box = data.draw(random_boxes(num_dims))
    holes = data.draw(st.lists(random_boxes(num_dims), max_size=4))
    left = subtract(box, holes)
    # Counters: the remaining boxes are disjoint when each element counts once.
    assert elements(left) == Counter(set(elements([box])) - set(elements(holes)))
    for hole in holes:
        common = intersect(box, hole)
        assert set(elements([box])) & set(elements([hole])) == set(elements([common] if common is not None else []))
    filled = [one for one in (box, *holes) if elements([one])]
    pairs = [(i, j) for j in range(len(filled)) for i in range(j) if elements([filled[i]]) & elements([filled[j]])]
    assert sorted(overlaps(filled)) == sorted(pairs)


@SETTINGS
@given(st.data())
def test_rows_and_slices_find_what_lies_in_memory(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    sharding = data.draw(grouped(shape, tuple(range(data.draw(st.integers(1, 6))))))
    tensor = np.arange(math.prod(shape)).reshape(shape)
    for holding in sharding.holdings:
        memory = own_part(tensor, holding)
        assert memory.shape == holding.local_shape
        start, stop = sorted(data.draw(st.integers(0, len(memory))) for _ in range(2))
        part = rows_of(holding.boxes, start, stop)
        assert num_rows(part) == stop - start
        for box in part:
            here = memory[local_slices(box, holding)]
            np.testing.assert_array_equal(here, tensor[tuple(slice(*interval) for interval in box)])
        if part:
            np.testing.assert_array_equal(memory[start:stop], own_part(tensor, LocalBoxes(rank=0, boxes=part)))


@SETTINGS
@given(st.data())
def test_divided_gives_every_element_one_holder(data: st.DataObject) -> None:
    sharding = data.draw(shardings(data.draw(shapes()), 0))
    divided = sharding.divided()
    held = elements([box for holding in divided.holdings for box in holding.boxes])
    assert held == elements([whole_box(sharding.shape)])
    for group in sharding.copies:
        assert elements([box for rank in group for box in divided.boxes_of(rank)]) == elements(
            sharding.boxes_of(group[0])
        )
        sizes = [num_rows(divided.boxes_of(rank)) for rank in group]
        assert max(sizes) - min(sizes) <= 1


@SETTINGS
@given(st.integers(0, 60), st.integers(1, 16), st.integers(1, 4))
def test_even_cuts(length: int, parts: int, factor: int) -> None:
    cuts = even_cuts(length, parts)
    sizes = [stop - start for start, stop in cuts]
    assert [index for start, stop in cuts for index in range(start, stop)] == list(range(length))
    assert len(cuts) == parts
    assert sizes[0] == max(sizes) and max(sizes) - min(sizes) <= 1
    # A cut at the same fraction of the whole is at the same place.
    finer = even_cuts(length, parts * factor)
    assert [start for start, _ in cuts] == [start for start, _ in finer[::factor]]


def test_rank0_refuses_what_some_ranks_share() -> None:
    shared = Sharding(
        shape=(4,),
        holdings=tuple(LocalBoxes(rank=rank, boxes=(((2 * (rank // 2), 2 * (rank // 2) + 2),),)) for rank in range(4)),
    )
    with pytest.raises(ConfigError, match="rank0"):
        plan_rank0(shared, replicated((4,), (9,)))
