"""How well orders of work hide the latency between edge and cloud: simulated step times, nothing is measured here.

    python -m benchmarks.u_shape            the table
    python -m benchmarks.u_shape --quick    a small grid

Measured steps: ``benchmarks/u_shape_wan.py``. All figures here are simulations
(``vtp_plugin.plan.schedule.cost.simulator``): durations are exact, bandwidth has no limit, sending and receiving cost
no compute and every message leaves as soon as it is there. Unit of time is t_f, the forward of one of the edge's two
parts; a backward takes twice its forward. L is the one-way latency of every link from or to stage 0.

Compared are, with the same total work and the same 6 t_f of work for a microbatch on every one of the P stages:

* ours: ``plan_u_shape``, with at most m (that is, any number of) or need + 2 microbatches in flight on each stage. A
  cloud stage is one chunk of 2 t_f.
* reference: the order of MindSpeed's layerwise disaggregated training on the same placement, with its own number of
  microbatches in flight (P + 1 on the edge).
* interleaved: Megatron's interleaved 1F1B with two chunks of t_f on every stage, in the smallest groups of microbatches
  that Megatron allows (P where P divides m, its default) and in one group of all m. The placement is another one: the
  loss is on the last stage, so labels would have to leave the edge; a microbatch crosses links of stage 0 three times
  in each direction, in the U twice; and chunks of 1 instead of 2 t_f fill and drain the pipeline faster. Step times
  compare directly, as the work is the same; the bound is that of its own placement. Megatron itself also waits for
  messages where this ideal run of its order does not. Left out where m < P, which Megatron refuses.

Columns: step time; efficiency, the share of the step in which a stage computes, in percent; step over the lower bound
that no order of the same placement can beat with any memory; step over the same order's at L = 0; and the most
activations that a stage keeps, in activations of one t_f of layers, at the least and the largest L.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.schedule.cost.costs import Costs, in_flight_needed, lower_bound, make_route, u_costs, uniform_costs
from vtp_plugin.plan.schedule.cost.simulator import simulate
from vtp_plugin.plan.schedule.make.u_shape import interleaved_one_f_one_b, plan_u_shape, reference_u_shape
from vtp_plugin.plan.schedule.order.actions import Op, Schedule
from vtp_plugin.plan.schedule.order.placement import interleaved_placement, u_placement

OURS, OURS_NEED = "ours, limit m", "ours, limit need+2"
REFERENCE = "reference"
INTERLEAVED, INTERLEAVED_M = "interleaved, small", "interleaved, m"
CLOUD = 2.0  # forward of a cloud stage, in t_f: as much as the edge's two parts together
WORK = 6.0  # of a stage for one microbatch, in t_f
LATENCIES = (0.0, 0.5, 1.0, 2.0, 4.0)

_Extreme = Callable[[Iterable[float]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One simulated step.

    Attributes:
        order: name of the order of work.
        num_stages: P, the number of stages.
        num_microbatches: m, the number of microbatches.
        latency: L, in t_f.
        step: time of the step, in t_f.
        bound: Time that no order of its placement can beat.
        kept: Most activations that a stage keeps at a time, in those of one t_f of layers.
    """

    order: str
    num_stages: int
    num_microbatches: int
    latency: float
    step: float
    bound: float
    kept: float

    @property
    def efficiency(self) -> float:
        """Share of the step in which a stage computes, the same for all stages."""
        return WORK * self.num_microbatches / self.step


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small grid")
    options = parser.parse_args()
    stages, counts = ((2, 3), (4, 16)) if options.quick else ((2, 3, 4, 8), (4, 8, 16, 32))
    results = [
        result
        for num_stages, num_microbatches, latency in product(stages, counts, LATENCIES)
        for result in simulate_all(num_stages, num_microbatches, latency)
    ]
    print("\n".join([*_table(results), "", *_summary(results)]))


def simulate_all(num_stages: int, num_microbatches: int, latency: float) -> Iterator[Result]:
    """Yield one step of every order."""
    costs = u_costs(num_stages, cloud=CLOUD, latency=latency)
    for name, limit in ((OURS, num_microbatches), (OURS_NEED, _limit(num_stages, costs))):
        plan = plan_u_shape(num_stages, num_microbatches, costs, limits=(limit,) * num_stages)
        yield _result(name, plan.schedule, costs, latency)
    yield _result(REFERENCE, reference_u_shape(num_stages, num_microbatches), costs, latency)
    if num_microbatches >= num_stages:
        costs = _interleaved_costs(num_stages, latency)
        smallest = _interleaved(num_stages, num_microbatches)
        yield _result(INTERLEAVED, smallest, costs, latency)
        one_group = interleaved_one_f_one_b(num_stages, 2, num_microbatches, group_size=num_microbatches)
        yield _result(INTERLEAVED_M, one_group, costs, latency)


def _limit(num_stages: int, costs: Costs) -> int:
    return in_flight_needed(u_placement(num_stages), costs) + 2


def _interleaved(num_stages: int, num_microbatches: int) -> Schedule:
    """Return the interleaved order with the smallest groups that are allowed; one group of all microbatches always is.

    >>> [_interleaved(3, m).describe().split()[2:6] for m in (6, 8)]
    [['0F0', '0F1', '0F2', '3F0'], ['0F0', '0F1', '0F2', '0F3']]
    """
    for group_size in range(num_stages, num_microbatches):
        try:
            return interleaved_one_f_one_b(num_stages, 2, num_microbatches, group_size=group_size)
        except ConfigError:
            continue
    return interleaved_one_f_one_b(num_stages, 2, num_microbatches, group_size=num_microbatches)


def _interleaved_costs(num_stages: int, latency: float) -> Costs:
    """Give every chunk t_f, and latency to the links of stage 0 as in the U.

    >>> _interleaved_costs(4, 0.5).latency
    (0.5, 0.0, 0.0, 0.5, 0.5, 0.0, 0.0)
    """
    placement = interleaved_placement(num_stages, 2)
    links = zip(placement.stages, placement.stages[1:], strict=False)
    return replace(uniform_costs(placement), latency=tuple(latency if 0 in link else 0.0 for link in links))


def _result(order: str, schedule: Schedule, costs: Costs, latency: float) -> Result:
    num_stages, num_microbatches = schedule.placement.num_stages, schedule.num_microbatches
    timeline = simulate(schedule, costs)
    assert timeline.busy == (WORK * num_microbatches,) * num_stages, "stages of unequal work"
    return Result(
        order=order,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        latency=latency,
        step=timeline.makespan,
        bound=lower_bound(make_route(schedule.placement, costs), num_microbatches, (num_microbatches,) * num_stages),
        kept=max(_kept(schedule, costs, stage) for stage in range(num_stages)),
    )


def _kept(schedule: Schedule, costs: Costs, stage: int) -> float:
    """Return the most activations that a stage keeps, each weighed with its forward.

    >>> costs = u_costs(3, cloud=CLOUD)
    >>> [_kept(reference_u_shape(3, 8), costs, stage) for stage in range(3)]
    [5.0, 6.0, 4.0]
    """
    live = peak = 0.0
    for action in schedule.orders[stage]:
        live += costs.forward[action.vstage] if action.op is Op.F else -costs.forward[action.vstage]
        peak = max(peak, live)
    return peak


def _table(results: Sequence[Result]) -> Iterator[str]:
    """Write a line for each P, m and order, with groups of columns over L."""
    latencies = [f"{latency:g}" for latency in LATENCIES]
    groups = {"step time at L =": 6, "efficiency, %": 4, "step / bound": 6}
    heads = [title.ljust(width * len(latencies)) for title, width in groups.items()]
    yield f"{'':27}" + "  ".join([*heads, "step / own at L = 0".ljust(5 * len(latencies) - 5), "kept"])
    columns = ["".join(f"{latency:>{width}}" for latency in latencies) for width in groups.values()]
    yield f" P  m  {'order':20}" + "  ".join([*columns, "".join(f"{latency:>5}" for latency in latencies[1:])])
    for (num_stages, num_microbatches), block in groupby(results, lambda r: (r.num_stages, r.num_microbatches)):
        rows: dict[str, list[Result]] = {}
        for result in block:
            rows.setdefault(result.order, []).append(result)
        yield ""
        for order, row in rows.items():
            cells = [
                "".join(f"{r.step:6.1f}" for r in row),
                "".join(f"{100 * r.efficiency:4.0f}" for r in row),
                "".join(f"{r.step / r.bound:6.3f}" for r in row),
                "".join(f"{r.step / row[0].step:5.2f}" for r in row[1:]),
                f"{row[0].kept:.0f}-{row[-1].kept:.0f}",
            ]
            yield f"{num_stages:2} {num_microbatches:2}  {order:20}" + "  ".join(cells)


def _summary(results: Sequence[Result]) -> Iterator[str]:
    """Write the extreme ratios over all P, for each order and L, where a step is long enough to hide latency."""
    steps = {(r.order, r.num_stages, r.num_microbatches, r.latency): r.step for r in results}

    def over_ours(r: Result) -> float:
        return r.step / steps[OURS_NEED, r.num_stages, r.num_microbatches, r.latency]

    ratios: tuple[tuple[str, _Extreme, Callable[[Result], float]], ...] = (
        ("largest step / bound", max, lambda r: r.step / r.bound),
        ("largest step / own at L = 0", max, lambda r: r.step / steps[r.order, r.num_stages, r.num_microbatches, 0.0]),
        (f"largest step / {OURS_NEED}", max, over_ours),
        (f"smallest step / {OURS_NEED}", min, over_ours),
    )
    long = [r for r in results if r.num_microbatches >= 16]
    yield f"{'over all P with m >= 16, at L =':57}" + "".join(f"{latency:7g}" for latency in LATENCIES)
    for (name, extreme, ratio), order in product(ratios, dict.fromkeys(r.order for r in results)):
        row = [extreme(ratio(r) for r in long if (r.order, r.latency) == (order, latency)) for latency in LATENCIES]
        yield f"{name:35} {order:21}" + "".join(f"{value:7.3f}" for value in row)


if __name__ == "__main__":
    main()
