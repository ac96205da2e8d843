"""The search finds the shortest interleaved step: brute force of its own cuts the layers of all lists of stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.expected.schedule_oracle import most_kept
from tests.property.test_search_properties import (
    TOLERANCE,
    Nodes,
    Stages,
    all_costs,
    are_together,
    between,
    brute,
    exchanged,
    random_question,
    stage_lists,
    summed,
)
from vtp_plugin.plan.schedule.cost.simulator import simulate
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
from vtp_plugin.plan.schedule.order.placement import interleaved_placement
from vtp_plugin.tune.cluster.read_cluster import HeldPart
from vtp_plugin.tune.search.find_best import find_best
from vtp_plugin.tune.search.problem import BatchSplit, SearchProblem

CHUNKS = (2, 3)


def brute_interleaved(problem: SearchProblem, cards: list[int]) -> float:
    """Return the shortest step of all interleaved layouts."""
    best = math.inf
    for split in problem.splits:
        nodes = [*zip([pool for pool in split.pools for _ in pool.cards_per_node], cards, strict=True)]
        for stages in stage_lists(split, cards, nodes, problem.most_stages):
            number, rest = divmod(problem.num_layers, len(stages) or 1)
            if len(stages) < 2 or rest or split.num_microbatches % len(stages) or not are_together(stages, nodes):
                continue
            for chunks in CHUNKS:
                if number % chunks == 0:
                    best = min(best, step(problem, split, stages, nodes, number // chunks, chunks))
    return best


def step(problem: SearchProblem, split: BatchSplit, stages: Stages, nodes: Nodes, number: int, chunks: int) -> float:
    """Virtual stage v has ``number`` layers from number v on, and lies on stage v mod p."""
    own = stages * chunks
    forward, backward = [], []
    updates = [0.0] * len(stages)
    for part, (size, places) in enumerate(own):
        start, end = part * number, (part + 1) * number
        speeds = [nodes[place][0].speeds[size] for place in places]
        forwards = zip(*(speed.forward_s[start:end] for speed in speeds), strict=True)
        backwards = zip(*(speed.backward_s[start:end] for speed in speeds), strict=True)
        more = [exchanged(problem, split, nodes, size, places, start, end)]
        more += [max(speed.first_s for speed in speeds)] * (part == 0)
        more += [max(speed.last_s for speed in speeds)] * (part == len(own) - 1)
        forward.append(sum(map(max, forwards)) + sum(one[0] for one in more))
        backward.append(sum(map(max, backwards)) + sum(one[1] for one in more))
        stage = part % len(stages)
        updates[stage] += sum(max(each) for each in zip(*(speed.update_s[start:end] for speed in speeds), strict=True))
    sums = []
    for stage, (size, places) in enumerate(stages):
        # All chunks are summed at once.
        parts = [(part * number, (part + 1) * number) for part in range(stage, len(own), len(stages))]
        sums.append(joined(problem, split, nodes, size, places, parts))
    tail = max(updates)
    if problem.tied_bytes:
        pairs = [between(problem, nodes, *pair) for pair in zip(stages[0][1], stages[-1][1], strict=True)]
        tail += max(link.latency_s + problem.tied_bytes / link.bytes_per_s for link in pairs)
    placement, best = interleaved_placement(len(stages), chunks), math.inf
    for costs in all_costs(problem, split, nodes, own, forward, backward):
        request = ScheduleRequest(placement=placement, num_microbatches=split.num_microbatches, costs=costs)
        schedule, _ = make_schedule(request)
        timeline = simulate(schedule, costs, mode="rendezvous")
        if holds(problem, stages, nodes, number, chunks, most_kept(schedule)):
            end = max(spans[-1].end + own_s for spans, own_s in zip(timeline.spans, sums, strict=True))
            best = min(best, end + tail + 14 * sum(costs.latency[: len(stages) - 1]))
    return best


def holds(
    problem: SearchProblem, stages: Stages, nodes: Nodes, number: int, chunks: int, kept_of: Sequence[int]
) -> bool:
    held_bytes = problem.splits[0].held_bytes
    assert held_bytes is not None
    kept = held_bytes(HeldPart(1, 1, 0, 0, True, True, 1))
    held = [
        chunks * math.ceil(number * 3 / size) + kept * most for (size, _), most in zip(stages, kept_of, strict=True)
    ]
    limits = [[nodes[place][0].memory_bytes for place in places] for _, places in stages]
    return all(limit is None or own <= limit for own, row in zip(held, limits, strict=True) for limit in row)


def joined(
    problem: SearchProblem,
    split: BatchSplit,
    nodes: Nodes,
    size: int,
    places: tuple[int, ...],
    parts: list[tuple[int, int]],
) -> float:
    """Move the layers of all chunks behind each other, and sum them."""
    order = [layer for part in parts for layer in range(*part)]

    def moved(index: int) -> Nodes:
        pool, number = nodes[index]
        speed = pool.speeds[size]
        speed = replace(
            speed,
            gradient_bytes=tuple(speed.gradient_bytes[layer] for layer in order),
            expert_bytes=tuple(speed.expert_bytes[layer] for layer in order) if speed.expert_bytes else (),
        )
        return [(replace(pool, speeds={size: speed}), number)]

    there = [moved(place)[0] if place in places else node for place, node in enumerate(nodes)]
    return summed(problem, split, there, size, places, 0, len(order))


def asked(seed: int) -> tuple[SearchProblem, list[int]]:
    """What is asked with a seed: every other one has one replica and size 1, so that stages are many."""
    problem, cards = random_question(seed, (4, 4, 6)[seed % 3])
    splits = problem.splits
    if seed % 2:
        pools = (replace(p, speeds={1: one} if (one := p.speeds.get(1)) else {}) for p in splits[0].pools)
        splits = (replace(splits[0], pools=tuple(pools)),)
    return replace(problem, chunks=CHUNKS, splits=splits), cards


def check(seed: int) -> bool:
    """Whether the best is interleaved."""
    problem, cards = asked(seed)
    found, least = find_best(problem), min(brute(problem, cards), brute_interleaved(problem, cards))
    assert found.is_complete
    if not found.best:
        assert least == math.inf
        return False
    best = found.best[0]
    assert best.step_s <= least * TOLERANCE, (seed, best.sizes, best.layers, best.num_chunks, best.step_s, least)
    assert best.step_s >= least * (1 - 1e-9), (seed, "no layout is so quick", best.step_s, least)
    assert found.stock is None or best.step_s <= found.stock.step_s
    return best.num_chunks > 1


def test_a_few_clusters() -> None:
    assert [check(seed) for seed in (0, 1, 27, 56)] == [False, False, True, True]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100))
def test_a_hundred_clusters(seed: int) -> None:
    check(seed)
