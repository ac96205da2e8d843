"""Unequal data parallelism, measured: step time and edge utilisation of multiplex and split, against the simulation.

    python -m benchmarks.unequal_dp_real --output docs/evidence    prints the table; writes unequal-dp-measured.md
    python -m benchmarks.unequal_dp_real --quick          two cases, few steps; nothing is written

This page compares the two modes of unequal data parallelism, multiplex and split, in real steps and in the simulator.
The benchmark takes three minutes. The edge has one replica. Each of the P - 1 cloud stages has k. Every replica is one
process.
The executor, the channels and gloo are real. Compute is sleep, so two cores are enough. t_f is 40 ms.

As in ``benchmarks/unequal_dp.py``, the edge computes 6 t_f per microbatch: 2 t_f forward, 4 t_f backward. A cloud stage
takes k times as long, so all stages are equally busy. A step has 8 microbatches for every cloud replica, and both modes
see the same samples. "1f1b" is a plain pipeline, "u" the U-shape. Both run the schedule that a run gets by default.

At L = 0 everything goes over loopback. With L above 0, messages from and to the edge cross the emulated line of
``benchmarks/wan``, with a one-way latency of L t_f. These cases need root and are skipped without it. A message of one
microbatch has 16 KiB.

All cases run at the same time. In each case the two modes take turns, step by step. A step lasts from the common start
until the last process is done; medians count. "Simulated" is the same schedule in the simulator, where a message leaves
only when its receiver is ready, as in gloo. "Edge use" is the share of the step in which the edge computes. "Kept" is
the largest number of activations that the edge kept at a time, in microbatches of a cloud replica; in the U for its
first and its last part.
"""

from __future__ import annotations

import argparse
import os
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from benchmarks.unequal_dp_results import MULTIPLEX, PER_REPLICA, PLAIN, SPLIT, SimulatedPipeline, U
from benchmarks.wan.link import LinkUnavailableError
from benchmarks.wan.steps import Job, Outcome, run_jobs
from vtp_plugin.plan.schedule.cost.costs import Costs, split_costs
from vtp_plugin.plan.schedule.cost.simulator import simulate
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule

T_F_S = 0.04
MBIT = 1000.0
SHAPE = (16, 1, 256)
NUM_STEPS = 7
SIZES = ((2, 2), (3, 2), (2, 4))  # P, k
FAR = (3, 2, 4.0)  # P, k, L
TARGET = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One mode of one case.

    Attributes:
        case: the case that was run.
        mode: mode in which it was run.
        simulated_s: simulated seconds of a step.
        steps_s: measured seconds of the steps.
        simulated_use: Share of the step in which the edge computes.
        uses: the same share in each measured step.
        planned_kept: Most microbatches of the schedule that the edge keeps at a time, by its virtual stages.
        measured_kept: the same as counted in the run.
    """

    case: SimulatedPipeline
    mode: str
    simulated_s: float
    steps_s: tuple[float, ...]
    simulated_use: float
    uses: tuple[float, ...]
    planned_kept: tuple[int, ...]
    measured_kept: tuple[int, ...]

    @property
    def median_s(self) -> float:
        """The measured time that counts."""
        return statistics.median(self.steps_s)

    @property
    def use(self) -> float:
        """The measured share that counts."""
        return statistics.median(self.uses)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two cases, few steps")
    parser.add_argument("--output", type=Path, help="folder for unequal-dp-measured.md")
    options = parser.parse_args()
    sizes, num_steps, far = (SIZES[:1], 2, ()) if options.quick else (SIZES, NUM_STEPS, (FAR,))
    cases = [_case(order, *where, 0.0) for order in (PLAIN, U) for where in sizes]
    far_cases = [_case(order, *where) for order in (PLAIN, U) for where in far]
    load_before = os.getloadavg()
    notes: list[str] = []
    try:
        rows = measure(cases + far_cases, num_steps)
    except LinkUnavailableError as reason:
        notes.append(f"no figures with latency: {reason}")
        rows = measure(cases, num_steps)
    loads = f"load average {load_before[0]:.1f} before, {os.getloadavg()[0]:.1f} after"
    notes.append(f"machine: {os.cpu_count()} cores, {loads}; {num_steps} steps of each mode, medians count")
    text = "\n".join([*_table(rows), "", *_summary(rows), *notes])
    print(text, _measured(rows), sep="\n")
    if options.output:
        path = options.output / "unequal-dp-measured.md"
        path.write_text(_document(text, _measured(rows)), encoding="ascii")
        print(f"wrote {path}")


def measure(cases: Sequence[SimulatedPipeline], num_steps: int) -> list[Row]:
    """Run all cases at once, each in both modes.

    Raises:
        LinkUnavailableError: This machine cannot make the lines of the cases with latency.
    """
    jobs = [_job(case, num_steps) for case in cases]
    outcomes = run_jobs(jobs)
    return [
        _row(case, mode, job, outcome)
        for case, job, outcome in zip(cases, jobs, outcomes, strict=True)
        for mode in job.schedules
    ]


def _case(order: str, num_stages: int, width: int, latency: float) -> SimulatedPipeline:
    return SimulatedPipeline(order=order, num_stages=num_stages, width=width, load=1.0, latency=latency)


def _job(case: SimulatedPipeline, num_steps: int) -> Job:
    wide, costs = case.placement, _in_seconds(case.costs)
    in_turn = ScheduleRequest(placement=wide, num_microbatches=case.width * PER_REPLICA, costs=costs)
    joined = replace(wide, num_replicas=())
    at_once = ScheduleRequest(placement=joined, num_microbatches=PER_REPLICA, costs=split_costs(wide, costs))
    return Job(
        latency_ms=1e3 * case.latency * T_F_S if case.latency else None,
        mbit=MBIT,
        costs=costs,
        schedules={mode: make_schedule(step)[0] for mode, step in ((MULTIPLEX, in_turn), (SPLIT, at_once))},
        num_steps=num_steps,
        shape=SHAPE,
        dp_sizes=wide.num_replicas,
        split=(SPLIT,),
    )


def _in_seconds(costs: Costs) -> Costs:
    def scaled(times: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(T_F_S * time for time in times)

    forward, backward, latency = map(scaled, (costs.forward, costs.backward, costs.latency))
    return replace(costs, forward=forward, backward=backward, latency=latency)


def _row(case: SimulatedPipeline, mode: str, job: Job, outcome: Outcome) -> Row:
    timeline = simulate(job.schedules[mode], job.costs_of(mode), mode="rendezvous")
    edge = case.placement.vstages(0)
    steps = zip(outcome.busy_s[mode], outcome.steps_s[mode], strict=True)
    return Row(
        case=case,
        mode=mode,
        simulated_s=timeline.makespan,
        steps_s=tuple(outcome.steps_s[mode]),
        simulated_use=timeline.busy[0] / timeline.makespan,
        uses=tuple(busy_s / step_s for busy_s, step_s in steps),
        planned_kept=tuple(timeline.activations[v] for v in edge),
        measured_kept=tuple(outcome.kept[mode][v] for v in edge),
    )


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """Write a line for each case and mode, times in t_f."""
    yield "                          time of a step, t_f                                  edge use, %"
    yield (
        "order  P  k  L  mode       simulated  median  (fastest..slowest)  / simulated  simulated  measured  "
        "split / multiplex  kept"
    )
    for case, pair in groupby(rows, lambda row: row.case):
        in_turn, at_once = pair
        for row in (in_turn, at_once):
            simulated, median, least, most = (
                time_s / T_F_S for time_s in (row.simulated_s, row.median_s, min(row.steps_s), max(row.steps_s))
            )
            ratio = f"{at_once.median_s / in_turn.median_s:17.3f}" if row is at_once else " " * 17
            size = case.width if row is at_once else 1
            kept = "+".join(str(size * number) for number in row.measured_kept)
            planned = "" if row.measured_kept == row.planned_kept else f", planned: {row.planned_kept}!"
            yield (
                f"{case.order:5}{case.num_stages:3}{case.width:3}{case.latency:3g}  {row.mode:9}  {simulated:9.1f}  "
                f"{median:6.1f}  ({least:7.1f}..{most:7.1f})  {median / simulated:11.3f}  "
                f"{100 * row.simulated_use:9.1f}  {100 * row.use:8.1f}  {ratio}  {kept}{planned}"
            )


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    """Write how measured and simulated figures agree, and which mode was faster."""
    apart = 100 * _largest_gap(rows)
    yield f"steps: measured and simulated differ by at most {apart:.1f} % (wanted: {100 * TARGET:.0f} %)"
    apart = max(abs(row.use - row.simulated_use) for row in rows)
    yield f"edge use: measured and simulated differ by at most {100 * apart:.1f} points"
    num_equal = sum(row.planned_kept == row.measured_kept for row in rows)
    yield f"the edge keeps as many activations as planned in {num_equal} of {len(rows)} rows"


def _largest_gap(rows: Sequence[Row]) -> float:
    return max(abs(row.median_s / row.simulated_s - 1) for row in rows)


def _measured(rows: Sequence[Row]) -> str:
    """Write split's measured time over multiplex's, by order and latency."""
    ratios: dict[tuple[str, float], list[float]] = {}
    for in_turn, at_once in zip(rows[::2], rows[1::2], strict=True):
        key = in_turn.case.order, in_turn.case.latency
        ratios.setdefault(key, []).append(at_once.median_s / in_turn.median_s)
    parts = [
        f"{' to '.join(f'{ratio:.3f}' for ratio in sorted({min(found), max(found)}))} ({order}, L = {latency:g})"
        for (order, latency), found in ratios.items()
    ]
    apart = 100 * _largest_gap(rows)
    text = (
        f"Time of a step with split over that with multiplex: {', '.join(parts)}. Differences below {apart:.1f} % are "
        "noise."
    )
    return textwrap.fill(text, 120)


def _document(text: str, measured: str) -> str:
    """Write the page."""
    head, _, rest = (__doc__ or "").partition("\n")
    return f"# {head}\n{rest}\n{measured}\n\n```\n{text}\n```\n"


if __name__ == "__main__":
    main()
