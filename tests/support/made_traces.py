"""Traces of runs that never ran: what ranks would write whose computes and links take given times."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from vtp_plugin.plan.schedule.cost.costs import Costs, u_costs
from vtp_plugin.plan.schedule.cost.simulator import simulate
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
from vtp_plugin.plan.schedule.order.actions import Schedule
from vtp_plugin.plan.schedule.order.placement import Placement, u_placement
from vtp_plugin.trace.compare_steps import plan_shares
from vtp_plugin.trace.stretches import (
    Cause,
    Owner,
    Plan,
    RankFile,
    RankStep,
    Stretch,
    clock_line,
    owner_line,
    plan_line,
    step_line,
    trace_path,
)

U = u_placement(3)
U_COSTS = u_costs(3, latency=30.0, cloud=20.0, edge=10.0)


def schedule_of(placement: Placement, costs: Costs | None, num_microbatches: int = 8) -> Schedule:
    """Make what a run would run."""
    return make_schedule(ScheduleRequest(placement=placement, num_microbatches=num_microbatches, costs=costs))[0]


def slowed(costs: Costs, *, forward: dict[int, float] | None = None, latency: dict[int, float] | None = None) -> Costs:
    """Add milliseconds to the forwards of virtual stages and to links."""
    forward, latency = forward or {}, latency or {}
    return replace(
        costs,
        forward=tuple(ms + forward.get(v, 0.0) for v, ms in enumerate(costs.forward)),
        latency=tuple(ms + latency.get(v, 0.0) for v, ms in enumerate(costs.latency)),
    )


def files_of(
    schedule: Schedule, planned: Costs | None, ran: Costs, *, apart_s: Sequence[float] = (), num_steps: int = 2
) -> list[RankFile]:
    """Let a run take what other costs than the planned ones give, on ranks whose clocks are apart.

    Each worker is a rank. Each step ends with 5 ms of the optimizer, for which the ranks wait for the last one.
    """
    plan = Plan(schedule=schedule, costs=planned)
    length_s = 1e-3 * simulate(schedule, ran, mode="rendezvous").makespan + 0.005
    files: list[RankFile] = []
    for share in plan_shares(schedule, ran):
        clock_s = apart_s[share.rank] if apart_s else 0.0
        owner = Owner(
            run="a", rank=share.rank, world_size=len(schedule.orders), stage=share.worker, worker=share.worker
        )
        file = RankFile(owner=owner, clocks=[(clock_s, -clock_s, 0.001)], plans={"p": plan})
        for number in range(1, num_steps + 1):
            start_s = number * length_s + clock_s
            end_s = start_s + length_s
            stretches = [s for s in share.stretches if s.cause is not Cause.OPTIMIZER]
            last_s = max(s.end_s for s in stretches)
            stretches.append(Stretch(cause=Cause.OPTIMIZER, name="", start_s=last_s, end_s=length_s))
            shifted = tuple(replace(s, start_s=s.start_s + start_s, end_s=s.end_s + start_s) for s in stretches)
            file.steps.append(RankStep(number=number, plan="p", start_s=start_s, end_s=end_s, stretches=shifted))
        files.append(file)
    return files


def write(folder: Path, files: list[RankFile], change: Callable[[list[dict[str, object]]], None] | None = None) -> None:
    """Write files as a run does."""
    for file in files:
        lines = [owner_line(file.owner), *(clock_line(*clock) for clock in file.clocks)]
        lines += [plan_line(digest, plan) for digest, plan in file.plans.items() if file.owner.rank == 0]
        lines += [step_line(step) for step in file.steps]
        if change is not None:
            change(lines)
        trace_path(folder, file.owner.rank).write_text("".join(json.dumps(line) + "\n" for line in lines))
