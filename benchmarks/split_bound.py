"""How far from the best the orders of plain pipelines are, if a backward could be split: 200 pipelines, made at random.

    python -m benchmarks.split_bound                prints how the steps compare, and the worst pipelines
    python -m benchmarks.split_bound --count 20     fewer pipelines

A backward computes the gradient of its input, for which the stage before waits, and the gradients of its weights, for
which nobody waits before the step ends. An order that runs the two parts apart (zero bubble, arXiv 2401.10241) fills
the waits of a pipeline with the second. This says what that gains: the step of an order with whole backwards, and of
the one that `--vtp-split-backward` plans, over a bound that no order can beat, split or not.

Pipelines were drawn before the planner was written, by fixed seeds and ranges: two to six stages, up to 32
microbatches, parts of unequal duration, links with latency, and limits of memory. Nothing is run: times are simulated,
in units of the mean forward.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.cost.simulator import simulate
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
from vtp_plugin.plan.schedule.make.u_shape import one_f_one_b
from vtp_plugin.plan.schedule.order.placement import plain_placement

SEED, COUNT, NUM_WORST = 2401_10241, 200, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPipeline:
    """A plain pipeline whose backward has two parts.

    Attributes:
        forward: duration of a microbatch's forward, by stage.
        of_input: duration of the backward's first part, the gradient of the input, by stage.
        of_weights: duration of its second part, the gradients of the weights, by stage.
        latency: of a message from a stage to the next, and back.
        num_microbatches: microbatches of a step.
        kept: most microbatches whose activations a stage can keep, by stage; the second part needs them too.
    """

    forward: tuple[float, ...]
    of_input: tuple[float, ...]
    of_weights: tuple[float, ...]
    latency: tuple[float, ...]
    num_microbatches: int
    kept: tuple[int, ...]


def draw_pipelines(count: int = COUNT, seed: int = SEED) -> tuple[SplitPipeline, ...]:
    """Draw pipelines; equal arguments give equal ones, and the first of many are those of few."""
    generator = random.Random(seed)
    return tuple(_draw(generator) for _ in range(count))


def _draw(generator: random.Random) -> SplitPipeline:
    """Draw one: a third has equal stages, half has no latency, half may keep no more than 1F1B does."""
    stages = range(generator.randint(2, 6))
    is_equal = generator.random() < 1 / 3
    own = [1.0 if is_equal else generator.uniform(0.5, 2.0) for _ in stages]
    # The gradient of the input takes about as long as the forward; attention has no weights, so the other part less.
    shares = [(1.0, 1.0) if is_equal else (generator.uniform(0.9, 1.4), generator.uniform(0.4, 1.0)) for _ in stages]
    longest = generator.choice((0.0, 0.0, 0.2, 2.0))
    more = generator.choice((0, 0, 1, 3))
    return SplitPipeline(
        forward=tuple(own),
        of_input=tuple(time * first for time, (first, _) in zip(own, shares, strict=True)),
        of_weights=tuple(time * second for time, (_, second) in zip(own, shares, strict=True)),
        latency=tuple(generator.uniform(0, longest) for _ in stages[1:]),
        num_microbatches=generator.choice((4, 8, 16, 32)),
        kept=tuple(len(stages) - stage + more for stage in stages),
    )


def time_of_today(pipeline: SplitPipeline) -> float:
    """Simulate a step of 1F1B with whole backwards, the best of what the limits allow to keep.

    >>> equal = SplitPipeline(forward=(1.0,) * 4, of_input=(1.0,) * 4, of_weights=(1.0,) * 4, latency=(0.0,) * 3,
    ...                       num_microbatches=8, kept=(4, 3, 2, 1))
    >>> time_of_today(equal), split_bound(equal)
    (33.0, 27.0)
    """
    num_stages, costs = len(pipeline.forward), _costs(pipeline)
    most = max(kept - (num_stages - stage) for stage, kept in enumerate(pipeline.kept))
    limits = [tuple(num_stages - stage + more for stage in range(num_stages)) for more in range(most + 1)]
    orders = (one_f_one_b(num_stages, pipeline.num_microbatches, in_flight=limit) for limit in limits)
    return min(simulate(order, costs).makespan for order in orders)


def time_of_split(pipeline: SplitPipeline) -> float:
    """Simulate a step of the order that is planned with split backwards, under the same limits."""
    costs = _costs(pipeline)
    request = ScheduleRequest(
        placement=plain_placement(len(pipeline.forward)),
        num_microbatches=pipeline.num_microbatches,
        costs=costs,
        in_flight=pipeline.kept,
        split_backward=True,
    )
    return simulate(make_schedule(request)[0], costs).makespan


def _costs(pipeline: SplitPipeline) -> Costs:
    links = len(pipeline.latency)
    return Costs(
        forward=pipeline.forward,
        backward=tuple(map(sum, zip(pipeline.of_input, pipeline.of_weights, strict=True))),
        latency=pipeline.latency,
        bandwidth=(math.inf,) * links,
        message_bytes=(0,) * links,
        weights=pipeline.of_weights,
    )


def split_bound(pipeline: SplitPipeline) -> float:
    """Return a time that no order can beat, whether it splits the backwards or not.

    A stage starts when the first microbatch can have reached it, and computes all that it has to. What it computes last
    but for weights is some microbatch's gradient of the input, which goes on to the first stage; every stage that it
    passes computes its weights' part after it. And where a stage keeps at most k microbatches, the forward of number
    i + k waits for the gradient of number i to come back, and for one part for weights.
    """
    num_stages, count = len(pipeline.forward), pipeline.num_microbatches
    arrive = [0.0, *itertools.accumulate(map(sum, zip(pipeline.forward, pipeline.latency, strict=False)))][:num_stages]
    back = list(itertools.accumulate((0.0, *map(sum, zip(pipeline.of_input, pipeline.latency, strict=False)))))
    bounds: list[float] = []
    for stage in range(num_stages):
        first, then, last = pipeline.forward[stage], pipeline.of_input[stage], pipeline.of_weights[stage]
        bounds.append(arrive[stage] + count * (first + then + last))
        # To the first stage, or to one on the way, whose weights' part comes after.
        out = max(back[stage] - back[other] + pipeline.of_weights[other] for other in range(stage + 1))
        bounds.append(arrive[stage] + count * (first + then) + out)
        rounds = math.ceil(count / pipeline.kept[stage])
        bounds.append(arrive[stage] + rounds * (_round_trip(pipeline, stage) + last))
    return max(bounds)


def _round_trip(pipeline: SplitPipeline, stage: int) -> float:
    """Return the time from the start of a microbatch's forward to the end of its gradient, for it alone."""
    computes = math.fsum((*pipeline.forward[stage:], *pipeline.of_input[stage:]))
    return computes + 2 * math.fsum(pipeline.latency[stage:])


def table(pipelines: Sequence[SplitPipeline]) -> Iterator[str]:
    """Yield the lines that are printed."""
    yield f"{len(pipelines)} pipelines, seed {SEED}: step over the bound"
    wholes = [time_of_today(each) / split_bound(each) for each in pipelines]
    ratios = [time_of_split(each) / split_bound(each) for each in pipelines]
    for name, found in (("whole backwards", wholes), ("split backwards", ratios)):
        quarters = statistics.quantiles(found, n=4, method="inclusive")
        spread = f"quarters {quarters[0]:.3f} and {quarters[2]:.3f}, most {max(found):.3f}"
        yield f"{name}: median {quarters[1]:.3f}, {spread}"
    gains = [split / whole for split, whole in zip(ratios, wholes, strict=True)]
    yield f"split over whole: median {statistics.median(gains):.3f}, least {min(gains):.3f}, most {max(gains):.3f}"
    yield "the farthest from the bound, with split backwards:"
    for number in sorted(range(len(ratios)), key=ratios.__getitem__, reverse=True)[:NUM_WORST]:
        each = pipelines[number]
        kind = "equal" if len(set(each.forward)) == 1 else "unequal"
        yield (
            f"{ratios[number]:.3f}  number {number}: {len(each.forward)} {kind} stages, {each.num_microbatches} "
            f"microbatches, {','.join(map(str, each.kept))} kept, latency up to {max(each.latency):.2f}"
        )


def main() -> None:
    """Print how far today's orders are from the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT, help="how many pipelines are drawn")
    options = parser.parse_args()
    for line in table(draw_pipelines(options.count)):
        print(line)


if __name__ == "__main__":
    main()
