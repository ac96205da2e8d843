"""Pages of commands: their sections, their pictures, their files."""

from __future__ import annotations

import argparse
import base64
import hashlib
import math
import shlex
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING

import vtp_plugin
from vtp_plugin.cli.boundaries import BoundaryView, PlansView, explain, format_bytes, view_boundaries
from vtp_plugin.cli.bridges import BridgeView, Module, bridge_picture
from vtp_plugin.cli.common import write_file
from vtp_plugin.cli.run_flags import Run
from vtp_plugin.cli.search_request import CARD_MEMORY, SearchRequest
from vtp_plugin.cli.terminal import TextTable
from vtp_plugin.config.flag import format_value
from vtp_plugin.config.resolve import option_context
from vtp_plugin.plan.boundary.strategies.known_strategies import TransportRules
from vtp_plugin.plan.launch.launch_commands import Launch, NodeRanks, named_nodes, usual_nodes
from vtp_plugin.plan.layout.layer_lists import Kept
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout, format_ranks, size_names, size_texts
from vtp_plugin.plan.memory.footprint import Footprint
from vtp_plugin.plan.schedule.cost.costs import u_costs
from vtp_plugin.plan.schedule.cost.simulator import Timeline, timeline_of
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
from vtp_plugin.plan.schedule.make.u_shape import choose_limits
from vtp_plugin.plan.schedule.order.actions import Op, Schedule, num_rings
from vtp_plugin.plan.schedule.proof.check_schedule import peaks_kept
from vtp_plugin.report import page as template
from vtp_plugin.report.page.report_page import (
    MemoryBar,
    MemorySection,
    PageNode,
    PageTable,
    RanksOfStage,
    ReportPage,
    TableRow,
)
from vtp_plugin.report.pictures.draw_pipeline import draw_pipeline
from vtp_plugin.report.pictures.draw_rows import Box, Group, draw_rows
from vtp_plugin.report.pictures.draw_timeline import draw_svg
from vtp_plugin.tune.search.evaluate import Candidate
from vtp_plugin.tune.search.find_best import SearchResult
from vtp_plugin.tune.search.schedule_time import compiled_for
from vtp_plugin.util.text import own_command

if TYPE_CHECKING:
    from markupsafe import Markup


Peaks = tuple[Kept, ...]
"""The fullest moments of a rank of a stage: what it keeps of each of its chunks."""
_HEADS = ("memory of a rank", "parameters", "weights", "gradients", "optimizer", "overhead", "activations")
_ABOUT_WAITING = "of one microbatch, from the gradient of its input to those of its weights"
_NOT_WAITING = "not known but of Megatron's own layers (--transformer-impl local) without --moe-grouped-gemm"
_ABOUT_CHUNKS = (
    "several numbers: of a stage's chunks, in the order of the model; chunks that keep as much are counted together"
)


def memory_lines(flags: Run) -> Iterator[str]:
    """Write a table of the fullest rank of every stage; neighbours that hold as much are one line."""
    if isinstance(flags.memory, str):
        yield f"memory of a rank: {flags.memory}"
        return
    peaks, is_split = peaks_by_stage(flags), flags.schedule_options.split_backward
    of_a_step = ("in flight + waiting" if is_split else "in flight", "total") if peaks else ()
    rows = [(*_HEADS, *(("waiting",) if is_split else ()), *of_a_step), *_rows(flags, flags.memory, peaks)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
    yield f"activations: {flags.about_activations}"
    if is_split:
        is_known = all(held.waiting_bytes is not None for held in flags.memory)
        yield f"waiting: {_ABOUT_WAITING if is_known else _NOT_WAITING}"
    if peaks and flags.is_ring:
        yield _ABOUT_CHUNKS
    most = max(flags.memory, key=lambda held: held.activation_bytes or 0)
    if most.kept_bytes:
        named = (f"{name} {format_bytes(size)}" for name, size in islice(most.kept_bytes.items(), 3))
        yield f"the most of it, on the fullest rank: {', '.join(named)}"
    if most.overhead_bytes:
        yield "overhead: estimated; buffers of communicators, workspaces, 8-bit weights and the allocator's blocks"


def peaks_by_stage(flags: Run) -> tuple[Peaks, ...]:
    """Give what a rank of every stage keeps at its fullest moments; empty where the bytes are not known."""
    is_split = flags.schedule_options.split_backward
    if isinstance(flags.memory, str) or any(held.activation_bytes is None for held in flags.memory):
        return ()
    if is_split and any(held.waiting_bytes is None for held in flags.memory):
        return ()
    request = ScheduleRequest(
        placement=flags.placement,
        num_microbatches=_num_microbatches(flags),
        costs=flags.schedule_options.costs,
        in_flight=flags.schedule_options.in_flight,
        split_backward=is_split,
    )
    schedule, _ = make_schedule(request)
    return tuple(peaks_kept(schedule, stage) for stage in range(flags.placement.num_stages))


def _num_microbatches(flags: Run) -> int:
    """Give the microbatches of a step, or fewer where these show the most that a stage keeps."""
    placement, options, given = flags.placement, flags.schedule_options, flags.num_microbatches
    rings, limits = num_rings(placement), options.in_flight or (0,)
    if given is not None and (rings or options.split_backward):
        # There it depends on the whole order.
        return given
    if rings:
        costs = options.costs or u_costs(placement.num_stages, num_rings=rings)
        limits, _ = choose_limits(options.in_flight, placement, costs, sys.maxsize)
    enough = math.lcm(*placement.num_replicas) * (placement.num_stages + max(limits))
    if flags.is_ring and not rings:
        # Interleaved microbatches go in groups of as many as there are stages; the third group is like all later ones.
        enough = 3 * placement.num_stages
    return enough if given is None else min(given, enough)


def _rows(flags: Run, memory: Sequence[Footprint], peaks: Sequence[Peaks]) -> Iterator[tuple[str, ...]]:
    stages, is_split = range(flags.layout.num_stages), flags.schedule_options.split_backward
    # The ranks of a stage differ in their share of the optimizer only.
    own = ([memory[rank] for rank in flags.layout.stage_ranks(stage)] for stage in stages)
    fullest = [max(ranks, key=lambda held: held.optimizer_bytes) for ranks in own]
    for (held, moments), alike in groupby(stages, key=lambda stage: (fullest[stage], peaks[stage] if peaks else None)):
        sizes = (held.weight_bytes, held.gradient_bytes, held.optimizer_bytes, held.overhead_bytes)
        row = [f"stage {format_ranks(alike)}", f"{held.num_parameters:,}", *map(format_bytes, sizes)]
        kept = held.fullest(moments) if moments else ((0, 0),) * len(held.chunks)
        kinds: dict[tuple[str, ...], list[int]] = {}
        for chunk, (in_flight, waiting) in zip(held.chunks, kept, strict=True):
            number = kinds.setdefault(tuple("-" if size is None else format_bytes(size) for size in chunk), [0, 0])
            number[0] += in_flight
            number[1] += waiting
        columns = [[one for one, _ in kinds], *([[one for _, one in kinds]] if is_split else [])]
        if moments:
            columns.append([" + ".join(map(str, number[: 1 + is_split])) for number in kinds.values()])
        row += [", ".join(column) or "-" for column in columns]
        yield (*row, *([format_bytes(held.held_bytes(kept))] if moments else []))


def memory_as_json(flags: Run) -> list[dict[str, object]] | str:
    """Give what every rank holds, or say why it is not known."""
    if isinstance(flags.memory, str):
        return flags.memory
    peaks, rows = peaks_by_stage(flags), list[dict[str, object]]()
    for rank, held in enumerate(flags.memory):
        kept = held.fullest(peaks[flags.layout.coord(rank).stage]) if peaks else None
        chunks = [
            {"in_flight": pair and pair[0], "num_waiting": pair and pair[1], **chunk._asdict()}
            for chunk, pair in zip(held.chunks, kept or (None,) * len(held.chunks), strict=True)
        ]
        of_all = {
            "in_flight": kept and sum(activations for activations, _ in kept),
            "num_waiting": kept and sum(waiting for _, waiting in kept),
            "total_bytes": kept and held.held_bytes(kept),
            "activation_bytes": held.activation_bytes,
            "waiting_bytes": held.waiting_bytes,
        }
        rows.append({"rank": rank, **asdict(held), **of_all, "chunks": chunks})
    return rows


# A picture that is longer is packed, and the browser unpacks it: 64 stages with 64 microbatches are 1.7 MB.
_MOST_CHARACTERS = 200_000


def write_page(path: Path, page: ReportPage) -> None:
    """Write a page.

    Raises:
        ConfigError: it cannot be written.
    """
    # Names of users may have any letters.
    write_file(path, render(page).encode("ascii", "xmlcharrefreplace").decode())


def render(page: ReportPage) -> str:
    """Fill the template; every text is escaped but the pictures, which are markup of `vtp_plugin.report.pictures`."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    folder = files(template)
    html, style, script = ((folder / f"page.{ending}").read_text(encoding="ascii") for ending in ("html", "css", "js"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["bytes"] = format_bytes
    environment.filters["picture"] = _picture
    # The browser runs this script and no other, whatever a name holds.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.from_string(html).render(
        page=page, style=Markup(style), script=Markup(script), digest=digest, version=vtp_plugin.__version__
    )


def _picture(svg: str) -> Markup:
    """Give a picture as markup; a long one as text that the page's script unpacks."""
    from markupsafe import Markup

    if len(svg) <= _MOST_CHARACTERS:
        return Markup(svg)
    packed = base64.b64encode(zlib.compress(svg.encode(), 9)).decode()
    return Markup(f'<template class="packed">{packed}</template><noscript>This picture needs JavaScript.</noscript>')


CROSSING_HEADER = ("boundary", "how", "messages", "for each microbatch", "why")
"""Columns of the table of what crosses."""


def quoted(argv: Iterable[str]) -> str:
    """Write the command line of this command."""
    return f"{own_command()} {shlex.join(argv)}"


def split_parts(parts: Iterable[str | TextTable]) -> tuple[PageTable | None, tuple[str, ...]]:
    """Take apart what a command prints: its table, and its lines."""
    table, notes = None, list[str]()
    for part in parts:
        if isinstance(part, TextTable):
            table = PageTable(header=part.header, rows=part.rows, marked=part.marked)
        elif part:
            notes.append(part)
    return table, tuple(notes)


def page_nodes(
    nodes: Sequence[NodeRanks], layout: PipelineLayout, sites: Sequence[str], launch: Launch | None = None
) -> tuple[PageNode, ...]:
    """Put stages on nodes.

    Args:
        nodes: the nodes with their ranks.
        layout: the pipeline layout.
        sites: site of every stage; empty where there are none.
        launch: the same nodes with what they start; None where that is not known.
    """
    found = []
    commands = {} if launch is None else dict(launch.commands())
    for node in nodes:
        stages = node.stages(layout)
        ranks = {stage: tuple(rank for rank in node.ranks if layout.stage_of(rank) == stage) for stage in stages}
        found.append(
            PageNode(
                name=node.name,
                site=" and ".join(dict.fromkeys(sites[stage] for stage in stages)) if sites else "",
                stages=tuple(RanksOfStage(stage=stage, ranks=ranks[stage]) for stage in stages),
                command=" &\n".join(commands.get(node, ())),
            )
        )
    return tuple(found)


def stage_table(layout: PipelineLayout, sites: Sequence[str]) -> PageTable:
    """Write a row for each stage; one that has a single stage says nothing that its node does not."""
    header = ["stage", *(["site"] if sites else []), *size_names(layout), "ranks"]
    rows = [
        [str(stage), *([sites[stage]] if sites else []), *size_texts(layout, stage), format_ranks(ranks)]
        for stage, ranks in ((stage, layout.stage_ranks(stage)) for stage in range(layout.num_stages))
    ]
    return PageTable(header=header, rows=rows)


def page_crossings(views: Sequence[BoundaryView]) -> tuple[TableRow, ...]:
    """Explain the boundaries; neighbouring boundaries that are crossed alike are one."""
    found = []
    for _, group in groupby(views, key=lambda view: view.pattern):
        first, *rest = group
        name = f"{first.name} to {rest[-1].name} ({len(rest) + 1} alike)" if rest else first.name
        cells = (str(first.boundary.strategy), *crossing_cells(first), first.reason)
        found.append(TableRow(name=name, cells=cells, lines=tuple(explain(first))))
    return tuple(found)


def crossing_cells(view: PlansView) -> tuple[str, str]:
    """Say how many messages cross forward, and how much they carry together."""
    transfers = view.forward.transfers
    if view.itemsize_bytes is None:
        share = float(sum(map(view.share, transfers)))
        return str(len(transfers)), f"{share:g} tensor{'' if share == 1 else 's'}"
    return str(len(transfers)), format_bytes(sum(view.num_bytes(transfer) or 0 for transfer in transfers))


def memory_section(flags: Run, limit_bytes: int | None, peaks: Sequence[Peaks]) -> MemorySection | None:
    """Draw what every rank holds; None where it is not known.

    Args:
        flags: the run.
        limit_bytes: memory of a device; None where it is not known.
        peaks: what a rank of each stage keeps at its fullest moments; empty where that is not known.
    """
    if isinstance(flags.memory, str):
        return None
    notes = [f"activations: {flags.about_activations}"]
    number = "as many microbatches as a stage has in flight when it holds the most" if peaks else "one microbatch"
    notes.append(f"drawn are those of {number}")
    if limit_bytes is None:
        notes.append(f"{CARD_MEMORY} 80GiB or the like draws the memory of a device beside them")
    return MemorySection(bars=tuple(_bars(flags.layout, flags.memory, limit_bytes, peaks)), notes=tuple(notes))


def _bars(
    layout: PipelineLayout,
    memory: Sequence[Footprint],
    limit_bytes: int | None,
    peaks: Sequence[Peaks],
) -> Iterator[MemoryBar]:
    for stage in range(layout.num_stages):
        alike: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for rank in layout.stage_ranks(stage):
            held = memory[rank]
            activations, waiting = held.kept_parts(
                held.fullest(peaks[stage]) if peaks else ((1, 0),) * len(held.chunks)
            )
            pieces = (
                ("weights", held.weight_bytes),
                ("gradients", held.gradient_bytes),
                ("optimizer", held.optimizer_bytes),
                ("overhead", held.overhead_bytes),
                ("activations", activations),
                ("waiting for gradients of weights", waiting),
            )
            alike.setdefault(pieces, []).append(rank)
        for pieces, ranks in alike.items():
            label = f"stage {stage}, rank{'s'[: len(ranks) > 1]} {format_ranks(ranks)}"
            yield MemoryBar(label=label, pieces=pieces, limit_bytes=limit_bytes)


_COLOURS = {
    "forward": "#3f6ca8",
    "backward": "#b4540a",
    "weights": "#6b5a14",
    "gradients": "#9a3f73",
    "optimizer": "#6b4a9b",
}
_KINDS = {Op.F: "forward", Op.B: "backward", Op.I: "backward", Op.W: "weights"}
# Once all stages are busy, every further microbatch looks like the one before.
_MOST_MICROBATCHES = 16


def draw_found(result: SearchResult) -> str:
    """Draw the stages of both layouts over one axis of seconds, as SVG."""
    named = [("best", result.best[0]), *([] if result.stock is None else [("stock", result.stock)])]
    most = max(candidate.split.num_microbatches for _, candidate in named)
    title = "One simulated step" if most <= _MOST_MICROBATCHES else f"The first {_MOST_MICROBATCHES} microbatches"
    groups = [
        Group(name=_name(name, candidate), note=_note(candidate), rows=[*_search_rows(candidate)])
        for name, candidate in named
    ]
    return draw_rows(groups, title=f"{title} of the layouts that search found", unit="s", colours=_COLOURS)


def _name(name: str, candidate: Candidate) -> str:
    return f"{name}: --vtp-size-list {format_value(candidate.sizes)}, layers {format_value(candidate.layers)}"


def _note(candidate: Candidate) -> str:
    split = candidate.split
    return f"{split.num_replicas} replicas, {split.num_microbatches} microbatches, step {candidate.step_s:.4g} s"


def _search_rows(candidate: Candidate) -> Iterator[tuple[str, list[Box]]]:
    number = min(_MOST_MICROBATCHES, candidate.split.num_microbatches)
    order = candidate.order
    compiled = compiled_for(
        candidate.placement,
        candidate.costs,
        number,
        is_planned=order.is_planned,
        in_flight=order.in_flight,
        is_split=order.is_split,
    )
    timeline = timeline_of(compiled, candidate.costs, mode="rendezvous")
    names = candidate.node_names
    for stage, spans in enumerate(timeline.spans):
        boxes = [
            Box(kind=_KINDS[span.action.op], start=span.start, end=span.end, text=str(span.action.microbatch))
            for span in spans
        ]
        boxes += _tail(timeline, candidate) if number == candidate.split.num_microbatches else []
        yield f"stage {stage} on {', '.join(dict.fromkeys(names[stage]))}", boxes


def _tail(timeline: Timeline, candidate: Candidate) -> Iterator[Box]:
    """Yield the boxes behind the last backward pass: gradients and optimizer."""
    start = timeline.makespan
    for kind, length_s in (("gradients", candidate.sums_s), ("optimizer", candidate.update_s)):
        yield Box(kind=kind, start=start, end=start + length_s)
        start += length_s


def page_of_search(
    options: argparse.Namespace,
    request: SearchRequest,
    result: SearchResult,
    advised: Candidate,
    parts: Iterable[str | TextTable],
    launch: Launch,
) -> ReportPage:
    """Show what was found.

    Args:
        options: parsed arguments.
        request: the request.
        result: the layouts.
        advised: the layout to start.
        parts: what the command prints.
        launch: what to start.
    """
    table, notes = split_parts(parts)
    is_stock = advised is result.stock
    sites = advised.sites if any(advised.sites) else ()
    rules = TransportRules() if is_stock else replace(request.problem.rules, transport=advised.transport, sites=sites)
    rings = num_rings(advised.placement)
    return ReportPage(
        command="search",
        title=f"{'stock: ' if is_stock else ''}--vtp-size-list {format_value(advised.sizes)}",
        argv=quoted(options.argv),
        notes=notes,
        table=table,
        about_table="Layouts that were found",
        step=draw_found(result),
        about_step="A simulated step of the best layout, above the best of stock Megatron",
        nodes=page_nodes(launch.nodes, launch.layout, sites, launch),
        about_nodes=tuple(launch.warnings()),
        stages=stage_table(launch.layout, sites),
        picture=draw_pipeline(
            launch.layout,
            is_ring=not rings and advised.num_chunks > 1,
            rules=rules,
            num_rings=rings,
        ),
        memory=MemorySection(bars=tuple(_search_bars(advised, launch)), notes=(request.about_memory,)),
        script="\n".join(launch.slurm_lines()) if options.slurm else "",
    )


def _search_bars(candidate: Candidate, launch: Launch) -> Iterator[MemoryBar]:
    """Yield the fullest rank of every stage, beside the smallest of its devices."""
    pools = candidate.split.pools
    for stage, (held, stage_type) in enumerate(zip(candidate.held_bytes, candidate.stage_types, strict=True)):
        known = [pools[pool].memory_bytes for pool in stage_type.pools]
        limits = [limit for limit in known if limit is not None]
        ranks = format_ranks(launch.layout.stage_ranks(stage))
        yield MemoryBar(
            label=f"stage {stage}, ranks {ranks}",
            pieces=(("held by the fullest rank", held),),
            limit_bytes=min(limits, default=None),
        )


def page_of_plan(
    options: argparse.Namespace,
    flags: Run,
    views: Sequence[BoundaryView],
    lines: Sequence[str],
    launch: Launch,
    note: str,
) -> ReportPage:
    """Show a layout: nodes, what crosses, memory, commands.

    Args:
        options: parsed arguments.
        flags: the run.
        views: its boundaries.
        lines: what is to be said at the beginning.
        launch: what to start.
        note: what is to be said of that.
    """
    return ReportPage(
        command="plan",
        title=option_context(flags.config, flags.layout).size_list,
        argv=quoted(options.argv),
        notes=tuple(lines),
        nodes=page_nodes(launch.nodes, flags.layout, flags.sites, launch),
        about_nodes=(*launch.warnings(), *note.splitlines()),
        stages=stage_table(flags.layout, flags.sites),
        picture=_pipeline(flags),
        crossing_header=CROSSING_HEADER,
        crossings=page_crossings(views),
        memory=memory_section(flags, options.card_memory, peaks_by_stage(flags)),
        script="\n".join(launch.slurm_lines()) if options.slurm else "",
    )


def page_of_bridges(
    options: argparse.Namespace, modules: tuple[Module, ...], views: tuple[BridgeView, ...]
) -> ReportPage:
    """Show modules on grids of their own, and the bridges between them."""
    rows = [(one.name, *map(str, one.sizes), f"{one.ranks.start}-{one.ranks.stop - 1}") for one in modules]
    crossings = [
        TableRow(
            name=f"{view.source.name} -> {view.destination.name}",
            cells=crossing_cells(view),
            lines=tuple(explain(view)),
        )
        for view in views
    ]
    return ReportPage(
        command="plan",
        title=f"{' and '.join(view.source.name for view in views)} -> {modules[-1].name}",
        argv=quoted(options.argv),
        table=PageTable(header=("module", "tp", "cp", "pp", "dp", "ranks"), rows=rows),
        about_table="Modules",
        picture=bridge_picture(modules, views),
        crossing_header=("bridge", "messages", "for each microbatch"),
        crossings=tuple(crossings),
    )


def page_of_simulation(
    options: argparse.Namespace,
    flags: Run | None,
    schedule: Schedule,
    timeline: Timeline,
    parts: Iterable[str | TextTable],
    *,
    title: str,
    unit: str,
) -> ReportPage:
    """Show a simulated step, and the layout that runs it.

    Args:
        options: parsed arguments.
        flags: the run; None for modules.
        schedule: the order of the step.
        timeline: the step.
        parts: what the command prints.
        title: heading of the step.
        unit: unit of its times.
    """
    table, notes = split_parts(parts)
    page = ReportPage(
        command="simulate",
        title=title,
        argv=quoted(options.argv),
        notes=notes,
        table=table,
        about_table="Stages in a step",
        step=draw_svg(timeline, title=title, unit=unit),
        about_step="A simulated step",
    )
    if flags is None:
        return page
    fitted, layout = flags.fitted, flags.layout
    nodes = named_nodes(fitted.candidate.node_names, layout) if fitted else usual_nodes(layout, flags.sites)
    assumed = "the nodes are assumed; plan --nodes 8,6 takes their devices, and says what to start on each"
    peaks = [peaks_kept(schedule, stage) for stage in range(layout.num_stages)]
    return replace(
        page,
        nodes=page_nodes(nodes, layout, flags.sites),
        about_nodes=() if fitted else (assumed,),
        stages=stage_table(layout, flags.sites),
        picture=_pipeline(flags),
        crossing_header=CROSSING_HEADER,
        crossings=page_crossings(view_boundaries(flags)),
        memory=memory_section(flags, options.card_memory, peaks),
    )


def _pipeline(flags: Run) -> str:
    return draw_pipeline(
        flags.layout,
        is_ring=flags.is_ring,
        rules=flags.rules,
        dp_mode=flags.replicas.mode,
        num_rings=flags.config.num_rings,
    )
