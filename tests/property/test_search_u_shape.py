"""The search finds the shortest U: brute force of its own tries every edge, and every stage on every node."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from tests.expected.schedule_oracle import most_kept
from tests.property.test_search_properties import TOLERANCE, Nodes, Stages, all_costs, between, stage_lists, summed
from vtp_plugin.plan.boundary.strategies.known_strategies import TransportRules
from vtp_plugin.plan.schedule.cost.simulator import simulate
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
from vtp_plugin.plan.schedule.order.placement import u_placement
from vtp_plugin.tune.cluster.speed import Link, Speed
from vtp_plugin.tune.search.find_best import find_best
from vtp_plugin.tune.search.problem import BatchSplit, NodePool, SearchProblem

KEPT = 1


def random_question(seed: int) -> SearchProblem:
    """Make an edge of one or two cards, a cloud of one or two nodes, and a model of three to five layers."""
    chance = random.Random(f"U {seed}")
    num_layers, batch = chance.randint(3, 5), chance.choice([2, 4])
    layers = [chance.choice([1.0, 1.5]) for _ in range(num_layers)]
    head = chance.choice([0.0, 0.7])
    crossing = random.Random(f"crossing {seed}")
    gather, broadcast = crossing.choice([(0.0, 0.0), (0.1, 0.05), (0.1, 0.4)])

    def speed(size: int, pace: float) -> Speed:
        times = [pace * time / size * (1.1 if size > 1 else 1) for time in layers]
        return Speed(
            forward_s=tuple(times),
            backward_s=tuple(2 * time for time in times),
            first_s=(0.1 * pace / size, 0.1 * pace / size),
            last_s=(pace * head / size, 2 * pace * head / size),
            update_s=tuple(0.1 * time for time in times),
            gradient_bytes=tuple(round(8 * time / size) for time in layers),
            gather_s=gather if size > 1 else 0.0,
            broadcast_s=broadcast if size > 1 else 0.0,
        )

    def pool(site: str, rooms: tuple[int, ...]) -> NodePool:
        pace = chance.choice([0.3, 1.0, 2.0])
        link = Link(latency_s=chance.choice([0.0, 0.2]), bytes_per_s=40.0, at_once=crossing.choice([None, 1, 2]))
        return NodePool(
            name=site,
            cards_per_node=rooms,
            speeds={size: speed(size, pace) for size in (1, 2)},
            between=link,
            site=site,
            memory_bytes=chance.choice([None, 9, 14]),
        )

    pools = (
        pool("home", (chance.randint(1, 2),)),
        pool("cloud", tuple(chance.randint(1, 2) for _ in range(chance.randint(1, 2)))),
    )
    return SearchProblem(
        num_layers=num_layers,
        splits=tuple(
            BatchSplit(
                num_replicas=replicas,
                num_microbatches=batch // replicas,
                micro_batch_size=1,
                pools=pools,
                message_bytes=4,
                held_bytes=lambda part: (
                    math.ceil((part.end - part.start) * 3 / part.tp) + KEPT * (part.in_flight + part.waiting)
                ),
            )
            for replicas in (1, 2)
        ),
        least_stages=2,
        most_stages=3,
        across={
            ("cloud", "home"): Link(
                latency_s=chance.choice([0.1, 1.0, 3.0]), bytes_per_s=20.0, at_once=crossing.choice([None, 1, 2])
            )
        },
        rules=TransportRules(is_sharded=crossing.choice([False, True])),
        edge="home",
        edge_layers=(1, 1),
    )


def brute(problem: SearchProblem) -> float:
    """Return the shortest step of all layouts."""
    best = math.inf
    for split in problem.splits:
        nodes = [(pool, room) for pool in split.pools for room in pool.cards_per_node]
        cards = [room for _, room in nodes]
        for stages in stage_lists(split, cards, nodes, problem.most_stages):
            sites = [{nodes[place][0].site for place in places} for _, places in stages]
            if len(stages) < 2 or sites[0] != {"home"} or any(one != {"cloud"} for one in sites[1:]):
                continue
            middle = range(2, problem.num_layers - 1)
            for cuts in itertools.combinations(middle, len(stages) - 2):
                ends = [0, 1, *cuts, problem.num_layers - 1, problem.num_layers]
                best = min(best, step(problem, split, stages, ends, nodes))
    return best


def step(problem: SearchProblem, split: BatchSplit, stages: Stages, ends: list[int], nodes: Nodes) -> float:
    placement = u_placement(len(stages))
    own = [stages[stage] for stage in placement.stages]
    forward, backward = [], []
    for part, (size, places) in enumerate(own):
        speed = nodes[places[0]][0].speeds[size]
        layers = slice(ends[part], ends[part + 1])
        more = [speed.first_s] * (part == 0) + [speed.last_s] * (part == len(own) - 1)
        forward.append(sum(speed.forward_s[layers]) + sum(one[0] for one in more))
        backward.append(sum(speed.backward_s[layers]) + sum(one[1] for one in more))
    sums, updates = [0.0] * len(stages), [0.0] * len(stages)
    for part, stage in enumerate(placement.stages):
        size, places = stages[stage]
        sums[stage] += summed(problem, split, nodes, size, places, ends[part], ends[part + 1])
        updates[stage] += sum(nodes[places[0]][0].speeds[size].update_s[ends[part] : ends[part + 1]])
    if len(stages[0][1]) == 2:  # one message holds both parts of the edge
        link = between(problem, nodes, *stages[0][1])
        sums[0] -= 2 * link.latency_s
    best = math.inf
    most_in_flight = (None, *range(1, split.num_microbatches + 1))
    for costs, most in itertools.product(all_costs(problem, split, nodes, own, forward, backward), most_in_flight):
        request = ScheduleRequest(
            placement=placement,
            num_microbatches=split.num_microbatches,
            costs=costs,
            in_flight=None if most is None else (most,) * len(stages),
        )
        schedule, _ = make_schedule(request)
        timeline = simulate(schedule, costs, mode="rendezvous")
        held = [KEPT * number for number in most_kept(schedule)]
        for part, stage in enumerate(placement.stages):
            size = stages[stage][0]
            held[stage] += math.ceil((ends[part + 1] - ends[part]) * 3 / size)
        limits = [[nodes[place][0].memory_bytes for place in places] for _, places in stages]
        if all(limit is None or number <= limit for number, row in zip(held, limits, strict=True) for limit in row):
            end = max(spans[-1].end + one for spans, one in zip(timeline.spans, sums, strict=True))
            # Seven numbers, such as the norm, go through all stages and back.
            best = min(best, end + max(updates) + 14 * sum(costs.latency[: len(stages) - 1]))
    return best


def check(seed: int) -> None:
    problem = random_question(seed)
    found, least = find_best(problem), brute(problem)
    assert found.is_complete and found.stock is None
    if not found.best:
        assert least == math.inf
        return
    best = found.best[0]
    assert best.layers[0] == best.layers[-1] == 1 and len(best.layers) == len(best.stage_types) + 1
    assert best.step_s <= least * TOLERANCE, (seed, best.sizes, best.layers, best.step_s, least)
    assert best.step_s >= least * (1 - 1e-9), (seed, "no layout is so quick", best.step_s, least)


@pytest.mark.parametrize("seed", range(4))
def test_a_few_edges(seed: int) -> None:
    check(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4, 100))
def test_a_hundred_edges(seed: int) -> None:
    check(seed)
