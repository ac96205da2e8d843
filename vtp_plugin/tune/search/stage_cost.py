"""What a stage costs: time, memory, microbatches in flight."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations
from typing import NamedTuple

from vtp_plugin.plan.boundary.boundary_plan import CollectiveKind, egress_bytes, ingress_bytes
from vtp_plugin.plan.boundary.endpoint import Sharding, replicated, sharded
from vtp_plugin.plan.boundary.strategies.known_strategies import STRATEGIES, TransportRules, clearly_fastest
from vtp_plugin.plan.layout.layer_lists import Kept
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.schedule.cost.costs import Costs, in_flight_needed_on, make_route
from vtp_plugin.plan.schedule.order.placement import Placement
from vtp_plugin.tune.cluster.read_cluster import HeldPart
from vtp_plugin.tune.cluster.speed import Link, Speed, all_reduce_s
from vtp_plugin.tune.search.problem import BatchSplit, NodeIndex, SearchProblem, SearchSpace, StageType

AUTO = "auto"
# Between stages of stock Megatron each rank sends what it has to its peer.
_RANK_TO_RANK = "sliced"


class BoundaryCost(NamedTuple):
    """What it costs to send a tensor over a boundary, and its gradient back.

    Attributes:
        strategy: name of the strategy that sends it.
        link: the slowest link of all replicas.
        num_bytes: effective size of the message: one rank that sent so many bytes alone would take as long.
        forward_s: seconds of collectives in the forward pass, on the sending and on the receiving stage.
        backward_s: seconds of collectives in the backward pass, on the same two stages in the same order.
    """

    strategy: str
    link: Link
    num_bytes: int
    forward_s: tuple[float, float]
    backward_s: tuple[float, float]

    @property
    def both_s(self) -> float:
        """Seconds of both messages, there and back, with their collectives."""
        return 2 * self.link.time_s(self.num_bytes) + sum(self.forward_s) + sum(self.backward_s)


class _Exchange(NamedTuple):
    """What a strategy sends in one direction.

    Attributes:
        largest: share of the tensor that the busiest rank sends or receives.
        total: what all ranks send together, as a share of the tensor.
        before: collective of the sending stage before it sends.
        behind: collective of the receiving stage after it has received.
    """

    largest: float
    total: float
    before: CollectiveKind
    behind: CollectiveKind


@functools.cache
def _exchange(strategy: str, src_tp: int, dst_tp: int, is_sharded: bool) -> _Exchange:
    """Read an exchange from the plan of a strategy.

    >>> _exchange("sliced", 2, 4, False)[:2], _exchange("sliced", 2, 2, False)[:2]
    ((0.5, 1.0), (1.0, 2.0))
    >>> _exchange("rank0", 2, 2, True).before
    <CollectiveKind.GATHER: 'gather'>
    """
    num_rows = src_tp * dst_tp  # which both cut evenly

    def sharding(ranks: range) -> Sharding:
        return sharded((num_rows,), tuple(ranks), dim=0) if is_sharded else replicated((num_rows,), tuple(ranks))

    plan = STRATEGIES[strategy].plan(sharding(range(src_tp)), sharding(range(src_tp, src_tp + dst_tp)))
    sent, got = egress_bytes(plan, 1).values(), ingress_bytes(plan, 1).values()
    return _Exchange(max(*sent, *got) / num_rows, sum(sent) / num_rows, plan.start.kind, plan.finish.kind)


@functools.cache
def _rivals(rules: TransportRules, src_tp: int, dst_tp: int) -> tuple[str, ...]:
    """List the transports that a run chooses between by itself, the simplest first."""
    layout = PipelineLayout.from_sizes((src_tp, dst_tp), world_size=src_tp + dst_tp)
    return *rules.rivals(layout, 0, 1), rules.choose(layout, 0, 1)[0]


def transports(problem: SearchProblem) -> Iterator[str]:
    """Yield the transports to try, that of a run without flags first; for stock Megatron only that one.

    Args:
        problem: the search problem.
    """
    yield problem.rules.transport
    if problem.rules.transport == AUTO and not problem.is_stock:
        yield from (name for name, strategy in STRATEGIES.items() if strategy.help is not None)


def cost_of_boundary(
    space: SearchSpace, transport: str, stages: tuple[StageType, StageType], links: Sequence[Link]
) -> BoundaryCost:
    """Give the cost of a boundary.

    Args:
        space: the search space.
        transport: the transport that the run is started with.
        stages: type of the stage before the boundary, and of the one behind it.
        links: the links between the two stages, one of each replica.
    """
    src, dst = stages
    if space.problem.is_stock:
        names: Sequence[str] = (_RANK_TO_RANK,)
    elif transport != AUTO:
        names = (transport,)
    else:
        both = (space.site(src), space.site(dst))
        sites = () if both[0] == both[1] else both
        rules = replace(space.problem.rules, sites=sites, tensor_bytes=space.split.message_bytes)
        names = _rivals(rules, src.tp, dst.tp)
    costs = {name: _cost_by(space, name, src, dst, links) for name in names}
    return costs[clearly_fastest({name: cost.both_s for name, cost in costs.items()})]


def _cost_by(space: SearchSpace, strategy: str, src: StageType, dst: StageType, links: Sequence[Link]) -> BoundaryCost:
    both, message_bytes = _exchanges(space, strategy, src, dst), space.split.message_bytes

    def num_bytes(link: Link) -> int:
        if link.at_once is None:
            return message_bytes
        share = max(max(exchange.largest, exchange.total / link.at_once) for exchange in both)
        return math.ceil(share * message_bytes)

    link = max(links, key=lambda link: link.time_s(num_bytes(link)))
    src_forward_s, src_backward_s, dst_forward_s, dst_backward_s = _together_s(space, strategy, src, dst)
    return BoundaryCost(
        strategy=strategy,
        link=link,
        num_bytes=num_bytes(link),
        forward_s=(src_forward_s, dst_forward_s),
        backward_s=(src_backward_s, dst_backward_s),
    )


def _exchanges(space: SearchSpace, strategy: str, src: StageType, dst: StageType) -> tuple[_Exchange, _Exchange]:
    """Give what a strategy sends there, and back."""
    is_sharded = space.problem.rules.is_sharded
    return _exchange(strategy, src.tp, dst.tp, is_sharded), _exchange(strategy, dst.tp, src.tp, is_sharded)


def _together_s(space: SearchSpace, strategy: str, src: StageType, dst: StageType) -> tuple[float, float, float, float]:
    """Give the seconds of collectives: of the stage before, forward and backward, then of the stage behind."""
    there, back = _exchanges(space, strategy, src, dst)
    one, other = space.speeds[src], space.speeds[dst]
    return (
        _collective_s(one, there.before),
        _collective_s(one, back.behind),
        _collective_s(other, there.behind),
        _collective_s(other, back.before),
    )


def _collective_s(speed: Speed, collective: CollectiveKind) -> float:
    if collective is CollectiveKind.NONE:
        return 0.0
    if collective is CollectiveKind.BROADCAST:
        return speed.broadcast_s
    return 2 * speed.gather_s if collective is CollectiveKind.SUM else speed.gather_s


def least_together_s(space: SearchSpace, src: StageType, dst: StageType) -> tuple[float, float, float, float]:
    """Bound from below the collectives of two stages at a boundary, whichever transport is used.

    Args:
        space: the search space.
        src: type of the stage before.
        dst: type of the stage behind.

    Returns:
        Seconds of the stage before in its forward and its backward pass, then those of the stage behind.
    """
    transport = space.problem.rules.transport
    names = STRATEGIES if transport == AUTO else (transport,)
    rows = [_together_s(space, name, src, dst) for name in names]
    first, second, third, fourth = (min(column) for column in zip(*rows, strict=True))
    return first, second, third, fourth


# Microbatches more than the links need, which even out the start and the end of a step.
_SLACKS = (0, 1, 2)
# In a pipeline of at most so many stages, the stages up to any one of them may have more in flight.
_SHORT = 6


def most_in_flight(
    space: SearchSpace, stage_types: Sequence[StageType], layers: Sequence[int], *, is_split: bool = False
) -> tuple[int, ...]:
    """Give how many microbatches in flight the cards of every stage have memory for, at least those of 1F1B.

    Args:
        space: the search space.
        stage_types: the type of every stage, in order.
        layers: number of layers of every stage, for which the memory suffices in 1F1B.
        is_split: whether backwards are split: then the last stage, too, may have more than one, and what waits may be
            more than an activation.
    """
    split, num_stages, found = space.split, len(stage_types), []
    starts = accumulate(layers[:-1], initial=0)
    for stage, (stage_type, start) in enumerate(zip(stage_types, starts, strict=True)):
        usual = num_stages - stage
        spare = max(0, split.num_microbatches - usual) if usual > 1 or is_split else 0
        if spare and split.held_bytes is not None and (limit := space.memory_bytes(stage_type)) is not None:
            part = (start, start + layers[stage])
            ends = {"is_first": stage == 0, "is_last": usual == 1}
            held, more = (
                max(
                    held_by(split, stage_type, part, *kept, **ends)
                    for kept in ((number, 0), (0, number))[: 1 + is_split]
                )
                for number in (usual, usual + 1)
            )
            spare = max(0, min(spare, (limit - held) // (more - held))) if more > held else spare
        found.append(usual + spare)
    return tuple(found)


def more_in_flight(
    placement: Placement, costs: Costs, num_microbatches: int, most: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Yield numbers of microbatches in flight per stage, each with more than 1F1B has, the fewest first.

    All stages up to a certain one get more. In a short pipeline that may be any stage; in a long one it is the first,
    the last but one, or one before a slow link. They get what the links need, or some more than in 1F1B.

    Args:
        placement: placement of a plain pipeline.
        costs: durations and links of a microbatch.
        num_microbatches: number of microbatches of a replica.
        most: number of microbatches in flight that every stage has memory for.

    >>> from vtp_plugin.plan.schedule.cost.costs import uniform_costs
    >>> from vtp_plugin.plan.schedule.order.placement import plain_placement
    >>> costs = uniform_costs(plain_placement(2), latency=3.0)
    >>> [*more_in_flight(plain_placement(2), costs, 8, (8, 1))]
    [(3, 1), (4, 1), (5, 1), (6, 1)]
    """
    num_stages = placement.num_stages
    usual = [num_stages - stage for stage in range(num_stages)]
    route = make_route(placement, costs)
    needed = [in_flight_needed_on(route, stage) for stage in range(num_stages)]
    wanted = [[number + slack for number in needed] for slack in _SLACKS]
    wanted += [[number + more for number in usual] for more in (1, 2, 4)]
    links = [latency + costs.transfer_time(number) for number, latency in enumerate(costs.latency)]
    last = num_stages - 2
    slow = {number for number, time in enumerate(links) if time >= max(links) / 2 or num_stages <= _SHORT}
    found = set()
    for numbers in wanted:
        for end in {0, last, *slow}:
            row: list[int] = []
            for stage, (limit, least, number) in enumerate(zip(most, usual, numbers, strict=True)):
                number = min(limit, max(least, min(number, num_microbatches))) if stage <= end else least
                # A stage that may hold more than the one before it would wait for that.
                row.append(max(least, min(number, row[-1])) if row else number)
            found.add(tuple(row))
    yield from sorted((row for row in found if row != tuple(usual)), key=lambda row: (sum(row), row))


Part = tuple[int, int]
"""The first layer of a virtual stage, and the first one behind it."""


def held_bytes_of(
    split: BatchSplit,
    stage_types: Sequence[StageType],
    placement: Placement,
    parts: Sequence[Part],
    peaks: Sequence[Sequence[Kept]],
) -> list[int]:
    """Give the bytes that the fullest rank of every stage holds.

    Args:
        split: how the samples of the step are shared out.
        stage_types: the type of every stage.
        placement: which stage holds which virtual stage.
        parts: the layers of every virtual stage.
        peaks: what a rank of every stage keeps at its fullest moments.
    """
    found, last = [], placement.num_vstages - 1
    for stage, (stage_type, moments) in enumerate(zip(stage_types, peaks, strict=True)):
        own = [(parts[vstage], vstage == 0, vstage == last) for vstage in placement.vstages(stage)]
        held = max(
            sum(
                held_by(split, stage_type, part, *pair, is_first=is_first, is_last=is_last)
                for (part, is_first, is_last), pair in zip(own, kept, strict=True)
            )
            for kept in moments
        )
        found.append(held - held_twice(split, stage_type, [(is_first, is_last) for _, is_first, is_last in own]))
    return found


def held_twice(split: BatchSplit, stage_type: StageType, ends: Sequence[tuple[bool, bool]]) -> int:
    """Give the bytes that are counted twice; ``ends``: whether each virtual stage has the embedding, and the head."""
    if split.counted_twice is None or len(ends) == 1:
        return 0
    return split.counted_twice(stage_type.tp, split.num_replicas, tuple(ends))


def held_by(
    split: BatchSplit,
    stage_type: StageType,
    part: Part,
    in_flight: int,
    waiting: int = 0,
    *,
    is_first: bool,
    is_last: bool,
) -> int:
    """Give the bytes that a virtual stage adds to what its stage holds.

    Args:
        split: how the samples of the step are shared out.
        stage_type: the type of the stage.
        part: the layers of the virtual stage.
        in_flight: number of microbatches whose activations it keeps.
        waiting: number of microbatches that keep only what the gradients of their weights need.
        is_first: whether it has the embedding.
        is_last: whether it has the head.
    """
    if split.held_bytes is None:
        return 0
    return split.held_bytes(
        HeldPart(
            tp=stage_type.tp,
            num_replicas=split.num_replicas,
            start=part[0],
            end=part[1],
            is_first=is_first,
            is_last=is_last,
            in_flight=in_flight,
            waiting=waiting,
        )
    )


def fits_memory(num_bytes: int, limit: int | None) -> bool:
    """Tell whether a card has memory for what a rank holds; all that the search drops for its memory is asked here.

    That is: stages with more layers than any place has memory for (:func:`most_held`), an edge's two parts
    (``fixed_edge``), the layers of a stage at its place (``layer_split``), and an order at its fullest moments
    (``evaluate``).

    Args:
        num_bytes: bytes that the rank holds.
        limit: memory of the card, see :meth:`~vtp_plugin.tune.search.problem.SearchSpace.memory_bytes`.
    """
    return limit is None or num_bytes <= limit


def peer_s(space: SearchSpace, stage_type: StageType, nodes: Sequence[NodeIndex]) -> float:
    """Give the seconds of a message between ranks that share experts, over the slowest link between two of them.

    Args:
        space: the search space.
        stage_type: the type of the stage.
        nodes: the nodes of its replicas.
    """
    speed, ranks = space.speeds[stage_type], stage_type.tp * space.split.cp
    slowest = 0.0
    for start in range(0, ranks * len(nodes), speed.peers):
        own = nodes[start // ranks : -(-(start + speed.peers) // ranks)]
        for pair in combinations(own, 2) if len(own) > 1 else [(own[0], own[0])]:
            slowest = max(slowest, space.link(*pair).time_s(speed.peer_bytes))
    return slowest


def most_held(space: SearchSpace, stage_type: StageType) -> int:
    """Count the layers that a stage type has memory for at most, anywhere in the pipeline."""
    if stage_type not in space.most_held:
        space.most_held[stage_type] = _most_held(space, stage_type)
    return space.most_held[stage_type]


def _most_held(space: SearchSpace, stage_type: StageType) -> int:
    split, limit, num_layers = space.split, space.memory_bytes(stage_type), space.problem.num_layers
    if split.held_bytes is None or limit is None:
        return num_layers
    # Between others a stage has no ends of the model, and keeps two microbatches at least; the last one keeps one.
    positions = ((False, 2), (True, 1))

    def fits(number: int) -> bool:
        return any(
            fits_memory(
                held_by(split, stage_type, (start, start + number), peak, is_first=False, is_last=is_last), limit
            )
            for is_last, peak in positions
            for start in range(num_layers - number + 1)
        )

    return bisect_left(range(1, num_layers + 1), True, key=lambda number: not fits(number))


def hop_s(link: Link, num_bytes: int, src_tp: int, dst_tp: int) -> float:
    """Bound from below the seconds of a message over a link, whichever transport is used.

    >>> [hop_s(Link(bytes_per_s=1.0, at_once=number), 8, 4, 2) for number in (None, 1, 2, 4)]
    [8.0, 8.0, 4.0, 4.0]
    """
    # All of the tensor crosses once at least, in as many parts as the smaller stage has ranks at best.
    parts = 1 if link.at_once is None else min(src_tp, dst_tp, link.at_once)
    return link.time_s(num_bytes / parts)


def best_hop_s(space: SearchSpace, one: StageType, other: StageType) -> float:
    """Bound from below the seconds of a message between two stages, over the quickest link that could connect them."""
    hops_s = []
    for pool_index in one.pools:
        for next_index in other.pools:
            most_cards = max(space.split.pools[pool_index].cards_per_node)
            fits_one_node = pool_index == next_index and most_cards >= one.tp + other.tp
            for node in (0, 1) if fits_one_node else (1,):
                link = space.link((pool_index, 0), (next_index, node))
                hops_s.append(hop_s(link, space.split.message_bytes, one.tp, other.tp))
    return min(hops_s)


def tail_s(space: SearchSpace, stage_type: StageType, num_layers: int) -> float:
    """Bound from below what the first stage does after its last backward: sum gradients, and step the optimizer."""
    split, update_s = space.split, space.speeds[stage_type].update_sums[num_layers]
    if split.num_replicas * split.cp == 1:
        return update_s
    first, last = stage_type.replica_pools[0], stage_type.replica_pools[-1]
    largest = max(split.pools[first].cards_per_node)
    is_one_node = first == last and largest >= split.num_replicas * stage_type.tp
    link = space.link((first, 0), (last, 0 if is_one_node else 1))
    return update_s + gradients_s(space, stage_type, [(0, num_layers)], link)


def gradients_s(space: SearchSpace, stage_type: StageType, parts: Sequence[tuple[int, int]], link: Link) -> float:
    """Give the seconds in which a stage sums its gradients, in rings whose slowest link is given.

    Args:
        space: the search space.
        stage_type: the type of the stage.
        parts: for each of its virtual stages the first layer, and the first layer behind it.
        link: the slowest link of the rings.
    """
    speed, num_ranks = space.speeds[stage_type], space.split.num_replicas * space.split.cp
    dense, routed = (
        sum(sums[end] - sums[start] for start, end in parts) for sums in (speed.gradient_sums, speed.expert_sums)
    )
    copies = num_ranks * stage_type.tp // speed.peers
    return all_reduce_s(dense, num_ranks, link) + (all_reduce_s(routed, copies, link) if copies > 1 else 0.0)
