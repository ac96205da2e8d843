"""How long a step of a layout takes, as the project's simulator says it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from vtp_plugin.schedule.cost.costs import Costs
from vtp_plugin.schedule.cost.simulate import Timeline, simulate
from vtp_plugin.schedule.make.choose import ScheduleRequest, make_schedule
from vtp_plugin.schedule.order.placement import Placement, plain_placement
from vtp_plugin.search.put import Node, put
from vtp_plugin.search.question import Kind, Question, Shape, Source, least_sure
from vtp_plugin.search.stage import Work, link_between, sum_s


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
    def source(self) -> Source:
        """Where the least sure of its times comes from."""
        return least_sure({self.shape.pools[pool].speeds[kind.tp].source for kind in self.kinds for pool in kind.pools})

    @property
    def num_cards(self) -> int:
        """Cards that work."""
        return sum(self.sizes) * self.shape.num_replicas


def judge(
    question: Question, shape: Shape, kinds: Sequence[Kind], works: Sequence[Work], layers: Sequence[int]
) -> Choice | None:
    """Simulate a step; None if the cards do not go into the nodes.

    Args:
        question: what is asked.
        shape: of the step.
        kinds: of the stages, in order.
        works: what each costs.
        layers: of every stage.
    """
    placement, ends = plain_placement(len(kinds)), [*accumulate(layers, initial=0)]
    choices = []
    # Ways to put stages into nodes often have the same links.
    known: dict[Costs, tuple[float, tuple[float, ...]]] = {}
    for nodes in put(question, shape, kinds):
        costs = _costs(question, shape, works, ends, nodes)
        if costs not in known:
            known[costs] = pipeline_time(placement, costs, shape.num_microbatches)
        pipeline_s, ends_s = known[costs]
        sums_s = _sums_s(question, shape, works, ends, nodes)
        choices.append(
            Choice(
                kinds=tuple(kinds),
                layers=tuple(layers),
                shape=shape,
                nodes=nodes,
                costs=costs,
                pipeline_s=pipeline_s,
                sums_s=max(end + sums for end, sums in zip(ends_s, sums_s, strict=True)) - pipeline_s,
                update_s=max(w.update_s[end] - w.update_s[start] for w, (start, end) in _parts(works, ends)),
            )
        )
    return min(choices, key=lambda choice: choice.step_s, default=None)


def _parts(works: Sequence[Work], ends: Sequence[int]) -> Iterator[tuple[Work, tuple[int, int]]]:
    """Yield of every stage what it costs, its first layer and the first one behind it."""
    return zip(works, pairwise(ends), strict=True)


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
    question: Question, shape: Shape, works: Sequence[Work], ends: Sequence[int], nodes: Sequence[Sequence[Node]]
) -> Costs:
    last = len(works) - 1
    times = [
        work.times_s(*part, is_first=not stage, is_last=stage == last)
        for stage, (work, part) in enumerate(_parts(works, ends))
    ]
    links = [
        max(
            (link_between(question, shape, *pair) for pair in zip(one, other, strict=True)),
            key=lambda link: link.time_s(shape.message_bytes),
        )
        for one, other in pairwise(nodes)
    ]
    return Costs(
        forward=tuple(forward for forward, _ in times),
        backward=tuple(backward for _, backward in times),
        latency=tuple(link.latency_s for link in links),
        bandwidth=tuple(link.bytes_per_s for link in links),
        message_bytes=(shape.message_bytes,) * len(links),
    )


def _sums_s(
    question: Question, shape: Shape, works: Sequence[Work], ends: Sequence[int], nodes: Sequence[Sequence[Node]]
) -> list[float]:
    """Say of every stage how long its replicas sum their gradients, in a ring."""
    found = []
    for (work, (start, end)), own in zip(_parts(works, ends), nodes, strict=True):
        num_bytes = work.gradient_bytes[end] - work.gradient_bytes[start]
        ring = (link_between(question, shape, node, own[i - 1]) for i, node in enumerate(own))
        found.append(max(sum_s(num_bytes, len(own), link) for link in ring))
    return found
