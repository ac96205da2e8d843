"""How long a step of a layout takes, as the project's simulator says it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from vtp_plugin.schedule.cost.costs import Costs
from vtp_plugin.schedule.order.placement import Placement, interleaved_placement, plain_placement, u_placement
from vtp_plugin.search.ahead import most_in_flight
from vtp_plugin.search.order import Order, choose_order
from vtp_plugin.search.put import Node, put
from vtp_plugin.search.question import Kind, Question, Shape, Source, least_sure
from vtp_plugin.search.room import Part, held_bytes_of
from vtp_plugin.search.stage import Work, gradients_s, link_between, peer_s

# Numbers that megatron.training 0.19 sums over all ranks in a step, one after another: whether to run it again, the
# norm of the gradients, whether the update succeeded, and twice two for the log. 0.12 has five.
_NUM_NUMBERS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A layout and its step.

    Attributes:
        kinds: of the stages.
        layers: of every stage; of a U one part more, the edge's last.
        num_chunks: virtual stages of every stage; 1 for a plain pipeline, and for a U.
        shape: of the step.
        nodes: of every stage, by replica.
        costs: of a microbatch, in seconds.
        order: of the microbatches.
        held_bytes: of the fullest rank of every stage.
        sums_s: what summing the gradients adds: over replicas, of weights that both ends of the model share, and of
            their norm over all stages.
        update_s: the optimizer, on the slowest stage.
    """

    kinds: tuple[Kind, ...]
    layers: tuple[int, ...]
    num_chunks: int
    shape: Shape
    nodes: tuple[tuple[Node, ...], ...]
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


def judge(
    question: Question,
    shape: Shape,
    kinds: Sequence[Kind],
    works: Sequence[Work],
    layers: Sequence[int],
    *,
    is_stock: bool = False,
    num_chunks: int = 1,
) -> Choice | None:
    """Simulate a step; None if the cards do not go into the nodes, or have too little memory for any order.

    Args:
        question: what is asked.
        shape: of the step.
        kinds: of the stages, in order.
        works: what each costs.
        layers: of every stage; of a U one part more.
        is_stock: in Megatron's order, not in a planned one.
        num_chunks: virtual stages of every stage.
    """
    placement, parts = place(len(kinds), layers, num_chunks)
    choices = []
    # Ways to put stages into nodes often have the same links.
    known: dict[Costs, Order | None] = {}
    most: Sequence[int] | None = None
    if not is_stock:
        is_plain = placement.num_vstages == len(kinds)
        most = most_in_flight(question, shape, kinds, works, layers) if question.runs_ahead and is_plain else ()

    def held(peaks: Sequence[int]) -> list[int]:
        return held_bytes_of(question, shape, kinds, placement, parts, peaks)

    def fits(peaks: Sequence[int]) -> bool:
        limits = (work.memory_bytes for work in works)
        return all(limit is None or num_bytes <= limit for limit, num_bytes in zip(limits, held(peaks), strict=True))

    for nodes in put(question, shape, kinds):
        costs = _costs(question, shape, kinds, works, placement, parts, nodes)
        if costs not in known:
            known[costs] = choose_order(placement, costs, shape.num_microbatches, most, fits)
        order = known[costs]
        if order is None:
            continue
        by_stage = [[parts[vstage] for vstage in placement.vstages(stage)] for stage in range(len(kinds))]
        sums_s = _sums_s(question, shape, kinds, works, by_stage, nodes)
        updates_s = (
            sum(work.update_s[end] - work.update_s[start] for start, end in own)
            for work, own in zip(works, by_stage, strict=True)
        )
        choices.append(
            Choice(
                kinds=tuple(kinds),
                layers=tuple(layers),
                num_chunks=num_chunks,
                shape=shape,
                nodes=nodes,
                costs=costs,
                order=order,
                held_bytes=tuple(held(order.peaks)),
                sums_s=max(end + sums for end, sums in zip(order.ends_s, sums_s, strict=True))
                - order.pipeline_s
                + _between_stages_s(question, shape, placement, costs, nodes),
                update_s=max(updates_s),
            )
        )
    return min(choices, key=lambda choice: choice.step_s, default=None)


def _between_stages_s(
    question: Question, shape: Shape, placement: Placement, costs: Costs, nodes: Sequence[Sequence[Node]]
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


def _costs(
    question: Question,
    shape: Shape,
    kinds: Sequence[Kind],
    works: Sequence[Work],
    placement: Placement,
    parts: Sequence[Part],
    nodes: Sequence[Sequence[Node]],
) -> Costs:
    last = placement.num_vstages - 1
    times = []
    for vstage, (stage, (start, end)) in enumerate(zip(placement.stages, parts, strict=True)):
        work = works[stage]
        forward, backward = work.times_s(start, end, is_first=not vstage, is_last=vstage == last)
        if (numbers := [sums[end] - sums[start] for sums in work.messages]) != [0, 0]:
            # The nodes may be farther apart than at best, which the times are for.
            more_s = peer_s(question, shape, kinds[stage], work, nodes[stage]) - work.peer_s
            forward, backward = forward + numbers[0] * more_s, backward + numbers[1] * more_s
        times.append((forward, backward))
    links = [
        max(
            (link_between(question, shape, *pair) for pair in zip(nodes[one], nodes[other], strict=True)),
            key=lambda link: link.time_s(shape.message_bytes),
        )
        for one, other in pairwise(placement.stages)
    ]
    return Costs(
        forward=tuple(forward for forward, _ in times),
        backward=tuple(backward for _, backward in times),
        latency=tuple(link.latency_s for link in links),
        bandwidth=tuple(link.bytes_per_s for link in links),
        message_bytes=(shape.message_bytes,) * len(links),
    )


def _sums_s(
    question: Question,
    shape: Shape,
    kinds: Sequence[Kind],
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
