"""How long a step of a layout takes, as the project's simulator says it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from vtp_plugin.schedule.cost.costs import Costs
from vtp_plugin.schedule.cost.simulate import Timeline, simulate
from vtp_plugin.schedule.make.choose import ScheduleRequest, make_schedule
from vtp_plugin.schedule.make.generate import one_f_one_b
from vtp_plugin.schedule.order.actions import Op
from vtp_plugin.schedule.order.lower import lower
from vtp_plugin.schedule.order.placement import Placement, plain_placement
from vtp_plugin.search.put import Node, put
from vtp_plugin.search.question import Kind, Question, Shape, Source, least_sure
from vtp_plugin.search.stage import Work, gradients_s, link_between, peer_s

# A planned order is taken where it is quicker by this share.
_LEAST_GAIN = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A layout and its step.

    Attributes:
        kinds: of the stages.
        layers: of every stage.
        shape: of the step.
        nodes: of every stage, by replica.
        costs: of a microbatch, in seconds.
        is_planned: the order is a planned one, whose receives are posted ahead, since that is quicker.
        pipeline_s: of all microbatches.
        sums_s: what summing the gradients adds: over replicas, of weights that both ends of the model share, and of
            their norm over all stages.
        update_s: the optimizer, on the slowest stage.
    """

    kinds: tuple[Kind, ...]
    layers: tuple[int, ...]
    shape: Shape
    nodes: tuple[tuple[Node, ...], ...]
    costs: Costs
    is_planned: bool
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
        return sum(self.sizes) * self.shape.cp * self.shape.num_replicas


def judge(
    question: Question,
    shape: Shape,
    kinds: Sequence[Kind],
    works: Sequence[Work],
    layers: Sequence[int],
    *,
    is_stock: bool = False,
) -> Choice | None:
    """Simulate a step; None if the cards do not go into the nodes.

    Args:
        question: what is asked.
        shape: of the step.
        kinds: of the stages, in order.
        works: what each costs.
        layers: of every stage.
        is_stock: in Megatron's order, not in a planned one.
    """
    placement, ends = plain_placement(len(kinds)), [*accumulate(layers, initial=0)]
    choices = []
    # Ways to put stages into nodes often have the same links.
    known: dict[Costs, tuple[bool, tuple[float, tuple[float, ...]]]] = {}
    for nodes in put(question, shape, kinds):
        costs = _costs(question, shape, kinds, works, ends, nodes)
        if costs not in known:
            known[costs] = _order(placement, costs, shape.num_microbatches, is_stock=is_stock)
        is_planned, (pipeline_s, ends_s) = known[costs]
        sums_s = _sums_s(question, shape, kinds, works, ends, nodes)
        choices.append(
            Choice(
                kinds=tuple(kinds),
                layers=tuple(layers),
                shape=shape,
                nodes=nodes,
                costs=costs,
                is_planned=is_planned,
                pipeline_s=pipeline_s,
                sums_s=max(end + sums for end, sums in zip(ends_s, sums_s, strict=True))
                - pipeline_s
                + _between_stages_s(question, shape, costs, nodes),
                update_s=max(w.update_s[end] - w.update_s[start] for w, (start, end) in _parts(works, ends)),
            )
        )
    return min(choices, key=lambda choice: choice.step_s, default=None)


def _between_stages_s(question: Question, shape: Shape, costs: Costs, nodes: Sequence[Sequence[Node]]) -> float:
    """Say how long stages sum what they share: the norm over all of them, tied weights over the first and the last.

    A sum of one number goes along the pipeline and back; the ends of tied weights send to each other at once.
    """
    if len(nodes) == 1:
        return 0.0
    norm_s = 2 * sum(costs.latency)
    if not question.tied_bytes:
        return norm_s
    ends = zip(nodes[0], nodes[-1], strict=True)
    return norm_s + max(link_between(question, shape, *pair).time_s(question.tied_bytes) for pair in ends)


def _parts(works: Sequence[Work], ends: Sequence[int]) -> Iterator[tuple[Work, tuple[int, int]]]:
    """Yield of every stage what it costs, its first layer and the first one behind it."""
    return zip(works, pairwise(ends), strict=True)


def timeline_of(placement: Placement, costs: Costs, num_microbatches: int, *, is_planned: bool) -> Timeline:
    """Simulate microbatches; the arguments are those of :func:`pipeline_time`."""
    if is_planned:
        request = ScheduleRequest(placement=placement, num_microbatches=num_microbatches, costs=costs)
        schedule = make_schedule(request)[0]
    else:
        schedule = lower(one_f_one_b(placement, num_microbatches), lookahead=0)
    return simulate(schedule, costs, mode="rendezvous")


def pipeline_time(
    placement: Placement, costs: Costs, num_microbatches: int, *, is_planned: bool = True
) -> tuple[float, tuple[float, ...]]:
    """Simulate all microbatches: when the last worker is done, and when each is.

    Once all stages are busy, every further microbatch takes as long as the one before. So a long step is simulated as
    far as that, and its rest is added.

    Args:
        placement: of the pipeline.
        costs: of a microbatch.
        num_microbatches: of a replica.
        is_planned: receives are posted ahead, as in a planned order; else when they are needed, as in Megatron's 1F1B.

    >>> from vtp_plugin.schedule.cost.costs import uniform_costs
    >>> placement = plain_placement(2)
    >>> costs = uniform_costs(placement, latency=1.0)
    >>> [pipeline_time(placement, costs, 1000, is_planned=is_planned)[0] for is_planned in (True, False)]
    [4003.0, 5003.0]
    """
    num_stages = placement.num_stages
    simulated = min(num_microbatches, 4 * num_stages + 4)
    if is_planned:
        schedule = make_schedule(ScheduleRequest(placement=placement, num_microbatches=simulated, costs=costs))[0]
    else:
        schedule = lower(one_f_one_b(placement, simulated), lookahead=0)
    timeline: Timeline = simulate(schedule, costs, mode="rendezvous")
    more = (
        (num_microbatches - simulated) * _cycle_s(timeline, costs, simulated) if num_microbatches > simulated else 0.0
    )
    return timeline.makespan + more, tuple(spans[-1].end + more for spans in timeline.spans)


def _cycle_s(timeline: Timeline, costs: Costs, num_microbatches: int) -> float:
    """Say how long a microbatch takes while all stages are busy.

    In a plain pipeline the backward passes of the first stage show it: over slow links it is more than what the busiest
    stage computes. A U is planned so that its busiest stage never waits, which its first stage may do.
    """
    placement = timeline.placement
    num_stages = placement.num_stages
    if placement.num_vstages == num_stages:
        ends = [span.end for span in timeline.spans[0] if span.action.op is Op.B]
        last = num_microbatches - num_stages - 1
        return (ends[last] - ends[last - 2 * num_stages]) / (2 * num_stages)
    loads = [0.0] * num_stages
    for stage, *both in zip(placement.stages, costs.forward, costs.backward, strict=True):
        loads[stage] += sum(both)
    return max(loads)


def _order(
    placement: Placement, costs: Costs, num_microbatches: int, *, is_stock: bool
) -> tuple[bool, tuple[float, tuple[float, ...]]]:
    """Choose between Megatron's order and the planned one, which is taken where it gains; and give its times."""
    stock = pipeline_time(placement, costs, num_microbatches, is_planned=False)
    if is_stock or not costs.latency:
        return False, stock
    planned = pipeline_time(placement, costs, num_microbatches)
    return (True, planned) if planned[0] * (1 + _LEAST_GAIN) < stock[0] else (False, stock)


def _costs(
    question: Question,
    shape: Shape,
    kinds: Sequence[Kind],
    works: Sequence[Work],
    ends: Sequence[int],
    nodes: Sequence[Sequence[Node]],
) -> Costs:
    last = len(works) - 1
    times = []
    for stage, (work, (start, end)) in enumerate(_parts(works, ends)):
        forward, backward = work.times_s(start, end, is_first=not stage, is_last=stage == last)
        if (numbers := [sums[end] - sums[start] for sums in work.messages]) != [0, 0]:
            # The nodes may be farther apart than at best, which the times are for.
            more_s = peer_s(question, shape, kinds[stage], work, nodes[stage]) - work.peer_s
            forward, backward = forward + numbers[0] * more_s, backward + numbers[1] * more_s
        times.append((forward, backward))
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
    question: Question,
    shape: Shape,
    kinds: Sequence[Kind],
    works: Sequence[Work],
    ends: Sequence[int],
    nodes: Sequence[Sequence[Node]],
) -> list[float]:
    """Say of every stage how long its replicas sum their gradients, in a ring."""
    found = []
    for kind, (work, part), own in zip(kinds, _parts(works, ends), nodes, strict=True):
        ring = {link_between(question, shape, node, own[i - 1]) for i, node in enumerate(own)}
        if shape.cp > 1:
            ring |= {shape.pools[pool].inside for pool, _ in own}
        found.append(max(gradients_s(shape, kind, work, part, link) for link in ring))
    return found
