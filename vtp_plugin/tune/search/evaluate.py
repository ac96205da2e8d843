"""Evaluates a layout: simulates its step, with the transport and the order that suit it best."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from vtp_plugin.plan.layout.layer_lists import Kept
from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.order.placement import Placement, interleaved_placement, plain_placement, u_placement
from vtp_plugin.tune.cluster.machines import Node
from vtp_plugin.tune.cluster.speed import Source, least_sure
from vtp_plugin.tune.search.node_assignment import assign_nodes
from vtp_plugin.tune.search.problem import BatchSplit, NodeIndex, SearchProblem, SearchSpace, StageType
from vtp_plugin.tune.search.schedule_time import Order, choose_order, choose_split_order, least_pipeline_s
from vtp_plugin.tune.search.stage_cost import (
    BoundaryCost,
    Part,
    cost_of_boundary,
    fits_memory,
    gradients_s,
    held_bytes_of,
    most_in_flight,
    peer_s,
    transports,
)

# Numbers that megatron.training 0.19 sums over all ranks in a step, one after another: whether to run it again, the
# norm of the gradients, whether the update succeeded, and twice two for the log. 0.12 has five.
_NUM_NUMBERS = 7
# A transport other than the one that a run chooses by itself is taken where it is quicker by this share.
_LEAST_GAIN = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout with its simulated step.

    Attributes:
        stage_types: the type of every stage, in order.
        layers: number of layers of every stage; in a U one part more, the edge's last.
        num_chunks: number of virtual stages of every stage; 1 for a plain pipeline, and for a U.
        placement: which stage holds which virtual stage.
        split: how the samples of the step are shared out.
        nodes: for every stage the node of each replica.
        transport: the transport that the run must be started with; ``auto`` where its own choice is best.
        costs: durations and links of a microbatch, in seconds; where no card was measured, a layer takes one card 1
            forward and 2 backward.
        order: the order of the microbatches, with its simulated times.
        held_bytes: bytes held by the fullest rank of every stage.
        sums_s: seconds that sums add to the step: of gradients over replicas, of weights that both ends of the model
            share, and of the gradients' norm over all stages.
        update_s: seconds of the optimizer on the slowest stage.
        whole: the same layout with whole backwards; None where its backwards are not split.
    """

    stage_types: tuple[StageType, ...]
    layers: tuple[int, ...]
    num_chunks: int
    placement: Placement
    split: BatchSplit
    nodes: tuple[tuple[NodeIndex, ...], ...]
    transport: str
    costs: Costs
    order: Order
    held_bytes: tuple[int, ...]
    sums_s: float
    update_s: float
    whole: Candidate | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a whole step."""
        return self.order.pipeline_s + self.sums_s + self.update_s

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tensor-parallel size of every stage."""
        return tuple(stage_type.tp for stage_type in self.stage_types)

    @property
    def num_replicas(self) -> int:
        """Number of replicas of every stage."""
        return self.split.num_replicas

    @property
    def sites(self) -> tuple[str, ...]:
        """Site of every stage."""
        return tuple(self.split.pools[stage_type.replica_pools[0]].site for stage_type in self.stage_types)

    @property
    def source(self) -> Source:
        """Where the least sure of its times comes from."""
        return least_sure(
            {
                self.split.pools[pool].speeds[stage_type.tp].source
                for stage_type in self.stage_types
                for pool in stage_type.pools
            }
        )

    @property
    def flagged(self) -> tuple[object, ...]:
        """What the flags of a run say of the layout: not its nodes, its order or its transport."""
        split = self.split
        return self.sizes, self.layers, self.num_chunks, split.num_replicas, split.micro_batch_size, self.sites

    @property
    def num_cards(self) -> int:
        """Number of cards that the layout uses."""
        return sum(self.sizes) * self.split.cp * self.split.num_replicas

    @property
    def node_names(self) -> list[list[str]]:
        """Name of the node of every replica of every stage."""
        pools = self.split.pools
        return [[pools[pool].nodes[node].name for pool, node in nodes_of_stage] for nodes_of_stage in self.nodes]

    @property
    def spare_cards(self) -> tuple[tuple[Node, int], ...]:
        """Every node, with the number of its cards that the layout does not use."""
        used: Counter[NodeIndex] = Counter()
        for stage_type, nodes_of_stage in zip(self.stage_types, self.nodes, strict=True):
            for place in nodes_of_stage:
                used[place] += stage_type.tp * self.split.cp
        return tuple(
            (node, node.num_cards - used[pool_index, index])
            for pool_index, pool in enumerate(self.split.pools)
            for index, node in enumerate(pool.nodes)
        )


def virtual_stages(
    num_stages: int, layers: Sequence[int], num_chunks: int, num_frozen: int = 0
) -> tuple[Placement, list[Part]]:
    """Say which stage holds which virtual stage, and the layers of these; ``num_frozen``: of the first layers.

    >>> virtual_stages(2, (4, 2), 2)[1], virtual_stages(2, (1, 4, 1), 1)[0].stages
    ([(0, 2), (2, 3), (3, 5), (5, 6)], (0, 1, 0))
    """
    parts = list(layers)
    if len(layers) > num_stages:
        placement = u_placement(num_stages)
    elif num_chunks > 1:
        placement, parts = interleaved_placement(num_stages, num_chunks), [n // num_chunks for n in layers] * num_chunks
    else:
        placement = plain_placement(num_stages)
    ends = [*accumulate(parts)]
    placement = replace(placement, num_frozen=sum(end <= num_frozen for end in ends))
    return placement, [*pairwise((0, *ends))]


def evaluate(
    space: SearchSpace, stage_types: Sequence[StageType], layers: Sequence[int], *, num_chunks: int = 1
) -> Candidate | None:
    """Simulate the step of a layout; None if its stages do not fit the nodes, or the memory suffices for no order.

    Args:
        space: the space of whole pipelines.
        stage_types: the type of every stage, in order.
        layers: number of layers of every stage; in a U one part more.
        num_chunks: number of virtual stages of every stage.
    """
    evaluation = _Evaluation(space, stage_types, layers, num_chunks=num_chunks)
    candidates = [candidate for nodes in assign_nodes(space, stage_types) for candidate in evaluation.candidates(nodes)]
    return min(candidates, key=lambda candidate: candidate.step_s, default=None)


def least_split_s(candidate: Candidate) -> float:
    """Bound the step of a layout with split backwards from below, in seconds."""
    least_s = least_pipeline_s(candidate.placement, candidate.costs, candidate.split.num_microbatches, is_split=True)
    return least_s + candidate.update_s


def with_split(problem: SearchProblem, candidate: Candidate) -> Candidate:
    """Split the backwards of a layout where the memory allows it and the step is shorter; else give it as it is.

    Args:
        problem: the search problem that the layout was found for.
        candidate: the layout, with whole backwards.
    """
    space = SearchSpace.of(problem, candidate.split)
    evaluation = _Evaluation(space, candidate.stage_types, candidate.layers, num_chunks=candidate.num_chunks)
    found = evaluation.with_split(candidate)
    return replace(found, whole=candidate) if found.step_s < candidate.step_s else candidate


class _Evaluation:
    """Stages with their layers, wherever they are; the arguments are those of :func:`evaluate`."""

    def __init__(
        self,
        space: SearchSpace,
        stage_types: Sequence[StageType],
        layers: Sequence[int],
        *,
        num_chunks: int,
    ) -> None:
        self.space, self.problem, self.split = space, space.problem, space.split
        self.stage_types, self.layers, self.num_chunks = stage_types, layers, num_chunks
        self.speeds = [space.speeds[stage_type] for stage_type in stage_types]
        num_frozen = self.problem.num_frozen
        self.placement, self.parts = virtual_stages(len(stage_types), layers, num_chunks, num_frozen)
        self.by_stage = [
            [self.parts[vstage] for vstage in self.placement.vstages(stage)] for stage in range(len(stage_types))
        ]
        # Different assignments of nodes often have the same links.
        self.known: dict[Costs, Order | None] = {}
        self.most: Sequence[int] | None = None
        self.is_plain = self.placement.num_vstages == len(stage_types)
        if not self.problem.is_stock:
            ahead = self.problem.runs_ahead and self.is_plain
            self.most = most_in_flight(space, stage_types, layers) if ahead else ()

    def candidates(self, nodes: tuple[tuple[NodeIndex, ...], ...]) -> Iterator[Candidate]:
        """Yield candidates on these nodes: with a run's own choice of transport, and with those that gain."""
        first: Sequence[BoundaryCost] = ()
        best_s = math.inf
        for transport in transports(self.problem):
            boundaries = self._boundary_costs(nodes, transport)
            first = first or boundaries
            is_other = transport != self.problem.rules.transport
            if is_other and not any(one.both_s < other.both_s for one, other in zip(boundaries, first, strict=True)):
                continue
            candidate = self._candidate(nodes, transport, boundaries)
            if candidate is not None and candidate.step_s * (1 + _LEAST_GAIN * is_other) < best_s:
                best_s = candidate.step_s
                yield candidate

    def with_split(self, whole: Candidate) -> Candidate:
        """Give a candidate with split backwards, where they gain and fit."""
        most = most_in_flight(self.space, self.stage_types, self.layers, is_split=True) if self.is_plain else ()
        number = self.split.num_microbatches
        order = choose_split_order(self.placement, whole.costs, number, most, self._order_fits_memory, whole.order)
        return self._in_order(whole.nodes, whole.transport, whole.costs, order)

    def _held(self, kept: Sequence[Sequence[Kept]]) -> list[int]:
        return held_bytes_of(self.split, self.stage_types, self.placement, self.parts, kept)

    def _order_fits_memory(self, kept: Sequence[Sequence[Kept]]) -> bool:
        limits = (self.space.memory_bytes(stage_type) for stage_type in self.stage_types)
        return all(fits_memory(held, limit) for held, limit in zip(self._held(kept), limits, strict=True))

    def _candidate(
        self, nodes: tuple[tuple[NodeIndex, ...], ...], transport: str, boundaries: Sequence[BoundaryCost]
    ) -> Candidate | None:
        costs = self._costs(nodes, boundaries)
        if costs not in self.known:
            num_microbatches = self.split.num_microbatches
            self.known[costs] = choose_order(
                self.placement, costs, num_microbatches, self.most, self._order_fits_memory
            )
        order = self.known[costs]
        return None if order is None else self._in_order(nodes, transport, costs, order)

    def _in_order(
        self, nodes: tuple[tuple[NodeIndex, ...], ...], transport: str, costs: Costs, order: Order
    ) -> Candidate:
        updates_s = (
            sum(speed.update_sums[end] - speed.update_sums[start] for start, end in own)
            for speed, own in zip(self.speeds, self.by_stage, strict=True)
        )
        return Candidate(
            stage_types=tuple(self.stage_types),
            layers=tuple(self.layers),
            num_chunks=self.num_chunks,
            placement=self.placement,
            split=self.split,
            nodes=nodes,
            transport=transport,
            costs=costs,
            order=order,
            held_bytes=tuple(self._held(order.kept)),
            sums_s=max(end + sums for end, sums in zip(order.ends_s, self._sums_s(nodes), strict=True))
            - order.pipeline_s
            + self._between_stages_s(costs, nodes),
            update_s=max(updates_s),
        )

    def _boundary_costs(self, nodes: Sequence[Sequence[NodeIndex]], transport: str) -> list[BoundaryCost]:
        """Give the cost of every boundary."""
        found = []
        for one, other in pairwise(self.placement.stages):
            links = [self.space.link(*pair) for pair in zip(nodes[one], nodes[other], strict=True)]
            pair = (self.stage_types[one], self.stage_types[other])
            found.append(cost_of_boundary(self.space, transport, pair, links))
        return found

    def _costs(self, nodes: Sequence[Sequence[NodeIndex]], boundaries: Sequence[BoundaryCost]) -> Costs:
        last = self.placement.num_vstages - 1
        forwards, backwards, weights = [], [], []
        for vstage, (stage, (start, end)) in enumerate(zip(self.placement.stages, self.parts, strict=True)):
            speed = self.speeds[stage]
            forward, backward = speed.times_s(start, end, is_first=not vstage, is_last=vstage == last)
            if (numbers := [sums[end] - sums[start] for sums in speed.message_sums]) != [0, 0]:
                # The times assume the nearest nodes; these may be farther apart.
                more_s = peer_s(self.space, self.stage_types[stage], nodes[stage]) - speed.peer_s
                forward, backward = forward + numbers[0] * more_s, backward + numbers[1] * more_s
            forwards.append(forward)
            backwards.append(backward)
            weights.append(min(speed.weights_sums[end] - speed.weights_sums[start], backward))
        for vstage, boundary in enumerate(boundaries):
            for end in (0, 1):
                forwards[vstage + end] += boundary.forward_s[end]
                backwards[vstage + end] += boundary.backward_s[end] * self.placement.is_trained(vstage)
        return Costs(
            forward=tuple(forwards),
            backward=tuple(backwards),
            latency=tuple(boundary.link.latency_s for boundary in boundaries),
            bandwidth=tuple(boundary.link.bytes_per_s for boundary in boundaries),
            message_bytes=tuple(boundary.num_bytes for boundary in boundaries),
            weights=tuple(weights),
        )

    def _between_stages_s(self, costs: Costs, nodes: Sequence[Sequence[NodeIndex]]) -> float:
        """Say how long stages sum what they share: numbers over all of them, tied weights over both ends of the model.

        A sum of one number goes along the pipeline and back; the ends of tied weights send to each other at once.
        """
        if len(nodes) == 1:
            return 0.0
        numbers_s = _NUM_NUMBERS * 2 * sum(costs.latency[: len(nodes) - 1])
        tied_bytes, stages = self.problem.tied_bytes, self.placement.stages
        if not tied_bytes or stages[0] == stages[-1]:
            return numbers_s
        ends = zip(nodes[0], nodes[-1], strict=True)
        return numbers_s + max(self.space.link(*pair).time_s(tied_bytes) for pair in ends)

    def _sums_s(self, nodes: Sequence[Sequence[NodeIndex]]) -> list[float]:
        """Give the seconds in which the replicas of every stage sum their gradients, in a ring."""
        sums_s = []
        for stage_type, parts, own in zip(self.stage_types, self.by_stage, nodes, strict=True):
            ring = {self.space.link(node, own[i - 1]) for i, node in enumerate(own)}
            if self.split.cp > 1:
                ring |= {self.split.pools[pool].inside for pool, _ in own}
            sums_s.append(max(gradients_s(self.space, stage_type, parts, link) for link in ring))
        return sums_s
