"""The search finds the shortest step: brute force of its own tries every stage on every node in every order.

Both ask the project's simulator for the step. The brute force shares nothing else with the search: it puts replicas on
nodes one by one, tries every transport, and adds up what layers, links and boundaries cost by itself.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest

from vtp_plugin.plan.boundary.strategies.known_strategies import SLICED_FROM_BYTES, TransportRules
from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.cost.simulator import simulate
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
from vtp_plugin.plan.schedule.make.u_shape import one_f_one_b
from vtp_plugin.plan.schedule.order.add_communication import lower
from vtp_plugin.plan.schedule.order.placement import plain_placement
from vtp_plugin.tune.cluster.read_cluster import HeldPart
from vtp_plugin.tune.cluster.speed import Link, Speed
from vtp_plugin.tune.search.find_best import find_best
from vtp_plugin.tune.search.problem import BatchSplit, NodePool, SearchProblem
from vtp_plugin.tune.search.schedule_time import pipeline_time

TOLERANCE = 1.01
Nodes = list[tuple[NodePool, int]]
Stage = tuple[int, tuple[int, ...]]
Stages = list[Stage]
TRANSPORTS = ("auto", "rank0", "sliced", "divided")


def random_question(seed: int, given_layers: int = 0) -> tuple[SearchProblem, list[int]]:
    """Make a small cluster of one or two kinds of cards, and a model whose layers may differ; also the nodes' cards."""
    chance, wider = random.Random(seed), random.Random(f"wider {seed}")
    # Context parallelism, and so many ranks that have all experts once together.
    cp, peers = wider.choice([1, 1, 2]), wider.choice([0, 0, 2, 4])
    kept, line = wider.choice([0, 0, 1]), Link(latency_s=wider.choice([0.1, 1.0, 4.0]), bytes_per_s=40.0)
    sites = wider.choice([("", ""), ("", ""), ("a", "b")])
    inside = Link(latency_s=wider.choice([0.0, 0.02]), bytes_per_s=wider.choice([math.inf, 200.0]))
    crossing = random.Random(f"crossing {seed}")
    # Of large tensors a run tries ways to cross, and of small ones none.
    scale, at_once = crossing.choice([1, SLICED_FROM_BYTES]), [crossing.choice([None, 1, 2, 3]) for _ in range(4)]
    gather, broadcast = crossing.choice([(0.0, 0.0), (0.1, 0.05), (0.1, 0.4)])

    def scaled(link: Link, kind: int) -> Link:
        return replace(link, bytes_per_s=scale * link.bytes_per_s, at_once=at_once[kind])

    num_layers, batch = chance.randint(2, 5), chance.choice([2, 4, 6])
    num_layers = given_layers or num_layers
    layers = [chance.choice([1.0, 1.0, 1.5]) for _ in range(num_layers)]
    head = chance.choice([0.0, 0.7, 2.0])
    loss_of_a_cut = chance.choice([0.0, 0.1, 0.4])

    def speed(size: int, pace: float) -> Speed:
        def cut(time: float) -> float:
            return pace * (time / size + (time * loss_of_a_cut if size > 1 else 0))

        return Speed(
            forward_s=tuple(cut(time) for time in layers),
            backward_s=tuple(2 * cut(time) for time in layers),
            first_s=(cut(0.2), cut(0.3)),
            last_s=(cut(head), cut(2 * head)),
            update_s=tuple(0.1 * cut(time) for time in layers),
            gradient_bytes=tuple(scale * round(8 * time / size) for time in layers),
            expert_bytes=tuple(scale * round(24 * time) for time in layers) if peers else (),
            peers=peers or size,
            peer_bytes=8 * scale,
            peer_messages=tuple((2, 3) if number % 2 else (0, 0) for number in range(num_layers)) if peers else (),
            gather_s=pace * gather * (size - 1) / size,
            broadcast_s=pace * broadcast if size > 1 else 0.0,
        )

    pools, cards = [], []
    for number in range(chance.randint(1, 2)):
        pace = chance.choice([1.0, 1.3, 2.0, 3.0])
        sizes = [1, 2, 3] if chance.random() < 0.3 else [1, 2, 4]
        rooms = [chance.randint(1, 3) for _ in range(chance.randint(1, 2))]
        # A card too many in a node is of no use to pairs.
        own = [cp * room + (wider.randint(0, 1) if cp > 1 else 0) for room in rooms]
        cards += own
        pools.append(
            NodePool(
                name=f"kind {number}",
                cards_per_node=tuple(each // cp for each in own),
                speeds={size: speed(size, pace) for size in sizes},
                inside=scaled(inside, 0),
                site=sites[number],
                # No quicker than inside a node.
                between=scaled(
                    Link(
                        latency_s=inside.latency_s + chance.choice([0.0, 0.1, 0.5]),
                        bytes_per_s=min(inside.bytes_per_s, chance.choice([math.inf, 40.0])),
                    ),
                    1 + number,
                ),
                memory_bytes=chance.choice([None, 3, 5]),
            )
        )

    def usable(replicas: int) -> tuple[NodePool, ...]:
        """Leave out sizes whose ranks cannot share the experts."""
        return tuple(
            replace(
                pool,
                speeds={
                    size: one for size, one in pool.speeds.items() if not peers or size * cp * replicas % peers == 0
                },
            )
            for pool in pools
        )

    problem = SearchProblem(
        num_layers=num_layers,
        splits=tuple(
            BatchSplit(
                num_replicas=replicas,
                num_microbatches=batch // replicas,
                micro_batch_size=1,
                pools=usable(replicas),
                message_bytes=4 * scale,
                cp=cp,
                # A microbatch in flight keeps something, too.
                held_bytes=lambda part: (
                    math.ceil((part.end - part.start) * 3 / part.tp) + kept * (part.in_flight + part.waiting)
                ),
            )
            for replicas in (1, 2)
        ),
        least_stages=1,
        most_stages=4,
        across={("a", "b"): scaled(line, 3)},
        tied_bytes=scale * chance.choice([0, 0, 8]),
        rules=TransportRules(is_sharded=crossing.choice([False, True])),
    )
    return problem, cards


class BruteLayout(NamedTuple):
    """One way to lay out a run, with what its stages take, and what its step takes at least."""

    split: BatchSplit
    nodes: Nodes
    stages: Stages
    ends: list[int]
    forward: list[float]
    backward: list[float]
    sums: list[float]
    tail: float
    least: float


def brute(problem: SearchProblem, cards: list[int]) -> float:
    """Return the shortest step of all layouts, in stock Megatron of those with one size."""
    best = math.inf
    # One that takes at least as long as another one need not be simulated: most, if those that may be short come first.
    for layout in sorted(layouts(problem, cards), key=lambda layout: layout.least):
        if layout.least < best:
            best = step(problem, layout, best)
    return best


def layouts(problem: SearchProblem, cards: list[int]) -> Iterator[BruteLayout]:
    """Yield all that memory allows."""
    for split in problem.splits:
        pools = [pool for pool in split.pools for _ in pool.cards_per_node]
        nodes = [*zip(pools, cards, strict=True)]
        for stages in stage_lists(split, cards, nodes, problem.most_stages):
            if not stages or len(stages) > problem.num_layers or not are_together(stages, nodes):
                continue
            if problem.is_stock and len({size for size, _ in stages}) > 1:
                continue
            for cuts in itertools.combinations(range(1, problem.num_layers), len(stages) - 1):
                ends = [0, *cuts, problem.num_layers]
                num_stages = len(stages)
                numbers = [end - start for start, end in itertools.pairwise(ends)]
                alike = {"any": [], "ends": numbers[1:-1], "equal": numbers}[problem.layers]
                if len(set(alike)) > 1:
                    continue
                usual = tuple(range(num_stages, 0, -1))
                if all(holds(problem, stages, ends, stage, nodes, usual) for stage in range(num_stages)):
                    yield layout_of(problem, split, stages, ends, nodes)


def are_together(stages: Stages, nodes: Nodes) -> bool:
    """Whether the stages of a site are neighbours."""
    sites = [nodes[places[0]][0].site for _, places in stages]
    return len([*itertools.groupby(sites)]) == len(set(sites))


def in_flights(num_stages: int, num_microbatches: int) -> Iterator[tuple[int, ...]]:
    """Yield all numbers of microbatches in flight with more than in 1F1B, none above that of the stage before."""
    most = [range(num_stages - stage, max(num_microbatches, num_stages - stage) + 1) for stage in range(num_stages - 1)]
    for numbers in itertools.product(*most):
        if sorted(numbers, reverse=True) == [*numbers] and sum(numbers) > sum(one[0] for one in most):
            yield (*numbers, 1)


def stage_lists(split: BatchSplit, left: list[int], nodes: Nodes, most: int) -> Iterator[Stages]:
    """Yield every list of stages, each its size and the node of every replica."""
    yield []
    if most == 0:
        return
    for size in (1, 2, 3, 4):
        for places in itertools.combinations_with_replacement(range(len(nodes)), split.num_replicas):
            if any(size not in nodes[place][0].speeds for place in places):
                continue
            if len({nodes[place][0].site for place in places}) > 1:
                continue  # replicas of a stage are in one site
            rest = [number - size * split.cp * places.count(place) for place, number in enumerate(left)]
            if min(rest) >= 0:
                for more in stage_lists(split, rest, nodes, most - 1):
                    yield [(size, places), *more]


def holds(
    problem: SearchProblem, stages: Stages, ends: list[int], stage: int, nodes: Nodes, in_flight: tuple[int, ...]
) -> bool:
    size, places = stages[stage]
    limits = [nodes[place][0].memory_bytes for place in places]
    held_bytes = problem.splits[0].held_bytes
    assert held_bytes is not None
    kept = held_bytes(HeldPart(1, 1, 0, 0, True, True, 1))
    held = math.ceil((ends[stage + 1] - ends[stage]) * 3 / size) + kept * in_flight[stage]
    return all(limit is None or held <= limit for limit in limits)


def layout_of(problem: SearchProblem, split: BatchSplit, stages: Stages, ends: list[int], nodes: Nodes) -> BruteLayout:
    forward, backward, sums, updates = [], [], [], []
    for stage, (size, places) in enumerate(stages):
        speeds = [nodes[place][0].speeds[size] for place in places]
        part = slice(ends[stage], ends[stage + 1])
        own = [max(column) for column in zip(*(speed.forward_s for speed in speeds), strict=True)][part]
        back = [max(column) for column in zip(*(speed.backward_s for speed in speeds), strict=True)][part]
        more = [(0.0, 0.0), exchanged(problem, split, nodes, size, places, ends[stage], ends[stage + 1])]
        if stage == 0:
            more.append(max(speed.first_s for speed in speeds))
        if stage == len(stages) - 1:
            more.append(max(speed.last_s for speed in speeds))
        forward.append(sum(own) + sum(one[0] for one in more))
        backward.append(sum(back) + sum(one[1] for one in more))
        updates.append(sum(max(column) for column in zip(*(speed.update_s[part] for speed in speeds), strict=True)))
        sums.append(summed(problem, split, nodes, size, places, ends[stage], ends[stage + 1]))
    both = [*map(sum, zip(forward, backward, strict=True))]
    tail = max(updates)
    if len(stages) > 1 and problem.tied_bytes:
        pairs = [between(problem, nodes, *pair) for pair in zip(stages[0][1], stages[-1][1], strict=True)]
        tail += max(link.latency_s + problem.tied_bytes / link.bytes_per_s for link in pairs)
    # Each stage computes all microbatches, after the first has come to it, and before the last has gone back from it.
    least = max(sum(both[:stage]) + split.num_microbatches * both[stage] for stage in range(len(both))) + tail
    return BruteLayout(split, nodes, stages, ends, forward, backward, sums, tail, least)


def step(problem: SearchProblem, layout: BruteLayout, best: float) -> float:
    """Simulate a layout in all orders and over all transports; return what is shorter, its step or the best so far."""
    split, nodes, stages, ends, forward, backward, sums, tail, _ = layout
    placement, number = plain_placement(len(stages)), split.num_microbatches
    has_sites = len({pool.site for pool, _ in nodes}) > 1
    ahead = [
        row
        for row in in_flights(len(stages), number)
        if has_sites
        and not problem.is_stock
        and all(holds(problem, stages, ends, stage, nodes, row) for stage in range(len(stages)))
    ]
    for costs in all_costs(problem, split, nodes, stages, forward, backward):
        # Megatron's order, or planned ones, with any numbers of microbatches in flight that memory allows.
        schedules = [lower(one_f_one_b(placement, number), lookahead=0)]
        request = ScheduleRequest(placement=placement, num_microbatches=number, costs=costs)
        if not problem.is_stock:
            schedules += [make_schedule(replace(request, in_flight=row))[0] for row in (None, *ahead)]
        timelines = [simulate(schedule, costs, mode="rendezvous") for schedule in schedules]
        found = min(
            max(spans[-1].end + own for spans, own in zip(timeline.spans, sums, strict=True)) for timeline in timelines
        )
        # Seven numbers, such as the norm, go through all stages and back.
        best = min(best, found + tail + 14 * sum(costs.latency))
    return best


def exchanged(
    problem: SearchProblem, split: BatchSplit, nodes: Nodes, size: int, places: tuple[int, ...], start: int, end: int
) -> tuple[float, float]:
    """What ranks that share experts wait for each other, forward and backward."""
    speed = nodes[places[0]][0].speeds[size]
    if not speed.peer_messages:
        return 0.0, 0.0
    ranks = [place for place in places for _ in range(size * split.cp)]
    slowest = 0.0
    for first in range(0, len(ranks), speed.peers):
        for pair in itertools.combinations(ranks[first : first + speed.peers], 2):
            link = between(problem, nodes, *pair)
            slowest = max(slowest, link.latency_s + speed.peer_bytes / link.bytes_per_s)
    numbers = speed.peer_messages[start:end]
    return sum(one[0] for one in numbers) * slowest, sum(one[1] for one in numbers) * slowest


def summed(
    problem: SearchProblem, split: BatchSplit, nodes: Nodes, size: int, places: tuple[int, ...], start: int, end: int
) -> float:
    """How long rings of ranks sum gradients, and other rings those of experts."""
    speed = nodes[places[0]][0].speeds[size]
    ring = [place for place in places for _ in range(split.cp)]
    if len(ring) == 1:
        return 0.0
    slowest = 0.0
    for one, other in itertools.pairwise([*ring, ring[0]]):
        link = between(problem, nodes, one, other)
        time = 0.0
        for num_bytes, number in (
            (sum(speed.gradient_bytes[start:end]), len(ring)),
            (sum(speed.expert_bytes[start:end]), len(ring) * size // speed.peers),
        ):
            time += 2 * (number - 1) * (link.latency_s + num_bytes / number / link.bytes_per_s)
        slowest = max(slowest, time)
    return slowest


def between(problem: SearchProblem, nodes: Nodes, one: int, other: int) -> Link:
    if one == other:
        return nodes[one][0].inside
    if nodes[one][0].site != nodes[other][0].site:
        (line,) = problem.across.values()
        return line
    first, second = nodes[one][0].between, nodes[other][0].between
    num_bytes = problem.splits[0].message_bytes
    return max(first, second, key=lambda link: link.latency_s + num_bytes / link.bytes_per_s)


class Passage(NamedTuple):
    """A boundary: its link, what is sent as if by one rank, and what both stages do for it, forward and backward."""

    link: Link
    num_bytes: int
    forward: tuple[float, float]
    backward: tuple[float, float]

    @property
    def time(self) -> float:
        return 2 * (self.link.latency_s + self.num_bytes / self.link.bytes_per_s) + sum(self.forward + self.backward)


def crossed_by(
    problem: SearchProblem, split: BatchSplit, nodes: Nodes, ends: tuple[Stage, Stage], links: list[Link], name: str
) -> Passage:
    """What a boundary costs by a transport: who sends how much, and who gathers, scatters or hands on."""
    sizes, is_sharded = [size for size, _ in ends], problem.rules.is_sharded
    gathers = [max(nodes[place][0].speeds[size].gather_s for place in places) for size, places in ends]
    hands_on = [max(nodes[place][0].speeds[size].broadcast_s for place in places) for size, places in ends]
    largest, total, sends, takes = 1.0, 1.0, [0.0, 0.0], [0.0, 0.0]
    if name == "rank0":
        sends, takes = (gathers, gathers) if is_sharded else (sends, hands_on)
    elif name == "sliced" and sizes[0] == sizes[1] and not is_sharded:
        total = sizes[0]  # each rank has all, and sends all
    else:
        largest, takes = 1 / min(sizes), takes if is_sharded else gathers

    def sent(link: Link) -> int:
        return math.ceil(split.message_bytes * (1 if link.at_once is None else max(largest, total / link.at_once)))

    link = max(links, key=lambda link: link.latency_s + sent(link) / link.bytes_per_s)
    return Passage(link, sent(link), (sends[0], takes[1]), (takes[0], sends[1]))


def tried(problem: SearchProblem, split: BatchSplit, nodes: Nodes, ends: tuple[Stage, Stage]) -> tuple[str, ...]:
    """What a run takes by itself, or tries, the simplest first."""
    (size, places), (next_size, next_places) = ends
    if nodes[places[0]][0].site != nodes[next_places[0]][0].site:
        return ("rank0",)
    if split.message_bytes < SLICED_FROM_BYTES:
        return ("sliced",) if size == next_size else ("rank0",)
    if size != next_size:
        return ("rank0", "sliced")
    return ("sliced", "divided") if size > 1 and not problem.rules.is_sharded else ("sliced",)


def all_costs(
    problem: SearchProblem,
    split: BatchSplit,
    nodes: Nodes,
    stages: Stages,
    forward: list[float],
    backward: list[float],
) -> set[Costs]:
    """What a microbatch costs by every transport; the slowest link of any replica counts."""
    found = set()
    for transport in ("sliced",) if problem.is_stock else TRANSPORTS:
        crossings = []
        for ends in itertools.pairwise(stages):
            links = [between(problem, nodes, *pair) for pair in zip(ends[0][1], ends[1][1], strict=True)]
            names = tried(problem, split, nodes, ends) if transport == "auto" else (transport,)
            ways = [crossed_by(problem, split, nodes, ends, links, name) for name in names]
            quickest = min(ways, key=lambda way: way.time)
            crossings.append(quickest if quickest.time < 0.9 * ways[0].time else ways[0])
        own, back = [*forward], [*backward]
        for part, crossing in enumerate(crossings):
            for end in (0, 1):
                own[part + end] += crossing.forward[end]
                back[part + end] += crossing.backward[end]
        found.add(
            Costs(
                forward=tuple(own),
                backward=tuple(back),
                latency=tuple(crossing.link.latency_s for crossing in crossings),
                bandwidth=tuple(crossing.link.bytes_per_s for crossing in crossings),
                message_bytes=tuple(crossing.num_bytes for crossing in crossings),
            )
        )
    return found


def asked(seed: int, num_layers: int = 0) -> tuple[SearchProblem, list[int]]:
    """What is asked with a seed, by the benchmark of the search, too."""
    problem, cards = random_question(seed, num_layers)
    return replace(problem, layers="ends" if seed % 3 == 2 else "any"), cards


def check(seed: int, num_layers: int = 0) -> float:
    problem, cards = asked(seed, num_layers)
    found, least = find_best(problem), brute(problem, cards)
    assert found.is_complete
    # Of more layers brute force takes long.
    for candidate, layers in () if num_layers else ((found.stock, problem.layers), (found.equal, "equal")):
        of_stock = brute(replace(problem, is_stock=True, layers=layers), cards)
        step_s = math.inf if candidate is None else candidate.step_s
        assert of_stock * (1 - 1e-9) <= step_s <= of_stock * TOLERANCE or step_s == of_stock, (seed, layers)
    if not found.best:
        assert least == math.inf
        return 1.0
    best = found.best[0]
    assert best.step_s <= least * TOLERANCE, (seed, best.sizes, best.layers, best.step_s, least)
    assert best.step_s >= least * (1 - 1e-9), (seed, "no layout is so quick", best.step_s, least)
    assert found.stock is None or best.step_s <= found.stock.step_s
    return best.step_s / least


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("latency", [0.0, 0.3, 2.0, 5.0])
def test_a_long_step_is_as_long_as_its_first_part_says(latency: float, is_planned: bool) -> None:
    """Also where links are so slow that every stage waits for them."""
    chance = random.Random(f"{latency}")
    for num_stages in (1, 2, 3, 4):
        forward = tuple(chance.choice([0.5, 1.0, 1.5, 2.0]) for _ in range(num_stages))
        num_links = num_stages - 1
        costs = Costs(
            forward=forward,
            backward=tuple(2 * each for each in forward),
            latency=(latency,) * num_links,
            bandwidth=(math.inf,) * num_links,
            message_bytes=(0,) * num_links,
        )
        placement = plain_placement(num_stages)
        request = ScheduleRequest(placement=placement, num_microbatches=50, costs=costs)
        schedule = make_schedule(request)[0] if is_planned else lower(one_f_one_b(placement, 50), lookahead=0)
        whole = simulate(schedule, costs, mode="rendezvous").makespan
        assert pipeline_time(placement, costs, 50, is_planned=is_planned)[0] == pytest.approx(whole, rel=1e-2)
        if is_planned and num_stages > 1:
            in_flight = (num_stages + 2, *range(num_stages - 1, 0, -1))
            schedule = make_schedule(replace(request, in_flight=in_flight))[0]
            whole = simulate(schedule, costs, mode="rendezvous").makespan
            found = pipeline_time(placement, costs, 50, in_flight=in_flight)
            assert found.pipeline_s == pytest.approx(whole, rel=1e-2) and found.peaks == in_flight


@pytest.mark.parametrize("seed", range(12))
def test_a_dozen_clusters(seed: int) -> None:
    check(seed)


@pytest.mark.parametrize("seed", [43, 396])
def test_the_best_layers_are_not_those_with_the_least_bound(seed: int) -> None:
    """These were missed by 2.7 and by 1.4 % when a beginning was dropped for good where another was no worse."""
    check(seed, num_layers=6)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12, 320))
def test_three_hundred_clusters(seed: int) -> None:
    check(seed)
