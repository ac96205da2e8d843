"""The bound of benchmarks/split_bound.py: no order beats it, whether it splits the backwards or not."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

import pytest

from benchmarks.split_bound import SplitPipeline, draw_pipelines, split_bound, time_of_split, time_of_today

Part = tuple[str, int]


def orders_of_a_stage(count: int, kept: int, done: tuple[int, int, int] = (0, 0, 0)) -> Iterator[tuple[Part, ...]]:
    """All orders of the forwards F, gradients of inputs I and of weights W of one stage."""
    if done == (count,) * 3:
        yield ()
    f, i, w = done
    allowed = {"F": f < count and f - w < kept, "I": i < f, "W": w < i}
    for at, (part, may) in enumerate(allowed.items()):
        if may:
            after = tuple(each + (at == place) for place, each in enumerate(done))
            for rest in orders_of_a_stage(count, kept, after):
                yield ((part, done[at]), *rest)


def makespan(pipeline: SplitPipeline, orders: tuple[tuple[Part, ...], ...]) -> float:
    """When the last part of a step ends; infinite where the stages wait for each other."""
    durations = {"F": pipeline.forward, "I": pipeline.of_input, "W": pipeline.of_weights}
    ends: dict[tuple[int, Part], float] = {}
    free = [0.0 for _ in orders]
    reached = [0 for _ in orders]
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while reached[stage] < len(order):
                part, microbatch = order[reached[stage]]
                beside = {"F": stage - 1, "I": stage + 1, "W": -1}[part]
                start = free[stage]
                if 0 <= beside < len(orders):
                    if (beside, (part, microbatch)) not in ends:
                        break
                    start = max(start, ends[beside, (part, microbatch)] + pipeline.latency[min(stage, beside)])
                free[stage] = ends[stage, (part, microbatch)] = start + durations[part][stage]
                reached[stage] += 1
                moved = True
    is_done = all(count == len(order) for count, order in zip(reached, orders, strict=True))
    return max(free) if is_done else float("inf")


def best_of_all(pipeline: SplitPipeline) -> float:
    each = [list(orders_of_a_stage(pipeline.num_microbatches, kept)) for kept in pipeline.kept]
    return min(makespan(pipeline, orders) for orders in itertools.product(*each))


def small(pipeline: SplitPipeline, num_stages: int, num_microbatches: int) -> SplitPipeline:
    """The first stages of a pipeline, with few microbatches, and as little memory as 1F1B needs."""
    return SplitPipeline(
        forward=pipeline.forward[:num_stages],
        of_input=pipeline.of_input[:num_stages],
        of_weights=pipeline.of_weights[:num_stages],
        latency=pipeline.latency[: num_stages - 1],
        num_microbatches=num_microbatches,
        kept=tuple(range(num_stages, 0, -1)),
    )


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 3), (3, 2)])
def test_no_order_beats_the_bound(num_stages: int, num_microbatches: int) -> None:
    wide = [each for each in draw_pipelines(30) if len(each.forward) >= num_stages]
    ratios = []
    for pipeline in (small(each, num_stages, num_microbatches) for each in wide):
        best, bound = best_of_all(pipeline), split_bound(pipeline)
        assert bound <= best * (1 + 1e-9), pipeline
        assert best <= time_of_today(pipeline) * (1 + 1e-9), "a whole backward is its two parts in a row"
        ratios.append(best / bound)
    assert len(ratios) >= 15 and min(ratios) < 1.06, "a bound that is far below all orders says nothing"


def test_today_is_never_below_the_bound() -> None:
    pipelines = draw_pipelines(40)
    assert all(split_bound(each) <= time_of_today(each) * (1 + 1e-9) for each in pipelines)
    assert pipelines == draw_pipelines(200)[:40] and pipelines != draw_pipelines(40, seed=1)


def test_split_backwards_are_never_slower_and_close_to_the_bound() -> None:
    """`python -m benchmarks.split_bound` does the same for all 200."""
    pipelines = draw_pipelines(24)
    bounds, splits, wholes = (
        [find(each) for each in pipelines] for find in (split_bound, time_of_split, time_of_today)
    )
    assert all(bound <= split * (1 + 1e-9) for bound, split in zip(bounds, splits, strict=True))
    assert all(split <= whole * (1 + 1e-9) for split, whole in zip(splits, wholes, strict=True))
    ratios = [split / bound for split, bound in zip(splits, bounds, strict=True)]
    assert statistics.median(ratios) < 1.08 and max(ratios) < 1.25


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 3), (3, 2)])
def test_small_ones_are_near_the_best_of_all_orders(num_stages: int, num_microbatches: int) -> None:
    wide = [each for each in draw_pipelines(30) if len(each.forward) >= num_stages]
    ratios = []
    for pipeline in (small(each, num_stages, num_microbatches) for each in wide):
        best = best_of_all(pipeline)
        ratios.append(time_of_split(pipeline) / best)
        assert ratios[-1] >= 1 - 1e-9
    assert max(ratios) < 1.06 and statistics.median(ratios) < 1.001
