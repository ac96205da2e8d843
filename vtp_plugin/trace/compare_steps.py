"""Steps beside their plans, and what differs."""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.layout.pipeline_layout import ChannelId, Direction
from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.cost.simulator import Timeline, simulate
from vtp_plugin.plan.schedule.order.actions import Action, Actions, Op, Schedule, parse_action, peer_of, receives_for
from vtp_plugin.plan.schedule.order.placement import Placement
from vtp_plugin.trace.explain import TimeShare, arrivals, explain, flatten, on_one_clock, totals
from vtp_plugin.trace.stretches import COMPUTES, Cause, Plan, RankFile, RankStep, Stretch

_COMPUTES = {Op.F: Cause.FORWARD, Op.B: Cause.BACKWARD, Op.I: Cause.BACKWARD, Op.W: Cause.WEIGHTS}
Boundary = tuple[int, int, Direction]
"""Upstream stage, downstream stage, and what crosses."""
_BOUNDARY = re.compile(r"boundary (\d+)->(\d+)\b.*?, (forward|backward)(?:,|$)")


def plan_shares(schedule: Schedule, costs: Costs) -> list[TimeShare]:
    """Simulate a step, and give what every worker does in it; times begin at 0.

    From its last compute to the end of the step a worker waits for the others, in the optimizer: that is ``OPTIMIZER``.

    Args:
        schedule: schedule of the step.
        costs: durations and links, in ms.

    >>> from vtp_plugin.plan.schedule.cost.costs import uniform_costs
    >>> from vtp_plugin.plan.schedule.make.u_shape import one_f_one_b
    >>> schedule = one_f_one_b(2, 1)
    >>> first, _ = plan_shares(schedule, uniform_costs(schedule.placement, latency=1.0))
    >>> for one in first.stretches:
    ...     print(one.cause, one.name, round(1e3 * one.length_s))
    forward 0F0 1
    send boundary 0->1, forward, microbatch 0 0
    wait boundary 0->1, backward, microbatch 0 5
    backward 0B0 2
    """
    # Gloo, NCCL and HCCL behave so: a message leaves when its receiver is ready.
    timeline = simulate(schedule, costs, mode="rendezvous")
    names = _message_names(timeline)
    end_s = 1e-3 * timeline.makespan
    return [
        TimeShare(
            rank=worker, worker=worker, start_s=0.0, end_s=end_s, stretches=tuple(_stretches(timeline, worker, names))
        )
        for worker in range(timeline.placement.num_workers)
    ]


def _stretches(timeline: Timeline, worker: int, names: Mapping[Action, str]) -> Iterator[Stretch]:
    """Yield what a worker does in a simulated step, in the order of their starts."""
    placement, spans = timeline.placement, timeline.spans[worker]
    flights = {flight.action: flight for flight in timeline.flights}
    found = [_stretch(_COMPUTES[span.action.op], str(span.action), span.start, span.end) for span in spans]
    found += [
        _stretch(Cause.SEND, names[flight.action], flight.sent, flight.sent)
        for flight in timeline.flights
        if flight.channel.src == worker
    ]
    ends = [0.0, *(span.end for span in spans)]
    for free, span in zip(ends, spans, strict=False):
        if span.start > free:
            sends = [flights[peer_of(placement, receive)] for receive in receives_for(placement, span.action)]
            last = max(sends, key=lambda flight: flight.end, default=None)
            found.append(_stretch(Cause.WAIT, "" if last is None else names[last.action], free, span.start))
    if ends[-1] < timeline.makespan:
        found.append(_stretch(Cause.OPTIMIZER, "", ends[-1], timeline.makespan))
    yield from sorted(found, key=lambda stretch: (stretch.start_s, stretch.end_s))


def _message_names(timeline: Timeline) -> dict[Action, str]:
    """Name every message as a run does, which counts what goes over a channel."""
    placement = timeline.placement
    counts: Counter[ChannelId] = Counter()
    names: dict[Action, str] = {}
    for flight in sorted(timeline.flights, key=lambda flight: (flight.channel, flight.start, flight.sent)):
        channel = flight.channel
        stages = "->".join(str(placement.stage_of(end)) for end in (channel.upstream, channel.downstream))
        shared = "" if placement.num_workers == placement.num_stages else f", workers {channel.src} to {channel.dst}"
        names[flight.action] = f"boundary {stages}{shared}, {channel.direction}, microbatch {counts[channel]}"
        counts[channel] += 1
    return names


def _stretch(cause: Cause, name: str, start_ms: float, end_ms: float) -> Stretch:
    return Stretch(cause=cause, name=name, start_s=1e-3 * start_ms, end_s=1e-3 * end_ms)


def name_computes(stretches: Sequence[Stretch], order: Iterable[Action]) -> Iterator[Stretch]:
    """Name the forwards and backwards of a rank by its order, where it did not know them itself.

    Args:
        stretches: stretches of one step, in the order of their ends.
        order: order of the rank's worker.
    """
    computes = iter([action for action in order if action.op.is_compute])
    for one in stretches:
        if one.cause in COMPUTES and not one.name:
            action = next(computes, None)
            if action is not None and _COMPUTES[action.op] is one.cause:
                yield Stretch(cause=one.cause, name=str(action), start_s=one.start_s, end_s=one.end_s)
                continue
        yield one


def boundary_of(name: str) -> Boundary | None:
    """Read the stages and the direction from the name of what crosses; None where it crosses no boundary.

    >>> boundary_of("boundary 0->1, replica dp 0->1 cp 0, backward, microbatch 3")
    (0, 1, <Direction.BACKWARD: 'backward'>)
    >>> boundary_of("tied embedding, first->last, replica dp 0 cp 0, step 2")
    """
    found = _BOUNDARY.match(name)
    return None if found is None else (int(found[1]), int(found[2]), Direction(found[3]))


def measured_costs(placement: Placement, steps: Sequence[Sequence[TimeShare]]) -> Costs:
    """Take the costs of a run from its trace: medians of computes and of messages that somebody waited for.

    The slowest rank of a stage counts. A message's whole time is taken for latency.

    Args:
        placement: placement of the run's schedules.
        steps: for each step the time shares of all ranks, on one clock, with the names of computes.
    """
    computes: defaultdict[tuple[Cause, int, int], list[float]] = defaultdict(list)
    crossings: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for shares in steps:
        for share in shares:
            for one in share.stretches:
                if one.cause in COMPUTES and one.name:
                    computes[one.cause, parse_action(one.name).vstage, share.rank].append(1e3 * one.length_s)
        for _, name, took_s in crossings_of(shares):
            boundary = boundary_of(name)
            if boundary is not None:
                crossings[boundary[:2]].append(1e3 * took_s)
    vstages = range(placement.num_vstages)

    def slowest(cause: Cause, vstage: int) -> float:
        own = [each for (kind, v, _), each in computes.items() if (kind, v) == (cause, vstage)]
        return max(map(statistics.median, own), default=0.0)

    links = [*pairwise(placement.stages)]
    weights = tuple(slowest(Cause.WEIGHTS, v) for v in vstages)
    return Costs(
        forward=tuple(slowest(Cause.FORWARD, v) for v in vstages),
        backward=tuple(slowest(Cause.BACKWARD, v) + weights[v] for v in vstages),
        latency=tuple(statistics.median(crossings[link]) if crossings[link] else 0.0 for link in links),
        bandwidth=(math.inf,) * len(links),
        message_bytes=(0,) * len(links),
        weights=weights if any(weights) else (),
    )


def crossings_of(shares: Sequence[TimeShare]) -> Iterator[tuple[int, str, float]]:
    """Yield how long messages took whose receiver waited before they were sent: its rank, their name, seconds."""
    for share, wait, _, sent_s in arrivals(shares):
        if wait.start_s < sent_s:
            yield share.rank, wait.name, max(0.0, wait.end_s - sent_s)


def crossing_s(costs: Costs, placement: Placement, boundary: tuple[int, int]) -> float:
    """Return how long a message is planned to take from a stage to another."""
    links = [v for v, link in enumerate(pairwise(placement.stages)) if link == boundary]
    return max((1e-3 * (costs.latency[v] + costs.transfer_time(v)) for v in links), default=0.0)


_ENDS = frozenset({Cause.GRADIENTS, Cause.OPTIMIZER})
# What follows from what others do: in each of these ranks wait for one another. The rest a rank does itself.
_FOLLOWING = frozenset({Cause.BUBBLE, Cause.MESSAGE, Cause.OPTIMIZER, Cause.LOG, Cause.PLAN})
# The user's flags say when, so no plan of a step has it.
_ASKED_FOR = frozenset({Cause.SAVE, Cause.EVALUATE, Cause.LOG})
# Other steps have none of it, so a step that has says nothing of them.
_DISTURBS = (Cause.SAVE, Cause.EVALUATE)
# A difference is named if it is at least this share of the planned step; so is what disturbs one, of its other time.
_LEAST_SHARE = 0.02
# Fewer messages in a step say too little of a link.
_LEAST_MESSAGES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """What a step had that other steps have not, on the rank that it took longest.

    Attributes:
        cause: a save or an evaluation.
        rank: the rank.
        took_s: seconds.
    """

    cause: Cause
    rank: int
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """One step of all ranks, and its plan.

    Attributes:
        number: number of the step.
        run: for each rank its stretches without a gap, on the clock of rank 0.
        shares: the stretches as the ranks recorded them.
        plan: for each worker its planned stretches, from second 0 on.
        placement: placement of the plan.
        costs: costs that the plan was made for, in ms.
        are_measured: whether the costs were taken from the trace, since the run was planned without any.
        disturbances: what it had that other steps have not.
    """

    number: int
    run: Mapping[int, list[Stretch]]
    shares: Sequence[TimeShare]
    plan: Mapping[int, list[Stretch]]
    placement: Placement
    costs: Costs
    are_measured: bool
    disturbances: tuple[Disturbance, ...] = ()

    @property
    def start_s(self) -> float:
        """Second at which the first rank begins it."""
        return min(share.start_s for share in self.shares)

    @property
    def planned_s(self) -> float:
        """Planned seconds, without the optimizer."""
        return max(stretches[-1].end_s for stretches in self.plan.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How much more of a step a cause takes on a rank than planned, on average.

    Attributes:
        rank: rank of the run.
        cause: what the time is spent on; the end of the step, gradients and optimizer together, counts as the
            optimizer.
        planned_s: planned seconds in a step.
        ran_s: measured seconds in a step.
        where: boundary whose messages, waits or finishes differ most; empty for other causes.
    """

    rank: int
    cause: Cause
    planned_s: float
    ran_s: float
    where: str = ""

    @property
    def more_s(self) -> float:
        """Seconds more than planned."""
        return self.ran_s - self.planned_s


def join_files(files: Sequence[RankFile]) -> list[TracedStep]:
    """Put the steps that all ranks have traced on one clock, each with its plan.

    Raises:
        ConfigError: there is no such step, or its plan is missing.
    """
    numbers = set.intersection(*({step.number for step in file.steps} for file in files))
    if not numbers:
        raise ConfigError("no step was traced to its end by all ranks; trace more steps")
    steps: dict[int, list[TimeShare]] = {}
    plans: dict[int, Plan] = {}
    for number in sorted(numbers):
        own = [next(step for step in file.steps if step.number == number) for file in files]
        try:
            plans[number] = files[0].plans[own[0].plan]
        except KeyError:
            raise ConfigError(f"step {number}: the file of rank 0 lacks its plan; trace the run again") from None
        orders = plans[number].schedule.orders
        steps[number] = [_share(file, step, orders[file.owner.worker]) for file, step in zip(files, own, strict=True)]
    disturbed = {number: disturbances(shares) for number, shares in steps.items()}
    return [_beside_plan(number, plans, steps, disturbed) for number in steps]


def _share(file: RankFile, step: RankStep, order: Actions) -> TimeShare:
    named = replace(step, stretches=tuple(name_computes(step.stretches, order)))
    owner = file.owner
    return on_one_clock(named, rank=owner.rank, worker=owner.worker, offset_s=functools.partial(offset_at, file.clocks))


def offset_at(clocks: Sequence[tuple[float, float, float]], at_s: float) -> float:
    """Return what is to be added to a rank's clock, by linear interpolation between two readings and beyond them.

    Args:
        clocks: readings of the clock: the time of each, what was to be added then, and its error.
        at_s: a time by the rank's clock.

    >>> offset_at([(0.0, 5.0, 0.1), (10.0, 6.0, 0.1)], 2.5), offset_at([(0.0, 5.0, 0.1)], 2.5), offset_at([], 2.5)
    (5.25, 5.0, 0.0)
    """
    if not clocks:
        return 0.0
    (first_s, before_s, _), (last_s, after_s, _) = clocks[0], clocks[-1]
    if last_s <= first_s:
        return before_s
    return before_s + (after_s - before_s) * (at_s - first_s) / (last_s - first_s)


def _beside_plan(
    number: int,
    plans: Mapping[int, Plan],
    steps: Mapping[int, list[TimeShare]],
    disturbed: Mapping[int, tuple[Disturbance, ...]],
) -> TracedStep:
    plan, shares = plans[number], steps[number]
    same = [other for other, one in plans.items() if one == plan]
    even = [other for other in same if not disturbed[other]]
    costs = plan.costs or measured_costs(plan.schedule.placement, [steps[other] for other in even or same])
    return TracedStep(
        number=number,
        run=explain(shares),
        shares=shares,
        plan=explain(plan_shares(plan.schedule, costs)),
        placement=plan.schedule.placement,
        costs=costs,
        are_measured=plan.costs is None,
        disturbances=disturbed[number],
    )


def disturbances(shares: Sequence[TimeShare]) -> tuple[Disturbance, ...]:
    """Find a save or an evaluation that took at least 2 % of a step's other time on a rank; the longest of each.

    >>> noted = (Stretch(cause=Cause.SAVE, name="", start_s=1.0, end_s=4.0),)
    >>> disturbances([TimeShare(rank=2, worker=2, start_s=0.0, end_s=4.0, stretches=noted)])
    (Disturbance(cause=<Cause.SAVE: 'save'>, rank=2, took_s=3.0),)
    """
    found: dict[Cause, Disturbance] = {}
    for share in shares:
        sums = totals(flatten(share))
        least_s = _LEAST_SHARE * sum(length_s for cause, length_s in sums.items() if cause not in _DISTURBS)
        for cause in _DISTURBS:
            took_s = sums.get(cause, 0.0)
            if took_s > max(least_s, found[cause].took_s if cause in found else 0.0):
                found[cause] = Disturbance(cause=cause, rank=share.rank, took_s=took_s)
    return tuple(found.values())


def undisturbed(steps: Sequence[TracedStep]) -> Sequence[TracedStep]:
    """Leave out steps in which a checkpoint was saved or the model evaluated; all stay if no other is left."""
    return [step for step in steps if not step.disturbances] or steps


def explained(steps: Sequence[TracedStep]) -> dict[int, float]:
    """Return, by rank, the share of the steps' time whose cause is known."""
    lengths: dict[int, float] = defaultdict(float)
    other: dict[int, float] = defaultdict(float)
    for step in steps:
        for rank, stretches in step.run.items():
            lengths[rank] += sum(one.length_s for one in stretches)
            other[rank] += totals(stretches).get(Cause.OTHER, 0.0)
    return {rank: 1.0 - other[rank] / length_s for rank, length_s in lengths.items() if length_s}


def differences(steps: Sequence[TracedStep]) -> list[Difference]:
    """List by how much the steps differ from their plan, by rank and cause, the largest first.

    A plan says nothing of the optimizer and the sums of gradients: each rank is planned to wait for the last one, and
    then to take as long as the fastest rank did.
    """
    base_s = min(_end_s(step.run[rank]) for step in steps for rank in step.run)
    found: list[Difference] = []
    for rank, worker in ((share.rank, share.worker) for share in steps[0].shares):
        ran = _average(step.run[rank] for step in steps)
        planned = _average(step.plan[worker] for step in steps)
        planned[Cause.OPTIMIZER] = planned.get(Cause.OPTIMIZER, 0.0) + base_s
        causes = {*ran, *planned}
        found += [
            Difference(
                rank=rank,
                cause=cause,
                planned_s=planned.get(cause, 0.0),
                ran_s=ran.get(cause, 0.0),
                where=_where(cause, [step.run[rank] for step in steps]),
            )
            for cause in causes
        ]
    return sorted(found, key=lambda one: (-abs(one.more_s), one.rank, one.cause))


def slower_by_itself(steps: Sequence[TracedStep], found: Sequence[Difference]) -> list[Difference]:
    """Select what took longer than planned and does not follow from what others did, the largest first.

    How long messages are waited for follows from when both sides are ready. What counts here is how long those took
    whose receiver was ready, from the send on, in comparison with the link's costs.

    Args:
        steps: steps of the run.
        found: their differences from the plan.
    """
    least_s = _least_s(steps)
    own = [one for one in found if one.cause not in _FOLLOWING | _ASKED_FOR and one.more_s >= least_s]
    slow = [one for one in _slower_links(steps) if one.more_s >= least_s]
    return sorted((*own, *slow), key=lambda one: (-one.more_s, one.rank, one.cause))


def split_asked_for(
    steps: Sequence[TracedStep], found: Sequence[Difference]
) -> tuple[list[Difference], list[Difference]]:
    """Set apart what no plan has since the user's flags ask for it: saves, evaluations and lines of the log.

    Args:
        steps: steps of the run.
        found: their differences from the plan, the largest first.

    Returns:
        The other differences; and of what the flags ask for, the longest of each cause, if it is long enough.
    """
    least_s, longest = _least_s(steps), dict[Cause, Difference]()
    for one in found:
        if one.cause in _ASKED_FOR and one.ran_s >= least_s:
            longest.setdefault(one.cause, one)
    return [one for one in found if one.cause not in _ASKED_FOR], [*longest.values()]


def _least_s(steps: Sequence[TracedStep]) -> float:
    """Return how long a difference must be to be named."""
    return _LEAST_SHARE * max(step.planned_s for step in steps)


def _slower_links(steps: Sequence[TracedStep]) -> Iterator[Difference]:
    """Yield for each rank and boundary how much longer than planned its messages took in a step.

    A message may also be late because its receive was posted late, as the first one of a step often is; the faster ones
    show how fast the link is.
    """
    took_s: dict[tuple[int, Boundary], list[float]] = defaultdict(list)
    for step in steps:
        for rank, name, each_s in crossings_of(step.shares):
            if (boundary := boundary_of(name)) is not None:
                took_s[rank, boundary].append(each_s)
    for (rank, boundary), each in took_s.items():
        per_step = len(each) / len(steps)
        if per_step < _LEAST_MESSAGES:
            continue
        yield Difference(
            rank=rank,
            cause=Cause.MESSAGE,
            planned_s=per_step * crossing_s(steps[-1].costs, steps[-1].placement, boundary[:2]),
            ran_s=per_step * sorted(each)[len(each) // 4],
            where=_name(boundary),
        )


def _name(boundary: Boundary) -> str:
    return "boundary {}->{}, {}".format(*boundary)


def _average(steps: Iterable[Sequence[Stretch]]) -> dict[Cause, float]:
    """Return the mean seconds of each cause in a step; gradients and optimizer count as one."""
    sums: dict[Cause, list[float]] = defaultdict(list)
    num_steps = 0
    for stretches in steps:
        num_steps += 1
        for cause, length_s in totals(stretches).items():
            sums[Cause.OPTIMIZER if cause in _ENDS else cause].append(length_s)
    return {cause: sum(each) / num_steps for cause, each in sums.items()}


def _end_s(stretches: Sequence[Stretch]) -> float:
    return sum(one.length_s for one in stretches if one.cause in _ENDS)


def _where(cause: Cause, steps: Sequence[Sequence[Stretch]]) -> str:
    """Name the boundary and direction that most of a cause's time goes to."""
    sums: dict[str, float] = defaultdict(float)
    for one in (stretch for stretches in steps for stretch in stretches if stretch.cause is cause):
        boundary = boundary_of(one.name)
        if boundary is not None:
            sums[_name(boundary)] += one.length_s
    return max(sums, key=lambda name: sums[name], default="")


def median_s(steps: Sequence[TracedStep]) -> float:
    """Return the median length of the steps, of the slowest rank in each."""
    return statistics.median(max(share.length_s for share in step.shares) for step in steps)
