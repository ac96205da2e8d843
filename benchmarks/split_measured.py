"""Steps with split backwards, measured beside steps without, and beside what was simulated.

    python -m benchmarks.split_measured             prints the table; the rows with a line need root and /dev/net/tun
    python -m benchmarks.split_measured --quick     fewer steps and rows, no line

Executor, channels, gloo and the line between the sites are real; the line's latency is emulated (``benchmarks/wan``).
Compute is sleep, so two cores are enough. t = 40 ms is a forward; both parts of a backward take as long as their
forward. A message has 256 KiB, the line carries 1 Gbit/s each way. The orders take turns, step by step; the median
counts.

"whole" is the order that a run plans without ``--vtp-split-backward``, "split" the one with it, under default limits.
"simulated" is the same schedule in the simulator, where a message leaves only when its receiver is ready, as in gloo.
In a U the stages of the cloud take 2 t, latency is in t, and "of L = 0" compares with whole backwards without latency.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.wan.link import LinkUnavailableError
from benchmarks.wan.steps import Job, Outcome, run_jobs
from vtp_plugin.plan.schedule.cost.costs import Costs, u_costs, uniform_costs
from vtp_plugin.plan.schedule.cost.simulator import simulate
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
from vtp_plugin.plan.schedule.order.placement import plain_placement, u_placement

T_S = 0.04
MBIT = 1000.0
SHAPE = (64, 1, 1024)
LATENCIES = (0.0, 1.0, 2.0, 4.0)


def plain_job(forward: tuple[float, ...], num_microbatches: int, num_steps: int) -> Job:
    """A plain pipeline on one machine; forwards in t."""
    placement = plain_placement(len(forward))
    costs = uniform_costs(placement, forward=T_S, backward=2 * T_S)
    costs = replace(
        costs,
        forward=tuple(T_S * each for each in forward),
        backward=tuple(2 * T_S * each for each in forward),
        weights=tuple(T_S * each for each in forward),
    )
    return _job(ScheduleRequest(placement=placement, num_microbatches=num_microbatches, costs=costs), None, num_steps)


def u_job(num_stages: int, latency: float, num_microbatches: int, num_steps: int) -> Job:
    """A U over a line; latency in t."""
    costs = u_costs(num_stages, cloud=2 * T_S, latency=latency * T_S, edge=T_S)
    bandwidth = tuple(MBIT * 1e6 / 8 if v in (0, num_stages - 1) else float("inf") for v in range(num_stages))
    message_bytes = 4 * SHAPE[0] * SHAPE[1] * SHAPE[2]
    costs = replace(costs, bandwidth=bandwidth, message_bytes=(message_bytes,) * num_stages)
    request = ScheduleRequest(placement=u_placement(num_stages), num_microbatches=num_microbatches, costs=costs)
    return _job(request, 1e3 * latency * T_S, num_steps)


def _job(request: ScheduleRequest, latency_ms: float | None, num_steps: int) -> Job:
    assert request.costs is not None
    schedules = {
        name: make_schedule(replace(request, split_backward=name == "split"))[0] for name in ("whole", "split")
    }
    return Job(
        latency_ms=latency_ms,
        mbit=MBIT,
        costs=request.costs,
        schedules=schedules,
        num_steps=num_steps,
        shape=SHAPE,
    )


def rows(name: str, job: Job, outcome: Outcome, costs: Costs, base_s: float | None = None) -> Iterator[str]:
    """Yield the line of one pipeline; all times in t."""
    simulated = {order: simulate(each, costs, mode="rendezvous").makespan for order, each in job.schedules.items()}
    medians = {order: statistics.median(outcome.steps_s[order]) for order in job.schedules}
    cells = [f"{value[order] / T_S:9.1f}" for order in ("whole", "split") for value in (simulated, medians)]
    apart = max(abs(medians[order] / simulated[order] - 1) for order in medians)
    beside = "" if base_s is None else f"{medians['whole'] / base_s:9.3f} {medians['split'] / base_s:9.3f}"
    yield f"{name:28} {' '.join(cells)} {medians['split'] / medians['whole']:9.3f} {100 * apart:7.1f} % {beside}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps and rows, no line")
    options = parser.parse_args()
    num_steps = 2 if options.quick else 7
    load = os.getloadavg()[0]
    head = ("whole sim.", "measured", "split sim.", "measured", "split/w.", "apart", "whole, split of L = 0")
    print(f"{'pipeline':28} {' '.join(f'{each:>9}' for each in head)}")
    plain = {
        "4 equal, 8 microbatches": ((1.0,) * 4, 8),
        "1,2: 1 and 1.5": ((1.0, 1.5), 8),
        "1,4,4: 1.5, 1 and 1": ((1.5, 1.0, 1.0), 8),
        "slow in the middle": ((1.0, 1.0, 1.6, 1.0, 1.0), 16),
    }
    for name, (forward, count) in [*plain.items()][: 1 if options.quick else None]:
        job = plain_job(forward, count, num_steps)
        (outcome,) = run_jobs([job])
        print(*rows(name, job, outcome, job.costs), sep="\n", flush=True)
    for num_stages in () if options.quick else (2, 3):
        jobs = [u_job(num_stages, latency, 16, num_steps) for latency in LATENCIES]
        try:
            outcomes = run_jobs(jobs)
        except LinkUnavailableError as reason:
            sys.exit(f"no figures of a U: {reason}")
        base_s = statistics.median(outcomes[0].steps_s["whole"])
        for latency, job, outcome in zip(LATENCIES, jobs, outcomes, strict=True):
            print(
                *rows(f"U of {num_stages} stages, L = {latency:g}", job, outcome, job.costs, base_s),
                sep="\n",
                flush=True,
            )
    print(f"load average of the machine: {load:.1f} before, {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
