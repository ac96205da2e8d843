"""How long a step of a layout takes, as the project's simulator says it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from vtp_plugin.schedule.cost.costs import Costs
from vtp_plugin.schedule.cost.simulate import Timeline, simulate
from vtp_plugin.schedule.make.choose import ScheduleRequest, make_schedule
from vtp_plugin.schedule.order.placement import Placement, plain_placement
from vtp_plugin.search.put import Node, put
from vtp_plugin.search.question import Kind, Question, Shape
from vtp_plugin.search.stage import link_between, sum_s, work_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A layout and its step.

    Attributes:
        kinds: of the stages.
        layers: of every stage.
        shape: of the step.
        nodes: of every stage, by replica.
        costs: of a microbatch, in seconds.
        pipeline_s: of all microbatches.
        sums_s: what summing the gradients adds.
        update_s: the optimizer, on the slowest stage.
    """

    kinds: tuple[Kind, ...]
    layers: tuple[int, ...]
    shape: Shape
    nodes: tuple[tuple[Node, ...], ...]
    costs: Costs
    pipeline_s: float
    sums_s: float
    update_s: float

    @property
    def step_s(self) -> float:
        """Length of a step."""
        return self.pipeline_s + self.sums_s + self.update_s

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tensor-parallel size of every stage."""
        return tuple(kind.tp for kind in self.kinds)

    @property
    def num_cards(self) -> int:
        """Cards that work."""
        return sum(self.sizes) * self.shape.num_replicas * self.shape.cards_per_part


def judge(question: Question, shape: Shape, kinds: Sequence[Kind], layers: Sequence[int]) -> Choice | None:
    """Simulate a step; None if the cards do not go into the nodes.

    Args:
        question: what is asked.
        shape: of the step.
        kinds: of the stages, in order.
        layers: of every stage.
    """
    choices = [_judge(question, shape, kinds, layers, nodes) for nodes in put(question, shape, kinds)]
    return min(choices, key=lambda choice: choice.step_s, default=None)


def _judge(
    question: Question, shape: Shape, kinds: Sequence[Kind], layers: Sequence[int], nodes: tuple[tuple[Node, ...], ...]
) -> Choice:
    placement, costs = plain_placement(len(kinds)), _costs(question, shape, kinds, layers, nodes)
    pipeline_s, ends_s = pipeline_time(placement, costs, shape.num_microbatches)
    sums_s, updates_s = zip(*_tails(question, shape, kinds, layers, nodes), strict=True)
    return Choice(
        kinds=tuple(kinds),
        layers=tuple(layers),
        shape=shape,
        nodes=nodes,
        costs=costs,
        pipeline_s=pipeline_s,
        sums_s=max(end + sums for end, sums in zip(ends_s, sums_s, strict=True)) - pipeline_s,
        update_s=max(updates_s),
    )


def pipeline_time(placement: Placement, costs: Costs, num_microbatches: int) -> tuple[float, tuple[float, ...]]:
    """Simulate all microbatches: when the last worker is done, and when each is.

    Once all stages are busy, every further microbatch takes as long as the slowest stage needs for it. So a long step
    is simulated as far as that, and its rest is added.

    Args:
        placement: of the pipeline.
        costs: of a microbatch.
        num_microbatches: of a replica.
    """
    simulated = min(num_microbatches, 4 * placement.num_stages + 4)
    request = ScheduleRequest(placement=placement, num_microbatches=simulated, costs=costs)
    timeline: Timeline = simulate(make_schedule(request)[0], costs, mode="rendezvous")
    loads = [0.0] * placement.num_stages
    for stage, *both in zip(placement.stages, costs.forward, costs.backward, strict=True):
        loads[stage] += sum(both)
    more = (num_microbatches - simulated) * max(loads)
    return timeline.makespan + more, tuple(spans[-1].end + more for spans in timeline.spans)


def _costs(
    question: Question, shape: Shape, kinds: Sequence[Kind], layers: Sequence[int], nodes: Sequence[Sequence[Node]]
) -> Costs:
    forward, backward = [], []
    start = 0
    for stage, (kind, number) in enumerate(zip(kinds, layers, strict=True)):
        work = work_of(kind, shape.pools)
        times = work.times_s(start, start + number, is_first=not stage, is_last=stage == len(kinds) - 1)
        start += number
        forward.append(times[0])
        backward.append(times[1])
    links = [
        max(
            (link_between(question, shape, *pair) for pair in zip(one, other, strict=True)),
            key=lambda link: link.time_s(shape.message_bytes),
        )
        for one, other in pairwise(nodes)
    ]
    return Costs(
        forward=tuple(forward),
        backward=tuple(backward),
        latency=tuple(link.latency_s for link in links),
        bandwidth=tuple(link.bytes_per_s for link in links),
        message_bytes=(shape.message_bytes,) * len(links),
    )


def _tails(
    question: Question, shape: Shape, kinds: Sequence[Kind], layers: Sequence[int], nodes: Sequence[Sequence[Node]]
) -> list[tuple[float, float]]:
    """Say of every stage how long replicas sum their gradients, in a ring, and how long the optimizer takes."""
    tails = []
    start = 0
    for kind, number, own in zip(kinds, layers, nodes, strict=True):
        work, end = work_of(kind, shape.pools), start + number
        replicas = len(own)
        num_bytes = work.gradient_bytes[end] - work.gradient_bytes[start]
        ring = [link_between(question, shape, own[i], own[i - 1]) for i in range(replicas)]
        sums = max(sum_s(num_bytes, replicas, link) for link in ring)
        tails.append((sums, work.update_s[end] - work.update_s[start]))
        start = end
    return tails
