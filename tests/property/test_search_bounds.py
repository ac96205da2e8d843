"""What the search leaves out by a bound is no better: every list, order and way to share out layers is bounded here."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from vtp_plugin.tune.cluster.speed import Link, Speed
from vtp_plugin.tune.search.enumerate_lists import StageCounts, enumerate_lists
from vtp_plugin.tune.search.evaluate import evaluate
from vtp_plugin.tune.search.layer_split import split_layers
from vtp_plugin.tune.search.problem import BatchSplit, NodePool, SearchProblem, SearchSpace


def random_question(seed: int) -> SearchProblem:
    """Make two kinds of cards, and so many microbatches that most lists have fewer stages."""
    chance = random.Random(seed)
    num_layers, replicas = chance.randint(3, 7), chance.choice([1, 1, 2])
    loss_of_a_cut = chance.choice([0.0, 0.1, 0.4])
    # Where layers are alike, and nothing else takes time, bounds are as tight as they can be.
    is_plain = seed % 4 < 2
    head = 0.0 if is_plain else chance.choice([0.0, 0.4, 2.0])
    forward = tuple(1.0 if is_plain else chance.choice([1.0, 1.0, 1.5]) for _ in range(num_layers))

    def speed(size: int, pace: float) -> Speed:
        cut = pace * (1 / size + loss_of_a_cut * (size > 1))
        return Speed(
            forward_s=tuple(cut * time for time in forward),
            backward_s=tuple((1.0 if is_plain else chance.choice([1.0, 2.0])) * cut * time for time in forward),
            first_s=(0.2 * cut, 0.3 * cut) if seed % 4 == 2 else (0.0, 0.0),
            last_s=(head * cut, 2 * head * cut),
            update_s=(0.0 if is_plain else 0.1 * cut,) * num_layers,
            gradient_bytes=(8,) * num_layers,
        )

    pools = tuple(
        NodePool(
            name=name,
            cards_per_node=tuple(chance.randint(1, 4) for _ in range(chance.randint(1, 2))),
            speeds={size: speed(size, pace) for size in (1, 2)},
            between=Link(latency_s=0.0 if is_plain else chance.choice([0.0, 0.1])),
        )
        for name, pace in (("new", 1.0), ("old", chance.choice([1.3, 1.7, 2.0, 4.0])))
    )
    split = BatchSplit(
        num_replicas=replicas, num_microbatches=chance.choice([2, 5, 6, 8, 30]), micro_batch_size=1, pools=pools
    )
    return SearchProblem(num_layers=num_layers, splits=(split,), least_stages=1, most_stages=4)


def least(space: SearchSpace, row: StageCounts) -> float:
    """Return the least bound of all orders of a list, and of all ways to share out the layers."""
    stage_types = [stage_type for stage_type, count in row.counts for _ in range(count)]
    found = math.inf
    for order in set(itertools.permutations(stage_types)):
        # Nothing is dropped for others that are as good.
        for one in split_layers(space, order, math.inf, most_alike=10**9):
            found = min(found, one.bound_s)
    return found


def freeze(problem: SearchProblem, num_frozen: int) -> SearchProblem:
    """Take the backwards of the first layers away, as adapters in later layers do."""

    def frozen(speed: Speed) -> Speed:
        later = speed.backward_s[num_frozen:]
        return replace(speed, backward_s=(0.0,) * num_frozen + later, first_s=(speed.first_s[0], 0.0))

    splits = tuple(
        replace(
            split,
            pools=tuple(
                replace(pool, speeds={size: frozen(speed) for size, speed in pool.speeds.items()})
                for pool in split.pools
            ),
        )
        for split in problem.splits
    )
    return replace(problem, splits=splits, num_frozen=num_frozen)


@pytest.mark.parametrize("seed", range(12))
def test_no_list_is_left_out_where_the_first_layers_have_no_backward(seed: int) -> None:
    problem = random_question(seed)
    check_lists(freeze(problem, 1 + seed % (problem.num_layers - 1)))


@pytest.mark.parametrize("seed", range(40))
def test_a_bound_is_below_the_simulated_step_where_the_first_layers_have_no_backward(seed: int) -> None:
    problem = random_question(seed)
    problem = freeze(problem, 1 + seed % (problem.num_layers - 1))
    space = SearchSpace.of(problem, *problem.splits)
    layouts = [
        (row.bound_s, order, one)
        for row in enumerate_lists(space, lambda: math.inf)
        for order in sorted(set(itertools.permutations(s for s, count in row.counts for _ in range(count))))
        for one in split_layers(space, order, math.inf, most_alike=10**9)
    ]
    for bound_s, order, one in random.Random(seed).sample(layouts, min(12, len(layouts))):
        found = evaluate(space, order, one.layers)
        assert found is not None
        assert max(bound_s, one.bound_s) <= found.step_s * (1 + 1e-9), (order, one.layers)
        frozen = sum(end <= problem.num_frozen for end in itertools.accumulate(one.layers))
        assert found.placement.num_frozen == frozen
        assert found.order.is_planned or not frozen or len(one.layers) == 1


@pytest.mark.parametrize("seed", range(80))
def test_no_list_is_left_out_that_may_be_quicker(seed: int) -> None:
    check_lists(random_question(seed))


def check_lists(problem: SearchProblem) -> None:
    """Compare the bounds of all lists with those of their layouts, and what is left out with what may be."""
    space = SearchSpace.of(problem, *problem.splits)
    every = {row: least(space, row) for row in enumerate_lists(space, lambda: math.inf)}
    assert every
    for row, least_s in every.items():
        assert row.bound_s <= least_s * (1 + 1e-9), row
    # What is asked for is shorter than all, than some, or than none.
    for below_s in sorted(every.values())[:: max(1, len(every) // 8)]:
        kept = {row.counts for row in enumerate_lists(space, lambda limit=below_s: limit)}
        assert {row.counts for row, least_s in every.items() if least_s < below_s * (1 - 1e-9)} <= kept


def test_a_bound_leaves_out_most_lists() -> None:
    """Of long lists of slow stages, which wait for each other."""
    layer = Speed(forward_s=(1.0,) * 12, backward_s=(2.0,) * 12)
    cut = Speed(forward_s=(0.55,) * 12, backward_s=(1.1,) * 12)
    pool = NodePool(name="", cards_per_node=(8,), speeds={1: layer, 2: cut})
    split = BatchSplit(num_replicas=1, num_microbatches=16, micro_batch_size=1, pools=(pool,))
    problem = SearchProblem(num_layers=12, splits=(split,), least_stages=1, most_stages=8)
    space = SearchSpace.of(problem, split)
    shortest = min(least(space, row) for row in enumerate_lists(space, lambda: 110.0))
    every = [*enumerate_lists(space, lambda: math.inf)]
    left = [*enumerate_lists(space, lambda: shortest * 1.01)]
    assert [[(stage_type.tp, count) for stage_type, count in row.counts] for row in left] == [[(2, 4)]]
    assert len(every) == 24
