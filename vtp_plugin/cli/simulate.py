"""``simulate``: one step of the schedule that a run with these flags would use; nothing is measured."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from vtp_plugin.cli.boundaries import add_bridge_flag, read_modules, title_of, view_boundaries
from vtp_plugin.cli.command_base import PAGE, Parser, add_output_flag, check_ending, named, print_answer, written
from vtp_plugin.cli.page_sections import split_parts, with_run, write_output
from vtp_plugin.cli.run_flags import Run, add_run_flags, read_run
from vtp_plugin.config import VtpConfig
from vtp_plugin.config.resolve import option_context, read_flags
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.launch.launch_commands import Launch, named_nodes, usual_nodes
from vtp_plugin.plan.layout.replica_map import ReplicaMap
from vtp_plugin.plan.schedule.cost.costs import (
    Costs,
    lower_bound,
    make_route,
    parse_costs,
    split_costs,
    u_costs,
    uniform_costs,
)
from vtp_plugin.plan.schedule.cost.simulator import Timeline, simulate
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
from vtp_plugin.plan.schedule.make.u_shape import by_stage, check_in_flight, choose_limits
from vtp_plugin.plan.schedule.order.actions import Schedule, channel_label
from vtp_plugin.plan.schedule.order.placement import Placement, num_rings, place_modules, place_workers
from vtp_plugin.plan.schedule.proof.check_schedule import peaks_kept
from vtp_plugin.report.page.report_page import ReportPage, TextTable
from vtp_plugin.report.pictures.draw_simulated_step import chrome_trace, draw_svg, draw_text, summarize
from vtp_plugin.util.text import in_digits

_WIDTH = 120
_MICROBATCHES = 8
_ENDINGS = {".svg": "picture", ".json": "trace for Perfetto or Chrome", PAGE: "page"}


def add_arguments(parser: Parser) -> None:
    """Declare the flags."""
    parser.description = run.__doc__
    parser.epilog = _answer.__doc__
    add_run_flags(parser)
    add_bridge_flag(parser)
    group = parser.add_argument_group("Of the simulation")
    group.add_argument(
        "--num-microbatches",
        type=int,
        metavar="N",
        help="of a step, instead of the batch sizes; those of all replicas of a stage that work for one replica of "
        f"another; default: {_MICROBATCHES}, or a few more where replicas or model chunks need them",
    )
    add_output_flag(group, "FILE", "FILE.html: page; FILE.svg: picture; FILE.json: trace for Perfetto")


@dataclass(frozen=True, kw_only=True)
class _Simulation:
    """A simulated step.

    Attributes:
        flags: the run; None for modules on grids of their own.
        request: the request for the schedule.
        costs: durations and links.
        are_given: whether flags give the costs, in ms; else they are model durations.
        name: what the step is of, for the title of a picture.
        why: why this order was chosen.
        least: time that no order can beat; None if the order is fixed.
        about_number: why there are so many microbatches; empty if the flags say it.
    """

    flags: Run | None
    request: ScheduleRequest
    costs: Costs
    are_given: bool
    name: str
    why: str
    least: float | None
    about_number: str

    @cached_property
    def schedule(self) -> Schedule:
        """The order of the step."""
        return make_schedule(self.request)[0]

    @cached_property
    def timeline(self) -> Timeline:
        """The step. Gloo, NCCL and HCCL behave so: a message leaves when its receiver is ready."""
        return simulate(self.schedule, self.costs, mode="rendezvous")

    @property
    def unit(self) -> str:
        """Unit of all times; empty for the model durations."""
        return "ms" if self.are_given else ""

    @property
    def title(self) -> str:
        """Title of a picture."""
        return f"{self.schedule.name}, {self.name}, {self.request.num_microbatches} microbatches"

    @property
    def about(self) -> list[str]:
        """What the order and the times follow from."""
        forward = "1, of a cloud stage 2" if self.flags and self.flags.config.layerwise_disaggregated else "1"
        durations = (
            f"no --vtp-costs: model durations (a forward takes {forward}; a backward twice that; messages no time)"
        )
        if self.are_given:
            durations = "times in ms, from --vtp-costs"
        said = (self.about_number, self.why, f"schedule {self.schedule.digest}; {durations}")
        return [text for text in said if text]


def run(options: argparse.Namespace) -> None:
    """The order is that of a run with these flags. Durations and links come from --vtp-costs, here for every kind of
    schedule. Without it a forward takes 1 on each stage (2 on a cloud stage of a U), a backward twice as long, and
    messages take no time.
    """
    check_ending(options.output, _ENDINGS)
    step = _of_modules(options) if options.bridge else _of_pipeline(options)
    found = [summarize(step.timeline, unit=step.unit), _table(step.timeline)]
    by_ending = {
        PAGE: lambda: _page(options, step, [*found, *step.about]),
        ".svg": lambda: draw_svg(step.timeline, title=step.title, unit=step.unit),
        # The model durations are drawn as seconds.
        ".json": lambda: chrome_trace(step.timeline, unit_s=1e-3 if step.unit else 1.0),
    }
    write_output(options, by_ending)
    lines = (textwrap.fill(text, _WIDTH) for text in step.about)
    parts = [draw_text(step.timeline), "", *found, "", *lines, *written(options)]
    print_answer(options, _answer(step, options.output), parts)


def _page(options: argparse.Namespace, step: _Simulation, parts: Sequence[str | TextTable]) -> ReportPage:
    """Show a simulated step, and the layout that runs it."""
    table, notes = split_parts(parts)
    page = ReportPage(
        title=step.title,
        notes=notes,
        table=table,
        about_table="Stages in a step",
        step=draw_svg(step.timeline, title=step.title, unit=step.unit),
        about_step="A simulated step",
    )
    if (flags := step.flags) is None:
        return page
    nodes = usual_nodes(flags.layout, flags.sites)
    about = ["the nodes are assumed; plan --nodes 8,6 takes their devices, and says what to start on each"]
    if flags.fitted is not None:
        nodes, about = named_nodes(flags.fitted.candidate.node_names, flags.layout), []
    page = replace(page, launch=Launch(layout=flags.layout, nodes=nodes, program=()), about_nodes=about)
    peaks = [peaks_kept(step.schedule, stage) for stage in range(flags.layout.num_stages)]
    return with_run(page, flags, view_boundaries(flags), options.card_memory, peaks)


def _of_pipeline(options: argparse.Namespace) -> _Simulation:
    flags = read_run(options, takes_all_costs=True)
    given = flags.num_microbatches if options.num_microbatches is None else options.num_microbatches
    num_microbatches, about_number = _num_microbatches(given, flags.placement)
    stated, is_split = flags.schedule_options.costs, flags.schedule_options.split_backward
    costs = _model_costs(flags) if stated is None else stated
    # None stands for the model durations, which know nothing of split microbatches.
    request = ScheduleRequest(
        placement=flags.placement,
        num_microbatches=num_microbatches,
        costs=costs if stated is not None or flags.replicas.is_split or is_split else None,
        in_flight=flags.schedule_options.in_flight,
        split_backward=is_split,
    )
    why, least = _why(flags, request, costs)
    return _Simulation(
        flags=flags,
        request=request,
        costs=costs,
        are_given=stated is not None,
        name=option_context(flags.config, flags.layout).layout_text,
        why=why,
        least=least,
        about_number=about_number,
    )


def _of_modules(options: argparse.Namespace) -> _Simulation:
    """Read the order in which a run with a planned schedule trains modules."""
    modules, config = read_modules(options), read_flags(options, VtpConfig())
    num_stages = {module.name: module.sizes[2] for module in modules}
    placed = place_modules(num_stages, {module.name: [modules[-1].name] for module in modules[:-1]})
    if config.in_flight is not None:
        check_in_flight(config.in_flight, placed.placement.num_stages)
    num_microbatches, about_number = _num_microbatches(options.num_microbatches, placed.placement)
    request = ScheduleRequest(
        placement=placed.placement,
        num_microbatches=num_microbatches,
        in_flight=by_stage(config.in_flight, placed.placement.num_stages),
    )
    stated = None if config.costs is None else parse_costs(config.costs, placed.placement)
    stages = ", ".join(f"{first} {name}" for name, first in placed.first_stages.items())
    return _Simulation(
        flags=None,
        request=request,
        costs=uniform_costs(placed.placement) if stated is None else stated,
        are_given=stated is not None,
        name=title_of(modules),
        why=f"order: 1F1B of all modules, whose first stages are {stages}; --vtp-in-flight lets encoders run ahead",
        least=None,
        about_number=about_number,
    )


def _num_microbatches(given: int | None, placement: Placement) -> tuple[int, str]:
    """Return the number of microbatches, by default one that all replicas and model chunks can share; and why."""
    if given is not None:
        if given < 1:
            raise ConfigError(f"--num-microbatches {given} must be at least 1; leave it out for {_MICROBATCHES}")
        return given, ""
    is_interleaved = not num_rings(placement) and placement.num_vstages > placement.num_stages
    step = math.lcm(*placement.num_replicas, placement.num_stages if is_interleaved else 1)
    number = -(-_MICROBATCHES // step) * step
    return number, f"{number} microbatches, by default; --num-microbatches N gives another number"


def _model_costs(flags: Run) -> Costs:
    """Return durations for a run without costs; of a split run they are those of the joined microbatches."""
    num_rings = flags.config.num_rings
    if flags.fitted is not None:
        return flags.fitted.candidate.costs
    costs = u_costs(flags.layout.num_stages, num_rings=num_rings) if num_rings else uniform_costs(flags.placement)
    if not flags.replicas.is_split:
        return costs
    replicas = ReplicaMap(dp_sizes=flags.layout.dp_sizes)
    return split_costs(place_workers(replicas, num_chunks=1, num_rings=num_rings), costs)


def _why(flags: Run, request: ScheduleRequest, costs: Costs) -> tuple[str, float | None]:
    """Return why this order was chosen, and the time that no order can beat; None if that is not known."""
    if request.split_backward:
        # Without a split, limits of a plain pipeline are what its stages run ahead, not what they may.
        in_flight = request.in_flight if flags.config.num_rings else None
        whole = replace(request, split_backward=False, in_flight=in_flight)
        step = simulate(make_schedule(whole)[0], costs, mode="rendezvous").makespan
        return (
            "order: gradients of weights are computed apart, where a stage would wait (--vtp-split-backward); without "
            f"that a step takes {in_digits(step, 6)}",
            None,
        )
    if not flags.config.layerwise_disaggregated:
        if flags.is_ring:
            num_chunks = flags.placement.num_vstages // flags.placement.num_stages
            return f"order: Megatron's interleaved 1F1B, {num_chunks} model chunks on each stage", None
        return (
            "order: Megatron's 1F1B, each stage runs forwards and backwards in turn once the first gradient is there",
            None,
        )
    placement = request.placement
    limits, _ = choose_limits(request.in_flight, placement, costs, request.num_microbatches)
    by_worker = placement.by_worker(limits)
    least = lower_bound(make_route(placement, costs), request.num_microbatches, by_worker)
    source = "what keeps the busiest stage busy, plus two" if request.in_flight is None else "--vtp-in-flight"
    return (
        "order: the shortest of many that were tried for these durations; no order can take less than "
        f"{in_digits(least, 6)} with at most {','.join(map(str, limits))} microbatches in flight on the stages "
        f"({source})",
        least,
    )


def _rows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the entry of each worker in the output of ``--json``."""
    placement = timeline.placement
    busy, utilization = timeline.busy, timeline.utilization
    for worker, in_flight in enumerate(timeline.in_flight):
        stage, replica = placement.stage_and_replica(worker)
        yield {
            "stage": stage,
            "replica": replica,
            "busy": busy[worker],
            "utilization": utilization[worker],
            "in_flight": in_flight,
            "kept_activations": [timeline.activations[vstage] for vstage in placement.vstages(stage)],
        }


def _table(timeline: Timeline) -> TextTable:
    """Write a row for each worker; the busiest one is marked."""
    placement = timeline.placement
    rows: list[tuple[str, ...]] = []
    for worker, row in enumerate(_rows(timeline)):
        percent, kept = 100 * row["utilization"], ", ".join(map(str, row["kept_activations"]))
        name = placement.label(worker).removeprefix("stage ")
        rows.append((name, f"{percent:.1f} %", f"{100 - percent:.0f} %", str(row["in_flight"]), kept))
    header = ("stage", "computing", "idle", "microbatches in flight", "activations kept, by chunk")
    width = max(len(name) for name, *_ in (header, *rows))
    form = f"{{:>{width}}}  {{:>9}}  {{:>5}}  {{:>22}}  {{}}"
    lines = [form.format(*row) for row in (header, *rows)]
    return TextTable(lines=lines, header=header, rows=rows, marked=timeline.busy.index(max(timeline.busy)))


def _answer(step: _Simulation, output: Path | None) -> dict[str, object]:
    """Keys of --json: unit (of all times: "ms", or null for the model durations), num_microbatches, schedule: digest,
    why; step; least_step (no order can be shorter; null where the order is fixed); stages: stage, replica, busy,
    utilization (share of the step), in_flight (microbatches), kept_activations (by chunk); channels: name, bytes;
    output (file or null).
    """
    timeline, schedule = step.timeline, step.schedule
    channels = [(channel_label(timeline.placement, channel), size) for channel, size in timeline.bytes_by_channel]
    return {
        "unit": step.unit or None,
        "num_microbatches": schedule.num_microbatches,
        "schedule": {**named(schedule, "digest", "name"), "why": step.why},
        "step": timeline.makespan,
        "least_step": step.least,
        "stages": [*_rows(timeline)],
        "channels": [{"name": name, "bytes": size} for name, size in channels],
        "output": output,
    }
