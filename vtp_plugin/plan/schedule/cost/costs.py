"""What actions cost: flags, routes of microbatches, and bounds of a step.

The route of a microbatch through the pipeline as numbers, for bounds and for the planner of a U.

The route has *legs*: leg q < V is the forward of virtual stage q, leg q >= V the backward of virtual stage 2V - 1 - q.
It ends before the backward of virtual stages that train nothing.
Microbatches pass each leg one after another (channels are first-in-first-out), so the order of a worker is a list of
legs: the n-th occurrence of a leg is the n-th microbatch of the worker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.plan.schedule.order.placement import Placement, u_placement
from vtp_plugin.util.text import in_digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Durations and links of a placement. Times may have any unit, as long as all have the same one.

    The two directions of a boundary do not share bandwidth: each has a channel, on which messages go one after the
    other. A message takes `message_bytes / bandwidth + latency`.

    Attributes:
        forward: Duration of one microbatch's forward, by virtual stage.
        backward: Duration of one microbatch's whole backward, by virtual stage.
        latency: One-way latency from virtual stage v to v + 1, and back, by v. Not used if one stage holds both.
        bandwidth: Bytes per unit of time on the same link, in each direction; `math.inf` for no limit.
        message_bytes: Size of an activation from v to v + 1, and of its gradient.
        weights: The part of `backward` that is for the gradients of weights, by virtual stage; empty if it is not
            known, and then it is taken for half.

    Raises:
        ConfigError: A tuple has the wrong length, a duration or latency is negative or not finite, a bandwidth is not
            above 0.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    latency: tuple[float, ...]
    bandwidth: tuple[float, ...]
    message_bytes: tuple[int, ...]
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check lengths and values."""
        num_vstages = len(self.forward)
        lengths = {"backward": num_vstages} | dict.fromkeys(("latency", "bandwidth", "message_bytes"), num_vstages - 1)
        if self.weights:
            lengths["weights"] = num_vstages
        for name, length in lengths.items():
            found = len(getattr(self, name))
            if found != length:
                raise ConfigError(f"{name} has {found} entries: {num_vstages} virtual stages need {length}")
        for name in ("forward", "backward", "latency", "message_bytes", "weights"):
            if not all(0 <= value < math.inf for value in getattr(self, name)):
                raise ConfigError(f"{name} {getattr(self, name)}: every entry must be finite and not negative")
        if any(part > whole for part, whole in zip(self.weights, self.backward, strict=False)):
            raise ConfigError(f"weights {self.weights}: no entry may be longer than its backward, of {self.backward}")
        if not all(value > 0 for value in self.bandwidth):
            raise ConfigError(f"bandwidth {self.bandwidth}: every entry must be above 0")

    @property
    def of_weights(self) -> tuple[float, ...]:
        """Duration of the gradients of weights, where a backward is split, by virtual stage."""
        return self.weights or tuple(whole / 2 for whole in self.backward)

    @property
    def of_input(self) -> tuple[float, ...]:
        """Duration of the gradient of the input, where a backward is split, by virtual stage."""
        return tuple(whole - part for whole, part in zip(self.backward, self.of_weights, strict=True))

    def transfer_time(self, vstage: int) -> float:
        """Return how long a message from a virtual stage to the next keeps its channel busy, without the latency."""
        return self.message_bytes[vstage] / self.bandwidth[vstage]


def uniform_costs(placement: Placement, *, forward: float = 1.0, backward: float = 2.0, latency: float = 0.0) -> Costs:
    """Give every virtual stage the same durations and every boundary the same latency, without limit of bandwidth.

    >>> from vtp_plugin.plan.schedule.order.placement import plain_placement
    >>> uniform_costs(plain_placement(3), latency=0.5).latency
    (0.5, 0.5)
    """
    num_vstages, num_links = placement.num_vstages, placement.num_vstages - 1
    return Costs(
        forward=(forward,) * num_vstages,
        backward=(backward,) * num_vstages,
        latency=(latency,) * num_links,
        bandwidth=(math.inf,) * num_links,
        message_bytes=(0,) * num_links,
    )


def split_costs(placement: Placement, costs: Costs) -> Costs:
    """Return the costs of a pipeline with replicas in the mode `split`, for the placement without replicas.

    L is the least common multiple of the numbers of replicas. One microbatch of the schedule stands for L microbatches
    of `costs`, so a step has m / L: a stage with n replicas runs L / n of them at once, as one microbatch that takes
    L / n times as long. Each pair of workers has a link to itself in both modes, so a link between n and n' replicas
    carries L / max(n, n') times the bytes at once. If all pairs share one link, divide its bandwidth by their number,
    in both modes.

    Args:
        placement: Placement with its replicas.
        costs: Costs of one microbatch in `placement`, where replicas run them in turn.

    >>> from vtp_plugin.plan.schedule.order.placement import plain_placement
    >>> placement = plain_placement(3, num_replicas=(1, 1, 2))
    >>> costs = replace(uniform_costs(placement), message_bytes=(8, 8))
    >>> split_costs(placement, costs).forward, split_costs(placement, costs).message_bytes
    ((2.0, 2.0, 1.0), (16, 8))
    """
    multiple = math.lcm(*placement.num_replicas)
    replicas = [placement.num_replicas[stage] for stage in placement.stages]
    return replace(
        costs,
        forward=tuple(multiple // n * duration for n, duration in zip(replicas, costs.forward, strict=True)),
        backward=tuple(multiple // n * duration for n, duration in zip(replicas, costs.backward, strict=True)),
        weights=tuple(multiple // n * duration for n, duration in zip(replicas, costs.weights, strict=False)),
        message_bytes=tuple(
            multiple // max(pair) * size for pair, size in zip(pairwise(replicas), costs.message_bytes, strict=True)
        ),
    )


def u_costs(
    num_stages: int, *, cloud: float = 2.0, latency: float = 0.0, edge: float = 1.0, num_rings: int = 1
) -> Costs:
    """Costs of the model U-shape: backward takes twice the forward, latency only between edge and cloud.

    Args:
        num_stages: Pipeline stages, the edge included.
        cloud: Forward of a cloud stage.
        latency: One way, between the edge and the first, and the edge and the last cloud stage.
        edge: Forward of each of the edge's parts.
        num_rings: How often a microbatch passes the cloud.

    >>> u_costs(3, latency=0.5).latency, u_costs(3).backward
    ((0.5, 0.0, 0.5), (2.0, 4.0, 4.0, 2.0))
    """
    placement = u_placement(num_stages, num_rings=num_rings)
    forward = tuple(cloud if stage else edge for stage in placement.stages)
    num_links = placement.num_vstages - 1
    latencies = [latency if 0 in placement.stages[v : v + 2] else 0.0 for v in range(num_links)]
    return Costs(
        forward=forward,
        backward=tuple(2 * duration for duration in forward),
        latency=tuple(latencies),
        bandwidth=(math.inf,) * num_links,
        message_bytes=(0,) * num_links,
    )


_BYTES_PER_MS = 125.0  # 1 Mbit/s
_MOST_MBIT = 1e6  # faster than any link, so it means no limit
_EXAMPLE = "forward_ms=40,80,40 latency_ms=20"


@dataclass(frozen=True, slots=True, kw_only=True)
class CostKey:
    """What the key of a `name=value` cost means, for people.

    Attributes:
        unit: Unit of its numbers.
        meaning: What its numbers are, how many there are, and the default.
    """

    unit: str
    meaning: str


COST_KEYS: Mapping[str, CostKey] = MappingProxyType(
    {
        "forward_ms": CostKey(
            unit="milliseconds",
            meaning="forward of one microbatch, one number for each part of the model in its order; of a U that is the "
            "edge's first part, every cloud stage, the edge's last part (of two rings the edge's next part, every "
            "cloud stage and the edge's last part follow); must be given",
        ),
        "backward_ms": CostKey(unit="milliseconds", meaning="its backward, likewise; default twice the forward"),
        "weights_ms": CostKey(
            unit="milliseconds",
            meaning="the part of its backward that is for the gradients of weights, likewise; it counts with "
            "--vtp-split-backward alone; default half of it",
        ),
        "latency_ms": CostKey(
            unit="milliseconds",
            meaning="one way, from each part to the next; or one number for the links of the edge; default 0",
        ),
        "mbit": CostKey(
            unit="Mbit/s", meaning="bandwidth of the same links, written likewise; default, and from 1e6 on, no limit"
        ),
        "message_kib": CostKey(
            unit="KiB", meaning="size of an activation, one number, or one for each link; default as in the run"
        ),
    }
)
"""The words of :func:`parse_costs`, in the order in which they are printed."""


def parse_costs(words: Sequence[str], placement: Placement, *, message_bytes: int | None = None) -> Costs:
    """Read costs; times in the result are in ms.

    Args:
        words: `name=value,value,...` each:
            `forward_ms`: duration of a microbatch's forward, by virtual stage; the only one that must be there;
            `backward_ms`: of its whole backward, likewise; default twice the forward;
            `weights_ms`: of that the gradients of weights, likewise; default half;
            `latency_ms`: one way, from each virtual stage to the next, or one number for the links from and to stage 0;
            `mbit`: bandwidth of these links in Mbit/s, written likewise; default, and from 1e6 on, no limit;
            `message_kib`: size of an activation in KiB; one number, or one from each virtual stage to the next.
        placement: Which stage holds which virtual stage.
        message_bytes: Size of an activation where the words do not say it; None if it is not known.

    Raises:
        ConfigError: A name is unknown or repeated, a value is not a number, or the count of values is wrong.

    >>> from vtp_plugin.plan.schedule.order.placement import u_placement
    >>> costs = parse_costs(("forward_ms=40,80,90,40", "latency_ms=20", "mbit=100", "message_kib=256"), u_placement(3))
    >>> costs.backward, costs.latency, costs.bandwidth
    ((80.0, 160.0, 180.0, 80.0), (20.0, 0.0, 20.0), (12500.0, inf, 12500.0))
    """
    values: dict[str, tuple[float, ...]] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in COST_KEYS or name in values:
            names = ", ".join(f"{key}=" for key in COST_KEYS)
            raise ConfigError(f"costs: {word!r} is not one of {names}, each at most once; write {_EXAMPLE}")
        values[name] = _numbers(name, text)
    num_vstages = placement.num_vstages
    forward = _entries(values, "forward_ms", num_vstages, "virtual stages")
    twice = tuple(2 * duration for duration in forward)
    bandwidth = _by_link(values, "mbit", placement, nothing=math.inf)
    message_kib = values.get("message_kib", () if message_bytes is None else (message_bytes / 1024,))
    if not message_kib and min(bandwidth, default=math.inf) < math.inf:
        raise ConfigError("costs: with mbit the size of an activation counts; give message_kib=, one number in KiB")
    if len(message_kib) > 1:
        _entries(values, "message_kib", num_vstages - 1, "links between virtual stages")
    else:
        message_kib = (message_kib or (0.0,)) * (num_vstages - 1)
    return Costs(
        forward=forward,
        backward=_entries(values, "backward_ms", num_vstages, "virtual stages") if "backward_ms" in values else twice,
        latency=_by_link(values, "latency_ms", placement, nothing=0.0),
        bandwidth=tuple(rate * _BYTES_PER_MS if rate < _MOST_MBIT else math.inf for rate in bandwidth),
        message_bytes=tuple(round(size * 1024) for size in message_kib),
        weights=_entries(values, "weights_ms", num_vstages, "virtual stages") if "weights_ms" in values else (),
    )


def format_costs(costs: Costs) -> str:
    """Write costs in ms for :func:`parse_costs`, which inverts this up to rounding to four digits.

    If no link has a limit of bandwidth, `mbit` is left out, and with it messages of no size; if only some have one, the
    others get 1,000,000 Mbit/s. Messages of one size are written as one number. `weights_ms` is left out
    if it is not known.

    >>> from vtp_plugin.plan.schedule.cost.costs import u_costs
    >>> format_costs(u_costs(2, latency=0.5))
    'forward_ms=1,2,1 backward_ms=2,4,2 latency_ms=0.5,0.5'
    """
    rows = {
        "forward_ms": costs.forward,
        "backward_ms": costs.backward,
        "weights_ms": costs.weights,
        "latency_ms": costs.latency,
        "mbit": tuple(min(rate / _BYTES_PER_MS, _MOST_MBIT) for rate in costs.bandwidth),
        "message_kib": tuple(size / 1024 for size in costs.message_bytes),
    }
    if len(set(rows["message_kib"])) <= 1:
        rows["message_kib"] = rows["message_kib"][:1] or (0.0,)
    if min(rows["mbit"], default=_MOST_MBIT) >= _MOST_MBIT:
        del rows["mbit"]
        if not any(costs.message_bytes):
            del rows["message_kib"]  # without a limit a size counts nothing, and a run need not know it
    if not costs.weights:
        del rows["weights_ms"]
    return " ".join(
        f"{name}={','.join(in_digits(value).replace(',', '') for value in row)}" for name, row in rows.items()
    )


def combine_reports(reports: Sequence[Mapping[str, Mapping[str, float]]], placement: Placement) -> Costs:
    """Combine what the ranks measured: the slowest value of every figure, in ms; messages of a ring have one size.

    Args:
        reports: One for each rank: by the names `forward_ms`, `backward_ms` (keys: virtual stage), `latency_ms`,
            `transfer_ms` and `message_bytes` (keys: virtual stage that the message comes from). `backward_ms` is that
            of whole backwards, and `weights_ms` what gradients of weights take of it: half where only other virtual
            stages have measured that. Keys are text, as in JSON.
        placement: Which stage holds which virtual stage; every one has been measured by some rank.

    >>> from vtp_plugin.plan.schedule.order.placement import plain_placement
    >>> edge = {"forward_ms": {"0": 4.0}, "backward_ms": {"0": 8.0}, "latency_ms": {"0": 3.0}}
    >>> slow = {"forward_ms": {"1": 5.0}, "backward_ms": {"1": 9.0}}
    >>> fast = {"forward_ms": {"1": 4.5}, "backward_ms": {"1": 9.5}}
    >>> format_costs(combine_reports([edge, slow, fast], plain_placement(2)))
    'forward_ms=4,5 backward_ms=8,9.5 latency_ms=3'
    """

    def slowest(name: str, vstage: int) -> float:
        return max((report.get(name, {}).get(str(vstage), 0.0) for report in reports), default=0.0)

    vstages = range(placement.num_vstages)
    backward = tuple(slowest("backward_ms", v) for v in vstages)
    weights = tuple(slowest("weights_ms", v) or whole / 2 for v, whole in enumerate(backward))
    transfers = [slowest("transfer_ms", v) for v in vstages[:-1]]
    measured = [round(slowest("message_bytes", v)) for v in vstages[:-1]]
    # Of a replica's share, another stage may have measured the whole. In every ring something else crosses.
    rings = [placement.chunk(v) for v in vstages[:-1]]
    sizes = [max(size for size, other in zip(measured, rings, strict=True) if other == ring) for ring in rings]
    return Costs(
        forward=tuple(slowest("forward_ms", v) for v in vstages),
        backward=backward,
        latency=tuple(slowest("latency_ms", v) for v in vstages[:-1]),
        bandwidth=tuple(
            size / time if size and time else math.inf for size, time in zip(measured, transfers, strict=True)
        ),
        message_bytes=tuple(sizes),
        weights=weights if any("weights_ms" in one for one in reports) else (),
    )


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"costs: {name}={text} is not a list of numbers; write {_EXAMPLE}") from None
    # Comparisons that are false for NaN, so that it is rejected as well.
    if not all(number > 0 if name == "mbit" else 0 <= number < math.inf for number in numbers):
        rule = "must be above 0" if name == "mbit" else "must be finite and not negative"
        raise ConfigError(f"costs: {name}={text}: every entry {rule}; write {_EXAMPLE}")
    return numbers


def _entries(values: Mapping[str, tuple[float, ...]], name: str, length: int, what: str) -> tuple[float, ...]:
    found = values.get(name, ())
    if len(found) != length:
        raise ConfigError(f"costs: {name} has {len(found)} entries; this pipeline has {length} {what}")
    return found


def _by_link(
    values: Mapping[str, tuple[float, ...]], name: str, placement: Placement, *, nothing: float
) -> tuple[float, ...]:
    """Return the value of every link; a single value counts for the links from and to stage 0."""
    links = [(placement.stages[v], placement.stages[after]) for v, after in enumerate(placement.successors)]
    found = values.get(name, (nothing,))
    if len(found) != 1:
        return _entries(values, name, len(links), "links between virtual stages")
    return tuple(found[0] if 0 in link else nothing for link in links)


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


ROUNDING = 1e-9  # relative error of sums of durations, at most


def in_flight_needed(placement: Placement, costs: Costs) -> int:
    """Return how many microbatches must be in flight on each worker of stage 0 to keep the busiest stage busy.

    That is the time of one microbatch through the whole pipeline, divided by the busiest stage's time for one; replicas
    of a stage share the work. For the model U-shape without replicas it is
    `ceil((6 t_f + 4 L + 3 c (P - 1)) / max(6 t_f, 3 c))`, with the forward times t_f of each part of the edge and c of
    a cloud stage, and the one-way latency L.

    >>> from vtp_plugin.plan.schedule.cost.costs import u_costs
    >>> from vtp_plugin.plan.schedule.order.placement import u_placement
    >>> [in_flight_needed(u_placement(3), u_costs(3, cloud=2.0, latency=latency)) for latency in (0, 1, 2, 4)]
    [3, 4, 5, 6]
    """
    return in_flight_needed_on(make_route(placement, costs), 0)


def in_flight_needed_on(route: MicrobatchRoute, stage: int) -> int:
    """Return the same as :func:`in_flight_needed` for any stage, from its first leg to its last.

    It is never less than what replicas that compute jointly need at once.
    """
    busiest = max(
        sum(route.durations[q] for q in route.legs(s)) / num_replicas
        for s, num_replicas in enumerate(route.num_replicas)
    )
    in_flight = _round_trip(route, stage) / busiest if busiest else 0
    joint = math.ceil(math.lcm(*route.joint) / route.num_replicas[stage])
    return max(joint, math.ceil(in_flight / route.num_replicas[stage] - ROUNDING))


def lower_bound(route: MicrobatchRoute, num_microbatches: int, limits: Sequence[int]) -> float:
    """Return a time that no order can beat: the largest of these bounds.

    * One microbatch alone takes its whole route.
    * A worker computes all its microbatches. Before that, the first of them has to reach it; after that, the last has
      to get from it to the end; in between it is idle while nothing can have arrived (fill and drain). Replicas of a
      wide stage cannot all start, nor all end, at once if a narrow stage serves them in turn.
    * A worker with a limit of k microbatches in flight needs `ceil(m / k)` round trips for its m one after the other.
    * A channel carries all its messages one after the other.

    Args:
        route: Legs of a microbatch.
        num_microbatches: Number of microbatches.
        limits: Most microbatches in flight, by worker.

    >>> from vtp_plugin.plan.schedule.cost.costs import u_costs
    >>> from vtp_plugin.plan.schedule.order.placement import u_placement
    >>> route = make_route(u_placement(3), u_costs(3))
    >>> lower_bound(route, 16, (16, 16, 16))  # the last cloud stage works 96, and 9 pass before and after
    105.0
    """
    bounds = [route.span]
    heads, tails = route.heads, route.reversed().heads[::-1]
    firsts = route.first_workers
    for stage, (first, num_replicas) in enumerate(zip(firsts, route.num_replicas, strict=True)):
        share, legs = num_microbatches // num_replicas, route.legs(stage)
        share_limits = [min(limit, share) for limit in limits[first : first + num_replicas]]
        reach = heads[legs[0]] + tails[legs[-1]]
        work = share * sum(route.durations[q] for q in legs)
        idle = min(_idle(route, stage, share, limit) for limit in set(share_limits))
        bounds.append(reach + work + idle + _stagger(route, stage))
        bounds.append(reach + math.ceil(share / min(share_limits)) * _round_trip(route, stage))
    for boundary in set(route.boundaries) - {-1}:
        messages = [q for q, crossed in enumerate(route.boundaries) if crossed == boundary]
        before = min(heads[q] + route.durations[q] for q in messages)
        after = min(route.latency[q] + route.durations[q + 1] + tails[q + 1] for q in messages)
        share = num_microbatches // len(route.channels[messages[0]])
        bounds.append(before + share * sum(route.occupancy[q] for q in messages) + after)
    return max(bounds)


def _round_trip(route: MicrobatchRoute, stage: int) -> float:
    """Return the time from the start of a stage's first leg to the end of its last, for one microbatch alone."""
    legs = route.legs(stage)
    return route.heads[legs[-1]] + route.durations[legs[-1]] - route.heads[legs[0]]


def _stagger(route: MicrobatchRoute, stage: int) -> float:
    """Return how long, at least, some replica of a stage waits at the start and the end of the step together.

    The largest such sum is smallest if the replica that starts first ends first, and so on.
    """
    late, early = _delays(route, stage), _delays(route.reversed(), stage)
    return max(first + last for first, last in zip(late, reversed(early), strict=True))


def _delays(route: MicrobatchRoute, stage: int) -> list[float]:
    """Return, by replica of a stage, how long after the first one it starts, at least.

    Once j of them have started, each earlier leg has run for j microbatches, shared by the replicas of its stage.
    """
    before = range(route.legs(stage)[0])
    return [
        max(
            ((math.ceil(j / route.num_replicas[route.stages[q]]) - 1) * route.durations[q] for q in before), default=0.0
        )
        for j in range(1, route.num_replicas[stage] + 1)
    ]


def _idle(route: MicrobatchRoute, stage: int, num_microbatches: int, limit: int) -> float:
    """Return how long a worker of a stage is idle between its first start and its last end, at least.

    Until its i-th leg runs for the first time, a worker can only run the legs before it, each at most `limit` times
    because no microbatch is done; the same holds at the end with time reversed. The two idle times do not overlap if
    the leg of the first comes no later on the route than the leg of the second, or if the limit forces the last
    microbatch to start after the first is done.
    """
    fill = _fill(route, stage, limit)
    drain = [*reversed(_fill(route.reversed(), stage, limit))]
    pairs = [
        first + last
        for i, first in enumerate(fill)
        for j, last in enumerate(drain)
        if i <= j or num_microbatches > limit
    ]
    return max(*fill, *drain, *pairs)


def _fill(route: MicrobatchRoute, stage: int, limit: int) -> list[float]:
    """Return for each leg of a stage how long a worker is idle before the leg first runs, at least."""
    legs = route.legs(stage)
    start, done, idle = route.heads[legs[0]], 0.0, list[float]()
    for q in legs:
        idle.append(max(0.0, route.heads[q] - start - done))
        done += limit * route.durations[q]
    return idle
