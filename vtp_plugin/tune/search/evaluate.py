"""How long a step of a layout takes, as the project's simulator says it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.order.placement import Placement, interleaved_placement, plain_placement, u_placement
from vtp_plugin.tune.cluster.speed import Source, least_sure
from vtp_plugin.tune.search.boundary_cost import BoundaryCost, End, cross, transports
from vtp_plugin.tune.search.in_flight import most_in_flight
from vtp_plugin.tune.search.memory_check import Part, held_bytes_of
from vtp_plugin.tune.search.node_assignment import Node, assign_nodes
from vtp_plugin.tune.search.problem import BatchSplit, SearchProblem, StageType
from vtp_plugin.tune.search.schedule_time import Order, choose_order
from vtp_plugin.tune.search.stage_cost import Work, gradients_s, link_between, peer_s

# Numbers that megatron.training 0.19 sums over all ranks in a step, one after another: whether to run it again, the
# norm of the gradients, whether the update succeeded, and twice two for the log. 0.12 has five.
_NUM_NUMBERS = 7
# Another transport than that of a run by itself is taken where it is quicker by this share.
_LEAST_GAIN = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout and its step.

    Attributes:
        kinds: of the stages.
        layers: of every stage; of a U one part more, the edge's last.
        num_chunks: virtual stages of every stage; 1 for a plain pipeline, and for a U.
        shape: of the step.
        nodes: of every stage, by replica.
        transport: that the run is asked for; ``auto`` where it chooses best by itself.
        costs: of a microbatch, in seconds.
        order: of the microbatches.
        held_bytes: of the fullest rank of every stage.
        sums_s: what summing the gradients adds: over replicas, of weights that both ends of the model share, and of
            their norm over all stages.
        update_s: the optimizer, on the slowest stage.
    """

    kinds: tuple[StageType, ...]
    layers: tuple[int, ...]
    num_chunks: int
    shape: BatchSplit
    nodes: tuple[tuple[Node, ...], ...]
    transport: str
    costs: Costs
    order: Order
    held_bytes: tuple[int, ...]
    sums_s: float
    update_s: float

    @property
    def step_s(self) -> float:
        """Length of a step."""
        return self.order.pipeline_s + self.sums_s + self.update_s

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tensor-parallel size of every stage."""
        return tuple(kind.tp for kind in self.kinds)

    @property
    def source(self) -> Source:
        """Where the least sure of its times comes from."""
        return least_sure({self.shape.pools[pool].speeds[kind.tp].source for kind in self.kinds for pool in kind.pools})

    @property
    def placement(self) -> Placement:
        """Of the virtual stages."""
        return place(len(self.kinds), self.layers, self.num_chunks)[0]

    @property
    def flagged(self) -> tuple[object, ...]:
        """What the flags of a run say of the layout; its nodes, its order and its transport may still differ."""
        shape = self.shape
        sites = tuple(shape.pools[kind.places[0]].site for kind in self.kinds)
        return self.sizes, self.layers, self.num_chunks, shape.num_replicas, shape.micro_batch_size, sites

    @property
    def num_cards(self) -> int:
        """Cards that work."""
        return sum(self.sizes) * self.shape.cp * self.shape.num_replicas


def place(num_stages: int, layers: Sequence[int], num_chunks: int) -> tuple[Placement, list[Part]]:
    """Say which stage holds which virtual stage, and the layers of these.

    >>> place(2, (4, 2), 2)[1], place(2, (1, 4, 1), 1)[0].stages
    ([(0, 2), (2, 3), (3, 5), (5, 6)], (0, 1, 0))
    """
    parts = list(layers)
    if len(layers) > num_stages:
        placement = u_placement(num_stages)
    elif num_chunks > 1:
        placement, parts = interleaved_placement(num_stages, num_chunks), [n // num_chunks for n in layers] * num_chunks
    else:
        placement = plain_placement(num_stages)
    return placement, [*pairwise(accumulate(parts, initial=0))]


def evaluate(
    question: SearchProblem,
    shape: BatchSplit,
    kinds: Sequence[StageType],
    works: Sequence[Work],
    layers: Sequence[int],
    *,
    num_chunks: int = 1,
) -> Candidate | None:
    """Simulate a step; None if the cards do not go into the nodes, or have too little memory for any order.

    Args:
        question: what is asked.
        shape: of the step.
        kinds: of the stages, in order.
        works: what each costs.
        layers: of every stage; of a U one part more.
        num_chunks: virtual stages of every stage.
    """
    judging = _Judging(question, shape, kinds, works, layers, num_chunks=num_chunks)
    choices = [choice for nodes in assign_nodes(question, shape, kinds) for choice in judging.choices(nodes)]
    return min(choices, key=lambda choice: choice.step_s, default=None)


class _Judging:
    """Stages with their layers, wherever they are; the arguments are those of :func:`evaluate`."""

    def __init__(
        self,
        question: SearchProblem,
        shape: BatchSplit,
        kinds: Sequence[StageType],
        works: Sequence[Work],
        layers: Sequence[int],
        *,
        num_chunks: int,
    ) -> None:
        self.question, self.shape, self.kinds, self.works, self.layers = question, shape, kinds, works, layers
        self.num_chunks = num_chunks
        self.placement, self.parts = place(len(kinds), layers, num_chunks)
        # Ways to put stages into nodes often have the same links.
        self.known: dict[Costs, Order | None] = {}
        self.most: Sequence[int] | None = None
        if not question.is_stock:
            is_plain = self.placement.num_vstages == len(kinds)
            ahead = question.runs_ahead and is_plain
            self.most = most_in_flight(question, shape, kinds, works, layers) if ahead else ()

    def choices(self, nodes: tuple[tuple[Node, ...], ...]) -> Iterator[Candidate]:
        """Yield a layout that fits, by the transport that a run takes by itself, and by others that gain."""
        first: Sequence[BoundaryCost] = ()
        best_s = math.inf
        for transport in transports(self.question):
            crossings = self._crossings(nodes, transport)
            first = first or crossings
            is_other = transport != self.question.rules.transport
            if is_other and not any(one.both_s < other.both_s for one, other in zip(crossings, first, strict=True)):
                continue
            choice = self._choice(nodes, transport, crossings)
            if choice is not None and choice.step_s * (1 + _LEAST_GAIN * is_other) < best_s:
                best_s = choice.step_s
                yield choice

    def _held(self, peaks: Sequence[int]) -> list[int]:
        return held_bytes_of(self.shape, self.kinds, self.placement, self.parts, peaks)

    def _fits(self, peaks: Sequence[int]) -> bool:
        limits = (work.memory_bytes for work in self.works)
        held = zip(limits, self._held(peaks), strict=True)
        return all(limit is None or num_bytes <= limit for limit, num_bytes in held)

    def _choice(
        self, nodes: tuple[tuple[Node, ...], ...], transport: str, crossings: Sequence[BoundaryCost]
    ) -> Candidate | None:
        question, shape, placement, works = self.question, self.shape, self.placement, self.works
        costs = self._costs(nodes, crossings)
        if costs not in self.known:
            self.known[costs] = choose_order(placement, costs, shape.num_microbatches, self.most, self._fits)
        order = self.known[costs]
        if order is None:
            return None
        by_stage = [[self.parts[vstage] for vstage in placement.vstages(stage)] for stage in range(len(self.kinds))]
        sums_s = _sums_s(question, shape, self.kinds, works, by_stage, nodes)
        updates_s = (
            sum(work.update_s[end] - work.update_s[start] for start, end in own)
            for work, own in zip(works, by_stage, strict=True)
        )
        return Candidate(
            kinds=tuple(self.kinds),
            layers=tuple(self.layers),
            num_chunks=self.num_chunks,
            shape=shape,
            nodes=nodes,
            transport=transport,
            costs=costs,
            order=order,
            held_bytes=tuple(self._held(order.peaks)),
            sums_s=max(end + sums for end, sums in zip(order.ends_s, sums_s, strict=True))
            - order.pipeline_s
            + _between_stages_s(question, shape, placement, costs, nodes),
            update_s=max(updates_s),
        )

    def _crossings(self, nodes: Sequence[Sequence[Node]], transport: str) -> list[BoundaryCost]:
        """Give what every boundary costs."""
        question, shape = self.question, self.shape
        ends = [
            End(kind.tp, work, shape.pools[kind.places[0]].site)
            for kind, work in zip(self.kinds, self.works, strict=True)
        ]
        found = []
        for one, other in pairwise(self.placement.stages):
            links = [link_between(question, shape, *pair) for pair in zip(nodes[one], nodes[other], strict=True)]
            pair = (ends[one], ends[other])
            found.append(cross(question, shape, transport, pair, links))
        return found

    def _costs(self, nodes: Sequence[Sequence[Node]], crossings: Sequence[BoundaryCost]) -> Costs:
        last = self.placement.num_vstages - 1
        forwards, backwards = [], []
        for vstage, (stage, (start, end)) in enumerate(zip(self.placement.stages, self.parts, strict=True)):
            work = self.works[stage]
            forward, backward = work.times_s(start, end, is_first=not vstage, is_last=vstage == last)
            if (numbers := [sums[end] - sums[start] for sums in work.messages]) != [0, 0]:
                # The nodes may be farther apart than at best, which the times are for.
                more_s = peer_s(self.question, self.shape, self.kinds[stage], work, nodes[stage]) - work.peer_s
                forward, backward = forward + numbers[0] * more_s, backward + numbers[1] * more_s
            forwards.append(forward)
            backwards.append(backward)
        for vstage, one in enumerate(crossings):
            for end in (0, 1):
                forwards[vstage + end] += one.forward_s[end]
                backwards[vstage + end] += one.backward_s[end]
        return Costs(
            forward=tuple(forwards),
            backward=tuple(backwards),
            latency=tuple(one.link.latency_s for one in crossings),
            bandwidth=tuple(one.link.bytes_per_s for one in crossings),
            message_bytes=tuple(one.num_bytes for one in crossings),
        )


def _between_stages_s(
    question: SearchProblem, shape: BatchSplit, placement: Placement, costs: Costs, nodes: Sequence[Sequence[Node]]
) -> float:
    """Say how long stages sum what they share: numbers over all of them, tied weights over both ends of the model.

    A sum of one number goes along the pipeline and back; the ends of tied weights send to each other at once.
    """
    if len(nodes) == 1:
        return 0.0
    numbers_s = _NUM_NUMBERS * 2 * sum(costs.latency[: len(nodes) - 1])
    if not question.tied_bytes or placement.stages[0] == placement.stages[-1]:
        return numbers_s
    ends = zip(nodes[0], nodes[-1], strict=True)
    return numbers_s + max(link_between(question, shape, *pair).time_s(question.tied_bytes) for pair in ends)


def _sums_s(
    question: SearchProblem,
    shape: BatchSplit,
    kinds: Sequence[StageType],
    works: Sequence[Work],
    by_stage: Sequence[Sequence[Part]],
    nodes: Sequence[Sequence[Node]],
) -> list[float]:
    """Say of every stage how long its replicas sum their gradients, in a ring."""
    found = []
    for kind, work, parts, own in zip(kinds, works, by_stage, nodes, strict=True):
        ring = {link_between(question, shape, node, own[i - 1]) for i, node in enumerate(own)}
        if shape.cp > 1:
            ring |= {shape.pools[pool].inside for pool, _ in own}
        found.append(max(gradients_s(shape, kind, work, parts, link) for link in ring))
    return found
