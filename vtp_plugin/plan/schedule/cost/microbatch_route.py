"""The route of a microbatch through the pipeline as numbers, for bounds and for the planner of a U.

The route has *legs*: leg q < V is the forward of virtual stage q, leg q >= V the backward of virtual stage 2V - 1 - q.
It ends before the backward of virtual stages that train nothing.
Microbatches pass each leg one after another (channels are first-in-first-out), so the order of a worker is a list of
legs: the n-th occurrence of a leg is the n-th microbatch of the worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from vtp_plugin.errors import PlanError
from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.order.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchRoute:
    """The legs of a microbatch with their costs.

    Attributes:
        stages: Stage that runs a leg.
        durations: Duration of a leg.
        latency: Time from the end of a leg to the start of the next, without `occupancy`; the last entry is 0.
        occupancy: How long the message to the next leg keeps its channel busy; the last entry is 0.
        boundaries: Number of the boundary that the message to the next leg crosses, a different one in each direction;
            -1 if there is no message.
        num_replicas: Replicas of every pipeline stage; replica `h mod num_replicas` runs microbatch h.
        joint: How many neighbouring replicas run a leg jointly (see :attr:`Placement.joint`).
    """

    stages: tuple[int, ...]
    durations: tuple[float, ...]
    latency: tuple[float, ...]
    occupancy: tuple[float, ...]
    boundaries: tuple[int, ...]
    num_replicas: tuple[int, ...]
    joint: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.num_replicas)

    @property
    def workers(self) -> tuple[tuple[int, int], ...]:
        """Stage and replica of every worker."""
        return tuple((stage, replica) for stage, num in enumerate(self.num_replicas) for replica in range(num))

    @property
    def first_workers(self) -> tuple[int, ...]:
        """First worker of every stage."""
        return tuple(sum(self.num_replicas[:stage]) for stage in range(self.num_stages))

    @property
    def mirrors(self) -> tuple[int, ...]:
        """For each worker, the one that does its work when time is reversed and the last microbatch is the first."""
        firsts, last = self.first_workers, [num - 1 for num in self.num_replicas]
        return tuple(firsts[stage] + last[stage] - replica for stage, replica in self.workers)

    @property
    def takers(self) -> tuple[range, ...]:
        """Workers that run the next leg, by leg: entry `h mod length` takes microbatch h; empty at the last leg."""
        firsts = self.first_workers
        takers = [range(firsts[stage], firsts[stage] + self.num_replicas[stage]) for stage in self.stages[1:]]
        return (*takers, range(0))

    @property
    def channels(self) -> tuple[range, ...]:
        """Channels of the messages to the next leg, by leg: microbatch h takes entry `h mod length`."""
        width, replicas = max(self.num_replicas), [self.num_replicas[stage] for stage in self.stages]
        sizes = (*map(max, replicas[:-1], replicas[1:]), 0)
        return tuple(range(c * width, c * width + size) for c, size in zip(self.boundaries, sizes, strict=True))

    @property
    def queues(self) -> tuple[bool, ...]:
        """Whether the message to the next leg waits for the messages before it on its channel, by leg.

        Of two rings an instant message waits for those of the other ring, too.
        """
        slow = {boundary for boundary, time in zip(self.boundaries, self.occupancy, strict=True) if time}
        return tuple(boundary in slow for boundary in self.boundaries)

    @property
    def num_channels(self) -> int:
        """Number of channels, unused ones included."""
        return (max(self.boundaries) + 1) * max(self.num_replicas)

    @property
    def groups(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """By leg and replica, the replicas of its stage that run the leg jointly: for most legs that one alone."""
        return tuple(
            tuple(
                tuple(range(replica - replica % size, replica - replica % size + size))
                for replica in range(self.num_replicas[stage])
            )
            for stage, size in zip(self.stages, self.joint, strict=True)
        )

    @property
    def num_legs(self) -> int:
        """Number of legs."""
        return len(self.stages)

    def legs(self, stage: int) -> tuple[int, ...]:
        """List the legs of a stage in the order of the route."""
        return tuple(q for q, holder in enumerate(self.stages) if holder == stage)

    @property
    def heads(self) -> tuple[float, ...]:
        """Earliest start of each leg after the start of its microbatch."""
        heads = [0.0]
        for q in range(self.num_legs - 1):
            heads.append(heads[-1] + self.durations[q] + self.occupancy[q] + self.latency[q])
        return tuple(heads)

    @property
    def span(self) -> float:
        """Time that one microbatch alone takes."""
        return self.heads[-1] + self.durations[-1]

    def reversed(self) -> MicrobatchRoute:
        """Let time run backwards: a good order for the result, reversed, is a good order for this route."""
        return MicrobatchRoute(
            stages=self.stages[::-1],
            durations=self.durations[::-1],
            latency=(*self.latency[-2::-1], 0.0),
            occupancy=(*self.occupancy[-2::-1], 0.0),
            boundaries=(*self.boundaries[-2::-1], -1),
            num_replicas=self.num_replicas,
            joint=self.joint[::-1],
        )


def make_route(placement: Placement, costs: Costs, *, forward_only: bool = False) -> MicrobatchRoute:
    """Line up the legs of a microbatch.

    >>> from vtp_plugin.plan.schedule.cost.costs import u_costs
    >>> from vtp_plugin.plan.schedule.order.placement import u_placement
    >>> route = make_route(u_placement(2), u_costs(2, latency=4.0))
    >>> route.stages, route.durations, route.latency, route.span
    ((0, 1, 0, 0, 1, 0), (1.0, 2.0, 1.0, 2.0, 4.0, 2.0), (4.0, 4.0, 0.0, 4.0, 4.0, 0.0), 28.0)
    """
    num_vstages = placement.num_vstages
    if len(costs.forward) != num_vstages:
        raise PlanError(f"costs of {len(costs.forward)} virtual stages for a placement of {num_vstages}")
    if not placement.is_chain:
        raise PlanError(f"virtual stages with the successors {placement.successors} are no chain")
    vstages, durations = [*range(num_vstages)], costs.forward
    joint = [forward for forward, _ in placement.joint]
    # By leg, the link v between v and v + 1 on which its message goes; -1 if nothing follows.
    links = [*range(num_vstages - 1), -1]
    if not forward_only:
        trained = [v for v in reversed(vstages) if placement.is_trained(v)]
        vstages, durations = vstages + trained, durations + tuple(costs.backward[v] for v in trained)
        joint += [placement.joint[v][1] for v in trained]
        links += [*(v - 1 for v in trained[:-1]), -1]
    is_used = [*map(placement.crosses, links)]
    latency = [costs.latency[link] if used else 0.0 for link, used in zip(links, is_used, strict=True)]
    occupancy = [costs.transfer_time(link) if used else 0.0 for link, used in zip(links, is_used, strict=True)]
    number_of = {pair: number for number, pair in enumerate(placement.boundaries)}
    boundaries = [
        2 * number_of[placement.stages[link], placement.stages[link + 1]] + (q >= num_vstages) if is_used[q] else -1
        for q, link in enumerate(links)
    ]
    return MicrobatchRoute(
        stages=tuple(placement.stages[v] for v in vstages),
        durations=tuple(durations),
        latency=tuple(latency),
        occupancy=tuple(occupancy),
        boundaries=tuple(boundaries),
        num_replicas=placement.num_replicas,
        joint=tuple(joint),
    )
