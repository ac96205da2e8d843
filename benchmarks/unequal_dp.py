"""Unequal data parallelism: a narrow edge serves k replicas of the cloud, in turn or all at once. Simulated step times.

    python -m benchmarks.unequal_dp                  the tables; two minutes
    python -m benchmarks.unequal_dp --output docs/evidence    also docs/evidence/unequal-dp.svg
    python -m benchmarks.unequal_dp --quick          a small grid

Real steps against the simulation: ``python -m benchmarks.unequal_dp_real --output docs/evidence``
(docs/evidence/unequal-dp-measured.md).

All figures are simulations (``vtp_plugin.plan.schedule.cost.simulator``): durations are exact, bandwidth has no limit,
sending and receiving cost no compute and every message leaves as soon as it is there. Stage 0, the edge, has one
replica, each of the P - 1 cloud stages has k. Unit of time is t_f: the edge works 6 t_f for a microbatch, 2 t_f of it
forward. The load of the cloud is its work for a microbatch per replica, in units of the edge's: at 1 all stages are
equally busy, below 1 the cloud has time to spare. L is the one-way latency of every link from or to stage 0.

Compared are the two modes, with the same samples in a step, 8 microbatches for every replica of the cloud:

* multiplex: the edge runs its 8 k microbatches one by one; microbatch h belongs to replica h mod k.
* split: the edge runs 8 microbatches that are k times as large and take k times as long; each is cut into k parts.

Both run the same kinds of order:

* 1f1b: a plain pipeline. With split the edge keeps P large microbatches, that is k P; with multiplex k (P - 1) + 1.
* 1f1b, kP: the same, but with multiplex the edge also keeps up to k P.
* u: the chosen order of the U-shape, where the edge has the first and the last part of the model, with any number of
  microbatches in flight on the edge.
* u, limit: the same with at most need + 2 k on the edge (as many as keep all stages busy, and two more for every
  replica that it serves); for split as many as fit in the same memory.

Columns: step time; step time over the lower bound of its mode; edge utilisation, the share of the step in which the
edge computes; the most activations that the edge keeps, in those of t_f of layers for a microbatch; and split's step
time over multiplex's, as it is and if a k times as large microbatch saves the edge a tenth of the k times the time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path

from benchmarks.unequal_dp_plot import draw
from benchmarks.unequal_dp_results import MULTIPLEX, PLAIN, PLAIN_SAME, SPLIT, U_LIMIT, Result, SimulatedPipeline, U
from vtp_plugin.plan.schedule.cost.costs import Costs, in_flight_needed, lower_bound, make_route, split_costs
from vtp_plugin.plan.schedule.cost.simulator import simulate
from vtp_plugin.plan.schedule.make.u_shape import one_f_one_b, one_f_one_b_limits, plan_u_shape
from vtp_plugin.plan.schedule.order.actions import Op, Schedule
from vtp_plugin.plan.schedule.order.placement import Placement, plain_placement

LATENCIES = (0.0, 1.0, 2.0, 4.0, 8.0)
LOADS = (0.5, 1.0, 2.0)
GAIN = 0.1


def main() -> None:
    """Simulate, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small grid")
    parser.add_argument("--output", type=Path, help="folder for unequal-dp.svg")
    options = parser.parse_args()
    stages, widths = ((3,), (2, 4)) if options.quick else ((2, 3, 5), (2, 4, 8))
    orders = (PLAIN, PLAIN_SAME, U, U_LIMIT)
    results = [
        result
        for order, num_stages, width, load, latency in product(orders, stages, widths, LOADS, LATENCIES)
        for result in both_modes(
            SimulatedPipeline(order=order, num_stages=num_stages, width=width, load=load, latency=latency)
        )
    ]
    print("\n".join([*_table(results), "", *_summary(results)]))
    if options.output:
        path = options.output / "unequal-dp.svg"
        path.write_text(draw(results), encoding="ascii")
        print(f"wrote {path}")


def both_modes(case: SimulatedPipeline) -> tuple[Result, Result]:
    """Simulate a case in turn and all at once."""
    placement, costs = case.placement, case.costs
    limits = {PLAIN_SAME: case.width * case.num_stages, U_LIMIT: in_flight_needed(placement, costs) + 2 * case.width}
    limit = limits.get(case.order)
    in_turn = _order(case, placement, case.per_replica * case.width, costs, limit)
    joined, at_once = replace(placement, num_replicas=()), split_costs(placement, costs)
    limit = None if limit is None else limit // case.width
    cheaper = _with_gain(joined, at_once)
    steps = [_order(case, joined, case.per_replica, paid, limit) for paid in (at_once, cheaper)]
    split = _result(case, SPLIT, steps[0], at_once)
    split = replace(split, step_with_gain=simulate(steps[1], cheaper).makespan)
    return _result(case, MULTIPLEX, in_turn, costs), split


def _order(
    case: SimulatedPipeline, placement: Placement, num_microbatches: int, costs: Costs, limit: int | None
) -> Schedule:
    """Return the order of a case; only the edge has a limit, the cloud may keep what it needs."""
    num_stages, num_replicas = placement.num_stages, placement.num_replicas
    if case.is_u_shaped:
        limits = [len(placement.microbatches(w, num_microbatches)) for w in range(placement.num_workers)]
        limits[0] = limits[0] if limit is None else min(limit, limits[0])
        return plan_u_shape(num_stages, num_microbatches, costs, num_replicas=num_replicas, limits=limits).schedule
    edge, *cloud = one_f_one_b_limits(plain_placement(len(num_replicas), num_replicas=num_replicas))
    in_flight = (edge if limit is None else limit, *cloud)
    return one_f_one_b(plain_placement(num_stages, num_replicas=num_replicas), num_microbatches, in_flight=in_flight)


def _with_gain(placement: Placement, costs: Costs) -> Costs:
    """Shorten the edge's work by a tenth."""

    def shortened(times: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(t * (1 - GAIN) if stage == 0 else t for t, stage in zip(times, placement.stages, strict=True))

    return replace(costs, forward=shortened(costs.forward), backward=shortened(costs.backward))


def _result(case: SimulatedPipeline, mode: str, schedule: Schedule, costs: Costs) -> Result:
    timeline = simulate(schedule, costs)
    placement, num_microbatches = schedule.placement, schedule.num_microbatches
    route = make_route(placement, costs)
    return Result(
        case=case,
        mode=mode,
        step=timeline.makespan,
        bound=lower_bound(route, num_microbatches, (num_microbatches,) * placement.num_workers),
        utilisation=timeline.busy[0] / timeline.makespan,
        kept=_kept(schedule, costs),
    )


def _kept(schedule: Schedule, costs: Costs) -> float:
    """Return the most activations that the edge keeps, each weighed with its forward."""
    live = peak = 0.0
    for action in schedule.orders[0]:
        live += costs.forward[action.vstage] if action.op is Op.F else -costs.forward[action.vstage]
        peak = max(peak, live)
    return peak


def _table(results: Sequence[Result]) -> Iterator[str]:
    """Write a line for each order, P, k, load and mode, with groups of columns over L."""
    latencies = [f"{latency:g}" for latency in LATENCIES]
    groups = {
        "step time at L =": 7,
        "step / bound": 6,
        "edge utilisation, %": 5,
        "kept by the edge": 5,
        "split / multiplex": 6,
        "the same with gain": 6,
    }
    heads = [title.ljust(width * len(latencies)) for title, width in groups.items()]
    yield f"{'':35}" + "  ".join(heads)
    columns = ["".join(f"{latency:>{width}}" for latency in latencies) for width in groups.values()]
    yield f"{'order':9} P  k  load  {'mode':12}" + "  ".join(columns)
    for _, block in groupby(results, lambda r: (r.case.order, r.case.num_stages, r.case.width, r.case.load)):
        pairs = list(block)
        case = pairs[0].case
        if case.load == LOADS[0]:
            yield ""
        in_turn, at_once = pairs[::2], pairs[1::2]
        ratios = "".join(f"{b.step / a.step:6.2f}" for a, b in zip(in_turn, at_once, strict=True))
        gains = "".join(f"{b.step_with_gain / a.step:6.2f}" for a, b in zip(in_turn, at_once, strict=True))
        for mode, row, rest in ((MULTIPLEX, in_turn, ()), (SPLIT, at_once, (ratios, gains))):
            cells = [
                "".join(f"{r.step:7.0f}" for r in row),
                "".join(f"{r.step / r.bound:6.2f}" for r in row),
                "".join(f"{100 * r.utilisation:5.0f}" for r in row),
                "".join(f"{r.kept:5.0f}" for r in row),
                *rest,
            ]
            yield f"{case.order:9}{case.num_stages:2} {case.width:2} {case.load:5}  {mode:12}" + "  ".join(cells)


def _summary(results: Sequence[Result]) -> Iterator[str]:
    """Write the range over P and k of split over multiplex, for each order, load and L."""
    ratios: tuple[tuple[str, Callable[[Result, Result], float]], ...] = (
        ("step, split / multiplex", lambda a, b: b.step / a.step),
        ("the same if split saves the edge a tenth", lambda a, b: b.step_with_gain / a.step),
        ("activations kept by the edge, split / multiplex", lambda a, b: b.kept / a.kept),
    )
    for title, value in ratios:
        yield f"{title + ', least to most over P and k':82}" + "".join(f"{f'L = {x:g}':>14}" for x in LATENCIES)
        for order, load in product(dict.fromkeys(r.case.order for r in results), LOADS):
            cells: list[str] = []
            for latency in LATENCIES:
                shown = [r for r in results if (r.case.order, r.case.load, r.case.latency) == (order, load, latency)]
                values = [value(a, b) for a, b in zip(shown[::2], shown[1::2], strict=True)]
                cells.append(f"{min(values):.2f} to {max(values):.2f}")
            yield f"{order:12} load {load:<64}" + "".join(f"{cell:>14}" for cell in cells)
        yield ""


if __name__ == "__main__":
    main()
