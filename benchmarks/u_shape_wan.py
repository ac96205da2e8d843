"""A U-shaped pipeline over a line with latency, measured, against the simulation and MindSpeed's order.

    python -m benchmarks.u_shape_wan --output docs/evidence    prints the table; writes u-shape-wan.md, .json and .svg
    python -m benchmarks.u_shape_wan --quick          a small grid; nothing is written
    python -m benchmarks.u_shape_wan --from docs/evidence/u-shape-wan.json --output docs/evidence   from old figures

This page shows what latency between edge and cloud costs a U-shaped pipeline, and how well the simulator predicts it.

The benchmark needs root and /dev/net/tun; without them it says why it cannot run, and ends. It takes seven to ten
minutes.

The executor, the channels, gloo, TCP and the line between the sites are real; the line's latency and bandwidth are
emulated (``benchmarks/wan``). Compute is sleep, so two cores are enough. t_f = 40 ms is the forward of one of the
edge's two parts for one microbatch. The forward of a cloud stage takes 2 t_f, and a backward twice its forward,
so every stage computes 6 t_f per microbatch. P is the number of stages, m the number of microbatches. L is the one-way
latency between the sites, in t_f. A message has 256 KiB. The line carries 1 Gbit/s each way. Connections are warmed up,
and do not fall back to a slow start after a pause (``tcp_slow_start_after_idle = 0``).

"ours" is the order that a run plans by default. It may have two microbatches more in flight than the busiest stage
needs. "reference" is the order of MindSpeed's layerwise disaggregated training, run by our executor, which posts its
receives as early as it is useful. It has its own number of microbatches in flight (P + 1 on the edge).

The two orders take turns, step by step. All rows of one P are measured at the same time: processes that sleep hardly
disturb each other. A step lasts from the common start until the last stage is done; the median counts. "simulated" is
the same schedule in the simulator, where a message leaves only when its receiver is ready, as in gloo. "kept" says
whether the stages kept as many activations as planned.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.u_shape_wan_plot import draw
from benchmarks.u_shape_wan_results import OURS, REFERENCE, Row
from benchmarks.wan.link import LinkUnavailableError
from benchmarks.wan.steps import Job, Outcome, run_jobs
from vtp_plugin.plan.schedule.cost.costs import Costs, u_costs
from vtp_plugin.plan.schedule.cost.simulator import choose_lookahead, simulate
from vtp_plugin.plan.schedule.make.u_shape import choose_limits, plan_u_shape, reference_u_shape
from vtp_plugin.plan.schedule.order.actions import Schedule
from vtp_plugin.plan.schedule.order.add_communication import lower
from vtp_plugin.plan.schedule.order.placement import u_placement

T_F_S = 0.04
CLOUD = 2.0
MBIT = 1000.0
SHAPE = (64, 1, 1024)
LATENCIES = (0.0, 0.5, 1.0, 2.0, 4.0)
TARGETS = {1.0: 1.05, 2.0: 1.10, 4.0: 1.20}  # of our own step at L = 0


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small grid")
    parser.add_argument("--output", type=Path, help="folder for u-shape-wan.md, .json and .svg")
    parser.add_argument("--from", dest="source", type=Path, help="read the figures of an earlier run from its JSON")
    options = parser.parse_args()
    if options.source:
        found = json.loads(options.source.read_text())
        _write(options.output, [_read(**row) for row in found["rows"]], found["lines"], found["summary"])
        return
    stages, num_microbatches, num_steps = ((2,), 4, 2) if options.quick else ((2, 3, 4), 16, 10)
    rows: list[Row] = []
    lines: list[dict[str, object]] = []
    load_before = os.getloadavg()
    try:
        for num_stages in stages:
            measured, seen = measure(num_stages, num_microbatches, num_steps)
            rows += measured
            lines += seen
            print(*_table(measured), sep="\n", flush=True)
    except LinkUnavailableError as reason:
        sys.exit(f"no figures: {reason}")
    loads = f"load average of the machine: {load_before[0]:.1f} before, {os.getloadavg()[0]:.1f} after"
    summary = [*_summary(rows), loads]
    print("", *summary, sep="\n")
    if options.output:
        _write(options.output, rows, lines, summary)


def _write(folder: Path, rows: Sequence[Row], lines: Sequence[object], summary: Sequence[str]) -> None:
    """Write all figures, the table and the picture."""
    about = {"t_f_s": T_F_S, "cloud_t_f": CLOUD, "mbit": MBIT, "message_shape": SHAPE, "cores": os.cpu_count()}
    table = "\n".join([*_table(rows), "", *summary]).strip("\n")
    texts = {
        "json": _json({**about, "summary": summary}, lines, [asdict(row) for row in rows]),
        "svg": draw(rows, T_F_S),
        "md": f"# {__doc__}\nTimes in t_f:\n\n```\n{table}\n```\n\n![Time of a step](u-shape-wan.svg)\n",
    }
    for kind, text in texts.items():
        path = folder / f"u-shape-wan.{kind}"
        path.write_text(text, encoding="ascii")
        print(f"wrote {path}")


def measure(num_stages: int, num_microbatches: int, num_steps: int) -> tuple[list[Row], list[dict[str, object]]]:
    """Run both orders over lines of all latencies at once; return the steps, and what was seen of the lines."""
    jobs = [_job(num_stages, num_microbatches, num_steps, latency) for latency in LATENCIES]
    outcomes = run_jobs(jobs)
    rows = [
        _row(name, latency, job, outcome)
        for latency, job, outcome in zip(LATENCIES, jobs, outcomes, strict=True)
        for name in job.schedules
    ]
    lines: list[dict[str, object]] = [
        {
            "num_stages": num_stages,
            "latency_ms": job.latency_ms,
            "found_ms": outcome.links["latency_ms"]["0"],
            "transfer_found_ms": outcome.links["transfer_ms"]["0"],
            "relay": outcome.line,
        }
        for job, outcome in zip(jobs, outcomes, strict=True)
    ]
    return rows, lines


def _job(num_stages: int, num_microbatches: int, num_steps: int, latency: float) -> Job:
    costs = wan_costs(num_stages, latency)
    limits, _ = choose_limits(None, u_placement(num_stages), costs, num_microbatches)
    orders = {
        OURS: plan_u_shape(num_stages, num_microbatches, costs, limits=limits).schedule,
        REFERENCE: reference_u_shape(num_stages, num_microbatches),
    }
    return Job(
        latency_ms=1e3 * latency * T_F_S,
        mbit=MBIT,
        costs=costs,
        schedules={name: lower(order, lookahead=choose_lookahead(order, costs)) for name, order in orders.items()},
        num_steps=num_steps,
        shape=SHAPE,
    )


def wan_costs(num_stages: int, latency: float) -> Costs:
    """Give the costs in seconds; the line's bandwidth counts between the sites only.

    >>> costs = wan_costs(3, 2.0)
    >>> costs.forward, costs.latency, [round(1e3 * costs.transfer_time(v), 1) for v in range(3)]
    ((0.04, 0.08, 0.08, 0.04), (0.08, 0.0, 0.08), [2.1, 0.0, 2.1])
    """
    costs = u_costs(num_stages, cloud=CLOUD * T_F_S, latency=latency * T_F_S, edge=T_F_S)
    bandwidth = [MBIT * 1e6 / 8 if v in (0, num_stages - 1) else float("inf") for v in range(num_stages)]
    message_bytes = 4 * SHAPE[0] * SHAPE[1] * SHAPE[2]
    return replace(costs, bandwidth=tuple(bandwidth), message_bytes=(message_bytes,) * num_stages)


def _row(name: str, latency: float, job: Job, outcome: Outcome) -> Row:
    schedule = job.schedules[name]
    timeline = simulate(schedule, job.costs, mode="rendezvous")
    return Row(
        order=name,
        num_stages=job.num_stages,
        num_microbatches=schedule.num_microbatches,
        latency=latency,
        in_flight=timeline.in_flight,
        lookahead=_lookahead(schedule, job.costs),
        simulated_s=timeline.makespan,
        steps_s=tuple(outcome.steps_s[name]),
        planned_kept=timeline.activations,
        measured_kept=tuple(outcome.kept[name]),
    )


def _lookahead(schedule: Schedule, costs: Costs) -> int:
    orders = tuple(tuple(action for action in order if action.op.is_compute) for order in schedule.orders)
    return choose_lookahead(replace(schedule, orders=orders), costs)


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """Write a line for each latency and order, times in t_f, with a head for each number of stages."""
    for _, block in groupby(rows, lambda row: row.num_stages):
        yield from _block([*block])


def _block(rows: Sequence[Row]) -> Iterator[str]:
    yield ""
    yield " P  m    L  order       in flight  simulated   median  (fastest..slowest)  / simulated  / own L=0  kept"
    own = {row.order: row.median_s for row in rows if row.latency == 0}
    for row in rows:
        simulated, median, least, most = (
            time_s / T_F_S for time_s in (row.simulated_s, row.median_s, min(row.steps_s), max(row.steps_s))
        )
        is_kept = "as planned" if row.measured_kept == row.planned_kept else f"{row.measured_kept}!"
        yield (
            f"{row.num_stages:2} {row.num_microbatches:2} {row.latency:4g}  {row.order:10}  "
            f"{','.join(map(str, row.in_flight)):9}  {simulated:9.1f}  {median:7.1f}  ({least:7.1f}..{most:7.1f})  "
            f"{median / simulated:11.3f}  {row.median_s / own[row.order]:9.3f}  {is_kept}"
        )


def _json(about: dict[str, object], lines: Sequence[object], rows: Sequence[object]) -> str:
    """Write the results with one line for each thing that was measured, times to 0.1 ms."""
    head = json.dumps(about, indent=1)[:-2]
    tables = {
        name: ",\n  ".join(map(json.dumps, _rounded(found))) for name, found in (("lines", lines), ("rows", rows))
    }
    return "".join([head, *(f',\n "{name}": [\n  {text}\n ]' for name, text in tables.items()), "\n}\n"])


def _read(**row: Any) -> Row:
    return Row(**{name: tuple(value) if isinstance(value, list) else value for name, value in row.items()})


def _rounded(found: Sequence[object]) -> list[object]:
    return json.loads(json.dumps(found), parse_float=lambda text: round(float(text), 4))


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    """Write how the figures stand to what was promised."""
    ours = {(row.num_stages, row.latency): row for row in rows if row.order == OURS}
    apart = [abs(row.median_s / row.simulated_s - 1) for row in rows]
    yield f"measured and simulated differ by at most {100 * max(apart):.1f} % (wanted: 10 %)"
    # Fewer microbatches cannot hide it: filling and draining the pipeline takes too much of the step.
    targets = TARGETS if min(row.num_microbatches for row in rows) >= 16 else {}
    for latency, target in targets.items():
        ratios = [ours[p, latency].median_s / ours[p, 0.0].median_s for p, at in ours if at == latency]
        yield f"L = {latency:g}: at most {max(ratios):.3f} of our own step at L = 0 (wanted: {target:.2f})"
    for latency in LATENCIES:
        gains = [
            row.median_s / ours[row.num_stages, latency].median_s
            for row in rows
            if row.order == REFERENCE and row.latency == latency
        ]
        yield f"L = {latency:g}: the reference's order takes {min(gains):.3f} to {max(gains):.3f} of ours"
    is_equal = all(row.planned_kept == row.measured_kept for row in rows)
    yield f"kept activations are as planned in {'all' if is_equal else 'NOT all'} {len(rows)} cases"


if __name__ == "__main__":
    main()
