"""The way of a microbatch through the pipeline as numbers, for the inner loops of search and simulation.

A microbatch passes through *steps*: step q < V is the forward of virtual stage q, step q >= V the backward of virtual
stage 2V - 1 - q. Microbatches pass each step in their order (channels are first-in-first-out), so the order of a stage
is a list of steps: the n-th occurrence of a step is microbatch n.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from vtp_plugin.schedule.actions import Action, Op
from vtp_plugin.schedule.costs import Costs
from vtp_plugin.schedule.placement import Placement
from vtp_plugin.schedule.plan import Actions

Orders = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Steps of a microbatch with their costs.

    Attributes:
        stages: Stage that runs a step.
        durations: Duration of a step.
        latency: From the end of a step to the start of the next, without `occupancy`; the last entry is 0.
        occupancy: How long the message to the next step keeps its channel busy; the last entry is 0.
        channels: Number of the channel of the message to the next step; -1 where there is no message.
        num_stages: Number of pipeline stages.
    """

    stages: tuple[int, ...]
    durations: tuple[float, ...]
    latency: tuple[float, ...]
    occupancy: tuple[float, ...]
    channels: tuple[int, ...]
    num_stages: int

    @property
    def num_steps(self) -> int:
        """Number of steps of a microbatch."""
        return len(self.stages)

    def steps(self, stage: int) -> tuple[int, ...]:
        """List the steps of a stage in the order in which one microbatch passes them."""
        return tuple(q for q, holder in enumerate(self.stages) if holder == stage)

    @property
    def heads(self) -> tuple[float, ...]:
        """Earliest start of each step after the start of its microbatch."""
        heads = [0.0]
        for q in range(self.num_steps - 1):
            heads.append(heads[-1] + self.durations[q] + self.occupancy[q] + self.latency[q])
        return tuple(heads)

    @property
    def span(self) -> float:
        """Time that one microbatch alone takes."""
        return self.heads[-1] + self.durations[-1]

    def reversed(self) -> Chain:
        """Let time run backwards: an order that is good for the result is good for this chain when it is reversed."""
        return Chain(
            stages=self.stages[::-1],
            durations=self.durations[::-1],
            latency=(*self.latency[-2::-1], 0.0),
            occupancy=(*self.occupancy[-2::-1], 0.0),
            channels=(*self.channels[-2::-1], -1),
            num_stages=self.num_stages,
        )


def in_ticks(chain: Chain) -> Chain:
    """Write all times as whole numbers, seven digits for the longest, so that sums are exact and equal times equal.

    >>> from vtp_plugin.schedule.costs import u_costs
    >>> from vtp_plugin.schedule.placement import u_placement
    >>> in_ticks(make_chain(u_placement(2), u_costs(2, cloud=0.2, latency=0.3, edge=0.1))).durations
    (1000000, 2000000, 1000000, 2000000, 4000000, 2000000)
    """
    times = (*chain.durations, *chain.latency, *chain.occupancy)
    exponent = int(f"{max(times):e}".partition("e")[2])
    scaled = [round(time * 10.0 ** (6 - exponent)) for time in times]
    num_steps = chain.num_steps
    return replace(
        chain,
        durations=tuple(scaled[:num_steps]),
        latency=tuple(scaled[num_steps : 2 * num_steps]),
        occupancy=tuple(scaled[2 * num_steps :]),
    )


def make_chain(placement: Placement, costs: Costs, *, forward_only: bool = False) -> Chain:
    """Line up the steps of a microbatch.

    >>> from vtp_plugin.schedule.costs import u_costs
    >>> from vtp_plugin.schedule.placement import u_placement
    >>> chain = make_chain(u_placement(2), u_costs(2, latency=4.0))
    >>> chain.stages, chain.durations, chain.latency, chain.span
    ((0, 1, 0, 0, 1, 0), (1.0, 2.0, 1.0, 2.0, 4.0, 2.0), (4.0, 4.0, 0.0, 4.0, 4.0, 0.0), 28.0)
    """
    num_vstages = placement.num_vstages
    assert len(costs.forward) == num_vstages, "costs of another placement"
    vstages, durations = [*range(num_vstages)], costs.forward
    # By step, the link v between v and v + 1 on which its message goes; the last virtual stage's forward sends nothing.
    links = [*range(num_vstages - 1), -1]
    if not forward_only:
        vstages, durations = vstages + vstages[::-1], durations + costs.backward[::-1]
        links += [*reversed(range(num_vstages - 1)), -1]
    is_used = [link >= 0 and placement.crosses(link) for link in links]
    latency = [costs.latency[link] if used else 0.0 for link, used in zip(links, is_used, strict=True)]
    occupancy = [costs.transfer_time(link) if used else 0.0 for link, used in zip(links, is_used, strict=True)]
    channels = [-1] * len(links)
    for q, link in enumerate(links):
        if is_used[q]:
            boundary = placement.boundaries.index((placement.stages[link], placement.stages[link + 1]))
            channels[q] = 2 * boundary + (q >= num_vstages)
    return Chain(
        stages=tuple(placement.stages[v] for v in vstages),
        durations=tuple(durations),
        latency=tuple(latency),
        occupancy=tuple(occupancy),
        channels=tuple(channels),
        num_stages=placement.num_stages,
    )


def dispatch(
    chain: Chain,
    num_microbatches: int,
    ranking: Sequence[Sequence[int]],
    limits: Sequence[int],
    detours: Iterator[Sequence[int] | None] | None = None,
) -> Orders:
    """Build orders greedily: a stage that is free starts the best ranked step for which a microbatch is there.

    Args:
        chain: Steps and costs.
        num_microbatches: Number of microbatches.
        ranking: `ranking[stage]` lists the steps of a stage, most urgent first.
        limits: Most microbatches in flight, by stage: begun with the stage's first step and not through its last.
        detours: Asked at each decision of stage 0; a ranking that it gives is used instead, for this decision only.
    """
    stages, durations, latency, occupancy, channels = (
        chain.stages, chain.durations, chain.latency, chain.occupancy, chain.channels,
    )  # fmt: skip
    last_step = chain.num_steps - 1
    arrived: list[list[float]] = [[] for _ in stages]
    arrived[0] = [0.0] * num_microbatches
    begun = [0] * chain.num_steps
    bounds = [(chain.steps(stage)[0], chain.steps(stage)[-1]) for stage in range(chain.num_stages)]
    free_at = [0.0] * chain.num_stages
    channel_free = [0.0] * (max(channels) + 1)
    orders: list[list[int]] = [[] for _ in range(chain.num_stages)]
    # A stage looks for work when it gets free and when something arrives for it.
    events = [(0.0, stages[0])]
    while events:
        now, stage = heappop(events)
        if free_at[stage] > now:
            continue
        first, last = bounds[stage]
        ranked = ranking[stage]
        if detours is not None and stage == 0:
            ranked = next(detours) or ranked
        for q in ranked:
            n = begun[q]
            if n >= len(arrived[q]) or arrived[q][n] > now or (q == first and n - begun[last] >= limits[stage]):
                continue
            begun[q] = n + 1
            orders[stage].append(q)
            end = free_at[stage] = now + durations[q]
            heappush(events, (end, stage))
            if q < last_step:
                if occupancy[q]:
                    channel = channels[q]
                    end = channel_free[channel] = max(end, channel_free[channel]) + occupancy[q]
                end += latency[q]
                arrived[q + 1].append(end)
                heappush(events, (end, stages[q + 1]))
            break
    assert begun == [num_microbatches] * chain.num_steps, "limits below 1"
    return tuple(tuple(order) for order in orders)


def makespan(chain: Chain, num_microbatches: int, orders: Orders) -> float | None:
    """Return when the last step ends if every stage keeps its order, or None if the orders wait for each other.

    >>> from vtp_plugin.schedule.costs import u_costs
    >>> from vtp_plugin.schedule.placement import u_placement
    >>> makespan(make_chain(u_placement(2), u_costs(2)), 1, ((0, 2, 3, 5), (1, 4)))
    12.0
    """
    stages, durations, latency, occupancy, channels = (
        chain.stages, chain.durations, chain.latency, chain.occupancy, chain.channels,
    )  # fmt: skip
    last_step = chain.num_steps - 1
    arrived: list[list[float]] = [[] for _ in stages]
    arrived[0] = [0.0] * num_microbatches
    begun = [0] * chain.num_steps
    free_at = [0.0] * chain.num_stages
    channel_free = [0.0] * (max(channels) + 1)
    places = [0] * chain.num_stages
    waiting = list(range(chain.num_stages - 1, -1, -1))
    while waiting:
        stage = waiting.pop()
        order, place, now = orders[stage], places[stage], free_at[stage]
        woken: set[int] = set()
        while place < len(order):
            q = order[place]
            n = begun[q]
            there = arrived[q]
            if n >= len(there):
                break
            begun[q] = n + 1
            place += 1
            now = end = (there[n] if there[n] > now else now) + durations[q]
            if q < last_step:
                if occupancy[q]:
                    channel = channels[q]
                    end = channel_free[channel] = max(end, channel_free[channel]) + occupancy[q]
                arrived[q + 1].append(end + latency[q])
                woken.add(stages[q + 1])
        places[stage], free_at[stage] = place, now
        woken.discard(stage)
        waiting.extend(woken)
    return max(free_at) if places == [len(order) for order in orders] else None


def in_flight(chain: Chain, orders: Orders) -> tuple[int, ...]:
    """Return the most microbatches in flight on each stage; a property of the orders alone."""
    peaks: list[int] = []
    for stage, order in enumerate(orders):
        first, last = chain.steps(stage)[0], chain.steps(stage)[-1]
        live = peak = 0
        for q in order:
            live += q == first
            peak = max(peak, live)
            live -= q == last
        peaks.append(peak)
    return tuple(peaks)


def to_actions(placement: Placement, orders: Orders) -> tuple[Actions, ...]:
    """Write orders of steps as actions.

    >>> from vtp_plugin.schedule.placement import plain_placement
    >>> [str(a) for a in to_actions(plain_placement(1), ((0, 1, 0, 1),))[0]]
    ['0F0', '0B0', '0F1', '0B1']
    """
    num_vstages = placement.num_vstages
    result: list[Actions] = []
    for order in orders:
        seen = [0] * (2 * num_vstages)
        actions: list[Action] = []
        for q in order:
            op, vstage = (Op.F, q) if q < num_vstages else (Op.B, 2 * num_vstages - 1 - q)
            actions.append(Action(op=op, vstage=vstage, microbatch=seen[q]))
            seen[q] += 1
        result.append(tuple(actions))
    return tuple(result)
